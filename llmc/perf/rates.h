// Rates measured on a GPU, and the times of operations that follow from them. The files of rates/, one row per line,
// are part of the executable; dev/bench/rates_of_bench.py makes such rows from what `bench --json` wrote.
#pragma once
#include <string>
#include <vector>

#include "llmc/base/gpu.h"
#include "llmc/ops/op_cost.h"

// How a matmul of a linear layer runs.
enum class GemmMode { kBf16, kFp8Fast, kFp8Precise, kFp8Block };
inline constexpr int kGemmModes = 4;

// Microseconds of one matmul D(M, N) with contraction K, by GemmMode; 0: not measured. Weight gradients accumulate in
// FP32. A line "linear" has three of these: the forward pass and both gradients.
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

struct Rates {
    std::string gpu;          // Gpu::name
    double copy_rate = 0;     // bytes per second of a copy, read and written
    double host_link = 0;     // bytes per second between host and device, each way while both are busy; 0: not measured
    double overhead = 0;      // what a step takes beyond the sum of its operations, as a share of that sum
    std::vector<MeasuredGemm> gemms;
    std::vector<MeasuredOp> ops;
    std::vector<MeasuredAttention> attention;

    // A matmul takes the measured time of its shape, or that of a smooth model of the shape, corrected by measurements
    // of similar shapes. Operations without rates, all of them small, run at the rate of a copy.
    double gemm_us(GemmMode mode, GemmLayout pass, int64_t M, int64_t N, int64_t K) const;
    double matmul_us(const GemmArgs& args) const;
    double op_us(const PlannedOp& op) const;

private:
    double attention_us(const PlannedOp& op) const;
    const MeasuredOp* nearest_op(const PlannedOp& op) const;
};

// Exit 2, with the file's name and the line, for a malformed row.
Rates parse_rates(const std::string& text, const std::string& name);
// Returns null if the GPU was not measured.
const Rates* find_rates(const std::string& gpu);
// The GPU whose rates are scaled for GPUs that have none, and these rates.
const Gpu& measured_gpu();
const Rates& measured_rates();
const Rates& rates_for(const Gpu& gpu);   // its own, or these

// Fixed cost of a kernel: its launch, first loads and last stores; an estimate.
inline constexpr double kKernelUs = 3;
inline double real(int64_t x) { return static_cast<double>(x); }
