// All-gathers and quantizes new weights after each step and after masters were loaded. With --zero 1 each rank has the
// new masters of its shard ranges, and the ranks all-gather the weights by bucket; with overlap this runs during the
// forward of earlier layers. A rank that has all masters computes all weights from them. With --zero 3 a LayerGatherer
// gathers all weights but norms and biases when a layer needs them.
#pragma once
#include <memory>
#include <vector>

#include "llmc/model/parameters/fp8_state.h"
#include "llmc/parallel/comm/comm_stream.h"
#include "llmc/parallel/groups.h"
#include "llmc/parallel/zero/layer_gatherer.h"
#include "llmc/parallel/zero/sharded_state.h"

// Whether the weights of FP8 linears are all-gathered in FP8, quantized by the ranks that own them, instead of in bf16.
bool gathers_fp8(const Config& config, const Buckets& buckets);

class WeightGatherer {
public:
    // Owns none of its arguments. Allocates communication buffers from the arena. slots: null without --zero 3.
    WeightGatherer(const Config& config, const ParamTable& table, ShardedState& state, Fp8State& fp8,
                   const WeightSlots* slots, const Groups& groups, CommStream& stream, Arena& arena);

    // Takes the maximum of the amaxes over the ranks, so that all compute the same scales.
    void all_reduce_amaxes(Ctx& ctx);
    // Computes all weights from this rank's new masters, its blocks of the weights in the working type, and the reduced
    // amaxes. FP8 weights do not change if step->skip; step may be null.
    void gather(Ctx& ctx, const StepState* step);
    // Computes weights and scales from the masters only. fresh: there is no FP8 state of a checkpoint in the same
    // recipe.
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
    int64_t timer_spans() const;   // of one step, at most; see CommTimer

private:
    const ParamGroup& bucket(int number) const { return buckets_.all()[static_cast<size_t>(number)]; }
    void round_masters(Ctx& ctx, int number, const Tensor& whole);
    void gather_bucket(Ctx& comm, int number, const StepState* step);
    void gather_fp8_bucket(Ctx& comm, int number);
    void wait(Ctx& ctx, int layer);

    const Config& config_;
    ShardedState& state_;
    const Buckets& buckets_;
    Fp8State& fp8_;
    const Groups& groups_;
    CommStream& stream_;
    Tensor rounded_;                     // communication buffer: the masters of a kFp8Linear bucket in bf16
    std::vector<OwnedEvent> done_;       // by bucket: its weights are gathered; empty until the side stream is open
    size_t next_;                        // first bucket that the compute stream has not waited for
    std::unique_ptr<LayerGatherer> layers_;   // null without --zero 3
};
