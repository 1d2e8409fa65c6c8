// Where the gradients of each bucket are in memory. With --zero 0 and 1 each bucket has memory of its own for the whole
// step. With --zero 2 and 3 it occupies memory only from the backward of the first layer that writes it until it is
// reduced, and buckets that do not need memory at the same time share it. Those that no other rank has, of experts, are
// never reduced, and have their own then, too.
#pragma once
#include <vector>

#include "llmc/model/parameters/params.h"
#include "llmc/parallel/zero/buckets.h"

struct GradPlacement {
    std::vector<int64_t> offsets;   // by bucket, in elements of the gradient memory
    int64_t elems = 0;              // of the gradient memory
    int64_t shared = 0;             // its first elements: those of buckets that share memory
    // Both are empty if no memory is shared. Stage s of a backward pass is the backward of layer L - s.
    std::vector<int> first_stage;                // by bucket: the first stage that writes it, or -1: alone
    std::vector<std::vector<int>> overlapping;   // by bucket: those that use some of its memory, itself included
};

// Every bucket at its offset in the flat buffers.
GradPlacement whole_placement(const Buckets& buckets);

// Buckets share memory, except those `alone`, by bucket. With overlap a bucket's memory is not used again until
// the backward of one more layer is done, so that this backward hides the reduction.
GradPlacement shared_placement(const Buckets& buckets, const ParamTable& table, bool overlap,
                               const std::vector<bool>& alone);
