// `bench --write-rates FILE`: measures rates for perf/rates.h on this GPU.
#pragma once
#include <deque>
#include <map>
#include <tuple>
#include <vector>

#include "llmc/ops/op_timer.h"
#include "llmc/perf/rates.h"

// Times the three matmuls of every linear layer in `work` in BF16 and in the FP8 modes that the device supports, with
// operands that rotate beyond the L2 cache: rates.gemms and rates.bf16_wgrads. Allocates device memory and frees it.
void measure_linears(Ctx& ctx, const DeviceInfo& device, const StepRecorder& work, Rates& rates);

// Collects operations of timed steps that ran alone: attention that also quantizes its result counts as two.
class RateRows {
public:
    // event_ms: what events add to a call.
    void add_step(const std::deque<OpCall>& calls, size_t count, double event_ms);
    // Medians over all calls: rates.ops and rates.attention.
    void put(Rates& rates) const;

private:
    using Key = std::tuple<OpKind, OpMode, Dtype, Activation, int64_t, int64_t, int64_t, int64_t, int64_t, bool>;
    struct Calls {
        PlannedOp op;
        std::vector<double> us;
    };
    std::map<Key, Calls> calls_;
};
