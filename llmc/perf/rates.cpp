#include "llmc/perf/rates.h"

#include <sstream>

#include "llmc/base/check.h"

// The name and text of each file of rates/. The Makefile generates this table; its last name is null.
struct RatesFile {
    const char *name, *text;
};
extern const RatesFile kRatesFiles[];

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

// The linear rows before have the library's times.
void read_custom_blocks(std::istream& words, Rates& rates) {
    double speed = 0, of_wgrad = 0;
    words >> speed >> of_wgrad;
    if (!(speed > 0) || !(of_wgrad > 0)) words.setstate(std::ios::failbit);
    for (MeasuredGemm& row : rates.gemms)
        row.us[static_cast<int>(GemmMode::kFp8Block)] /= row.pass == GemmLayout::kWgrad ? of_wgrad : speed;
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

// A name may have several words.
void read_gpu(std::istream& words, Rates& rates) { std::getline(words >> std::ws, rates.gpu); }

void read_copy(std::istream& words, Rates& rates) { words >> rates.copy_rate; }
void read_host_link(std::istream& words, Rates& rates) { words >> rates.host_link; }
void read_overhead(std::istream& words, Rates& rates) { words >> rates.overhead; }

constexpr struct {
    const char* name;
    void (*read)(std::istream& words, Rates& rates);
} kRows[] = {{"gpu", read_gpu},
             {"copy", read_copy},
             {"host-link", read_host_link},
             {"overhead", read_overhead},
             {"linear", read_linear},
             {"custom-blocks", read_custom_blocks},
             {"op", read_op},
             {"attention", read_attention},
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

std::string rates_text(const Rates& rates, const std::string& comment) {
    std::string text;
    std::istringstream lines(comment);
    for (std::string line; std::getline(lines, line);) text += "# " + line + "\n";
    text += "gpu " + rates.gpu + "\n";
    text += strf("copy %.4g\n", rates.copy_rate);
    if (rates.host_link > 0) text += strf("host-link %.4g\n", rates.host_link);
    text += strf("overhead %.4f\n", rates.overhead);
    // A line has three matmuls.
    for (size_t i = 0; i + 2 < rates.gemms.size(); i += 3) {
        const MeasuredGemm& forward = rates.gemms[i];
        text += strf("linear %lld %lld %lld", ll(forward.M), ll(forward.N), ll(forward.K));
        for (size_t pass = i; pass < i + 3; pass++)
            for (const double& us : rates.gemms[pass].us)
                text += strf("%s%.2f", &us == rates.gemms[pass].us ? "   " : " ", us);
        text += "\n";
    }
    for (const MeasuredOp& op : rates.ops)
        text += strf("op %s %s %s %.0f %.1f\n", rate_name(op.kind, op.activation).c_str(), dtype_name(op.dtype),
                     op_mode_name(op.mode), op.bytes, op.us);
    for (const MeasuredAttention& a : rates.attention)
        text += strf("attention %s %lld %lld %lld %lld %.1f %.1f %.1f\n", dtype_name(a.dtype), ll(a.B), ll(a.NH),
                     ll(a.T), ll(a.HS), a.forward_us, a.backward_us, a.fp8_forward_us);
    for (const WgradRatio& row : rates.bf16_wgrads) {
        text += strf("bf16-wgrad %lld %lld %lld", ll(row.M), ll(row.N), ll(row.K));
        for (double ratio : row.ratio) text += strf("   %.4f 1", ratio);
        text += "\n";
    }
    return text;
}

const Rates* find_rates(const std::string& gpu) {
    static const std::vector<Rates> all = [] {
        std::vector<Rates> parsed;
        for (const RatesFile* file = kRatesFiles; file->name; file++)
            parsed.push_back(parse_rates(file->text, file->name));
        return parsed;
    }();
    for (const Rates& rates : all)
        if (rates.gpu == gpu) return &rates;
    return nullptr;
}
