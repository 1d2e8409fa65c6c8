#include "llmc/parallel/zero/weight_shards.h"

void WeightShards::keep_master(Ctx& ctx, const ShardRange& range) const {
    if (state_.offloads(state_.source_kind()) && buckets_.layout().form(range.param) == ParamForm::kFp8Linear)
        ops::cast(ctx, {.out = grads_.reduced(range), .in = state_.source(range)});
}

Tensor WeightShards::new_master(const ShardRange& range) const {
    if (!state_.offloads(state_.source_kind())) return state_.source(range);
    const bool fp8_only = buckets_.layout().form(range.param) == ParamForm::kFp8Linear;
    return fp8_only ? grads_.reduced(range) : state_.weight(range);
}

// Without layer buffers a shard has its place in the whole weights.
Tensor WeightShards::shard(const ParamGroup& bucket) const {
    if (bucket.form != ParamForm::kFp8Linear) return state_.weight_shard(bucket);
    const int64_t elems = buckets_.shard_elems(bucket);
    if (state_.holds_whole(bucket)) return whole(bucket).slice(state_.shard_of(bucket) * elems, elems);
    return fp8_.flat_weights().slice(buckets_.fp8_begin(bucket), elems);
}

Tensor WeightShards::whole(const ParamGroup& bucket) const {
    if (bucket.form != ParamForm::kFp8Linear) return state_.weights(bucket);
    if (state_.holds_whole(bucket)) return fp8_.flat_weights().slice(bucket.weight_begin, bucket.elems);
    return layer_buffers_->whole(bucket);
}

void WeightShards::quantize(Ctx& ctx, int bucket) const {
    const ParamGroup& group = buckets_.all()[static_cast<size_t>(bucket)];
    const Tensor bytes = shard(group);
    for (const ShardRange& range : state_.ranges_in(bucket))
        fp8_.quantize_shard(ctx, range.param, range.begin, new_master(range),
                            bytes.slice(range.shard - buckets_.shard_begin(group), range.elems));
}

void WeightShards::gather(Ctx& ctx, const ParamGroup& bucket) const {
    const Tensor all = whole(bucket);
    if (!state_.holds_whole(bucket)) {
        const Tensor mine = shard(bucket), place = all.slice(state_.shard_of(bucket) * mine.elems, mine.elems);
        device::copy_on_device(ctx, place.data, mine.data, mine.bytes());
    }
    stream_.timed(ctx, [&] { groups_.shard_of(bucket).all_gather(ctx, all); });
}
