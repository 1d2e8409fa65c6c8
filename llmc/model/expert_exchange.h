// The communication of expert parallelism: `ranks` ranks, 2, 4 or 8, share the experts of each layer, in this order. A
// null pointer to an ExpertExchange means that a rank has all experts.
#pragma once
#include <functional>

#include "llmc/ops/device.h"

struct ExpertExchange {
    int ranks = 1, rank = 0;
    // See Comm. They run beside what is enqueued on ctx from now on, which must leave their tensors alone until wait()
    // for the number that they return. what, layer: the purpose, "tokens of layers." of 3, for hang reports and plans.
    std::function<int64_t(Ctx& ctx, const char* what, int layer, Tensor shards)> all_gather;
    std::function<int64_t(Ctx& ctx, const char* what, int layer, Tensor out, Tensor in)> all_to_all;
    // Makes ctx's stream wait for this exchange and those before.
    std::function<void(Ctx& ctx, int64_t number)> wait;
};
