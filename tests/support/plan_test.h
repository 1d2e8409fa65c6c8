// Predictions of `plan`, for its tests.
#pragma once
#include "tests/support/config_test.h"
#include "tests/support/fp8_model_test.h"

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
