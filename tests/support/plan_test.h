// Predictions of `plan`, for its tests.
#pragma once
#include "tests/support/config_test.h"
#include "tests/support/fp8_model_test.h"

// Options of runs that several tests plan.
inline const Words kLlama8 = {"--model", "llama3-8B", "--seq-length", "8192", "--micro-batch-size", "1",
                              "--global-batch-size", "4", "--grad-dtype", "bf16", "--moment-dtype", "bf16"};
inline const Words kGpt2 = {"--model", "gpt2-124M", "--micro-batch-size", "64", "--global-batch-size", "512"};
inline const Words kTwo = {"--model", "llama3-small", "--fp8-recipe", "delayed", "--micro-batch-size", "1",
                           "--ranks", "2"};
inline const Words kDelayed = {"--fp8-recipe", "delayed"};

inline Config planned_config(const std::string& family, const Words& words) {
    return parse(family, joined({"--dry-run", "--synthetic-data"}, words)).config;
}

inline MemoryPlan planned(const Config& config) {
    return memory_of(config, config.ranks > 0 ? static_cast<int>(config.ranks) : 1);
}

inline const PlannedOp* find_op(const MemoryPlan& plan, OpKind kind) {
    for (const PlannedOp& op : plan.step_ops)
        if (op.kind == kind) return &op;
    return nullptr;
}
