// Rates measured on a GPU, and the times of operations that follow from them. Each GPU has a file,
// rates_h200.inl; dev/bench/rates_of_bench.py makes one from what `bench --json` wrote.
#pragma once
#include <array>
#include <map>
#include <string>
#include <vector>

#include "llmc/base/gpu.h"
#include "llmc/ops/op_cost.h"

// How a matmul of a linear layer runs.
enum class GemmMode { kBf16, kFp8Fast, kFp8Precise, kFp8Block };
inline constexpr int kGemmModes = 4;

// Of a matmul D(M, N) with contraction K: time = fixed + 2 M N K / rate + M N * output. The first is the launch, and
// the last what the matrix units do not hide: filling the pipeline, and writing the result.
struct GemmRate {
    double fixed_us, tflops, output_us;   // output: of 10^6 elements
};

// Times of attention of one shape; 0: not measured.
struct MeasuredAttention {
    Dtype dtype;
    int64_t B, NH, T, HS;
    double forward_us, backward_us, fp8_forward_us;
};

struct Rates {
    const char* gpu;    // Gpu::name
    double copy_rate;   // bytes per second of a copy, read and written
    double overhead;    // what a step takes beyond the sum of its operations, as a share of that sum
    std::array<std::array<GemmRate, 3>, kGemmModes> gemms;   // by mode and GemmLayout
    // Bytes per second as a share of copy_rate, by name (rate_name) and OpMode. Where none is measured (0), that of the
    // plain mode is taken, and for other operations the rate of a copy.
    std::map<std::string, std::array<double, 5>> ops;
    std::vector<MeasuredAttention> attention;

    double gemm_us(GemmMode mode, GemmLayout pass, int64_t M, int64_t N, int64_t K) const;
    double matmul_us(const GemmArgs& args) const;
    // Of many experts, whose rows together are those of args.
    double expert_matmul_us(const GemmArgs& args, int64_t experts) const;
    double op_us(const PlannedOp& op) const;
};

// Returns null if the GPU was not measured.
const Rates* find_rates(const std::string& gpu);
// The GPU whose rates are scaled for GPUs that have none, and these rates.
const Gpu& measured_gpu();
const Rates& measured_rates();

inline double real(int64_t x) { return static_cast<double>(x); }
