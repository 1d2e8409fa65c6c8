// Shared by the bf16 and FP8 attention forward of compute capability 9.0: shared memory of a block, the TMA producer,
// the output path. Two things overlap the softmax with the tensor cores: within a warpgroup, P V of one tile of keys
// runs during the exponentials of the next, whose S was computed before it; and the warpgroups of a block ping-pong:
// while one issues products, another computes exponentials.
#pragma once
#include "llmc/cuda/attention_sm90.cuh"

namespace cuda {

// Tiles defines kHeadSize, kElemBytes of the operands, kConsumers, kKeys, kStages, kProducerRegisters,
// kConsumerRegisters, kOrdered. Every consumer warpgroup owns 64 queries. Ordered warpgroups take turns to issue their
// products, so all must visit the same tiles, and a block owns as many queries as a tile has keys. With head dims above
// 128 memory has room for the queries of one item, and the results take their place.
template <typename Tiles> struct Forward : Tiles {
    static constexpr int HS = Tiles::kHeadSize, kThreads = 128 * (Tiles::kConsumers + 1);
    static constexpr int kQueries = 64 * Tiles::kConsumers, kOutPanels = HS / kPanel;
    static constexpr uint32_t kQueryBytes = kQueries * HS * Tiles::kElemBytes;
    static constexpr uint32_t kKeyBytes = Tiles::kKeys * HS * Tiles::kElemBytes;
    static constexpr bool kOutInQueries = HS > 128;
    // Of a warp's 16 rows of results: between its panels, and to the next warp.
    static constexpr uint32_t kOutPanelBytes = (kOutInQueries ? kQueries : 16) * kPanelRowBytes;
    static constexpr uint32_t kOutBytes = (kOutInQueries ? 1 : kOutPanels) * 16 * kPanelRowBytes;
    // With two, warpgroups may start the next item before others finish this one.
    static constexpr int kQueryStages = kOutInQueries ? 1 : 2;
    // Whether only the last tile of a warpgroup has keys after some of its queries.
    static constexpr bool kAligned = kQueries % Tiles::kKeys == 0;
    // Shared memory: stages of queries | results | stages of keys | stages of values | barriers.
    static constexpr uint32_t kOut = kOutInQueries ? 0 : kQueryStages * kQueryBytes;
    static constexpr uint32_t kKeysAt = kOutInQueries ? kQueryBytes : kOut + 4 * Tiles::kConsumers * kOutBytes;
    static constexpr uint32_t kValuesAt = kKeysAt + Tiles::kStages * kKeyBytes;
    static constexpr uint32_t kBarriers = kValuesAt + Tiles::kStages * kKeyBytes;
    static constexpr int kSharedBytes = kBarriers + 8 * (2 * kQueryStages + 4 * Tiles::kStages);
    static_assert(!Tiles::kOrdered || kQueries == Tiles::kKeys);
    static_assert(registers_suffice(Tiles::kConsumers, Tiles::kProducerRegisters, Tiles::kConsumerRegisters));
    static_assert(kSharedBytes <= 227 * 1024);

    // The last tile of keys that a block of queries attends to.
    __device__ static int last_tile(int first_query, int T) {
        return (min(T, first_query + kQueries) - 1) / Tiles::kKeys;
    }
    // The first tile of keys that a block of queries attends to.
    template <bool kBorders> __device__ static int first_tile(const AttentionShape& shape, int b, int first_query) {
        return kBorders ? shape.first_key(b, first_query) / Tiles::kKeys : 0;
    }
};

// Rings of a block and the current position in each.
template <typename P> struct ForwardState {
    uint32_t shared;
    Ring<P::kQueryStages> queries;
    Ring<P::kStages> keys, values;

    __device__ static uint32_t barrier(uint32_t base, int number) { return base + P::kBarriers + 8 * number; }
    __device__ explicit ForwardState(uint32_t base)
        : shared(base),
          queries{barrier(base, 0), barrier(base, P::kQueryStages)},
          keys{barrier(base, 2 * P::kQueryStages), barrier(base, 2 * P::kQueryStages + P::kStages)},
          values{barrier(base, 2 * P::kQueryStages + 2 * P::kStages),
                 barrier(base, 2 * P::kQueryStages + 3 * P::kStages)} {}
    __device__ uint32_t query_tile() const { return shared + queries.stage * P::kQueryBytes; }
    __device__ uint32_t key_tile() const { return shared + P::kKeysAt + keys.stage * P::kKeyBytes; }
    __device__ uint32_t value_tile() const { return shared + P::kValuesAt + values.stage * P::kKeyBytes; }

    // Called by one thread, before the block's first barrier.
    __device__ void init() const {
        queries.init(4 * P::kConsumers);
        keys.init(4 * P::kConsumers);
        values.init(4 * P::kConsumers);
        ptx::barrier_init_fence();
    }
    // Called by consumers: releases a tile unread.
    __device__ void skip_tile(int lane) {
        keys.wait(), keys.release(lane), keys.next();
        values.wait(), values.release(lane), values.next();
    }
};

// Run by the one thread that issues TMA loads. For every item: its queries, then tiles of keys and values from the last
// one that the queries attend to down to the first. With borders the first tile is that of the first query, whose
// keys begin before those of the others. Values are loaded one tile after keys, in the order of their use.
// Copies: queries(shared, barrier, first, head, b), keys and values(shared, barrier, tile, key head, b).
template <typename P, bool kBorders, typename Copies>
__device__ void produce(ForwardState<P> state, const Copies& copies, const AttentionShape& shape,
                        const Schedule& schedule) {
    const int T = static_cast<int>(shape.T), group = schedule.group;
    for (uint32_t round = 0;; round++) {
        const uint32_t item = schedule.item(round, blockIdx.x, gridDim.x);
        if (item >= schedule.items) return;
        const Schedule::Place at = schedule.place(item);
        const int first = at.tile * P::kQueries, key_head = at.head / group;
        auto load_keys = [&](int tile) {
            const uint32_t full = state.keys.claim(P::kKeyBytes);
            copies.keys(state.key_tile(), full, tile, key_head, at.b);
            state.keys.next();
        };
        auto load_values = [&](int tile) {
            const uint32_t full = state.values.claim(P::kKeyBytes);
            copies.values(state.value_tile(), full, tile, key_head, at.b);
            state.values.next();
        };
        if (P::kOutInQueries) load_keys(P::last_tile(first, T));   // while the results of the previous item are stored
        const uint32_t full = state.queries.claim(P::kQueryBytes);
        copies.queries(state.query_tile(), full, first, at.head, at.b);
        state.queries.next();
        const int last = P::last_tile(first, T), begin = P::template first_tile<kBorders>(shape, at.b, first);
        if (!P::kOutInQueries) load_keys(last);
        for (int tile = last; tile >= begin; tile--) {
            if (tile > begin) load_keys(tile - 1);
            load_values(tile);
        }
    }
}

// Stores a warp's 16 rows of O from `row` on as bf16, staged in shared memory at `own_out`. The store may still be in
// flight on return. A box has all panels if they follow each other and none is padded.
template <int dim, uint32_t panel_bytes = 16 * kPanelRowBytes, int count>
__device__ inline void send_rows(const CUtensorMap& out_map, uint32_t own_out, const float (&o)[count], int row,
                                 int head, int b, int lane) {
    if (lane == 0) ptx::bulk_wait_read<0>();   // the previous item's rows have been read from own_out
    __syncwarp();
    stage_rows<panel_bytes>(own_out, o, lane);
    ptx::fence_async();
    __syncwarp();
    if (lane == 0) {
        if constexpr (panel_bytes == 16 * kPanelRowBytes && !HeadPanels<dim>::kPadded) {
            ptx::store_box(&out_map, own_out, row, head * (2 * count / kPanel), b);
        } else {
            for (int p = 0; p < HeadPanels<dim>::kPanels; p++)
                HeadPanels<dim>::store(out_map, own_out + p * panel_bytes, row, head * HeadPanels<dim>::kPlaces, p, b);
        }
        ptx::bulk_commit();
    }
}

template <typename Kernel, typename Maps, typename... Rest>
void launch_forward(Ctx& ctx, Kernel* kernel, int threads, int shared_bytes, const Schedule& schedule,
                    const Maps& maps, const Rest&... rest) {
    allow_shared_memory(kernel, shared_bytes);
    const unsigned grid = grid_size(std::min<int64_t>(schedule.items, ctx.sm_count));
    kernel<<<grid, threads, shared_bytes, stream_of(ctx)>>>(maps, rest..., schedule);
}

}  // namespace cuda
