// What this device can do at best, measured as the steps of a bench are: the floors that its operations are held
// against.
#pragma once
#include <map>

#include <vector>
#include "llmc/ops/op_cost.h"

struct Ceilings {
    double copy_rate = 0;            // bytes a second, read and written
    std::map<Dtype, double> flops;   // FLOP/s of a square matmul, by type of its operands; E5M2 counts as E4M3
    int64_t matmul_size = 0;
    // What two events around an operation add to it, in ms: launched as usual, and early (op_timer.h).
    double event_ms = 0, early_event_ms = 0;

    // Milliseconds that the operation takes at least, from its bytes at the rate of a copy. Attention and matmuls: at
    // the rate of the square one if that takes longer.
    double floor_ms(const PlannedOp& op) const;
    double floor_ms(const GemmArgs& args) const;
    double copy_ms(int64_t bytes) const { return 1e3 * static_cast<double>(bytes) / copy_rate; }
};

// FLOP of causal attention as written, half of the square: two products forward, five backward.
double attention_flop(const PlannedAttention& shape);

// Of the types whose matmuls, or attention, these operations have. Takes memory of the device and gives it back.
Ceilings measure_ceilings(Ctx& ctx, const StepRecorder& work);
