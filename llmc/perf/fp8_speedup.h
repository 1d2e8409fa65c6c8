// Predicts the speedup of FP8 over BF16 for each linear layer, from rates measured on one GPU.
#pragma once
#include <string>

#include "llmc/model/parameters/fp8_recipe.h"

// How much faster the three matmuls of a linear layer are in FP8: their time in BF16 over that less what a step gains,
// which includes quantization, bias gradients and the layer's part of the optimizer.
double predict_speedup(const Config& config, const Fp8Plan& plan, const LinearPlan& linear);

// Returns make_fp8_plan() with these predictions.
Fp8Plan fp8_plan_of(const Config& config, const ParamTable& table);

// For the plan: the configuration's FP8 plan, what the device lacks for it, and the predicted speedup for each kind of
// linear layer. "" without FP8.
std::string fp8_speedup_text(const Config& config, const ParamTable& table, const DeviceInfo& device);
