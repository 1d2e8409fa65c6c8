// The weights of an FP8 run as it exports them, for evaluations: the masters of linears in FP8, rounded to the working
// type. They are in the memory of gradients, which is idle between steps and where a weight has the place of its
// gradient. If buckets share that memory (--zero 2 and 3), ranks keep their rounded shards and all-gather those of a
// layer before it runs, with overlap one layer ahead; otherwise all are there at once. Other weights are ZeroStore's.
#pragma once
#include <vector>

#include "llmc/model/parameters/param_store.h"
#include "llmc/parallel/zero/gradients.h"
#include "llmc/parallel/zero/weight_gatherer.h"

class Bf16Store : public ParamStore {
public:
    // Owns none of its arguments.
    Bf16Store(const Config& config, ShardedState& state, const Gradients& grads, WeightGatherer& gatherer,
              const Groups& groups, CommStream& stream);

    // Rounds the current masters. Collective; call it before the passes of an evaluation.
    void round_masters(Ctx& ctx);
    // Whether all ranks must make the same passes.
    bool gathers_in_passes() const { return grads_.shares_memory(); }

    void before_layer(Ctx& ctx, int layer, Pass pass) override;
    void after_layer(Ctx& ctx, int layer, Pass pass) override { gatherer_.after_layer(ctx, layer, pass); }
    Tensor weight(int param) const override;
    Tensor grad(int /*param*/) const override { return {}; }

private:
    Tensor rounded(const ShardRange& range) const;
    void gather(Ctx& comm, const ParamGroup& bucket) const;
    void gather_layer(Ctx& ctx, int layer);
    const std::vector<ParamGroup>& all() const { return state_.buckets().all(); }

    const Config& config_;
    ShardedState& state_;
    const Gradients& grads_;
    WeightGatherer& gatherer_;
    const Groups& groups_;
    CommStream& stream_;
    int next_ = 0;   // the first layer that this pass has not gathered
    struct Layer {
        OwnedEvent done;      // on the side stream
        int64_t number = 0;   // of that event, see CommStream::record; 0: nothing to wait for
    };
    std::vector<Layer> layers_;   // of the model, then the head
};
