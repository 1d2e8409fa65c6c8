// Predicts the speedup of FP8 over BF16 for each linear layer, from rates measured on one GPU.
#pragma once
#include <string>

#include "llmc/model/parameters/fp8_recipe.h"

// Time of one linear layer for one micro-batch: three matmuls, and quantization in FP8 or the bias gradient in BF16.
struct LinearSpeedup {
    double bf16_ms = 0, fp8_ms = 0;
    double speedup() const { return bf16_ms / fp8_ms; }
};
LinearSpeedup predict_speedup(const Config& config, const Fp8Plan& plan, const LinearPlan& linear);

// Returns make_fp8_plan() with these predictions.
Fp8Plan fp8_plan_of(const Config& config, const ParamTable& table);

// For the plan: the configuration's FP8 plan, what the device lacks for it, and the predicted speedup for each kind of
// linear layer. "" without FP8.
std::string fp8_speedup_text(const Config& config, const ParamTable& table, const DeviceInfo& device);
