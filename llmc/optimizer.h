// Training state of the parameters, in flat buffers, and the update.
#pragma once
#include <functional>

#include "llmc/arena.h"
#include "llmc/checkpoint.h"
#include "llmc/config.h"
#include "llmc/ops.h"
#include "llmc/params.h"

class Optimizer {
public:
    // Takes weights, gradients, masters and moments of table.flat_elems elements each from the arena.
    Optimizer(const Config& config, const ParamTable& table, Arena& arena);

    // Masters from the keyed generator (a pure function of seed, parameter name and element; padded vocabulary rows
    // and the gaps between parameters are 0), weights from the masters, moments 0.
    void initialise(Ctx& ctx);
    // Weights = masters rounded to the working type; after masters were loaded.
    void weights_from_masters(Ctx& ctx);
    void zero_moments(Ctx& ctx);

    void zero_grads(Ctx& ctx);
    // Norm of the gradients, clip factor and guard into *state, then AdamW on every parameter; nothing is updated when
    // the guard says so. No host synchronisation.
    void update(Ctx& ctx, StepState* state);

    // For checkpoints: blocking copies between host memory and the flat buffers.
    StateAccess access(Ctx& ctx);

    Tensor weights() const { return weights_; }
    Tensor grads() const { return grads_; }

private:
    Tensor flat(StateKind kind) const;

    const Config& config_;
    const ParamTable& table_;
    Arena& arena_;
    Tensor weights_, grads_, master_, m_, v_;
};
