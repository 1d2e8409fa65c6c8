#include "llmc/parallel/zero/sharded_state.h"

#include <algorithm>
#include <cstring>

#include "llmc/base/rng.h"
#include "llmc/ops/ops.h"

ShardedState::ShardedState(const Config& config, const ParamTable& table, const Buckets& buckets, int rank,
                           Arena& arena, const WeightSlots* weight_slots)
    : table_(table), buckets_(buckets), rank_(rank), sharded_(shards_state(config, buckets.ranks())),
      dtypes_{config.dtype, config.moment_dtype},
      placement_(shards_grads(config, buckets.ranks()) ? shared_placement(buckets, table, config.overlap)
                                                       : whole_placement(buckets)),
      ranges_(sharded_ ? buckets.shard_ranges(rank) : buckets.whole_ranges()), in_bucket_(buckets.all().size()),
      range_of_(table.params.size(), -1), weight_slots_(weight_slots) {
    for (size_t i = 0; i < ranges_.size(); i++) {
        const ShardRange& range = ranges_[i];
        in_bucket_[static_cast<size_t>(range.bucket)].push_back(range);
        range_of_[static_cast<size_t>(range.param)] = static_cast<int>(i);
    }
    const int64_t own = sharded_ ? buckets.shard_elems() : layout().flat_elems();
    const Dtype grad_dtype = config.dtype == Dtype::kFp64 ? Dtype::kFp64 : config.grad_dtype;
    int64_t weights = 0;
    for (const ParamGroup& bucket : buckets.all()) {
        weight_begin_.push_back(weights);
        if (bucket.form == ParamForm::kFp8Linear) continue;
        weights += holds_whole(bucket) ? bucket.elems : buckets.block_elems(bucket);
    }
    weights_ = arena.take(Purpose::kWeights, config.dtype, weights);
    grads_ = arena.take(Purpose::kGradients, grad_dtype, placement_.elems);
    if (shares_grads() || (buckets.ranks() > 1 && grad_dtype == Dtype::kBf16))
        reduced_ = arena.take(Purpose::kGradients, shares_grads() ? config.grad_shard_dtype : Dtype::kFp32, own);
    make_slots(config, own, arena);
    for (const Param& p : table.params)
        CHECK(p.shard == ShardPolicy::kElementwise, "%s: only elementwise sharding is implemented", p.name.c_str());
    CHECK(buckets.ranks() == 1 || config.dtype != Dtype::kFp64, "%d ranks in FP64", buckets.ranks());
}

void ShardedState::make_slots(const Config& config, int64_t own, Arena& arena) {
    const double resident = (1 - config.offload_fraction) * static_cast<double>(own / kParamAlign);
    const int64_t first = static_cast<int64_t>(resident) * kParamAlign;
    std::vector<OffloadedSlots::Slot> offloaded;
    for (const StateSlot& row : kStateSlots) {
        if (std::none_of(table_.params.begin(), table_.params.end(), [&](const Param& p) { return p.has(row.kind); }))
            continue;
        const bool away = ::offloads(config, row.moment ? "moments" : "masters");
        if (away) offloaded.push_back({row.kind, dtypes_.of(row.kind)});
        buffer(row.kind) = arena.take(row.purpose, dtypes_.of(row.kind), away ? first : own);
    }
    if (offloaded.empty()) return;
    offloaded_ = std::make_unique<OffloadedSlots>(offloaded, first, own,
                                                  static_cast<int64_t>(config.offload_chunk_mb * 1e6), arena);
}

// ---- views

const ShardRange* ShardedState::range_of(int param) const {
    const int number = range_of_[static_cast<size_t>(param)];
    return number < 0 ? nullptr : &ranges_[static_cast<size_t>(number)];
}

Tensor ShardedState::weight(int param) const {
    const ParamGroup& bucket = layout().group_of(param);
    if (bucket.form == ParamForm::kFp8Linear) return {};
    return weights(bucket).slice(layout().offset(param) - bucket.begin, layout().elems(param));
}

Tensor ShardedState::weight(const ShardRange& range) const {
    const ParamGroup& bucket = layout().group_of(range.param);
    if (bucket.form == ParamForm::kFp8Linear) return {};
    if (holds_whole(bucket)) return weight(range.param).slice(range.begin, range.elems);
    return weight_block(bucket).slice(range.shard - bucket.begin / buckets_.ranks(), range.elems);
}

Tensor ShardedState::weights(const ParamGroup& bucket) const {
    if (!holds_whole(bucket)) return weight_slots_->whole(bucket);
    return weights_.slice(weight_begin(bucket), bucket.elems);
}

Tensor ShardedState::weight_block(const ParamGroup& bucket) const {
    const int64_t block = buckets_.block_elems(bucket);
    if (!holds_whole(bucket)) return weights_.slice(weight_begin(bucket), block);
    return weights(bucket).slice(rank_ * block, block);
}

Tensor ShardedState::grads(const ParamGroup& bucket) const {
    const auto number = static_cast<size_t>(&bucket - buckets_.all().data());
    return grads_.slice(placement_.offsets[number], bucket.elems);
}

Tensor ShardedState::grad(int param) const {
    const ParamGroup& bucket = layout().group_of(param);
    return grads(bucket).slice(layout().offset(param) - bucket.begin, layout().elems(param));
}

Tensor ShardedState::slot(StateKind slot, const ShardRange& range) const {
    if (offloads(slot) && range.shard >= offloaded_->begin()) return offloaded_->at(slot, range.shard, range.elems);
    return slots_[static_cast<size_t>(slot)].slice(range.shard, range.elems);
}

Tensor ShardedState::reduced_grad(const ShardRange& range) const {
    if (reduced_) return reduced_.slice(range.shard, range.elems);
    return grad(range.param).slice(range.begin, range.elems);
}

Tensor ShardedState::reduced_whole(const ParamGroup& bucket) const {
    return (reduced_ ? reduced_ : grads_).slice(bucket.begin, bucket.elems);
}

Tensor ShardedState::reduced_block(const ParamGroup& bucket) const {
    const int64_t block = buckets_.block_elems(bucket);
    if (reduced_ && sharded_) return reduced_.slice(bucket.begin / buckets_.ranks(), block);
    return reduced_whole(bucket).slice(rank_ * block, block);
}

std::vector<Tensor> ShardedState::norm_blocks() const {
    if (buckets_.ranks() == 1) return {grads_};
    std::vector<Tensor> blocks;
    for (const ParamGroup& bucket : buckets_.all()) blocks.push_back(reduced_block(bucket));
    return blocks;
}

// ---- --offload

void ShardedState::each_range(Ctx& ctx, SlotAccess access, const std::function<void(const ShardRange&)>& use) {
    if (!offloaded_ || (access == SlotAccess::kReadMasters && !offloads(StateKind::kMaster))) {
        for (const ShardRange& range : ranges_) use(range);
        return;
    }
    const auto use_between = [&](int64_t begin, int64_t end) {
        for (ShardRange range : ranges_) {
            const int64_t first = std::max(begin, range.shard), last = std::min(end, range.shard + range.elems);
            if (first >= last) continue;
            range.begin += first - range.shard;
            range.elems = last - first;
            range.shard = first;
            use(range);
        }
    };
    use_between(0, offloaded_->begin());
    offloaded_->pass(ctx, access, use_between);
}

void ShardedState::keep_master(Ctx& ctx, const ShardRange& range) {
    if (offloads(StateKind::kMaster) && layout().form(range.param) == ParamForm::kFp8Linear)
        ops::cast(ctx, {.out = reduced_grad(range), .in = master(range)});
}

Tensor ShardedState::new_master(const ShardRange& range) const {
    if (!offloads(StateKind::kMaster)) return master(range);
    return layout().form(range.param) == ParamForm::kFp8Linear ? reduced_grad(range) : weight(range);
}

// ---- values

void ShardedState::initialise(Ctx& ctx, uint64_t seed) {
    for (const Tensor& resident : slots_) device::fill_bytes(ctx, resident.data, 0, resident.bytes());
    each_range(ctx, SlotAccess::kWrite, [&](const ShardRange& range) {
        for (const StateSlot& row : kStateSlots) {
            if (!offloads(row.kind)) continue;
            const Tensor values = slot(row.kind, range);
            device::fill_bytes(ctx, values.data, 0, values.bytes());
        }
        initialise_master(ctx, seed, range);
    });
}

void ShardedState::initialise_master(Ctx& ctx, uint64_t seed, const ShardRange& range) {
    const Param& p = table_.params[static_cast<size_t>(range.param)];
    // Without the padded rows of the vocabulary.
    const HfPart& last = p.hf.back();
    const int64_t true_elems = (last.row_begin + last.rows) * p.cols;
    const int64_t count = std::clamp<int64_t>(true_elems - range.begin, 0, range.elems);
    if (count == 0) return;
    const Tensor values = master(range).slice(0, count);
    if (p.init == Param::Init::kNormal) {
        ops::fill_normal(ctx, {.out = values, .key = rng_key(seed, "init." + p.name), .element_offset = range.begin,
                               .mean = 0.0f, .std = static_cast<float>(p.init_std)});
    } else if (p.init == Param::Init::kOnes) {
        ops::fill_constant(ctx, {.out = values, .value = 1.0f});
    }
}

// ---- checkpoints

std::vector<ShardedState::Held> ShardedState::held(StateKind kind, int param) const {
    const ShardRange* range = range_of(param);
    if (!range) return {};
    const int64_t resident =
        offloads(kind) ? std::clamp<int64_t>(offloaded_->begin() - range->shard, 0, range->elems) : range->elems;
    std::vector<Held> held;
    if (resident > 0)
        held.push_back({.begin = range->begin,
                        .elems = slots_[static_cast<size_t>(kind)].slice(range->shard, resident)});
    if (resident < range->elems)
        held.push_back({.begin = range->begin + resident,
                        .elems = {offloaded_->host(kind, range->shard + resident), dtypes_.of(kind),
                                  range->elems - resident},
                        .on_host = true});
    return held;
}

void ShardedState::read(Ctx& ctx, StateKind kind, int param, int64_t begin, int64_t count, void* host) const {
    int64_t found = 0;
    for (const Held& held : this->held(kind, param)) {
        const int64_t first = std::max(begin, held.begin);
        const int64_t last = std::min(begin + count, held.begin + held.elems.elems);
        if (first >= last) continue;
        const Tensor from = held.elems.slice(first - held.begin, last - first);
        char* const to = static_cast<char*>(host) + (first - begin) * dtype_bytes(from.dtype);
        if (held.on_host) std::memcpy(to, from.data, static_cast<size_t>(from.bytes()));
        else device::copy_to_host(ctx, to, from.data, from.bytes());
        found += from.elems;
    }
    device::synchronize(ctx);
    CHECK(found == count, "%lld of the elements [%lld, +%lld) of parameter %d that are read belong to this rank",
          (long long)found, (long long)begin, (long long)count, param);
}

void ShardedState::write(Ctx& ctx, StateKind kind, int param, int64_t begin, int64_t count, const void* host) {
    for (const Held& held : this->held(kind, param)) {
        const int64_t first = std::max(begin, held.begin);
        const int64_t last = std::min(begin + count, held.begin + held.elems.elems);
        if (first >= last) continue;
        const Tensor to = held.elems.slice(first - held.begin, last - first);
        const char* const from = static_cast<const char*>(host) + (first - begin) * dtype_bytes(to.dtype);
        if (held.on_host) std::memcpy(to.data, from, static_cast<size_t>(to.bytes()));
        else device::copy_to_device(ctx, to.data, from, to.bytes());
    }
    device::synchronize(ctx);
}
