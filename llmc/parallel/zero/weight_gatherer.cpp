#include "llmc/parallel/zero/weight_gatherer.h"

#include <algorithm>
#include <climits>

bool gathers_fp8(const Config& config, const Buckets& buckets) {
    return shards_state(config, buckets.ranks()) && buckets.layout().fp8_elems() > 0
           && (config.param_comm_dtype == Dtype::kE4m3 || shards_weights(config, buckets.ranks()));
}

WeightGatherer::WeightGatherer(const Config& config, const ParamTable& table, ShardedState& state, Fp8State& fp8,
                               const WeightSlots* slots, const Groups& groups, CommStream& stream, Arena& arena)
    : config_(config), state_(state), buckets_(state.buckets()), fp8_(fp8), groups_(groups), stream_(stream),
      next_(buckets_.all().size()) {
    if (slots) layers_ = std::make_unique<LayerGatherer>(config, table, state, fp8, *slots, groups, stream, arena);
    if (!state.sharded() || fp8.gathers_bytes()) return;
    int64_t longest = 0;
    for (const ParamGroup& bucket : buckets_.all())
        if (bucket.form == ParamForm::kFp8Linear) longest = std::max(longest, bucket.elems);
    if (longest > 0) rounded_ = arena.take(Purpose::kComm, Dtype::kBf16, longest);
}

int64_t WeightGatherer::timer_spans() const {
    const int64_t micro_batches = config_.global_batch_size / (config_.micro_batch_size * groups_.data_ranks);
    // A calibration micro-batch may come first, and counting scales takes another pass.
    const int64_t in_passes = layers_ ? (micro_batches + 2) * layers_->timer_spans() : 0;
    return 8 + 4 * static_cast<int64_t>(buckets_.all().size()) + in_passes;
}

void WeightGatherer::all_reduce_amaxes(Ctx& ctx) {
    const Fp8State::Amaxes amaxes = fp8_.amaxes();
    if (buckets_.ranks() == 1 || amaxes.count == 0) return;
    const CollectivePurpose purpose(ctx, "amaxes");
    stream_.timed(ctx, [&] { groups_.world.max(ctx, amaxes.values, amaxes.count); });
}

void WeightGatherer::from_masters(Ctx& ctx, bool fresh) {
    wait(ctx);
    if (fresh) fp8_.initialise(ctx);
    fp8_.clear_weight_amax(ctx, nullptr);
    state_.zero_weights(ctx);   // the gaps
    state_.each_range(ctx, SlotAccess::kReadMasters, [&](const ShardRange& range) {
        const Tensor master = state_.master(range);
        if (const Tensor weight = state_.weight(range)) ops::cast(ctx, {.out = weight, .in = master});
        fp8_.record_amax(ctx, range.param, master);
        fp8_.record_block_amaxes(ctx, range.param, range.begin, master);
        state_.keep_master(ctx, range);
    });
    all_reduce_amaxes(ctx);
    if (fresh) fp8_.start_weight_histories(ctx);
    gather(ctx, nullptr);
}

void WeightGatherer::gather(Ctx& ctx, const StepState* step) {
    CHECK(next_ == buckets_.all().size(), "the last all-gather of weights was not waited for");
    Ctx& comm = state_.sharded() ? stream_.comm_ctx(ctx) : ctx;
    const bool side = &comm != &ctx;
    if (fp8_.gathers_bytes()) fp8_.prepare_shards(ctx, step);
    stream_.wait_for_compute(ctx, comm);
    while (side && !layers_ && done_.size() < buckets_.all().size()) done_.push_back(OwnedEvent::create());
    for (size_t b = 0; b < buckets_.all().size(); b++) {   // ascending layers
        const int number = static_cast<int>(b);
        if (!state_.holds_whole(bucket(number))) continue;
        const CollectivePurpose purpose(comm, "gather " + layers_text(bucket(number), config_.shape.num_layers));
        gather_bucket(comm, number, step);
        if (side && !layers_) device::event_record(comm, done_[b]);
    }
    if (layers_) layers_->restart(ctx, step);   // a wait for a layer also waits for the buckets above
    else if (side) next_ = 0;
}

void WeightGatherer::gather_bucket(Ctx& comm, int number, const StepState* step) {
    const ParamGroup& bucket = this->bucket(number);
    const bool fp8 = bucket.form == ParamForm::kFp8Linear;
    if (fp8 && fp8_.gathers_bytes()) return gather_fp8_bucket(comm, number);
    Tensor whole;   // to all-gather, in bf16; empty if this rank has all masters
    if (state_.sharded() && fp8) {
        whole = rounded_.slice(0, bucket.elems);
        round_masters(comm, number, whole);
    } else if (state_.sharded()) {
        whole = state_.weights(bucket);
    }
    if (whole) stream_.timed(comm, [&] { groups_.shard.all_gather(comm, whole); });
    const FlatLayout& layout = buckets_.layout();
    for (int param : bucket.params) {
        const Fp8Linear* linear = fp8_.linear_of_param(param);
        if (!linear) continue;
        const Tensor from = whole ? whole.slice(layout.offset(param) - bucket.begin, layout.elems(param))
                                  : state_.new_master(*state_.range_of(param));
        fp8_.quantize_weight(comm, *linear, from, step);
    }
}

// Writes this rank's block of a whole bucket in bf16.
void WeightGatherer::round_masters(Ctx& ctx, int number, const Tensor& whole) {
    for (const ShardRange& range : state_.ranges_in(number)) {
        const int64_t offset = buckets_.layout().offset(range.param) + range.begin - bucket(number).begin;
        ops::cast(ctx, {.out = whole.slice(offset, range.elems), .in = state_.new_master(range)});
    }
}

void WeightGatherer::gather_fp8_bucket(Ctx& comm, int number) {
    const ParamGroup& bucket = this->bucket(number);
    for (const ShardRange& range : state_.ranges_in(number))
        fp8_.quantize_shard(comm, range.param, range.begin, state_.new_master(range),
                            fp8_.linear_of_param(range.param)->weight.data.slice(range.begin, range.elems));
    stream_.timed(comm, [&] {
        groups_.shard.all_gather(comm, fp8_.flat_weights().slice(bucket.weight_begin, bucket.elems));
    });
    for (int param : bucket.params) {
        fp8_.transpose_weight(comm, *fp8_.linear_of_param(param));
        fp8_.count_weight_scales(comm, *fp8_.linear_of_param(param));
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
