// The communication of expert parallelism: `ranks` ranks, 2, 4 or 8, share the experts of each layer, in this order. A
// null pointer to an ExpertExchange means that a rank has all experts.
#pragma once
#include <functional>

#include "llmc/ops/device.h"

struct ExpertExchange {
    int ranks = 1, rank = 0;
    // See Comm. layer: for hang reports.
    std::function<void(Ctx& ctx, int layer, Tensor shards)> all_gather;
    std::function<void(Ctx& ctx, int layer, Tensor out, Tensor in)> all_to_all;
};
