// How a flat layout is cut for several ranks. Its groups are the buckets: each travels as one message and is cut into
// `ranks` equal blocks, and each rank owns one block of every bucket, with the optimizer's state of what lies in it
// (ZeRO-1; Rajbhandari et al., arXiv 1910.02054).
#pragma once
#include <cstdint>
#include <vector>

#include "llmc/model/flat_layout.h"

// Consecutive elements of one parameter inside one rank's block.
struct ShardRange {
    int bucket, param;
    int64_t begin, elems;   // in the parameter
    int64_t shard;          // of its first element in the state that the rank holds
    bool operator==(const ShardRange&) const = default;
};

class Buckets {
public:
    // The unit of a layout that can be cut so.
    static int64_t unit(int ranks) { return ranks * kParamAlign; }
    // The layout is not owned.
    Buckets(const FlatLayout& layout, int ranks);

    const FlatLayout& layout() const { return layout_; }
    const std::vector<ParamGroup>& all() const { return layout_.groups(); }
    int ranks() const { return ranks_; }
    int64_t block_elems(const ParamGroup& bucket) const { return bucket.elems / ranks_; }
    int64_t shard_elems() const { return layout_.flat_elems() / ranks_; }   // of one rank
    // In the order of the flat buffers: what lies in rank's blocks, or (--zero 0) whole parameters, whose state has the
    // places that they have in the flat buffers. Of a parameter at most one range.
    std::vector<ShardRange> shard_ranges(int rank) const;
    std::vector<ShardRange> whole_ranges() const;

private:
    const FlatLayout& layout_;
    const int ranks_;
};
