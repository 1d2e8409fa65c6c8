// How a flat layout is sharded over ranks. Its groups are the buckets: each is communicated as one message of `ranks`
// equal blocks, and rank r owns block r of every bucket, with the optimizer state of its elements (ZeRO-1; Rajbhandari
// et al., arXiv 1910.02054).
#pragma once
#include <cstdint>
#include <vector>

#include "llmc/model/parameters/flat_layout.h"

// Consecutive elements of one parameter inside one rank's block.
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
    int ranks() const { return ranks_; }
    int64_t block_elems(const ParamGroup& bucket) const { return bucket.elems / ranks_; }
    int64_t shard_elems() const { return layout_.flat_elems() / ranks_; }   // of one rank
    // The ranges that a rank owns, in the order of the flat buffers, at most one per parameter: those in its blocks, or
    // (--zero 0) all parameters, with state at their offsets in the flat buffers.
    std::vector<ShardRange> shard_ranges(int rank) const;
    std::vector<ShardRange> whole_ranges() const;

private:
    const FlatLayout& layout_;
    const int ranks_;
};
