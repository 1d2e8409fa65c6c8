// All-gathers the weights of a layer before it runs (ZeRO-3), into WeightSlots. With overlap this happens on the side
// stream, one layer ahead in the direction of the pass. A layer that is still in its slot is not gathered again. So the
// backward pass begins with the last layers of the forward pass, and the next micro-batch with the first layers.
#pragma once
#include <vector>

#include "llmc/model/parameters/fp8_state.h"
#include "llmc/model/parameters/param_store.h"
#include "llmc/parallel/comm/comm_stream.h"
#include "llmc/parallel/groups.h"
#include "llmc/parallel/zero/sharded_state.h"

class LayerGatherer {
public:
    // Owns none of its arguments.
    LayerGatherer(const Config& config, const ParamTable& table, const ShardedState& state, Fp8State& fp8,
                  const WeightSlots& slots, const Groups& groups, CommStream& stream, const Arena& arena);

    // Called when the weights have changed: quantizes this rank's blocks from its masters and gathers the first layers
    // of a pass. The caller has made the side stream wait for the new masters. step: see WeightGatherer::gather.
    void restart(Ctx& ctx, const StepState* step);
    // Whether another pass with the same weights follows, so that the end of this one can gather the embedding.
    void set_pass_follows(bool follows) { pass_follows_ = follows; }

    // See ParamStore, whose calls these are. In backward the weights of a layer are valid from after_layer of the layer
    // above it.
    void before_layer(Ctx& ctx, int layer, Pass pass);
    void after_layer(Ctx& ctx, int layer, Pass pass);
    // Makes ctx wait for everything that was enqueued on the side stream.
    void wait(Ctx& ctx);
    int64_t timer_spans() const;   // of a micro-batch, at most; see CommTimer

private:
    static constexpr int kNone = -2;
    struct Unit {   // a layer
        std::vector<int> groups;   // the layer's groups that are gathered
        bool fp8 = false;          // some of them in FP8
        OwnedEvent done;           // on the side stream: all is gathered; null without a side stream
        int64_t number = 0;        // of that event, see CommStream::record
    };
    struct Slot {
        int layer = kNone;      // the layer that is in the slot
        int users = 0;          // layers between before_layer and after_layer
        int64_t released = 0;   // CommStream's mark behind the work that used the slot last
    };

    Unit& unit(int layer) { return units_[static_cast<size_t>(layer + 1)]; }
    // A tied head reads the weight of the embedding.
    int home(int layer) const { return layer == layers_ && config_.shape.tied_head ? -1 : layer; }
    Slot& slot(int layer) { return slots_state_[static_cast<size_t>(slots_.slot_of(layer))]; }
    Slot& transposed_slot(int layer) { return transposed_[static_cast<size_t>(layer % slots_.transposed_ring())]; }
    const ParamGroup& group(int number) const { return state_.buckets().all()[static_cast<size_t>(number)]; }
    template <typename Use> void each_fp8_linear(int layer, Use&& use);

    void prepare(Ctx& ctx, int layer, bool backward);
    void wait(Ctx& ctx, int layer);
    void quantize(Ctx& comm, int layer);
    void count_scales(Ctx& ctx);
    void gather(Ctx& comm, const ParamGroup& group);
    Tensor block_of(const ParamGroup& group) const;
    void release(Ctx& ctx, int layer, Pass pass);

    const Config& config_;
    const ParamTable& table_;
    const ShardedState& state_;
    Fp8State& fp8_;
    const WeightSlots& slots_;
    const Groups& groups_;
    CommStream& stream_;
    const Arena& arena_;
    const int layers_;                 // blocks
    std::vector<Unit> units_;          // from the embedding to the head
    std::vector<Slot> slots_state_;    // by WeightSlots::slot_of
    std::vector<Slot> transposed_;
    OwnedEvent all_done_;
    bool pass_follows_ = false;
    bool idle_ = true;                 // nothing was enqueued on the side stream since the last wait for all of it
};
