#include "llmc/parallel/zero/sharded_state.h"

#include <algorithm>
#include <cstring>

#include "llmc/base/rng.h"

ShardedState::ShardedState(const Config& config, const ParamTable& table, const Buckets& buckets, int rank,
                           Arena& arena, const std::optional<LayerBuffers>& layer_buffers)
    : table_(table), buckets_(buckets), rank_(rank), sharded_(shards_state(config, buckets.ranks())),
      dtypes_{config.dtype, config.moment_dtype},
      ranges_(sharded_ ? buckets.shard_ranges(rank) : Buckets(buckets.layout(), 1).shard_ranges(0)),
      in_bucket_(buckets.all().size()),
      range_of_(table.params.size(), -1), gathers_layers_(shards_weights(config, buckets.ranks())),
      layer_buffers_(layer_buffers) {
    CHECK(buckets.ranks() == 1 || config.dtype != Dtype::kFp64, "%d ranks in FP64", buckets.ranks());
    for (size_t i = 0; i < ranges_.size(); i++) {
        const ShardRange& range = ranges_[i];
        in_bucket_[static_cast<size_t>(range.bucket)].push_back(range);
        range_of_[static_cast<size_t>(range.param)] = static_cast<int>(i);
    }
    int64_t weights = 0;
    for (const ParamGroup& bucket : buckets.all()) {
        weight_begin_.push_back(weights);
        if (bucket.form == ParamForm::kFp8Linear) continue;
        weights += holds_whole(bucket) ? bucket.elems : buckets.shard_elems(bucket);
    }
    take_states(config, sharded_ ? buckets.shard_elems() : layout().flat_elems(), arena);
    weights_ = arena.take(Purpose::kWeights, config.dtype, weights);
}

void ShardedState::take_states(const Config& config, int64_t own, Arena& arena) {
    const double stays = (1 - config.offload_fraction) * static_cast<double>(own / kParamAlign);
    // The least fraction offloads one unit.
    const int64_t first = std::min(static_cast<int64_t>(stays), own / kParamAlign - 1) * kParamAlign;
    std::vector<OffloadedState::Kind> offloaded;
    for (const OptimizerState& row : kOptimizerStates) {
        places_.emplace_back(table_, ranges_, row.kind);
        if (std::none_of(table_.params.begin(), table_.params.end(), [&](const Param& p) { return p.has(row.kind); }))
            continue;
        if (row.by_row) {
            int64_t rows = 0;
            for (const Param& p : table_.params) {
                row_begin_.push_back(rows);
                if (p.has(row.kind)) rows += p.rows;
            }
            states_[static_cast<size_t>(row.kind)] = arena.take(row.purpose, dtypes_.of(row.kind), rows);
            continue;
        }
        const bool away = ::offloads(config, row.offload);
        int64_t on_device = 0, on_host = 0;   // the most that a rank has, so that all have the same memory
        for (int rank = 0; rank < (sharded_ ? buckets_.ranks() : 1); rank++) {
            const StatePlaces theirs(table_, sharded_ ? buckets_.shard_ranges(rank) : ranges_, row.kind);
            on_device = std::max(on_device, row.values(theirs.at(away ? first : own)));
            on_host = std::max(on_host, row.values(theirs.at(own) - theirs.at(first)));
        }
        if (away) offloaded.push_back({row.kind, dtypes_.of(row.kind), places_.back(), on_host});
        states_[static_cast<size_t>(row.kind)] = arena.take(row.purpose, dtypes_.of(row.kind), on_device);
    }
    if (offloaded.empty()) return;
    offloaded_ = std::make_unique<OffloadedState>(offloaded, first, own, arena);
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
    return weight_shard(bucket).slice(range.shard - buckets_.shard_begin(bucket), range.elems);
}

Tensor ShardedState::weights(const ParamGroup& bucket) const {
    if (!holds_whole(bucket)) return layer_buffers_->whole(bucket);
    return weights_.slice(weight_begin(bucket), bucket.elems);
}

Tensor ShardedState::weight_shard(const ParamGroup& bucket) const {
    const int64_t elems = buckets_.shard_elems(bucket);
    if (!holds_whole(bucket)) return weights_.slice(weight_begin(bucket), elems);
    return weights(bucket).slice(shard_of(bucket) * elems, elems);
}

Tensor ShardedState::state(StateKind kind, const ShardRange& range) const {
    if (offloads(kind) && range.shard >= offloaded_->begin()) return offloaded_->at(kind, range.shard, range.elems);
    const OptimizerState& row = state_row(kind);
    return resident(kind).slice(row.values(places(kind).at(range.shard)), row.values(range.elems));
}

void ShardedState::each_range(Ctx& ctx, OffloadAccess access, const std::function<void(const ShardRange&)>& use) {
    const bool copied = std::any_of(std::begin(kOptimizerStates), std::end(kOptimizerStates), [&](const auto& row) {
        return offloads(row.kind) && copies(access, row.kind, source_);
    });
    if (!copied) {
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
    offloaded_->pass(ctx, access, use_between, source_);
}

// ---- values

void ShardedState::initialise(Ctx& ctx, uint64_t seed) {
    for (const Tensor& memory : states_) device::fill_bytes(ctx, memory.data, 0, memory.bytes());
    each_range(ctx, OffloadAccess::kWrite, [&](const ShardRange& range) {
        for (const OptimizerState& row : kOptimizerStates) {
            if (!offloads(row.kind) || !table_.params[static_cast<size_t>(range.param)].has(row.kind)) continue;
            const Tensor values = state(row.kind, range);
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
        ops::fill_normal(ctx, {.out = values, .key = rng_key(seed, "init." + p.name),
                               .element_offset = p.first_elem() + range.begin, .mean = 0.0f,
                               .std = static_cast<float>(p.init_std)});
    } else if (p.init == Param::Init::kOnes) {
        ops::fill_constant(ctx, {.out = values, .value = 1.0f});
    }
}

// ---- checkpoints

std::vector<ShardedState::Part> ShardedState::parts(StateKind kind, int param) const {
    const Param& p = table_.params[static_cast<size_t>(param)];
    CHECK(p.has(kind), "parameter %d has no %s", param, state_row(kind).name);
    if (state_row(kind).by_row) return {{.begin = 0, .elems = row_state(kind).slice(row_begin(param), p.rows)}};
    const ShardRange* range = range_of(param);
    if (!range) return {};
    const int64_t on_device =
        offloads(kind) ? std::clamp<int64_t>(offloaded_->begin() - range->shard, 0, range->elems) : range->elems;
    std::vector<Part> parts;
    const OptimizerState& row = state_row(kind);
    const int64_t at = row.values(places(kind).at(range->shard)), count = row.values(on_device);
    if (on_device > 0) parts.push_back({.begin = row.values(range->begin), .elems = resident(kind).slice(at, count)});
    if (on_device < range->elems)
        parts.push_back({.begin = row.values(range->begin) + count,
                         .elems = {offloaded_->host(kind, range->shard + on_device), dtypes_.of(kind),
                                   row.values(range->elems) - count},
                         .on_host = true});
    return parts;
}

void ShardedState::read(Ctx& ctx, StateKind kind, int param, int64_t begin, int64_t count, void* host) const {
    int64_t found = 0;
    for (const Part& part : parts(kind, param)) {
        const int64_t first = std::max(begin, part.begin);
        const int64_t last = std::min(begin + count, part.begin + part.elems.elems);
        if (first >= last) continue;
        const Tensor from = part.elems.slice(first - part.begin, last - first);
        char* const to = static_cast<char*>(host) + (first - begin) * dtype_bytes(from.dtype);
        if (part.on_host) std::memcpy(to, from.data, static_cast<size_t>(from.bytes()));
        else device::copy_to_host(ctx, to, from.data, from.bytes());
        found += from.elems;
    }
    device::synchronize(ctx);
    CHECK(found == count, "%lld of the elements [%lld, +%lld) of parameter %d that are read belong to this rank",
          (long long)found, (long long)begin, (long long)count, param);
}

void ShardedState::write(Ctx& ctx, StateKind kind, int param, int64_t begin, int64_t count, const void* host) {
    for (const Part& part : parts(kind, param)) {
        const int64_t first = std::max(begin, part.begin);
        const int64_t last = std::min(begin + count, part.begin + part.elems.elems);
        if (first >= last) continue;
        const Tensor to = part.elems.slice(first - part.begin, last - first);
        const char* const from = static_cast<const char*>(host) + (first - begin) * dtype_bytes(to.dtype);
        if (part.on_host) std::memcpy(to.data, from, static_cast<size_t>(to.bytes()));
        else device::copy_to_device(ctx, to.data, from, to.bytes());
    }
    device::synchronize(ctx);
}
