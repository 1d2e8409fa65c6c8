// Exchanges heads between the ranks that share sequences (context parallelism). Each sequence is split into equal
// parts, in the order of these ranks. A null pointer to a HeadExchange means that a rank has whole sequences.
#pragma once
#include <functional>

#include "llmc/ops/device.h"

struct HeadExchange {
    int64_t ranks, rank;
    // out, in: (sequences, ranks, ...) of any dtype. Block r of a sequence of out = block `rank` of the same sequence
    // of rank r's in. layer: for hang reports.
    std::function<void(Ctx& ctx, int layer, int64_t sequences, Tensor out, Tensor in)> all_to_all;
};
