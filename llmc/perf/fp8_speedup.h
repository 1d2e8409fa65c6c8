// What FP8 is expected to gain over BF16, linear by linear, from rates measured on one kind of GPU.
#pragma once
#include <string>
#include <vector>

#include "llmc/model/fp8_recipe.h"

// How a matmul of an FP8 linear, or its BF16 counterpart, runs.
enum class GemmMode { kBf16, kFp8Fast, kFp8Precise, kFp8Block };
inline constexpr int kGemmModes = 4;

// Microseconds of one matmul D(M, N) with contraction K, by GemmMode; 0 where it was not measured. Weight gradients add
// to FP32. In gain_rates.cpp, with the GPU and the date.
struct MeasuredGemm {
    GemmLayout pass;
    int64_t M, N, K;
    double us[kGemmModes];
};
extern const char* const kMeasuredOn;
const std::vector<MeasuredGemm>& measured_gemms();

// Measured where the shape was, else a smooth model of size and K, corrected by what was measured nearby.
double predicted_gemm_us(GemmMode mode, GemmLayout pass, int64_t M, int64_t N, int64_t K);

// One linear, one micro-batch: three matmuls, what quantising adds (FP8), what the bias gradient adds (BF16).
struct LinearSpeedup {
    double bf16_ms = 0, fp8_ms = 0;
    double speedup() const { return bf16_ms / fp8_ms; }
};
LinearSpeedup predict_speedup(const Config& config, const Fp8Plan& plan, const LinearPlan& linear);

// make_fp8_plan with these predictions.
Fp8Plan fp8_plan_of(const Config& config, const ParamTable& table);

// For --dry-run: the FP8 plan of the configuration and a line for each kind of linear, "FP8 loses" where it would; and
// what the device lacks for it. "" without FP8.
std::string fp8_dry_run_text(const Config& config, const ParamTable& table, const DeviceInfo& device);
