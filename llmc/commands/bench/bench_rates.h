// `bench --write-rates FILE`: measures rates for perf/rates.h on this GPU.
#pragma once
#include <deque>
#include <map>
#include <string>
#include <vector>

#include "llmc/ops/op_timer.h"
#include "llmc/perf/rates.h"

// Times the three matmuls of every linear layer in `work` in BF16 and in the FP8 modes that the device supports, with
// operands that rotate beyond the L2 cache: rates.gemms and rates.bf16_wgrads. Allocates device memory and frees it.
void measure_linears(Ctx& ctx, const DeviceInfo& device, const StepRecorder& work, Rates& rates);

// Collects the operations of timed steps.
class RateRows {
public:
    // event_ms: what events add to a call.
    void add_step(const std::deque<OpCall>& calls, size_t count, double event_ms);
    // Medians over all calls: rates.ops, rates.attention, and the rates.gemms that are there already. Between other
    // operations a matmul is faster than in a series of itself, which lowers the clocks of a power-limited GPU.
    void put(Rates& rates) const;

private:
    struct Calls {
        StepRecorder work;   // of one call
        std::vector<double> us;
    };
    std::map<std::string, Calls> calls_;   // by what a call does, and how many bytes it moves
};
