// Measured ceilings of this device, from which the floors of operations follow.
#pragma once
#include <map>

#include "llmc/ops/op_cost.h"

struct Ceilings {
    double copy_rate = 0;            // bytes per second, read and written
    double host_link = 0;            // bytes per second from and to pinned host memory, each while both are busy
    std::map<Dtype, double> flops;   // FLOP/s of a square matmul, by operand dtype; E5M2 counts as E4M3
    int64_t matmul_size = 0;
    double event_ms = 0;             // milliseconds that two events around an operation add to it (op_timer.h)

    // The least time of an operation: its bytes at the rate of a copy or, if that takes longer, the FLOPs of attention
    // or a matmul at the rate of the square matmul.
    double floor_ms(const PlannedOp& op) const;
    double floor_ms(const GemmArgs& args) const;
    double copy_ms(int64_t bytes) const { return 1e3 * static_cast<double>(bytes) / copy_rate; }
};

// FLOPs of causal attention, half of T x T: two products forward, five backward.
double attention_flop(const PlannedAttention& shape);

// Measures the copy rates and, for the dtypes of the matmuls and attention in `work`, the matmul rate. Allocates device
// memory and frees it.
Ceilings measure_ceilings(Ctx& ctx, const StepRecorder& work);
