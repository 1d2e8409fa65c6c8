// Rates that were measured on one kind of GPU. They are data: rates/h200.txt is part of the executable, a line a row.
#pragma once
#include <cmath>
#include <initializer_list>
#include <string>
#include <vector>

#include "llmc/ops/op_cost.h"

// How a matmul of an FP8 linear, or its BF16 counterpart, runs.
enum class GemmMode { kBf16, kFp8Fast, kFp8Precise, kFp8Block };
inline constexpr int kGemmModes = 4;

// Microseconds of one matmul D(M, N) with contraction K, by GemmMode; 0 where it was not measured. Weight gradients add
// to FP32. A line "linear" has those of the forward pass and of both gradients.
struct MeasuredGemm {
    GemmLayout pass;
    int64_t M, N, K;
    double us[kGemmModes];
};

// One call of a kernel of the kind and mode that moves so many bytes.
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

// Speed of a weight gradient that is added to BF16 over one that is added to FP32.
struct WgradRatio {
    int64_t M, N, K;
    double ratio[kGemmModes];
};

struct Rates {
    std::string gpu;
    std::vector<MeasuredGemm> gemms;
    std::vector<MeasuredOp> ops;
    std::vector<MeasuredAttention> attention;
    std::vector<WgradRatio> bf16_wgrads;
};
// Exit 2 with the name and the line of what is no row.
Rates parse_rates(const std::string& text, const std::string& name);
const Rates& measured_rates();

// What is known of a point from those that were measured: the mean of logarithms weighted by 1 / distance^2, where
// distances are logarithms, too. A point that was measured itself decides alone.
class NearbyMean {
public:
    // other_weight: of a point far away whose value is 1.
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
