// Where the gradients of each bucket are in memory. With --zero 0 and 1 they have a place for the whole step. With
// --zero 2 and 3 a bucket has a place only from the backward of the layer that writes it first until it is reduced.
// Buckets that never have a place at the same time share memory.
#pragma once
#include <vector>

#include "llmc/model/parameters/params.h"
#include "llmc/parallel/zero/buckets.h"

struct GradPlacement {
    std::vector<int64_t> offsets;   // by bucket, in elements of the gradient memory
    int64_t elems = 0;              // of the gradient memory
    // The vectors below are empty if nothing is shared. Stage s of a backward pass is the backward of layer L - s.
    std::vector<int> opens;                  // by bucket: the stage before which its place must be free
    std::vector<std::vector<int>> sharers;   // by bucket: the buckets that overlap its place, itself included
};

// Every bucket at its offset in the flat buffers.
GradPlacement whole_placement(const Buckets& buckets);

// Buckets share memory. With overlap a place is not used again until the backward of one more layer is done, so that
// this backward hides the reduction.
GradPlacement shared_placement(const Buckets& buckets, const ParamTable& table, bool overlap);
