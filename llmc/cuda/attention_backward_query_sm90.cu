// Attention backward on compute capability 9.0: the gradient of the queries.
#include "llmc/cuda/attention_backward_sm90.cuh"

namespace cuda {
namespace {

// Registers of a consumer thread, head size 128 (64): dq 64 (32), scores 32, their gradients 32, those as operands 16,
// q and dout 64 (0). Operands in registers because products of 64 columns with both in shared memory read it at the
// full 128 bytes a cycle. For head size 64 they stay there all the same: ptxas 13.0 gives registers of q or dout to the
// operands of dq, although the next tile needs them. As they are wanted until the last tile, those of the next item get
// their own place.
template <int HS> struct QueryTiles {
    static constexpr int kConsumers = 2, kStages = 4, kProducerRegisters = 24, kConsumerRegisters = 240;
    static constexpr bool kShared = HS == 64;
    static constexpr int kQueryStages = kShared ? 2 : 1;
};
template <int HS> struct QueryKernel : QueryTiles<HS> {
    using Tiles = QueryTiles<HS>;
    static constexpr int kThreads = 128 * (Tiles::kConsumers + 1), kWarps = 4 * Tiles::kConsumers;
    static constexpr int kQueries = 64 * Tiles::kConsumers, kKeys = 64, kPanels = HS / kPanel;
    static constexpr uint32_t kQueryPanel = kQueries * kPanelRowBytes, kKeyPanel = kKeys * kPanelRowBytes;
    static constexpr uint32_t kQueryBytes = kPanels * kQueryPanel, kKeyBytes = kPanels * kKeyPanel;
    static constexpr uint32_t kOutBytes = kPanels * 16 * kPanelRowBytes;   // of a warp
    // Shared memory: stages of queries and dout | results | stages of keys | stages of values | barriers.
    static constexpr uint32_t kDouts = kQueryBytes, kOut = 2 * kQueryBytes * Tiles::kQueryStages;
    static constexpr uint32_t kKeysAt = kOut + kWarps * kOutBytes;
    static constexpr uint32_t kValuesAt = kKeysAt + Tiles::kStages * kKeyBytes;
    static constexpr uint32_t kBarriers = kValuesAt + Tiles::kStages * kKeyBytes;
    static constexpr int kSharedBytes = kBarriers + 8 * (2 * Tiles::kQueryStages + 4 * Tiles::kStages);
    static_assert(registers_suffice(Tiles::kConsumers, Tiles::kProducerRegisters, Tiles::kConsumerRegisters));
    static_assert(kSharedBytes <= 227 * 1024);
};

struct QueryMaps {
    CUtensorMap queries, douts, keys, dqueries;
};

template <int HS> struct QueryState {
    using P = QueryKernel<HS>;
    uint32_t shared;
    Ring<P::kQueryStages> queries;   // with dout
    Ring<P::kStages> keys, values;

    __device__ static uint32_t barriers(uint32_t base, int pairs_before, int stages) {
        return base + P::kBarriers + 8 * (2 * pairs_before + stages);
    }
    __device__ explicit QueryState(uint32_t base)
        : shared(base),
          queries{barriers(base, 0, 0), barriers(base, 0, P::kQueryStages)},
          keys{barriers(base, P::kQueryStages, 0), barriers(base, P::kQueryStages, P::kStages)},
          values{barriers(base, P::kQueryStages + P::kStages, 0),
                 barriers(base, P::kQueryStages + P::kStages, P::kStages)} {}
    __device__ uint32_t query_tile() const { return shared + queries.stage * 2 * P::kQueryBytes; }
    __device__ uint32_t key_tile(uint32_t stage) const { return shared + P::kKeysAt + stage * P::kKeyBytes; }
    __device__ uint32_t value_tile() const { return shared + P::kValuesAt + values.stage * P::kKeyBytes; }
    __device__ static int last_tile(int first_query, int T) {
        return (min(T, first_query + P::kQueries) - 1) / P::kKeys;
    }
    // The first query's document starts before those of the others.
    template <bool kDocuments> __device__ static int first_tile(const AttentionShape& shape, int b, int first_query) {
        return kDocuments ? shape.document_start(b, first_query) / P::kKeys : 0;
    }
};

template <int HS, bool kDocuments>
__device__ void produce(QueryState<HS> state, const QueryMaps& maps, const AttentionShape& shape,
                        const Schedule& schedule) {
    using P = QueryKernel<HS>;
    const int T = static_cast<int>(shape.T), group = schedule.group;
    const int NH = static_cast<int>(shape.NH), NKV = static_cast<int>(shape.NKV);
    for (uint32_t round = 0;; round++) {
        const uint32_t item = schedule.item(round, blockIdx.x, gridDim.x);
        if (item >= schedule.items) return;
        const Schedule::Place at = schedule.place(item);
        const int first = at.tile * P::kQueries, key_panel = (NH + at.head / group) * P::kPanels;
        const uint32_t full = state.queries.claim(2 * P::kQueryBytes);
        ptx::load_box(state.query_tile(), &maps.queries, full, first, at.head * P::kPanels, at.b);
        ptx::load_box(state.query_tile() + P::kDouts, &maps.douts, full, first, at.head * P::kPanels, at.b);
        state.queries.next();
        const int begin = state.template first_tile<kDocuments>(shape, at.b, first);
        for (int tile = state.last_tile(first, T); tile >= begin; tile--) {
            const uint32_t keys = state.keys.claim(P::kKeyBytes);
            ptx::load_box(state.key_tile(state.keys.stage), &maps.keys, keys, tile * P::kKeys, key_panel, at.b);
            state.keys.next();
            const uint32_t values = state.values.claim(P::kKeyBytes);
            ptx::load_box(state.value_tile(), &maps.keys, values, tile * P::kKeys, key_panel + NKV * P::kPanels,
                          at.b);
            state.values.next();
        }
    }
}

// This warp's 16 rows of a tile as operands, whose panels have `panel_bytes`; shared: the first of the rows.
template <int HS>
__device__ void load_operands(uint32_t (&a)[HS / 16][4], uint32_t shared, uint32_t panel_bytes, int lane) {
#pragma unroll
    for (int j = 0; j < HS / 16; j++) {
        const uint32_t chunk = 2 * j + (lane >> 4);
        ptx::load_matrix_x4(a[j], shared + chunk / 8 * panel_bytes + panel_offset(lane & 15, chunk % 8));
    }
}

// One consumer warpgroup of 64 queries. Products of tile n: scores, gradients of weights, and sums of dq, behind which
// the first two of tile n - 1 queue up at once.
template <int HS, bool kDocuments>
__device__ void consume(QueryState<HS> state, int group_of_warps, const CUtensorMap& out_map, const float* lse,
                        const float* delta, const AttentionShape& shape, const Schedule& schedule) {
    using P = QueryKernel<HS>;
    const int warp = warp_uniform(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x) % 32;
    const int T = static_cast<int>(shape.T);
    const float mul = shape.softmax_mul * kLog2e;
    for (uint32_t round = 0;; round++) {
        const uint32_t item = schedule.item(round, blockIdx.x, gridDim.x);
        if (item >= schedule.items) break;
        const Schedule::Place at = schedule.place(item);
        const int first = at.tile * P::kQueries + group_of_warps * 64, row = first + warp % 4 * 16;
        int tile = state.last_tile(at.tile * P::kQueries, T);
        const int begin = state.template first_tile<kDocuments>(shape, at.b, at.tile * P::kQueries);
        const std::conditional_t<kDocuments, FirstKeys, NoBorders> borders(shape, at.b, row, lane);
        float minus_lse[2], minus_delta[2];   // of the lane's rows; lse in log2 units
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int query = row + 8 * half + lane / 4;
            const int64_t stat = shape.stat(at.b, query, at.head);
            minus_lse[half] = query < T ? -kLog2e * lse[stat] : -INFINITY;   // no weight beyond the end
            minus_delta[half] = query < T ? -delta[stat] : 0;
        }
        state.queries.wait();
        uint32_t q[HS / 16][4], dout[HS / 16][4];
        const uint32_t own_queries = state.query_tile() + group_of_warps * 64 * kPanelRowBytes;
        if constexpr (!P::kShared) {
            const uint32_t own_rows = state.query_tile() + (group_of_warps * 64 + warp % 4 * 16) * kPanelRowBytes;
            load_operands<HS>(q, own_rows, P::kQueryPanel, lane);
            load_operands<HS>(dout, own_rows + P::kDouts, P::kQueryPanel, lane);
            await_loaded(q), await_loaded(dout);
            __syncwarp();
            state.queries.release(lane), state.queries.next();
        }
        // Tiles that only later warpgroups see; all of them if these rows do not exist.
        for (const int own = first < T ? first / P::kKeys : begin - 1; tile > own; tile--) {
            state.keys.wait(), state.keys.release(lane), state.keys.next();
            state.values.wait(), state.values.release(lane), state.values.next();
        }
        if (tile < begin) {
            if constexpr (P::kShared) state.queries.release(lane), state.queries.next();
            continue;
        }

        float dq[HS / 2], s[32], ds[32];
        uint32_t a[4][4];
#pragma unroll
        for (float& sum : dq) sum = 0;
        uint32_t held = 0;   // stage of the keys that the sums of dq under way read
        for (const int last = tile; tile >= begin; tile--) {
            state.keys.wait();
            if constexpr (P::kShared) {
                start_scores_shared<HS>(s, own_queries, P::kQueryPanel, state.key_tile(state.keys.stage), P::kKeyPanel);
            } else {
                start_scores<HS>(s, q, state.key_tile(state.keys.stage), P::kKeyPanel);
            }
            state.values.wait();
            if constexpr (P::kShared) {
                start_scores_shared<HS>(ds, own_queries + P::kDouts, P::kQueryPanel, state.value_tile(), P::kKeyPanel);
            } else {
                start_scores<HS>(ds, dout, state.value_tile(), P::kKeyPanel);
            }
            ptx::wgmma_wait<1>();
            ptx::pin(s);
            if (tile < last && lane == 0) ptx::barrier_arrive(state.keys.empty + 8 * held);
            if (tile == last) mask_future(s, row - tile * P::kKeys, lane);
            borders.mask(s, row - tile * P::kKeys, lane);
#pragma unroll
            for (int i = 0; i < 32; i++) s[i] = exp2_approx(fmaf(s[i], mul, minus_lse[half_of(i)]));
            evaluate_now(s);
            ptx::wgmma_wait<0>();
            ptx::pin(ds);
            state.values.release(lane), state.values.next();
#pragma unroll
            for (int i = 0; i < 32; i++) ds[i] = s[i] * (ds[i] + minus_delta[half_of(i)]);
#pragma unroll
            for (int j = 0; j < 4; j++) as_operand(a[j], ds, j);
            start_sums<HS>(dq, a, state.key_tile(state.keys.stage), P::kKeyPanel);
            held = state.keys.stage;
            state.keys.next();
        }
        ptx::wgmma_wait<0>();
        ptx::pin(dq);
        if constexpr (P::kShared) state.queries.release(lane), state.queries.next();
        if (lane == 0) ptx::barrier_arrive(state.keys.empty + 8 * held);
        store_rows<HS>(out_map, state.shared + P::kOut + warp * P::kOutBytes, dq, shape.softmax_mul, row,
                       at.head * P::kPanels, at.b, lane);
    }
    if (lane == 0) ptx::bulk_wait_read<0>();   // shared memory must outlive the copies
}

// Math: p_j = exp(s_j - lse); ds_j = p_j (dout . v_j - delta); dq = softmax_mul sum_j ds_j k_j (kDocuments: keys of the
//       query's document)
// Source: Dao, FlashAttention-2, arXiv 2307.08691, algorithm 2; Shah et al., FlashAttention-3, arXiv 2407.08608; PTX
//         ISA 9.0, wgmma and cp.async.bulk.tensor.
// Traffic: q, dout, lse, delta read and dq written once; k and v once per block of queries (mostly L2).
// Requires: sm_90a; bf16, HS 64 or 128, 16-byte aligned; dynamic shared memory of kSharedBytes.
// Parallel: a block owns 128 queries of one head after the other (Schedule); its last warpgroup copies,
//           each other one owns 64 queries and meets 64 keys at a time.
template <int HS, bool kDocuments>
__global__ void __launch_bounds__(QueryKernel<HS>::kThreads, 1)
attention_backward_query_sm90_kernel(const __grid_constant__ QueryMaps maps, const float* lse, const float* delta,
                                     AttentionShape shape, Schedule schedule) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using P = QueryKernel<HS>;
    extern __shared__ __align__(1024) char memory[];
    const QueryState<HS> state(ptx::shared_address(memory));
    const int group_of_warps = warp_uniform(threadIdx.x / 128);
    if (threadIdx.x == 0) {
        state.queries.init(P::kWarps);
        state.keys.init(P::kWarps);
        state.values.init(P::kWarps);
        ptx::barrier_init_fence();
    }
    __syncthreads();
    if (group_of_warps == P::kConsumers) {
        ptx::registers_shrink<P::kProducerRegisters>();
        if (threadIdx.x == 128 * P::kConsumers) produce<HS, kDocuments>(state, maps, shape, schedule);
    } else {
        ptx::registers_grow<P::kConsumerRegisters>();
        consume<HS, kDocuments>(state, group_of_warps, maps.dqueries, lse, delta, shape, schedule);
    }
#endif
}

template <int HS, bool kDocuments>
void launch(Ctx& ctx, const AttentionBackwardArgs& args, const AttentionShape& shape) {
    using P = QueryKernel<HS>;
    const int64_t B = shape.B, T = shape.T, width = shape.row(), out_width = shape.NH * HS;
    const QueryMaps maps{panel_map(args.qkv.data, B, T, width, P::kQueries, P::kPanels),
                         panel_map(args.dout.data, B, T, out_width, P::kQueries, P::kPanels),
                         panel_map(args.qkv.data, B, T, width, P::kKeys, P::kPanels),
                         panel_map(args.dqkv.data, B, T, width, 16, P::kPanels)};
    const Schedule schedule = make_schedule(shape, shape.NH, P::kQueries, true, ctx.sm_count);
    auto* const kernel = attention_backward_query_sm90_kernel<HS, kDocuments>;
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, P::kSharedBytes));
    const unsigned grid = grid_size(std::min<int64_t>(schedule.items, ctx.sm_count));
    kernel<<<grid, P::kThreads, P::kSharedBytes, stream_of(ctx)>>>(maps, args.lse.as<float>(),
                                                                  args.delta.as<float>(), shape, schedule);
    CHECK_LAUNCH("attention_backward_query_sm90_kernel");
}

}  // namespace

void attention_backward_query_sm90(Ctx& ctx, const AttentionBackwardArgs& args, const AttentionShape& shape) {
    auto* const with_documents = shape.HS == 64 ? launch<64, true> : launch<128, true>;
    auto* const without = shape.HS == 64 ? launch<64, false> : launch<128, false>;
    (shape.documents ? with_documents : without)(ctx, args, shape);
}

}  // namespace cuda
