// The update of parameters from reduced gradients: math only. ShardedState has the buffers and this rank's shard
// ranges; optimizer_state.h has the optimizers and their states.
#pragma once
#include <array>
#include <memory>
#include <vector>

#include "llmc/config/config.h"
#include "llmc/model/parameters/params.h"
#include "llmc/ops/ops.h"

// Consecutive elements of one parameter, and what an update reads and writes.
struct ShardUpdate {
    const Param& param;
    int64_t begin = 0;                          // number of the first element within the parameter
    Tensor weight;                              // working type, =; empty if stored in FP8 only
    Tensor grad;                                // summed over the ranks; an optimizer may overwrite it
    std::array<Tensor, kStateKinds> states;      // by StateKind, updated; empty if the parameter has no such state
    ScaleEntry* amax = nullptr;                    // optional: amax_bits = max(itself, |new weight rounded to bf16|)
    int64_t moments_begin = 0;                  // see AdamWArgs

    int64_t first_elem() const { return param.first_elem() + begin; }   // within the whole parameter
    const Tensor& state(StateKind kind) const { return states[static_cast<size_t>(kind)]; }
};

// The factor of the learning rate of a parameter (--lr-scale, --mup-base-width).
inline double lr_scale_of(const Config& config, const Param& param) {
    return config.lr_scale[static_cast<size_t>(param.lr_group)] * param.mup_lr_scale;
}
// Its weight decay, which is multiplied by that factor: by --mup-base-width a step decays as at any other width.
inline double weight_decay_of(const Config& config, const Param& param) {
    return param.decay ? config.weight_decay / param.mup_lr_scale : 0;
}

class Optimizer {
public:
    virtual ~Optimizer() = default;
    // Updates nothing if state->skip. No host synchronisation.
    virtual void update(Ctx& ctx, const ShardUpdate& shard, const StepState* state) const = 0;
    // Whether update() leaves the parameter as it is, and finish() completes the update once Orthogonalizer has
    // replaced what update() has left in shard.grad.
    virtual bool finishes() const { return false; }
    virtual void finish(Ctx&, const ShardUpdate&, const StepState*) const {}
};

// By OptimizerKind. expert_load: see RouterBias.
std::vector<std::unique_ptr<Optimizer>> make_optimizers(const Config& config, Tensor expert_load);
