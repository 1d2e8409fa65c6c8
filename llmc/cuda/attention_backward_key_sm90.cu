// Attention backward on compute capability 9.0: the gradients of keys and values.
#include "llmc/cuda/attention_backward_sm90.cuh"

namespace cuda {
namespace {

// Registers of a consumer thread, head size 128 (64): dk and dv 64 (32) each, scores and the gradients of weights 32
// each, both as operands 16 each. Scores stand transposed, rows are keys: operands of dk and dv as they lie.
template <int HS> struct KeyTiles;
template <> struct KeyTiles<128> {
    static constexpr int kConsumers = 2, kStages = 3, kProducerRegisters = 24, kConsumerRegisters = 240;
};
template <> struct KeyTiles<64> {
    static constexpr int kConsumers = 2, kStages = 4, kProducerRegisters = 24, kConsumerRegisters = 240;
};
template <int HS> struct KeyKernel : KeyTiles<HS> {
    using Tiles = KeyTiles<HS>;
    static constexpr int kThreads = 128 * (Tiles::kConsumers + 1), kWarps = 4 * Tiles::kConsumers;
    static constexpr int kKeys = 64 * Tiles::kConsumers, kQueries = 64, kPanels = HS / kPanel;
    static constexpr uint32_t kKeyPanel = kKeys * kPanelRowBytes, kQueryPanel = kQueries * kPanelRowBytes;
    static constexpr uint32_t kKeyBytes = kPanels * kKeyPanel, kQueryBytes = kPanels * kQueryPanel;
    static constexpr uint32_t kOutBytes = kPanels * 16 * kPanelRowBytes;   // of a warp
    static constexpr uint32_t kStatBytes = 2 * 4 * kQueries;               // of a tile: -lse in log2 units, -delta
    // Shared memory: keys | values | results | stages of queries | of dout | of statistics | barriers.
    static constexpr uint32_t kValues = kKeyBytes, kOut = 2 * kKeyBytes, kQueriesAt = kOut + kWarps * kOutBytes;
    static constexpr uint32_t kDoutsAt = kQueriesAt + Tiles::kStages * kQueryBytes;
    static constexpr uint32_t kStatsAt = kDoutsAt + Tiles::kStages * kQueryBytes;
    static constexpr uint32_t kBarriers = kStatsAt + Tiles::kStages * kStatBytes;
    static constexpr int kSharedBytes = kBarriers + 8 * (2 + 6 * Tiles::kStages);
    static_assert(registers_suffice(Tiles::kConsumers, Tiles::kProducerRegisters, Tiles::kConsumerRegisters));
    static_assert(kSharedBytes <= 227 * 1024);
    // At the beginning of a head the last warpgroup holds a stage of the head before, passes the tiles that come before
    // its keys, and wants the one after those.
    static_assert(Tiles::kStages > Tiles::kConsumers);
};

struct KeyMaps {
    CUtensorMap keys, queries, douts, dkeys;
};

template <int HS> struct KeyState {
    using P = KeyKernel<HS>;
    uint32_t shared;
    Ring<1> keys;   // with values
    Ring<P::kStages> queries, douts, stats;

    __device__ static uint32_t barriers(uint32_t base, int pair) {
        return base + P::kBarriers + 16 + pair * 8 * P::kStages;
    }
    __device__ explicit KeyState(uint32_t base)
        : shared(base),
          keys{base + P::kBarriers, base + P::kBarriers + 8},
          queries{barriers(base, 0), barriers(base, 1)},
          douts{barriers(base, 2), barriers(base, 3)},
          stats{barriers(base, 4), barriers(base, 5)} {}
    __device__ uint32_t query_tile() const { return shared + P::kQueriesAt + queries.stage * P::kQueryBytes; }
    __device__ uint32_t dout_tile() const { return shared + P::kDoutsAt + douts.stage * P::kQueryBytes; }
    __device__ uint32_t stat_tile() const { return P::kStatsAt + stats.stage * P::kStatBytes; }
};

// One past the last tile of queries that a block of keys meets: the last key's document ends after those of the others.
template <int HS, bool kDocuments>
__device__ int end_tile(const AttentionShape& shape, const Schedule::Place& at) {
    using P = KeyKernel<HS>;
    const int T = static_cast<int>(shape.T);
    const int end = kDocuments ? shape.document_end(at.b, min(T, (at.tile + 1) * P::kKeys) - 1) : T;
    return (end - 1) / P::kQueries + 1;
}

// Calls item(place) for every item of this block, and visit(place, head, tile of queries) for what it meets.
template <int HS, bool kDocuments, typename Item, typename Visit>
__device__ void for_items(const AttentionShape& shape, const Schedule& schedule, Item item, Visit visit) {
    using P = KeyKernel<HS>;
    const int group = schedule.group;
    for (uint32_t round = 0;; round++) {
        const uint32_t number = schedule.item(round, blockIdx.x, gridDim.x);
        if (number >= schedule.items) return;
        const Schedule::Place at = schedule.place(number);
        const int end = end_tile<HS, kDocuments>(shape, at);
        item(at);
        for (int head = at.head * group; head < (at.head + 1) * group; head++) {
#pragma unroll 1   // producers have few registers
            for (int tile = at.tile * P::kKeys / P::kQueries; tile < end; tile++) visit(at, head, tile);
        }
    }
}

// The thread that orders copies.
template <int HS, bool kDocuments>
__device__ void produce_tiles(KeyState<HS> state, const KeyMaps& maps, const AttentionShape& shape,
                              const Schedule& schedule) {
    using P = KeyKernel<HS>;
    const int NH = static_cast<int>(shape.NH), NKV = static_cast<int>(shape.NKV);
    auto load_own = [&](const Schedule::Place& at) {
        const uint32_t full = state.keys.claim(2 * P::kKeyBytes);
        const int panel = (NH + at.head) * P::kPanels, first = at.tile * P::kKeys;
        ptx::load_box(state.shared, &maps.keys, full, first, panel, at.b);
        ptx::load_box(state.shared + P::kValues, &maps.keys, full, first, panel + NKV * P::kPanels, at.b);
        state.keys.next();
    };
    for_items<HS, kDocuments>(shape, schedule, load_own, [&](const Schedule::Place& at, int head, int tile) {
        const uint32_t queries = state.queries.claim(P::kQueryBytes);
        ptx::load_box(state.query_tile(), &maps.queries, queries, tile * P::kQueries, head * P::kPanels, at.b);
        state.queries.next();
        const uint32_t douts = state.douts.claim(P::kQueryBytes);
        ptx::load_box(state.dout_tile(), &maps.douts, douts, tile * P::kQueries, head * P::kPanels, at.b);
        state.douts.next();
    });
}

// A warp that fetches a statistic of the queries, lse or delta: rows of T floats begin anywhere, which the copy engine
// cannot do. Walks as for_items does, with fewer registers.
template <int HS, bool kDocuments, bool is_lse>
__device__ void produce_stats(KeyState<HS> state, char* memory, const float* source, const AttentionShape& shape,
                              const Schedule& schedule, int lane) {
    using P = KeyKernel<HS>;
    const int T = static_cast<int>(shape.T);
    for (uint32_t round = 0;; round++) {
        const uint32_t item = schedule.item(round, blockIdx.x, gridDim.x);
        if (item >= schedule.items) return;
        const Schedule::Place at = schedule.place(item);
        const float* row = source + shape.stat(at.b, 0, at.head * schedule.group);
        const int first = at.tile * P::kKeys + lane;
        const int end = kDocuments ? end_tile<HS, true>(shape, at) * P::kQueries : T;
        for (int heads = schedule.group; heads > 0; heads--, row += shape.T) {
#pragma unroll 1
            for (int query = first; query - lane < end; query += P::kQueries) {
                ptx::barrier_wait(state.stats.empty + 8 * state.stats.stage, state.stats.parity ^ 1);
                float* to = reinterpret_cast<float*>(memory + state.stat_tile()) + (is_lse ? 0 : P::kQueries) + lane;
#pragma unroll
                for (int i = 0; i < P::kQueries; i += 32) {   // no weight beyond the end
                    to[i] = query + i < T ? (is_lse ? -kLog2e : -1.0f) * row[query + i] : is_lse ? -INFINITY : 0.0f;
                }
                ptx::barrier_arrive(state.stats.full + 8 * state.stats.stage);
                state.stats.next();
            }
        }
    }
}

// One consumer warpgroup of 64 keys.
template <int HS> struct KeyConsumer {
    using P = KeyKernel<HS>;
    KeyState<HS> state;
    const char* memory;
    const int group_of_warps, lane;
    const float mul;
    float dk[HS / 2], dv[HS / 2];
    uint32_t p[4][4], ds[4][4];   // weights and gradients of scores as operands; products that read them run on
    int held = -1;                // stage of the queries that the sums under way read; those of dout: same number

    // A tile of queries that comes before all of these keys.
    __device__ void skip() {
        state.queries.wait(), state.queries.release(lane), state.queries.next();
        state.douts.wait(), state.douts.release(lane), state.douts.next();
        state.stats.wait(), state.stats.release(lane), state.stats.next();
    }
    // Gives back a stage of the tile before, if there was one.
    template <typename Stages> __device__ void release_held(const Stages& ring) const {
        if (held >= 0 && lane == 0) ptx::barrier_arrive(ring.empty + 8 * held);
    }
    // behind: the tile's first query minus the warp's first key; diagonal: some queries come before some keys.
    template <typename Borders>
    __device__ void visit(uint32_t own_keys, int behind, bool diagonal, const Borders& borders) {
        float s[32], dp[32];
        ptx::wgmma_wait<1>();   // dv of the tile before is done, dk may run on
        release_held(state.douts);
        state.queries.wait();
        start_scores_shared<HS>(s, own_keys, P::kKeyPanel, state.query_tile(), P::kQueryPanel);
        state.douts.wait();
        start_scores_shared<HS>(dp, own_keys + P::kValues, P::kKeyPanel, state.dout_tile(), P::kQueryPanel);
        ptx::wgmma_wait<1>();
        ptx::pin(s);
        release_held(state.queries);
        if (diagonal) mask_past(s, behind, lane);
        borders.mask(s, behind, lane);
        state.stats.wait();
        const float* stats = reinterpret_cast<const float*>(memory + state.stat_tile()) + 2 * (lane % 4);
#pragma unroll
        for (int i = 0; i < 32; i += 2) {   // columns side by side
            const float2 minus_lse = *reinterpret_cast<const float2*>(stats + 8 * (i / 4));
            s[i] = exp2_approx(fmaf(s[i], mul, minus_lse.x));
            s[i + 1] = exp2_approx(fmaf(s[i + 1], mul, minus_lse.y));
        }
#pragma unroll
        for (int j = 0; j < 4; j++) as_operand(p[j], s, j);
        start_sums<HS>(dv, p, state.dout_tile(), P::kQueryPanel);
        ptx::wgmma_wait<1>();
        ptx::pin(dp);
#pragma unroll
        for (int i = 0; i < 32; i += 2) {
            const float2 minus_delta = *reinterpret_cast<const float2*>(stats + P::kQueries + 8 * (i / 4));
            dp[i] = s[i] * (dp[i] + minus_delta.x);
            dp[i + 1] = s[i + 1] * (dp[i + 1] + minus_delta.y);
        }
#pragma unroll
        for (int j = 0; j < 4; j++) as_operand(ds[j], dp, j);
        start_sums<HS>(dk, ds, state.query_tile(), P::kQueryPanel);
        state.stats.release(lane), state.stats.next();   // they have been read (await_loaded): ds is worked out
        held = static_cast<int>(state.queries.stage);
        state.queries.next(), state.douts.next();
    }
};

template <int HS, bool kDocuments>
__device__ void consume(KeyState<HS> state, char* memory, int group_of_warps, const CUtensorMap& out_map,
                        const AttentionShape& shape, const Schedule& schedule) {
    using P = KeyKernel<HS>;
    const int warp = warp_uniform(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x) % 32;
    const int NH = static_cast<int>(shape.NH), NKV = static_cast<int>(shape.NKV);
    const int group = schedule.group;
    const uint32_t own_keys = state.shared + group_of_warps * 64 * kPanelRowBytes;
    KeyConsumer<HS> c{state, memory, group_of_warps, lane, shape.softmax_mul * kLog2e, {}, {}, {}, {}};
    for (uint32_t round = 0;; round++) {
        const uint32_t item = schedule.item(round, blockIdx.x, gridDim.x);
        if (item >= schedule.items) break;
        const Schedule::Place at = schedule.place(item);
        const int first = at.tile * P::kKeys + group_of_warps * 64, row = first + warp % 4 * 16;
        const int own = first / P::kQueries;   // the tile of queries on the diagonal
        const int end = end_tile<HS, kDocuments>(shape, at);
        const std::conditional_t<kDocuments, EndQueries, NoBorders> borders(shape, at.b, row, lane);
#pragma unroll
        for (int i = 0; i < HS / 2; i++) c.dk[i] = c.dv[i] = 0;
        c.state.keys.wait();
        for (int head = 0; head < group; head++) {
            for (int tile = at.tile * P::kKeys / P::kQueries; tile < end; tile++) {
                if (tile < own) c.skip();
                else c.visit(own_keys, tile * P::kQueries - row, tile == own, borders);
            }
        }
        ptx::wgmma_wait<0>();
        ptx::pin(c.dk);
        ptx::pin(c.dv);
        c.release_held(c.state.queries), c.release_held(c.state.douts);
        c.held = -1;
        c.state.keys.release(lane), c.state.keys.next();
        const uint32_t own_out = state.shared + P::kOut + warp * P::kOutBytes;
        const int panel = (NH + at.head) * P::kPanels;
        store_rows<HS>(out_map, own_out, c.dv, 1.0f, row, panel + NKV * P::kPanels, at.b, lane);
        store_rows<HS>(out_map, own_out, c.dk, shape.softmax_mul, row, panel, at.b, lane);
    }
    if (lane == 0) ptx::bulk_wait_read<0>();   // shared memory must outlive the copies
}

// Math: dv_j = sum_t p_tj dout_t; dk_j = softmax_mul sum_t ds_tj q_t, over the queries t >= j of every query head that
//       reads this key head (kDocuments: those of j's document); p_tj = exp(s_tj - lse_t),
//       ds_tj = p_tj (dout_t . v_j - delta_t)
// Source: Dao, FlashAttention-2, arXiv 2307.08691, algorithm 2; Shah et al., FlashAttention-3, arXiv 2407.08608; PTX
//         ISA 9.0, wgmma and cp.async.bulk.tensor.
// Traffic: k, v read and dk, dv written once; q, dout, lse and delta of the group once per block of keys (mostly L2).
// Requires: delta; sm_90a; bf16, HS 64 or 128, 16-byte aligned; dynamic shared memory of kSharedBytes.
// Parallel: a block owns 128 keys of one key head after the other (Schedule); of its last warpgroup a
//           thread orders copies and two warps fetch statistics, each other warpgroup owns 64 keys and meets 64 queries
//           at a time, those of all heads of the group.
template <int HS, bool kDocuments>
__global__ void __launch_bounds__(KeyKernel<HS>::kThreads, 1)
attention_backward_key_sm90_kernel(const __grid_constant__ KeyMaps maps, const float* lse, const float* delta,
                                   AttentionShape shape, Schedule schedule) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using P = KeyKernel<HS>;
    extern __shared__ __align__(1024) char memory[];
    const KeyState<HS> state(ptx::shared_address(memory));
    const int group_of_warps = warp_uniform(threadIdx.x / 128);
    if (threadIdx.x == 0) {
        state.keys.init(P::kWarps);
        state.queries.init(P::kWarps);
        state.douts.init(P::kWarps);
        state.stats.init(P::kWarps, 64);
        ptx::barrier_init_fence();
    }
    __syncthreads();
    if (group_of_warps == P::kConsumers) {
        ptx::registers_shrink<P::kProducerRegisters>();
        const int thread = static_cast<int>(threadIdx.x) - 128 * P::kConsumers;
        if (thread == 0) produce_tiles<HS, kDocuments>(state, maps, shape, schedule);
        else if (thread / 32 == 1)
            produce_stats<HS, kDocuments, true>(state, memory, lse, shape, schedule, thread % 32);
        else if (thread / 32 == 2)
            produce_stats<HS, kDocuments, false>(state, memory, delta, shape, schedule, thread % 32);
    } else {
        ptx::registers_grow<P::kConsumerRegisters>();
        consume<HS, kDocuments>(state, memory, group_of_warps, maps.dkeys, shape, schedule);
    }
#endif
}

template <int HS, bool kDocuments>
void launch(Ctx& ctx, const AttentionBackwardArgs& args, const AttentionShape& shape) {
    using P = KeyKernel<HS>;
    const int64_t B = shape.B, T = shape.T, width = shape.row(), out_width = shape.NH * HS;
    const KeyMaps maps{panel_map(args.qkv.data, B, T, width, P::kKeys, P::kPanels),
                       panel_map(args.qkv.data, B, T, width, P::kQueries, P::kPanels),
                       panel_map(args.dout.data, B, T, out_width, P::kQueries, P::kPanels),
                       panel_map(args.dqkv.data, B, T, width, 16, P::kPanels)};
    const Schedule schedule = make_schedule(shape, shape.NKV, P::kKeys, false, ctx.sm_count);
    auto* const kernel = attention_backward_key_sm90_kernel<HS, kDocuments>;
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, P::kSharedBytes));
    const unsigned grid = grid_size(std::min<int64_t>(schedule.items, ctx.sm_count));
    kernel<<<grid, P::kThreads, P::kSharedBytes, stream_of(ctx)>>>(maps, args.lse.as<float>(),
                                                                  args.delta.as<float>(), shape, schedule);
    CHECK_LAUNCH("attention_backward_key_sm90_kernel");
}

}  // namespace

void attention_backward_key_sm90(Ctx& ctx, const AttentionBackwardArgs& args, const AttentionShape& shape) {
    auto* const with_documents = shape.HS == 64 ? launch<64, true> : launch<128, true>;
    auto* const without = shape.HS == 64 ? launch<64, false> : launch<128, false>;
    (shape.documents ? with_documents : without)(ctx, args, shape);
}

}  // namespace cuda
