#include "llmc/parallel/zero/weight_gatherer.h"

#include <climits>

WeightGatherer::WeightGatherer(const Config& config, const ParamTable& table, ShardedState& state, Fp8State& fp8,
                               const Gradients& grads, const LayerBuffers* layer_buffers, const Groups& groups,
                               CommStream& stream, const Arena& arena)
    : config_(config), state_(state), buckets_(state.buckets()), fp8_(fp8),
      shards_(state, fp8, grads, layer_buffers, groups, stream), groups_(groups), stream_(stream),
      next_(buckets_.all().size()) {
    if (layer_buffers)
        layers_ = std::make_unique<LayerGatherer>(config, table, state, fp8, shards_, *layer_buffers, stream, arena);
}

void WeightGatherer::all_reduce_amaxes(Ctx& ctx) {
    const Fp8State::Amaxes amaxes = fp8_.amaxes();
    if (buckets_.ranks() == 1 || amaxes.count == 0) return;
    const CollectivePurpose purpose(ctx, "amaxes");
    uint32_t* const of_parts = amaxes.values + amaxes.count - amaxes.of_parts;
    stream_.timed(ctx, [&] {
        groups_.world.max(ctx, amaxes.values, amaxes.count - amaxes.of_parts);
        for (Comm* group : {&groups_.expert_data, &groups_.replicas})
            if (amaxes.of_parts > 0) group->max(ctx, of_parts, amaxes.of_parts);
    });
}

void WeightGatherer::from_masters(Ctx& ctx, bool fresh) {
    wait(ctx);
    if (fresh) fp8_.initialise(ctx);
    fp8_.clear_weight_amax(ctx, nullptr);
    state_.zero_weights(ctx);   // the gaps
    state_.each_range(ctx, OffloadAccess::kReadSource, [&](const ShardRange& range) {
        const Tensor master = state_.source(range);
        if (const Tensor weight = state_.weight(range)) ops::cast(ctx, {.out = weight, .in = master});
        fp8_.record_amax(ctx, range.param, master);
        fp8_.record_block_amaxes(ctx, range.param, range.begin, master);
        keep_master(ctx, range);
    });
    all_reduce_amaxes(ctx);
    if (fresh) fp8_.start_weight_histories(ctx);
    gather(ctx, nullptr);
}

void WeightGatherer::gather(Ctx& ctx, const StepState* step) {
    CHECK(next_ == buckets_.all().size(), "the last all-gather of weights was not waited for");
    Ctx& comm = state_.sharded() ? stream_.comm_ctx(ctx) : ctx;
    const bool side = &comm != &ctx;
    if (state_.sharded()) fp8_.prepare_shards(ctx, step);
    stream_.wait_for_compute(ctx, comm);
    while (side && !layers_ && done_.size() < buckets_.all().size()) done_.push_back(OwnedEvent::create());
    for (size_t b = 0; b < buckets_.all().size(); b++) {   // ascending layers
        const ParamGroup& bucket = buckets_.all()[b];
        if (!state_.holds_whole(bucket)) continue;
        const CollectivePurpose purpose(comm, "gather " + layers_text(bucket, config_.shape.num_layers));
        gather_bucket(comm, static_cast<int>(b), step);
        if (side && !layers_) device::event_record(comm, done_[b]);
    }
    if (layers_) layers_->restart(ctx, step);   // a wait for a layer also waits for the buckets above
    else if (side) next_ = 0;
}

void WeightGatherer::gather_bucket(Ctx& comm, int number, const StepState* step) {
    const ParamGroup& bucket = buckets_.all()[static_cast<size_t>(number)];
    const bool fp8_only = bucket.form == ParamForm::kFp8Linear;
    if (state_.sharded()) {
        if (fp8_only) shards_.quantize(comm, number);
        shards_.gather(comm, bucket);
    }
    for (int param : bucket.params) {
        const Fp8Linear* linear = fp8_.linear_of_param(param);
        if (!linear) continue;
        if (!state_.sharded()) {   // this rank has all masters
            fp8_.quantize_weight(comm, *linear, shards_.new_master(*state_.range_of(param)), step);
        } else if (fp8_only) {
            fp8_.transpose_weight(comm, *linear);
            fp8_.count_weight_scales(comm, *linear);
        } else {   // the head
            fp8_.quantize_weight(comm, *linear, state_.weight(param), step);
        }
    }
}

void WeightGatherer::wait(Ctx& ctx, int layer) {
    const std::vector<ParamGroup>& all = buckets_.all();
    const size_t before = next_;
    while (next_ < all.size() && all[next_].first_layer <= layer) next_++;
    if (next_ == before) return;
    stream_.timed(ctx, [&] { device::event_order(ctx, done_[next_ - 1]); });
}

void WeightGatherer::wait(Ctx& ctx) {
    if (layers_) layers_->wait(ctx);
    else wait(ctx, INT_MAX);
}

void WeightGatherer::before_layer(Ctx& ctx, int layer, Pass pass) {
    if (layers_) layers_->before_layer(ctx, layer, pass);
    else wait(ctx, layer);
}

void WeightGatherer::after_layer(Ctx& ctx, int layer, Pass pass) {
    if (layers_) layers_->after_layer(ctx, layer, pass);
}
