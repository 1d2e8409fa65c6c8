// Rates measured on a GPU. The files of rates/, one row per line, are part of the executable; `bench --write-rates`
// writes such files.
#pragma once
#include <cmath>
#include <initializer_list>
#include <string>
#include <vector>

#include "llmc/ops/op_cost.h"

// How a matmul of a linear layer runs.
enum class GemmMode { kBf16, kFp8Fast, kFp8Precise, kFp8Block };
inline constexpr int kGemmModes = 4;

// Microseconds of one matmul D(M, N) with contraction K, by GemmMode; 0: not measured. Weight gradients accumulate in
// FP32. A line "linear" has three of these: the forward pass and both gradients. A line "custom-blocks" with two
// numbers divides FP8 block times in the lines "linear" before it, those of forward and dgrad by the first, those of
// weight gradients by the second.
struct MeasuredGemm {
    GemmLayout pass;
    int64_t M, N, K;
    double us[kGemmModes];
};

// Time of one call of an operation that moves `bytes`.
struct MeasuredOp {
    OpKind kind;
    OpMode mode;
    Dtype dtype;   // as in PlannedOp
    double bytes, us;
    Activation activation;   // as in PlannedOp
};

// Attention of one shape; 0: not measured.
struct MeasuredAttention {
    Dtype dtype;
    int64_t B, NH, T, HS;
    double forward_us, backward_us, fp8_forward_us;
};

// Speed of a weight gradient that accumulates in BF16, over one that accumulates in FP32.
struct WgradRatio {
    int64_t M, N, K;
    double ratio[kGemmModes];
};

struct Rates {
    std::string gpu;          // Gpu::name (kernel_rates.h), or what CUDA calls a GPU that is not listed there
    double copy_rate = 0;     // bytes per second of a copy, read and written
    double host_link = 0;     // bytes per second between host and device, each way while both are busy; 0: not measured
    double overhead = 0;      // what a step takes beyond the sum of its operations, as a share of that sum
    std::vector<MeasuredGemm> gemms;
    std::vector<MeasuredOp> ops;
    std::vector<MeasuredAttention> attention;
    std::vector<WgradRatio> bf16_wgrads;
};
// Exit 2, with the file's name and the line, for a malformed row.
Rates parse_rates(const std::string& text, const std::string& name);
// A text that parse_rates reads back: the rows in the order of the vectors. Each line of `comment` begins with "# ".
std::string rates_text(const Rates& rates, const std::string& comment);
// Returns null if the GPU was not measured.
const Rates* find_rates(const std::string& gpu);
// The rates of measured_gpu(), from which times on other GPUs are scaled.
const Rates& measured_rates();

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
    bool empty() const { return weights_ == 0; }
    double value() const { return std::exp(sum_ / weights_); }

private:
    double sum_ = 0, weights_;
};
