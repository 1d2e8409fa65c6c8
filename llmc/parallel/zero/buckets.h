// How a flat layout is sharded over ranks. Its groups are the buckets: each is communicated as one message of `ranks`
// equal shards, and rank r owns shard r of every bucket, with the optimizer state of its elements (ZeRO-1; Rajbhandari
// et al., arXiv 1910.02054). Buckets of experts that only every `parts`-th rank holds have ranks / parts shards, and
// rank r owns shard r / parts.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "llmc/config/config.h"
#include "llmc/model/parameters/flat_layout.h"

// Whether the optimizer state is sharded over `ranks` ranks, whether the sums of gradients are, and whether the weights
// are, so that a layer's are gathered before it runs.
inline bool shards_state(const Config& config, int ranks) { return config.zero >= 1 && ranks > 1; }
inline bool shards_grads(const Config& config, int ranks) { return config.zero >= 2 && ranks > 1; }
inline bool shards_weights(const Config& config, int ranks) { return config.zero == 3 && ranks > 1; }
// The least FP32 bytes of a full bucket. A layer that is gathered in several messages may not be there when it begins:
// with four of 256 MB, Llama-3.1-70B waited for a tenth of the step (dev/results/2026-11-27-h200-start).
inline int64_t bucket_bytes(const Config& config, int ranks) {
    if (config.bucket_mb == 0 && shards_weights(config, ranks)) return INT64_MAX;
    return static_cast<int64_t>((config.bucket_mb == 0 ? 256 : config.bucket_mb) * 1e6);
}

// Consecutive elements of one parameter that one rank owns.
struct ShardRange {
    int bucket, param;
    int64_t begin, elems;   // in the parameter
    int64_t shard;          // offset of the first element in the rank's optimizer state
    bool operator==(const ShardRange&) const = default;
};

class Buckets {
public:
    // The `unit` that the layout must have.
    static int64_t unit(int ranks) { return ranks * kParamAlign; }
    // The layout is not owned.
    Buckets(const FlatLayout& layout, int ranks);

    const FlatLayout& layout() const { return layout_; }
    const std::vector<ParamGroup>& all() const { return layout_.groups(); }
    size_t number(const ParamGroup& bucket) const { return static_cast<size_t>(&bucket - all().data()); }
    int ranks() const { return ranks_; }
    // The shards of a bucket, and the one of a rank.
    int ranks(const ParamGroup& bucket) const { return std::max(1, ranks_ / static_cast<int>(bucket.parts)); }
    int shard_of(const ParamGroup& bucket, int rank) const { return rank / static_cast<int>(bucket.parts); }
    // The elements of one rank's shard of a bucket, its offset in the rank's state, and the elements of all its shards.
    int64_t shard_elems(const ParamGroup& bucket) const { return bucket.elems / ranks(bucket); }
    int64_t shard_begin(const ParamGroup& bucket) const { return shard_begin_[number(bucket)]; }
    int64_t shard_elems() const { return shard_begin_.back(); }
    // The offset of one rank's shard of an FP8 bucket in those of all FP8 buckets.
    int64_t fp8_begin(const ParamGroup& bucket) const { return fp8_begin_[number(bucket)]; }
    // The ranges in a rank's shards, in the order of the flat buffers, at most one per parameter. With one rank they
    // are whole parameters, with state at their offsets in the flat buffers.
    std::vector<ShardRange> shard_ranges(int rank) const;

private:
    const FlatLayout& layout_;
    const int ranks_;
    std::vector<int64_t> shard_begin_ = {0}, fp8_begin_ = {0};   // by bucket, then the end
};
