#include "llmc/train/checkpoint_access.h"

#include <algorithm>

namespace {

// A weight that is stored in FP8 only, or sharded, is saved as its rounded master.
void read_rounded_master(Ctx& ctx, const ShardedState& state, const WeightGatherer& gatherer, int param, int64_t begin,
                         int64_t count, void* host) {
    if (state.sharded()) {
        const Tensor gathered = gatherer.gathered_for_checkpoint(param).slice(begin, count);
        device::copy_to_host(ctx, host, gathered.data, gathered.bytes());
        device::synchronize(ctx);
        return;
    }
    CHECK(state.dtypes().weight == Dtype::kBf16, "FP8 linears need BF16 weights, not %s",
          dtype_name(state.dtypes().weight));
    std::vector<float> values(static_cast<size_t>(count));
    state.read(ctx, StateKind::kMaster, param, begin, count, values.data());
    std::transform(values.begin(), values.end(), static_cast<bf16*>(host), [](float x) { return bf16(x); });
}

}  // namespace

StateAccess checkpoint_access(Ctx& ctx, ShardedState& state, WeightGatherer& gatherer) {
    StateAccess access{.dtypes = state.dtypes(), .read = {}, .write = {}};
    access.read = [&](StateKind kind, int param, int64_t begin, int64_t count, void* host) {
        gatherer.wait(ctx);
        if (kind == StateKind::kWeight && !state.holds_weight(param))
            return read_rounded_master(ctx, state, gatherer, param, begin, count, host);
        state.read(ctx, kind, param, begin, count, host);
    };
    access.write = [&](StateKind kind, int param, int64_t begin, int64_t count, const void* host) {
        gatherer.wait(ctx);
        state.write(ctx, kind, param, begin, count, host);
    };
    if (!state.sharded()) return access;
    access.held = [&](int param) -> std::vector<ElementRange> {
        const ShardRange* range = state.range_of(param);
        if (!range) return {};
        return {{range->begin, range->elems}};
    };
    access.gather_weight = [&](int param) { gatherer.gather_for_checkpoint(ctx, param); };
    return access;
}
