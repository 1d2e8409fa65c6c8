#include "llmc/parallel/zero/bf16_store.h"

Bf16Store::Bf16Store(const Config& config, ShardedState& state, const Gradients& grads, WeightGatherer& gatherer,
                     const Groups& groups, CommStream& stream)
    : config_(config), state_(state), grads_(grads), gatherer_(gatherer), groups_(groups), stream_(stream),
      layers_(static_cast<size_t>(config.shape.num_layers + 1)) {}

// Where elements of a parameter that this rank owns are put.
Tensor Bf16Store::rounded(const ShardRange& range) const {
    const ParamGroup& bucket = state_.buckets().layout().group_of(range.param);
    if (!grads_.shares_memory()) return weight(range.param).slice(range.begin, range.elems);
    return grads_.idle_shard(bucket, config_.dtype)
        .slice(range.shard - state_.buckets().shard_begin(bucket), range.elems);
}

void Bf16Store::round_masters(Ctx& ctx) {
    gatherer_.wait(ctx);   // the memory may have masters that are being quantized, see WeightShards::keep_master
    state_.each_range(ctx, OffloadAccess::kReadSource, [&](const ShardRange& range) {
        if (state_.buckets().layout().form(range.param) == ParamForm::kFp8Linear)
            ops::cast(ctx, {.out = rounded(range), .in = state_.source(range)});
    });
    if (!state_.sharded() || grads_.shares_memory()) return;
    for (const ParamGroup& bucket : all())
        if (bucket.form == ParamForm::kFp8Linear) gather(ctx, bucket);
}

void Bf16Store::gather(Ctx& comm, const ParamGroup& bucket) const {
    const CollectivePurpose purpose(comm, "gather BF16 " + layers_text(bucket, config_.shape.num_layers));
    const Tensor whole = grads_.idle(bucket, config_.dtype);
    if (grads_.shares_memory()) {
        const Tensor mine = grads_.idle_shard(bucket, config_.dtype);
        const Tensor place = whole.slice(state_.shard_of(bucket) * mine.elems, mine.elems);
        if (place.data != mine.data) device::copy_on_device(comm, place.data, mine.data, mine.bytes());
    }
    groups_.shard_of(bucket).all_gather(comm, whole);
}

// Enqueues the all-gather of the buckets that this layer is the first to read. By their placement (shared_placement)
// they overlap no bucket that this layer or, with overlap, the one below reads.
void Bf16Store::gather_layer(Ctx& ctx, int layer) {
    Ctx& comm = stream_.comm_ctx(ctx);
    Layer& gathered = layers_[static_cast<size_t>(layer)];
    gathered.number = 0;
    stream_.wait_for_compute(ctx, comm);
    for (const ParamGroup& bucket : all())
        if (bucket.form == ParamForm::kFp8Linear && bucket.first_layer == layer) gather(comm, bucket);
    if (&comm == &ctx) return;
    if (!gathered.done) gathered.done = OwnedEvent::create();
    gathered.number = stream_.record(comm, gathered.done);
}

void Bf16Store::before_layer(Ctx& ctx, int layer, Pass pass) {
    gatherer_.before_layer(ctx, layer, pass);
    if (!grads_.shares_memory()) return;
    if (layer < 0) next_ = 0;
    const int last = std::min<int>(layer + config_.overlap, static_cast<int>(config_.shape.num_layers));
    while (next_ <= last) gather_layer(ctx, next_++);
    if (layer < 0) return;
    const Layer& gathered = layers_[static_cast<size_t>(layer)];
    stream_.order_after(ctx, gathered.done, gathered.number);
}

Tensor Bf16Store::weight(int param) const {
    const FlatLayout& layout = state_.buckets().layout();
    const ParamGroup& bucket = layout.group_of(param);
    if (bucket.form != ParamForm::kFp8Linear) return state_.weight(param);
    return grads_.idle(bucket, config_.dtype).slice(layout.offset(param) - bucket.begin, layout.elems(param));
}
