// The head exchange of context parallelism over the ranks of a context group, on the compute stream.
#pragma once
#include "llmc/model/head_exchange.h"
#include "llmc/parallel/comm/comm_stream.h"
#include "llmc/parallel/groups.h"

class ContextExchange : public HeadExchange {
public:
    // Owns none of its arguments. stream: times the exchanges.
    ContextExchange(const Groups& groups, CommStream& stream)
        : HeadExchange(groups.context.world().ranks, groups.context.world().rank), context_(groups.context),
          stream_(stream) {}

    void all_to_all(Ctx& ctx, int layer, int64_t sequences, Tensor out, Tensor in) override;

private:
    Comm& context_;
    CommStream& stream_;
};
