#include "llmc/parallel/zero/layer_gatherer.h"

#include <algorithm>

LayerGatherer::LayerGatherer(const Config& config, const ParamTable& table, const ShardedState& state, Fp8State& fp8,
                             const WeightShards& shards, const LayerBuffers& buffers, CommStream& stream,
                             const Arena& arena)
    : config_(config), table_(table), state_(state), fp8_(fp8), shards_(shards), buffers_(buffers), stream_(stream),
      arena_(arena), num_layers_(static_cast<int>(config.shape.num_layers)),
      layers_(static_cast<size_t>(num_layers_ + 2)), rowwise_(static_cast<size_t>(buffers.ring() + 1)),
      transposed_(static_cast<size_t>(buffers.ring())) {
    for (size_t g = 0; g < state.buckets().all().size(); g++) {
        const ParamGroup& group = state.buckets().all()[g];
        if (!LayerBuffers::gathers(group)) continue;
        Layer& layer = layer_at(group.first_layer);
        layer.groups.push_back(static_cast<int>(g));
        layer.fp8 |= group.form == ParamForm::kFp8Linear;
    }
}

template <typename Use> void LayerGatherer::each_fp8_linear(int layer, Use&& use) {
    for (int number : layer_at(layer).groups)
        for (int param : group(number).params)
            if (group(number).form == ParamForm::kFp8Linear) use(*fp8_.linear_of_param(param));
}

// ---- new weights

void LayerGatherer::restart(Ctx& ctx, const StepState* step) {
    Ctx& comm = stream_.comm_ctx(ctx);
    for (Buffer& buffer : rowwise_) buffer.layer = kNone;
    // The quantized weight of the head has memory of its own, outside the layer buffers. It is quantized from the
    // gathered one, whose memory an untied head leaves to the embedding.
    if (const Fp8Linear* head = fp8_.linear_of_param(table_.head)) {
        prepare(ctx, home(num_layers_), false);
        fp8_.quantize_weight(comm, *head, state_.weight(table_.head), step);
        record(ctx, layer_at(home(num_layers_)));
    }
    const bool counts = fp8_.counts_weight_scales();
    for (int layer = -1; layer <= num_layers_; layer++) {
        for (int number : layer_at(layer).groups)
            if (group(number).form == ParamForm::kFp8Linear) shards_.quantize(comm, number);
        if (!counts && layer < buffers_.ring()) prepare(ctx, layer, false);
    }
    if (counts) {
        count_scales(ctx);
        for (int layer = -1; layer < buffers_.ring(); layer++) prepare(ctx, layer, false);
    }
}

// Counts the scales of all scale blocks for the report of a step, for which it gathers every layer once.
void LayerGatherer::count_scales(Ctx& ctx) {
    for (int layer = 0; layer <= num_layers_; layer++) {
        if (!layer_at(layer).fp8) continue;
        prepare(ctx, layer, false);
        each_fp8_linear(layer, [&](const Fp8Linear& linear) {
            fp8_.count_weight_scales(stream_.comm_ctx(ctx), linear);
        });
    }
}

// ---- a layer

// Enqueues what is missing for a pass of a layer: the all-gather of its weights, and the transposed ones.
void LayerGatherer::prepare(Ctx& ctx, int number, bool backward) {
    Layer& layer = layer_at(number);
    Buffer& buffer = this->buffer(number);
    if (layer.groups.empty()) return;
    const bool gathers = buffer.layer != number;
    const bool transposes = layer.fp8 && backward && transposed_buffer(number).layer != number;
    if (!gathers && !transposes) return;
    CHECK(!gathers || buffer.users == 0, "the buffer of layer %d is in use", number);
    Ctx& comm = stream_.comm_ctx(ctx);
    const int64_t released = std::max(gathers ? buffer.released : 0,
                                      transposes ? transposed_buffer(number).released : 0);
    const bool counts = transposes && fp8_.counts_transposed_weights();   // after compute has cleared the counts
    if (counts || !stream_.waits_for(released)) stream_.wait_for_compute(ctx, comm);
    const CollectivePurpose purpose(comm, "gather " + layer_text(number, num_layers_));
    if (gathers)
        for (int g : layer.groups) shards_.gather(comm, group(g));
    if (transposes) each_fp8_linear(number, [&](const Fp8Linear& linear) { fp8_.transpose_weight(comm, linear); });
    if (gathers) buffer.layer = number;
    if (transposes) transposed_buffer(number).layer = number;
    record(ctx, layer);
}

// Whoever waits for the layer from now on waits for everything that is on the side stream.
void LayerGatherer::record(Ctx& ctx, Layer& layer) {
    Ctx& comm = stream_.comm_ctx(ctx);
    if (&comm == &ctx) return;
    idle_ = false;
    if (!layer.done) layer.done = OwnedEvent::create();
    layer.number = stream_.record(comm, layer.done);
}

void LayerGatherer::wait(Ctx& ctx, int layer) {
    stream_.order_after(ctx, layer_at(layer).done, layer_at(layer).number);
}

void LayerGatherer::wait(Ctx& ctx) {
    Ctx& comm = stream_.comm_ctx(ctx);
    if (&comm == &ctx || idle_) return;
    if (!all_done_) all_done_ = OwnedEvent::create();
    stream_.order_after(ctx, all_done_, stream_.record(comm, all_done_));
    idle_ = true;
}

// ---- passes

void LayerGatherer::before_layer(Ctx& ctx, int layer, Pass pass) {
    const bool backward = pass == Pass::kBackward;
    if (backward && layer < 0) {   // the backward of the embedding reads no weight
        if (pass_follows_) prepare(ctx, -1, false);
        return;
    }
    prepare(ctx, home(layer), backward);
    buffer(home(layer)).users++;
    if (backward && layer < num_layers_) return;   // after_layer of the layer above waits
    wait(ctx, home(layer));
    if (backward) return;
    if (layer + 1 < num_layers_) prepare(ctx, layer + 1, false);
    if (layer == std::max(0, num_layers_ - 2)) prepare(ctx, home(num_layers_), false);
}

void LayerGatherer::after_layer(Ctx& ctx, int layer, Pass pass) {
    const bool backward = pass == Pass::kBackward;
    if (backward && layer < 0) return;
    release(ctx, home(layer), pass);
    if (backward && layer > 0) wait(ctx, layer - 1);
}

void LayerGatherer::release(Ctx& ctx, int layer, Pass pass) {
    const bool backward = pass == Pass::kBackward, in_ring = buffers_.in_ring(layer);
    Buffer& buffer = this->buffer(layer);
    buffer.users--;
    // Whether another layer's weights come into the buffer in this pass.
    const int next = backward ? layer - buffers_.ring() : layer + buffers_.ring();
    const bool ends = in_ring ? next >= 0 && next < num_layers_ : !config_.shape.tied_head && backward == (layer >= 0);
    auto poison = [&](const Tensor& memory) {
        if (arena_.poisons()) device::fill_bytes(ctx, memory.data, 0xff, memory.bytes());
    };
    if (ends) {
        buffer.layer = kNone;
        poison(buffers_.memory(layer));
    }
    const int64_t point = stream_.compute_point();
    buffer.released = point;
    if (!in_ring || !backward) return;
    Buffer& transposed = transposed_buffer(layer);
    transposed.layer = kNone;
    poison(buffers_.transposed_memory(layer));
    transposed.released = point;
}
