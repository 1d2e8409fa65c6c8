#include "llmc/parallel/context_exchange.h"

HeadExchange context_exchange(const Groups& groups, CommStream& stream) {
    Comm& context = groups.context;
    return {context.world().ranks, context.world().rank,
            [&context, &stream](Ctx& ctx, int layer, int64_t sequences, Tensor out, Tensor in) {
                const CollectivePurpose purpose(ctx, kExchangePurpose + std::to_string(layer));
                const int64_t elems = in.elems / sequences;
                stream.timed(ctx, [&] {
                    for (int64_t b = 0; b < sequences; b++)
                        context.all_to_all(ctx, out.slice(b * elems, elems), in.slice(b * elems, elems));
                });
            }};
}
