#include "llmc/train/checkpoint_access.h"

StateAccess checkpoint_access(Ctx& ctx, ShardedState& state, WeightGatherer& gatherer) {
    StateAccess access{.dtypes = state.dtypes(), .read = {}, .write = {}};
    access.read = [&](StateKind kind, int param, int64_t begin, int64_t count, void* host) {
        state.read(ctx, kind, param, begin, count, host);
    };
    access.write = [&](StateKind kind, int param, int64_t begin, int64_t count, const void* host) {
        gatherer.wait(ctx);   // the gatherer's side stream reads masters
        state.write(ctx, kind, param, begin, count, host);
    };
    if (!state.sharded()) return access;
    access.held = [&](int param) -> std::vector<ElementRange> {
        const ShardRange* range = state.range_of(param);
        if (!range) return {};
        return {{range->begin, range->elems}};
    };
    return access;
}
