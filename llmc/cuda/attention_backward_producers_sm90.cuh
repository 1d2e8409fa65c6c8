// The producers of the fused attention backward: the threads that load tiles and statistics and add dQ to its sums.
#pragma once
#include "llmc/cuda/attention_backward_fused_sm90.cuh"

namespace cuda {

// Of K and V, Q, and dO: tiles; of dK and dV: a warp's rows.
struct FusedMaps {
    CUtensorMap keys, queries, douts, dkeys;
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900   // as in ptx.cuh

// The thread that claims items and issues TMA loads.
template <bool kBorders, typename Tiles>
__device__ void load_tiles(FusedState<Tiles> state, char* memory, uint32_t* taken, const FusedMaps& maps,
                           const AttentionShape& shape, const Schedule& schedule) {
    using P = Fused<Tiles>;
    using Panels = HeadPanels<P::kDim>;
    const int NH = static_cast<int>(shape.NH), NKV = static_cast<int>(shape.NKV);
    auto take = [&](uint32_t item) {
        const uint32_t number = atomicAdd(taken, 1u);
        state.items().await_empty(item);
        FusedState<Tiles>::number(memory, item) = number;
        if (number >= schedule.items) state.items().arrive_full(item);
        return number;
    };
    auto load_own = [&](const Steps& steps, uint32_t item) {
        const Schedule::Place& at = steps.at;
        const int place = (NH + at.head) * Panels::kPlaces, first = at.tile * P::kKeys;
        const uint32_t full = state.items().full_of(item), keys = state.key_tile(item);
        ptx::barrier_expect(full, 2 * P::kKeyBytes);
        Panels::template load<P::kKeys>(keys, maps.keys, full, first, place, at.b);
        const int values = place + NKV * Panels::kPlaces;
        Panels::template load<P::kKeys>(keys + P::kKeyBytes, maps.keys, full, first, values, at.b);
    };
    auto load_step = [&](const Steps& steps, int tile, int i, uint32_t step) {
        const int row = tile * P::kQueries, b = steps.at.b;
        const int place = (steps.at.head * schedule.group + i) * Panels::kPlaces;
        const uint32_t queries_full = state.queries().full_of(step), douts_full = state.douts().full_of(step);
        state.queries().await_empty(step);
        ptx::barrier_expect(queries_full, P::kQueryBytes);
        Panels::template load<P::kQueries>(state.query_tile(step), maps.queries, queries_full, row, place, b);
        ptx::barrier_expect(douts_full, P::kQueryBytes);
        Panels::template load<P::kQueries>(state.dout_tile(step), maps.douts, douts_full, row, place, b);
    };
    for_steps<kBorders, P::kKeys>(shape, schedule, take, load_own, load_step);
}

// The warp that loads lse and delta of the queries.
template <bool kBorders, typename Tiles>
__device__ void load_stats(FusedState<Tiles> state, char* memory, const float* lse, const float* delta,
                           const AttentionShape& shape, const Schedule& schedule, int lane) {
    using P = Fused<Tiles>;
    const int T = static_cast<int>(shape.T);
    auto take = [&](uint32_t item) { return warp_uniform(lane == 0 ? state.follow(memory, item) : 0); };
    auto load_step = [&](const Steps& steps, int tile, int i, uint32_t step) {
        const int query = tile * P::kQueries + lane;
        const uint64_t row = static_cast<uint64_t>(steps.first_head + i) * static_cast<uint32_t>(T) + query;
        const float unscale = reciprocal_approx(shape.softmax_mul);
        float s[2] = {-1e30f, -1e30f}, dp[2] = {};   // beyond the end S is so small that P = 0
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (query + 32 * half < T) s[half] = -lse[row + 32 * half] * unscale, dp[half] = -delta[row + 32 * half];
        }
        state.await_stats_empty(step);
        auto* const to = reinterpret_cast<uint4*>(memory + state.stats_at(step)) + lane;
#pragma unroll
        for (int half = 0; half < 2; half++) to[32 * half] = statistics_row(s[half], dp[half]);
        ptx::fence_async();
        state.queries().arrive_full(step);
    };
    for_steps<kBorders, P::kKeys>(shape, schedule, take, no_item, load_step);
}

// The thread that adds a consumer's partial dQ to the sums in memory. Key tile j adds after the tiles before it; the
// first one stores. The turn counter advances when the addition is complete, not merely when its source has been read.
// The thread waits first for its turn and then for the partial sum, which usually arrives last.
template <bool kBorders, typename Tiles>
__device__ void add_sums(FusedState<Tiles> state, char* memory, int consumer, DqSums sums,
                         const AttentionShape& shape, const Schedule& schedule) {
    using P = Fused<Tiles>;
    const uint32_t barriers = ptx::opaque(state.sums(consumer).full);
    const uint32_t from = ptx::opaque(state.shared + state.sums_at(consumer));
    const Slots<1> buffer{barriers, barriers + 8};
    uint32_t added = 0;
    auto take = [&](uint32_t item) { return state.follow(memory, item); };
    bool owns = false;   // P::owns() of the next step; computing it from the step takes more registers than there are
    auto begin = [&](const Steps&, uint32_t) { owns = P::owns(consumer, 0); };
    for_steps<kBorders, P::kKeys>(shape, schedule, take, begin, [&](const Steps& steps, int tile, int i, uint32_t) {
        const bool now = owns;
        owns = !owns;
        if (!now) return;
        uint32_t turn = ptx::opaque(steps.first) / (P::kKeys / P::kQueries);
        if (kBorders) {
            const int t = tile * P::kQueries;
            const uint32_t row = steps.at.b * ptx::opaque(static_cast<uint32_t>(shape.T)) + t;
            turn -= static_cast<uint32_t>(shape.first_key_of_row(row, t)) / P::kKeys;
        }
        const uint32_t unit = (steps.first_head + i) * sums.tiles + tile;
        float* const to = sums.data + static_cast<uint64_t>(unit) * (P::kSumBytes / 4);
        if (turn > 0) {
            while (ptx::load_acquire(sums.turns + unit) != turn) {}
            ptx::fence_async_global();
        }
        buffer.await_full(added);
        if (turn == 0) ptx::bulk_store(to, from, P::kSumBytes);
        else ptx::bulk_add(to, from, P::kSumBytes);
        ptx::bulk_commit();
        ptx::bulk_wait_read<0>();
        buffer.arrive_empty(added++);
        ptx::bulk_wait<0>();
        ptx::fence_async_global();
        ptx::store_release(sums.turns + unit, turn + 1);
    });
}

#endif

}  // namespace cuda
