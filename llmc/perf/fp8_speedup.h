// What FP8 is expected to gain over BF16, linear by linear, from rates measured on one kind of GPU.
#pragma once
#include <string>

#include <vector>
#include "llmc/model/fp8_recipe.h"

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
