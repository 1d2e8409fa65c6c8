#include "llmc/parallel/zero/layer_gatherer.h"

#include <algorithm>

LayerGatherer::LayerGatherer(const Config& config, const ParamTable& table, const ShardedState& state, Fp8State& fp8,
                             const WeightSlots& slots, const Groups& groups, CommStream& stream, const Arena& arena)
    : config_(config), table_(table), state_(state), fp8_(fp8), slots_(slots), groups_(groups), stream_(stream),
      arena_(arena), layers_(static_cast<int>(config.shape.num_layers)), units_(static_cast<size_t>(layers_ + 2)),
      slots_state_(static_cast<size_t>(slots.ring() + 1)), transposed_(static_cast<size_t>(slots.transposed_ring())) {
    for (size_t g = 0; g < state.buckets().all().size(); g++) {
        const ParamGroup& group = state.buckets().all()[g];
        if (!WeightSlots::gathers(group)) continue;
        Unit& layer = unit(group.first_layer);
        layer.groups.push_back(static_cast<int>(g));
        layer.fp8 |= group.form == ParamForm::kFp8Linear;
    }
}

// A pass gathers each group at most once and waits for each layer at most once.
int64_t LayerGatherer::timer_spans() const {
    return 2 * static_cast<int64_t>(state_.buckets().all().size() + units_.size());
}

template <typename Use> void LayerGatherer::each_fp8_linear(int layer, Use&& use) {
    for (int number : unit(layer).groups)
        for (int param : group(number).params)
            if (group(number).form == ParamForm::kFp8Linear) use(*fp8_.linear_of_param(param));
}

// ---- new weights

void LayerGatherer::restart(Ctx& ctx, const StepState* step) {
    Ctx& comm = stream_.comm_ctx(ctx);
    for (Slot& slot : slots_state_) slot.layer = kNone;
    const bool counts = fp8_.counts_weight_scales();
    for (int layer = -1; layer <= layers_; layer++) {
        quantize(comm, layer);
        if (!counts && layer < slots_.ring()) prepare(ctx, layer, false);
    }
    if (counts) {
        count_scales(ctx);
        for (int layer = -1; layer < slots_.ring(); layer++) prepare(ctx, layer, false);
    }
    // The quantized weight of a tied head has memory of its own, outside the slots.
    if (const Fp8Linear* head = fp8_.linear_of_param(table_.wte))
        fp8_.quantize_weight(comm, *head, state_.weight(table_.wte), step);
}

void LayerGatherer::quantize(Ctx& comm, int layer) {
    for (int number : unit(layer).groups) {
        const ParamGroup& bucket = group(number);
        if (bucket.form != ParamForm::kFp8Linear) continue;
        const int64_t begin = bucket.begin / state_.buckets().ranks();
        for (const ShardRange& range : state_.ranges_in(number))
            fp8_.quantize_shard(comm, range.param, range.begin, state_.new_master(range),
                                block_of(bucket).slice(range.shard - begin, range.elems));
    }
}

// Counts the scales of all blocks for the report of a step, for which it gathers every layer once.
void LayerGatherer::count_scales(Ctx& ctx) {
    for (int layer = 0; layer <= layers_; layer++) {
        if (!unit(layer).fp8) continue;
        prepare(ctx, layer, false);
        each_fp8_linear(layer, [&](const Fp8Linear& linear) {
            fp8_.count_weight_scales(stream_.comm_ctx(ctx), linear);
        });
    }
}

// ---- a layer

// Enqueues what is missing for a pass of a layer: the all-gather of its weights, and the transposed ones.
void LayerGatherer::prepare(Ctx& ctx, int layer, bool backward) {
    Unit& unit = this->unit(layer);
    Slot& slot = this->slot(layer);
    if (unit.groups.empty()) return;
    const bool block = slots_.is_block(layer), gathers = slot.layer != layer;
    const bool transposes = unit.fp8 && (block ? backward && transposed_slot(layer).layer != layer : gathers);
    if (!gathers && !transposes) return;
    CHECK(!gathers || slot.users == 0, "the slot of layer %d is in use", layer);
    Ctx& comm = stream_.comm_ctx(ctx);
    const int64_t released = std::max(gathers ? slot.released : 0,
                                      transposes && block ? transposed_slot(layer).released : 0);
    if (!stream_.waits_for(released)) stream_.wait_for_compute(ctx, comm);
    const CollectivePurpose purpose(comm, "gather " + layer_text(layer, layers_));
    if (gathers)
        for (int number : unit.groups) gather(comm, group(number));
    if (transposes) each_fp8_linear(layer, [&](const Fp8Linear& linear) { fp8_.transpose_weight(comm, linear); });
    if (gathers) slot.layer = layer;
    if (transposes && block) transposed_slot(layer).layer = layer;
    if (&comm == &ctx) return;
    idle_ = false;
    if (!unit.done) unit.done = OwnedEvent::create();
    unit.number = stream_.record(comm, unit.done);
}

Tensor LayerGatherer::block_of(const ParamGroup& group) const {
    if (group.form != ParamForm::kFp8Linear) return state_.weight_block(group);
    const int64_t ranks = state_.buckets().ranks();
    return fp8_.flat_weights().slice(group.weight_begin / ranks, group.elems / ranks);
}

void LayerGatherer::gather(Ctx& comm, const ParamGroup& group) {
    const Tensor whole = slots_.whole(group), block = block_of(group);
    const Tensor own = whole.slice(groups_.shard.world().rank * block.elems, block.elems);
    device::copy_on_device(comm, own.data, block.data, block.bytes());
    stream_.timed(comm, [&] { groups_.shard.all_gather(comm, whole); });
}

void LayerGatherer::wait(Ctx& ctx, int layer) {
    stream_.order_after(ctx, unit(layer).done, unit(layer).number);
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
    slot(home(layer)).users++;
    if (backward && layer < layers_) return;   // after_layer of the layer above waits
    wait(ctx, home(layer));
    if (backward) return;
    if (layer + 1 < layers_) prepare(ctx, layer + 1, false);
    if (layer == std::max(0, layers_ - 2)) prepare(ctx, home(layers_), false);
}

void LayerGatherer::after_layer(Ctx& ctx, int layer, Pass pass) {
    const bool backward = pass == Pass::kBackward;
    if (backward && layer < 0) return;
    release(ctx, home(layer), pass);
    if (backward && layer > 0) wait(ctx, layer - 1);
}

void LayerGatherer::release(Ctx& ctx, int layer, Pass pass) {
    const bool backward = pass == Pass::kBackward, block = slots_.is_block(layer);
    Slot& slot = this->slot(layer);
    slot.users--;
    // Whether another layer's weights come into the slot in this pass.
    const int next = backward ? layer - slots_.ring() : layer + slots_.ring();
    const bool ends = block ? next >= 0 && next < layers_ : !config_.shape.tied_head && backward == (layer >= 0);
    auto poison = [&](const Tensor& memory) {
        if (arena_.poisons()) device::fill_bytes(ctx, memory.data, 0xff, memory.bytes());
    };
    if (ends) {
        slot.layer = kNone;
        poison(slots_.slot_memory(layer));
    }
    const int64_t mark = stream_.mark_compute();
    slot.released = mark;
    if (!block || !backward) return;
    Slot& transposed = transposed_slot(layer);
    transposed.layer = kNone;
    poison(slots_.transposed_memory(layer));
    transposed.released = mark;
}
