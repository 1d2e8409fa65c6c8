// Training state of the parameters, in flat buffers, and the update. Masters, moments and gradients have an element for
// every parameter; the weights of the working type leave out those that only FP8 copies hold.
#pragma once
#include <functional>

#include "llmc/arena.h"
#include "llmc/checkpoint.h"
#include "llmc/config.h"
#include "llmc/fp8_state.h"
#include "llmc/ops.h"
#include "llmc/params.h"

class Optimizer {
public:
    // Takes weights, gradients, masters and moments from the arena. `fp8` is not owned.
    Optimizer(const Config& config, const ParamTable& table, Arena& arena, Fp8State& fp8);

    // Masters from the keyed generator (a pure function of seed, parameter name and element; padded vocabulary rows
    // and the gaps between parameters are 0), weights from the masters, moments 0.
    void initialise(Ctx& ctx);
    // Weights = masters rounded to the working type, and the FP8 copies; after masters were loaded. fresh: not from a
    // checkpoint of a run in the same recipe.
    void weights_from_masters(Ctx& ctx, bool fresh);
    void zero_moments(Ctx& ctx);

    void zero_grads(Ctx& ctx);
    // Norm of the gradients, clip factor and guard into *state, then AdamW on every parameter; nothing is updated when
    // the guard says so. No host synchronisation.
    void update(Ctx& ctx, StepState* state);

    // For checkpoints: blocking copies between host memory and the flat buffers.
    StateAccess access(Ctx& ctx);

    // By parameter; empty for those in FP8 alone.
    const std::vector<Tensor>& weights() const { return weights_; }
    Tensor grads() const { return grads_; }

private:
    void read_rounded_master(Ctx& ctx, int index, int64_t begin, int64_t count, void* host);
    Tensor state_tensor(StateKind kind, int index) const;

    const Config& config_;
    const ParamTable& table_;
    Arena& arena_;
    Fp8State& fp8_;
    std::vector<Tensor> weights_;     // by parameter, parts of one buffer
    Tensor flat_weights_, grads_, master_, m_, v_;
};
