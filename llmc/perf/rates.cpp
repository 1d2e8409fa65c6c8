#include "llmc/perf/rates.h"

#include <sstream>

#include "llmc/base/check.h"

extern const char* const kH200Rates;   // rates/h200.txt; the Makefile makes it a string

namespace {

template <typename T> T word_of(std::istream& words, std::initializer_list<T> values, const char* (*name)(T)) {
    std::string word;
    words >> word;
    for (T value : values)
        if (word == name(value)) return value;
    words.setstate(std::ios::failbit);
    return *values.begin();
}

Dtype read_dtype(std::istream& words) {
    return word_of(words, {Dtype::kBf16, Dtype::kFp32, Dtype::kE4m3, Dtype::kE5m2}, dtype_name);
}
// Reads a name that rate_name has written.
std::pair<OpKind, Activation> read_kind(std::istream& words) {
    constexpr OpKind kKinds[] = {
#define OP(name, Args) OpKind::name,
#include "llmc/ops/ops.inl"
#undef OP
    };
    std::string word;
    words >> word;
    for (OpKind kind : kKinds)
        for (const ActivationFunction& function : kActivations)
            if (word == rate_name(kind, function.kind)) return {kind, function.kind};
    words.setstate(std::ios::failbit);
    return {};
}
OpMode read_mode(std::istream& words) {
    return word_of(words, {OpMode::kPlain, OpMode::kSums, OpMode::kRecord, OpMode::kCopies, OpMode::kBlocks},
                   op_mode_name);
}

void read_linear(std::istream& words, Rates& rates) {
    int64_t tokens, out, in;
    words >> tokens >> out >> in;
    for (const MeasuredGemm& shape : {MeasuredGemm{GemmLayout::kForward, tokens, out, in, {}},
                                      MeasuredGemm{GemmLayout::kDgrad, tokens, in, out, {}},
                                      MeasuredGemm{GemmLayout::kWgrad, out, in, tokens, {}}}) {
        MeasuredGemm& row = rates.gemms.emplace_back(shape);
        for (double& us : row.us) words >> us;
    }
}

void read_op(std::istream& words, Rates& rates) {
    const auto [kind, activation] = read_kind(words);
    const Dtype dtype = read_dtype(words);
    do {
        MeasuredOp& row = rates.ops.emplace_back(MeasuredOp{kind, read_mode(words), dtype, 0, 0, activation});
        words >> row.bytes >> row.us;
    } while (words.good() && (words >> std::ws).good());   // at the end std::ws would fail
}

void read_attention(std::istream& words, Rates& rates) {
    MeasuredAttention& row = rates.attention.emplace_back(MeasuredAttention{read_dtype(words), 0, 0, 0, 0, 0, 0, 0});
    words >> row.B >> row.NH >> row.T >> row.HS >> row.forward_us >> row.backward_us >> row.fp8_forward_us;
}

void read_bf16_wgrad(std::istream& words, Rates& rates) {
    WgradRatio& row = rates.bf16_wgrads.emplace_back();
    words >> row.M >> row.N >> row.K;
    for (double& ratio : row.ratio) {
        double bf16, fp32;
        words >> bf16 >> fp32;
        ratio = bf16 / fp32;
    }
}

void read_gpu(std::istream& words, Rates& rates) { words >> rates.gpu; }

constexpr struct {
    const char* name;
    void (*read)(std::istream& words, Rates& rates);
} kRows[] = {{"gpu", read_gpu}, {"linear", read_linear}, {"op", read_op}, {"attention", read_attention},
             {"bf16-wgrad", read_bf16_wgrad}};

}  // namespace

Rates parse_rates(const std::string& text, const std::string& name) {
    Rates rates;
    std::istringstream lines(text);
    std::string line;
    for (int number = 1; std::getline(lines, line); number++) {
        if (line.empty() || line[0] == '#') continue;
        std::istringstream words(line);
        std::string first;
        words >> first;
        bool known = false;
        for (const auto& row : kRows) {
            if (first != row.name) continue;
            row.read(words, rates);
            known = !words.fail() && (words.eof() || (words >> std::ws).eof());
        }
        REQUIRE(known, "%s, line %d: no row of rates: \"%s\"", name.c_str(), number, line.c_str());
    }
    return rates;
}

const Rates& measured_rates() {
    static const Rates rates = parse_rates(kH200Rates, "rates/h200.txt");
    return rates;
}
