#include "llmc/perf/rates.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <sstream>

#include "llmc/base/check.h"

// The name and text of each file of rates/. The Makefile generates this table; its last name is null.
struct RatesFile {
    const char *name, *text;
};
extern const RatesFile kRatesFiles[];

namespace {

// ---- reading

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
OpMode read_mode(std::istream& words) {
    return word_of(words, {OpMode::kPlain, OpMode::kSums, OpMode::kRecord, OpMode::kCopies, OpMode::kBlocks},
                   op_mode_name);
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

void read_linear(std::istream& words, Rates& rates) {
    int64_t tokens, out, in;
    words >> tokens >> out >> in;
    for (const MeasuredGemm& shape : {MeasuredGemm{GemmLayout::kForward, tokens, out, in, {}},
                                      MeasuredGemm{GemmLayout::kDgrad, tokens, in, out, {}},
                                      MeasuredGemm{GemmLayout::kWgrad, out, in, tokens, {}}})
        for (double& us : rates.gemms.emplace_back(shape).us) words >> us;
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

constexpr struct {
    const char* name;
    void (*read)(std::istream& words, Rates& rates);
} kRows[] = {
    {"gpu", [](std::istream& words, Rates& rates) { std::getline(words >> std::ws, rates.gpu); }},   // several words
    {"copy", [](std::istream& words, Rates& rates) { words >> rates.copy_rate; }},
    {"host-link", [](std::istream& words, Rates& rates) { words >> rates.host_link; }},
    {"overhead", [](std::istream& words, Rates& rates) { words >> rates.overhead; }},
    {"linear", read_linear},
    {"op", read_op},
    {"attention", read_attention},
};

// ---- predictions

// Interpolates measured values: the geometric mean weighted by 1 / distance^2, with distances in logarithms. At a
// measured point it is that point's value.
class NearbyMean {
public:
    // other_weight: weight of an additional value of 1, which decides far from all points.
    explicit NearbyMean(double other_weight = 0) : weights_(other_weight) {}
    void add(double value, std::initializer_list<double> distances) {
        constexpr double kSame = 1e-9;
        double squares = 0;
        for (double distance : distances) squares += distance * distance;
        const double weight = 1 / (squares + kSame);
        sum_ += weight * std::log(value);
        weights_ += weight;
    }
    double value() const { return weights_ > 0 ? std::exp(sum_ / weights_) : 0; }

private:
    double sum_ = 0, weights_;
};

// time = fixed + 2 M N K / rate, rate = best * K / (K + half_k) * area / (area + half_area), area = M N: a short
// contraction spends much of its time filling and draining the pipeline, and a small result does not fill the
// multiprocessors. Fitted by least squares of log time over the measured shapes; 6 % root mean square error.
constexpr struct {
    double best;           // FLOP/s
    double half_k;
    double wgrad;          // factor on the time of a weight gradient, which also reads and writes FP32 sums
} kRates[kGemmModes] = {{726e12, 11, 1.03}, {1433e12, 99, 1.06}, {1394e12, 386, 1.05},
                        {1178e12, 305, 1.39}};

double model_us(GemmMode mode, GemmLayout pass, int64_t M, int64_t N, int64_t K) {
    constexpr double kHalfArea = 6e4, kFixedUs = 9.3;
    const auto& rate = kRates[static_cast<int>(mode)];
    const double area = real(M) * real(N);
    const double share = real(K) / (real(K) + rate.half_k) * area / (area + kHalfArea);
    return kFixedUs + 1e6 * 2 * area * real(K) / (rate.best * share) * (pass == GemmLayout::kWgrad ? rate.wgrad : 1.0);
}

// A weight gradient that accumulates in BF16 moves fewer bytes than one in FP32: means of the rows "wgrad" of
// bench_gemm_fp8 in dev/results/2026-11-21-h200-fp8.md, by GemmMode.
constexpr double kBf16WgradSpeed[kGemmModes] = {1.04, 1.04, 1.07, 1.03};

double log_ratio(int64_t a, int64_t b) { return std::log(real(a) / real(b)); }

}  // namespace

double Rates::gemm_us(GemmMode mode, GemmLayout pass, int64_t M, int64_t N, int64_t K) const {
    // Interpolates measured / model, which approaches 1 far from all measured shapes.
    constexpr double kModelWeight = 0.5;
    NearbyMean mean(kModelWeight);
    for (const MeasuredGemm& m : gemms) {
        const double us = m.us[static_cast<int>(mode)];
        if (m.pass != pass || us == 0) continue;
        mean.add(us / model_us(mode, pass, m.M, m.N, m.K), {log_ratio(M, m.M), log_ratio(N, m.N), log_ratio(K, m.K)});
    }
    return model_us(mode, pass, M, N, K) * mean.value();
}

double Rates::matmul_us(const GemmArgs& g) const {
    // 124M fc forward in FP32, bench_gemm at commit 3e8874e.
    constexpr double kFp32Rate = 49.4e12;
    if (g.A.dtype == Dtype::kFp32) return 1e6 * 2 * real(g.M) * real(g.N) * real(g.K) / kFp32Rate;
    const GemmMode mode = dtype_bytes(g.A.dtype) != 1                  ? GemmMode::kBf16
                          : g.A_granularity != Granularity::kTensor ? GemmMode::kFp8Block
                          : g.fast_accumulation                     ? GemmMode::kFp8Fast
                                                                    : GemmMode::kFp8Precise;
    const double us = gemm_us(mode, g.layout, g.M, g.N, g.K);
    const bool bf16_sum = g.layout == GemmLayout::kWgrad && g.D.dtype == Dtype::kBf16;
    return bf16_sum ? us / kBf16WgradSpeed[static_cast<int>(mode)] : us;
}

// The nearest row replaces a missing one: of the same activation function or one that moves as many bytes; then of the
// mode, where plain replaces sums, record copies, and copies blocks; then of the dtype; then of the number of bytes.
const MeasuredOp* Rates::nearest_op(const PlannedOp& op) const {
    const MeasuredOp* best = nullptr;
    double smallest = 0;
    for (const MeasuredOp& row : ops) {
        if (row.kind != op.kind) continue;
        const int further = static_cast<int>(row.mode) - static_cast<int>(op.mode);
        const bool gated = activation_function(row.activation).gated == activation_function(op.activation).gated;
        const double distance = 1e6 * (row.activation == op.activation ? 0 : gated ? 1 : 2)
                                + 1e4 * (further > 0 ? 8 + further : -further) + (row.dtype == op.dtype ? 0 : 1e3)
                                + std::abs(std::log(row.bytes / std::max(real(op.bytes), 1.0)));
        if (!best || distance < smallest) best = &row, smallest = distance;
    }
    return best;
}

double Rates::op_us(const PlannedOp& op) const {
    if (op.attention.HS > 0) return attention_us(op);
    const MeasuredOp* row = nearest_op(op);
    if (!row) return kKernelUs + 1e6 * real(op.bytes) / copy_rate;
    return kKernelUs + (row->us - kKernelUs) * real(op.bytes) / row->bytes;
}

// Interpolates time / (B NH T^2 HS), corrected for the share of the GPU that has work, by distance in T, in heads and,
// weighted more, in HS.
double Rates::attention_us(const PlannedOp& op) const {
    // Number of tiles of 128 queries with which half of the time is spent filling and draining the multiprocessors. It
    // follows from the two rows with head dim 64, whose times per unit of work differ by a factor of 1.16, forward and
    // backward.
    constexpr double kHalfTiles = 150;
    const auto work = [](int64_t B, int64_t NH, int64_t T, int64_t HS) {
        const double tiles = real(B * NH) * std::ceil(real(T) / 128);
        return real(B * NH) * real(T) * real(T) * real(HS) * (1 + kHalfTiles / tiles);
    };
    NearbyMean mean;
    const PlannedAttention& s = op.attention;
    for (const MeasuredAttention& row : attention) {
        const double us = s.backward ? row.backward_us : s.fp8 ? row.fp8_forward_us : row.forward_us;
        if (us == 0 || (row.dtype == Dtype::kBf16) != (op.dtype == Dtype::kBf16)) continue;
        mean.add(us / work(row.B, row.NH, row.T, row.HS),
                 {log_ratio(s.T, row.T), 0.5 * log_ratio(s.B * s.NH, row.B * row.NH), 4 * log_ratio(s.HS, row.HS)});
    }
    return mean.value() * work(s.B, s.NH, s.T, s.HS);
}

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

const Gpu& measured_gpu() { return planned_gpus().front(); }
const Rates& measured_rates() { return *find_rates(measured_gpu().name); }
const Rates& rates_for(const Gpu& gpu) {
    const Rates* own = find_rates(gpu.name);
    return own ? *own : measured_rates();
}
