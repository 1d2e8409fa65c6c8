// The update of parameters from reduced gradients: math only. Which elements a rank updates, and where they lie, is
// ShardedState's; which optimizer a parameter has, and what that keeps of it, is in state_slots.h.
#pragma once
#include <array>
#include <memory>
#include <vector>

#include "llmc/config/config.h"
#include "llmc/model/params.h"
#include "llmc/ops/ops.h"

// Consecutive elements of one parameter, and all that an update of them reads and writes.
struct ShardUpdate {
    const Param& param;
    int64_t begin = 0;                          // number of the first element within the parameter
    Tensor weight;                              // working type, =; empty where only FP8 weights hold it
    Tensor grad;                                // summed over the ranks
    std::array<Tensor, kStateKinds> slots;      // by StateKind; of those that the parameter has
    Fp8Slot* amax = nullptr;                    // optional: amax_bits = max with every |new weight rounded to bf16|

    const Tensor& slot(StateKind kind) const { return slots[static_cast<size_t>(kind)]; }
};

class Optimizer {
public:
    virtual ~Optimizer() = default;
    // Nothing is updated where state->skip. No host synchronisation.
    virtual void update(Ctx& ctx, const ShardUpdate& shard, const StepState* state) const = 0;
};

// By OptimizerKind.
std::vector<std::unique_ptr<Optimizer>> make_optimizers(const Config& config);
