// All-gathers the weights of a layer before it runs (ZeRO-3), into LayerBuffers. With overlap this happens on the side
// stream, one layer ahead in the direction of the pass. A layer that is still in its buffer is not gathered again. So
// the backward pass begins with the last layers of the forward pass, and the next micro-batch with the first layers.
#pragma once
#include <vector>

#include "llmc/model/parameters/param_store.h"
#include "llmc/parallel/zero/weight_shards.h"

class LayerGatherer {
public:
    // Owns none of its arguments.
    LayerGatherer(const Config& config, const ParamTable& table, const ShardedState& state, Fp8State& fp8,
                  const WeightShards& shards, const LayerBuffers& buffers, CommStream& stream, const Arena& arena);

    // Called when the weights have changed: quantizes this rank's shards from its masters and gathers the first layers
    // of a pass. The caller has made the side stream wait for the new masters. step: see WeightGatherer::gather.
    void restart(Ctx& ctx, const StepState* step);
    // Whether another pass with the same weights follows, so that the end of this one can gather the embedding.
    void set_pass_follows(bool follows) { pass_follows_ = follows; }

    // The decoder's calls around each layer, as ParamStore describes them. In forward before_layer makes ctx wait until
    // the layer's weights are gathered; in backward after_layer of the layer above does, if there is one.
    void before_layer(Ctx& ctx, int layer, Pass pass);
    void after_layer(Ctx& ctx, int layer, Pass pass);
    // Makes ctx wait for everything that was enqueued on the side stream.
    void wait(Ctx& ctx);

private:
    static constexpr int kNone = -2;
    struct Layer {
        std::vector<int> groups;   // those of its groups that are gathered
        bool fp8 = false;          // some of them in FP8
        OwnedEvent done;           // on the side stream: all is gathered; null without a side stream
        int64_t number = 0;        // of that event, see CommStream::record
    };
    struct Buffer {
        int layer = kNone;      // the layer whose weights are in the buffer
        int users = 0;          // layers between before_layer and after_layer
        int64_t released = 0;   // CommStream's point behind the work that used the buffer last
    };

    Layer& layer_at(int layer) { return layers_[static_cast<size_t>(layer + 1)]; }
    // A tied head reads the weight of the embedding.
    int home(int layer) const { return layer == num_layers_ && config_.shape.tied_head ? -1 : layer; }
    Buffer& buffer(int layer) { return rowwise_[static_cast<size_t>(buffers_.buffer_of(layer))]; }
    Buffer& transposed_buffer(int layer) { return transposed_[static_cast<size_t>(layer % buffers_.ring())]; }
    const ParamGroup& group(int number) const { return state_.buckets().all()[static_cast<size_t>(number)]; }
    template <typename Use> void each_fp8_linear(int layer, Use&& use);

    void prepare(Ctx& ctx, int number, bool backward);
    void record(Ctx& ctx, Layer& layer);
    void wait(Ctx& ctx, int layer);
    void count_scales(Ctx& ctx);
    void release(Ctx& ctx, int layer, Pass pass);

    const Config& config_;
    const ParamTable& table_;
    const ShardedState& state_;
    Fp8State& fp8_;
    const WeightShards& shards_;
    const LayerBuffers& buffers_;
    CommStream& stream_;
    const Arena& arena_;
    const int num_layers_;
    std::vector<Layer> layers_;       // from the embedding to the head
    std::vector<Buffer> rowwise_;     // by LayerBuffers::buffer_of
    std::vector<Buffer> transposed_;
    OwnedEvent all_done_;
    bool pass_follows_ = false;
    bool idle_ = true;                // nothing was enqueued on the side stream since the last wait for all of it
};
