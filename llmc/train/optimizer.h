// Training state of the parameters, in flat buffers cut into buckets, and the update. Gradients have an element for
// every parameter, masters and moments for what this rank owns; the weights of the working type leave out those that
// only quantized tensors hold.
#pragma once

#include <functional>
#include "llmc/checkpoint/checkpoint.h"
#include "llmc/config/config.h"
#include "llmc/model/fp8_state.h"
#include "llmc/model/params.h"
#include "llmc/ops/arena.h"
#include "llmc/ops/ops.h"
#include "llmc/parallel/zero.h"

class Optimizer {
public:
    // Takes weights, gradients, masters and moments from the arena. Nothing else is owned.
    Optimizer(const Config& config, const ParamTable& table, const Buckets& buckets, Comm& comm, Arena& arena,
              Fp8State& fp8);

    // Masters from the keyed generator (a pure function of seed, parameter name and element; padded vocabulary rows
    // and the gaps between parameters are 0), weights from the masters, moments 0.
    void initialise(Ctx& ctx);
    // Weights on all ranks = masters rounded to the working type, and the quantized tensors; after masters were loaded.
    // fresh: not from a checkpoint of a run in the same recipe.
    void weights_from_masters(Ctx& ctx, bool fresh);
    void zero_moments(Ctx& ctx);

    void zero_grads(Ctx& ctx);
    // After the backward of the last micro-batch, with the gradients reduced: norm over all ranks, clip scale and
    // guard into *state, then AdamW on what this rank owns, and the new weights to all ranks; nothing is updated when
    // the guard says so. No host synchronisation.
    void update(Ctx& ctx, StepState* state);

    // For checkpoints: blocking copies between host memory and the flat buffers. What a write brings of masters and
    // moments that other ranks own is left out.
    StateAccess access(Ctx& ctx);

    // By parameter; empty for those in FP8 alone.
    const std::vector<Tensor>& weights() const { return weights_; }
    Tensor grads() const { return state_.grads; }
    Zero& zero() { return zero_; }

private:
    void adamw(Ctx& ctx, const Piece& piece, const StepState* state);
    void read(Ctx& ctx, StateKind kind, int index, int64_t begin, int64_t count, void* host);
    void read_rounded_master(Ctx& ctx, int index, int64_t begin, int64_t count, void* host);
    void write(Ctx& ctx, StateKind kind, int index, int64_t begin, int64_t count, const void* host);
    // What this rank has of it, empty if nothing.
    struct Held {
        int64_t begin = 0;   // in the parameter
        Tensor elems;
    };
    Held held(StateKind kind, int index) const;
    const Param& param(int index) const { return table_.params[static_cast<size_t>(index)]; }

    const Config& config_;
    const ParamTable& table_;
    Arena& arena_;
    Fp8State& fp8_;
    const FlatState state_;
    std::vector<Tensor> weights_;     // by parameter, parts of one buffer
    Zero zero_;
    std::vector<int> piece_of_;       // by parameter, number in zero_.pieces(), -1: other ranks have it
};
