// Makes the weights that passes read from new masters, after each step and after masters were loaded. With --zero 1 and
// 2 each rank has the new masters of its shard ranges, and the ranks all-gather the weights by bucket (WeightShards);
// with overlap this runs during the forward of earlier layers. A rank that has all masters computes all weights from
// them. With --zero 3 a LayerGatherer gathers all weights but norms and biases when a layer needs them.
#pragma once
#include <memory>
#include <vector>

#include "llmc/parallel/zero/layer_gatherer.h"

class WeightGatherer {
public:
    // Owns none of its arguments. layer_buffers: null without --zero 3.
    WeightGatherer(const Config& config, const ParamTable& table, ShardedState& state, Fp8State& fp8,
                   const Gradients& grads, const LayerBuffers* layer_buffers, const Groups& groups, CommStream& stream,
                   const Arena& arena);

    // Called when the optimizer has written the master of a range of each_range(); see WeightShards.
    void keep_master(Ctx& ctx, const ShardRange& range) { shards_.keep_master(ctx, range); }
    // Takes the maximum of the amaxes over the ranks, so that all compute the same scales.
    void all_reduce_amaxes(Ctx& ctx);
    // Computes all weights from this rank's new masters, its shards of the weights in the working type, and the reduced
    // amaxes. FP8 weights do not change if step->skip; step may be null.
    void gather(Ctx& ctx, const StepState* step);
    // Computes weights and scales from the masters only, or from the EMA (ShardedState::set_source). fresh: there is no
    // FP8 state of a checkpoint in the same recipe.
    void from_masters(Ctx& ctx, bool fresh);

    // See ParamStore. Without --zero 3, before_layer makes ctx wait until the weights of layers <= `layer` are
    // gathered.
    void before_layer(Ctx& ctx, int layer, Pass pass);
    void after_layer(Ctx& ctx, int layer, Pass pass);
    // Makes ctx wait for everything that is being gathered.
    void wait(Ctx& ctx);
    // --zero 3: gathers weights in every pass, so that all ranks must make the same passes.
    bool gathers_in_passes() const { return layers_ != nullptr; }
    void set_pass_follows(bool follows) { if (layers_) layers_->set_pass_follows(follows); }

private:
    void gather_bucket(Ctx& comm, int number, const StepState* step);
    void wait(Ctx& ctx, int layer);

    const Config& config_;
    ShardedState& state_;
    const Buckets& buckets_;
    Fp8State& fp8_;
    const WeightShards shards_;
    const Groups& groups_;
    CommStream& stream_;
    std::vector<OwnedEvent> done_;       // by bucket: its weights are gathered; empty until the side stream is open
    size_t next_;                        // first bucket that the compute stream has not waited for
    std::unique_ptr<LayerGatherer> layers_;   // null without --zero 3
};
