// Attention forward on compute capability 9.0: copies by the copy engine on the order of one thread, products by wgmma,
// head size 64 and 128. Two things hide the softmax behind the tensor cores: within a warpgroup the weighted sum of one
// tile of keys runs beside the exponentials of the next, whose scores were computed before it; and the warpgroups of a
// block take turns: while one multiplies, another does its exponentials.
#include "llmc/cuda/attention_sm90.cuh"

namespace cuda {
namespace {

// Tile shapes and register budgets (a multiprocessor has 65,536 registers; a warpgroup takes 128 times its share).
// Every consumer warpgroup owns 64 queries. Ordered warpgroups issue their products in turn and therefore must all
// visit the same tiles, so that a block owns as many queries as a tile has keys.
template <int HS> struct ForwardTiles;
template <> struct ForwardTiles<128> {   // a consumer: 64 sums, 64 scores, 32 weights
    static constexpr int kConsumers = 2, kKeys = 128, kStages = 2, kProducerRegisters = 24, kConsumerRegisters = 240;
    static constexpr bool kOrdered = true;
};
// A consumer: 32 sums, 32 scores, 16 weights. Three consumers with 128 keys are 8 % slower on an H200, two 10 %.
template <> struct ForwardTiles<64> {
    static constexpr int kConsumers = 4, kKeys = 64, kStages = 6, kProducerRegisters = 24, kConsumerRegisters = 112;
    static constexpr bool kOrdered = false;
};
template <int HS> struct Forward : ForwardTiles<HS> {
    using Tiles = ForwardTiles<HS>;
    static constexpr int kThreads = 128 * (Tiles::kConsumers + 1);
    static constexpr int kQueries = 64 * Tiles::kConsumers, kPanels = HS / kPanel;
    static constexpr uint32_t kQueryPanel = kQueries * kPanelRowBytes, kKeyPanel = Tiles::kKeys * kPanelRowBytes;
    static constexpr uint32_t kQueryBytes = kPanels * kQueryPanel, kKeyBytes = kPanels * kKeyPanel;
    static constexpr uint32_t kOutBytes = kPanels * 16 * kPanelRowBytes;   // of a warp
    static constexpr int kQueryStages = 2;   // whoever is done with an item goes on to the next
    // Shared memory: stages of queries | results | stages of keys | stages of values | barriers.
    static constexpr uint32_t kOut = kQueryStages * kQueryBytes, kKeysAt = kOut + 4 * Tiles::kConsumers * kOutBytes;
    static constexpr uint32_t kValuesAt = kKeysAt + Tiles::kStages * kKeyBytes;
    static constexpr uint32_t kBarriers = kValuesAt + Tiles::kStages * kKeyBytes;
    static constexpr int kSharedBytes = kBarriers + 8 * (2 * kQueryStages + 4 * Tiles::kStages);
    static_assert(!Tiles::kOrdered || kQueries == Tiles::kKeys);
    static_assert(128 * (Tiles::kProducerRegisters + Tiles::kConsumers * Tiles::kConsumerRegisters) <= 65536);
    static_assert(kSharedBytes <= 227 * 1024);
};

template <int HS> struct ForwardMaps {
    CUtensorMap queries, keys, out;
};

// A block's rings and where it is in the work.
template <int HS> struct ForwardState {
    using P = Forward<HS>;
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
    // The last tile of keys that a block of queries sees.
    __device__ static int last_tile(int first_query, int T) {
        return (min(T, first_query + P::kQueries) - 1) / P::kKeys;
    }
    // The first one.
    template <bool kDocuments> __device__ static int first_tile(const AttentionShape& shape, int b, int first_query) {
        return kDocuments ? shape.document_start(b, first_query) / P::kKeys : 0;
    }
};

// The one thread that orders copies: for every item its queries, then tiles of keys and values from the last one that
// the queries see down to the first: with documents that of the first query's, which starts before the others'. Values
// come one tile after the keys, as they are wanted.
template <int HS, bool kDocuments>
__device__ void produce(ForwardState<HS> state, const ForwardMaps<HS>& maps, const AttentionShape& shape,
                        const Schedule& schedule) {
    using P = Forward<HS>;
    const int T = static_cast<int>(shape.T), group = schedule.group;
    const int NH = static_cast<int>(shape.NH), NKV = static_cast<int>(shape.NKV);
    for (uint32_t round = 0;; round++) {
        const uint32_t item = schedule.item(round, blockIdx.x, gridDim.x);
        if (item >= schedule.items) return;
        const Schedule::Place at = schedule.place(item);
        const int first = at.tile * P::kQueries, key_panel = (NH + at.head / group) * P::kPanels;
        auto load_keys = [&](int tile) {
            const uint32_t full = state.keys.claim(P::kKeyBytes);
            ptx::load_box(state.key_tile(), &maps.keys, full, tile * P::kKeys, key_panel, at.b);
            state.keys.next();
        };
        auto load_values = [&](int tile) {
            const uint32_t full = state.values.claim(P::kKeyBytes);
            ptx::load_box(state.value_tile(), &maps.keys, full, tile * P::kKeys, key_panel + NKV * P::kPanels, at.b);
            state.values.next();
        };
        const uint32_t full = state.queries.claim(P::kQueryBytes);
        ptx::load_box(state.query_tile(), &maps.queries, full, first, at.head * P::kPanels, at.b);
        state.queries.next();
        const int last = state.last_tile(first, T), begin = state.template first_tile<kDocuments>(shape, at.b, first);
        load_keys(last);
        for (int tile = last; tile >= begin; tile--) {
            if (tile > begin) load_keys(tile - 1);
            load_values(tile);
        }
    }
}

// Starts s = q k^T.
template <int HS, int count>
__device__ void start_scores(float (&s)[count], uint32_t queries, uint32_t keys) {
    using P = Forward<HS>;
    const uint64_t q = tile_descriptor(queries, P::kQueryPanel), k = tile_descriptor(keys, P::kKeyPanel);
    ptx::pin(s);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < HS / 16; i++) {
        ptx::wgmma<P::kKeys, false, false>(s, along_columns(q, i, P::kQueryPanel), along_columns(k, i, P::kKeyPanel),
                                           i > 0);
    }
    ptx::wgmma_commit();
}

// Starts o += p v.
template <int HS, int count, int steps>
__device__ void start_sums(float (&o)[count], const uint32_t (&p)[steps][4], uint32_t values) {
    const uint64_t v = tile_descriptor(values, Forward<HS>::kKeyPanel);
    ptx::pin(o);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < steps; i++) ptx::wgmma<HS, true>(o, p[i], along_rows(v, i), true);
    ptx::wgmma_commit();
}

template <int count> __device__ void as_weights(uint32_t (&p)[count / 8][4], const float (&s)[count]) {
#pragma unroll
    for (int j = 0; j < count / 8; j++) as_operand(p[j], s, j);
}

// One consumer warpgroup.
template <int HS, bool kDocuments>
__device__ void consume(ForwardState<HS> state, int group_of_warps, const CUtensorMap& out_map, float* lse,
                        const AttentionShape& shape, const Schedule& schedule) {
    using P = Forward<HS>;
    const int warp = warp_uniform(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x) % 32;
    const int T = static_cast<int>(shape.T);
    const float mul = shape.softmax_mul * kLog2e;
    const uint32_t own_out = state.shared + P::kOut + warp * P::kOutBytes;
    const int my_turn = 1 + group_of_warps, next_turn = 1 + (group_of_warps + 1) % P::kConsumers;
    if (P::kOrdered && group_of_warps == P::kConsumers - 1) ptx::named_arrive<256>(next_turn);

    for (uint32_t round = 0;; round++) {
        const uint32_t item = schedule.item(round, blockIdx.x, gridDim.x);
        if (item >= schedule.items) break;
        const Schedule::Place at = schedule.place(item);
        const int first = at.tile * P::kQueries + group_of_warps * 64, row = first + warp % 4 * 16;
        int tile = state.last_tile(at.tile * P::kQueries, T);
        const int begin = state.template first_tile<kDocuments>(shape, at.b, at.tile * P::kQueries);
        const std::conditional_t<kDocuments, FirstKeys, NoBorders> borders(shape, at.b, row, lane);
        state.queries.wait();
        const uint32_t queries = state.query_tile() + group_of_warps * 64 * kPanelRowBytes;
        if (!P::kOrdered) {   // tiles that only later warpgroups see; all of them if these rows do not exist
            for (const int own = first < T ? first / P::kKeys : begin - 1; tile > own; tile--) {
                state.keys.wait(), state.keys.release(lane), state.keys.next();
                state.values.wait(), state.values.release(lane), state.values.next();
            }
        }
        if (tile < begin) {
            state.queries.release(lane), state.queries.next();
            continue;
        }

        float s[P::kKeys / 2], o[HS / 2];
        uint32_t p[P::kKeys / 16][4];
        RowSoftmax softmax;
        state.keys.wait();
        start_scores<HS>(s, queries, state.key_tile());
#pragma unroll
        for (float& sum : o) sum = 0;
        ptx::wgmma_wait<0>();
        ptx::pin(s);
        state.keys.release(lane), state.keys.next();
        mask_future(s, row - tile * P::kKeys, lane);   // leaves every row at least itself
        borders.mask(s, row - tile * P::kKeys, lane);
        softmax.grow(s, mul);
        softmax.exponentials(s, mul);
        as_weights(p, s);
        for (; tile > begin; tile--) {
            state.keys.wait();
            if (P::kOrdered) ptx::named_sync<256>(my_turn);
            start_scores<HS>(s, queries, state.key_tile());
            state.values.wait();
            start_sums<HS>(o, p, state.value_tile());
            if (P::kOrdered) ptx::named_arrive<256>(next_turn);
            ptx::wgmma_wait<1>();
            ptx::pin(s);
            state.keys.release(lane), state.keys.next();
            borders.mask(s, row - (tile - 1) * P::kKeys, lane);
            const bool grown = softmax.grow(s, mul);
            softmax.exponentials(s, mul);
            softmax.evaluate();   // while the products run
            ptx::wgmma_wait<0>();
            ptx::pin(o);
            state.values.release(lane), state.values.next();
            if (grown) softmax.correct(o);
            as_weights(p, s);
        }
        state.queries.release(lane), state.queries.next();
        state.values.wait();
        start_sums<HS>(o, p, state.value_tile());
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float sum = warp_sum<4>(softmax.sum[half]);   // above 2^-8: the reference was within the headroom
            softmax.correction[half] = __fdividef(1.0f, sum);
            const int query = row + 8 * half + lane / 4;
            if (lane % 4 == 0 && query < T) {
                lse[shape.stat(at.b, query, at.head)] = softmax.reference[half] * kLn2 + logf(sum);
            }
        }
        ptx::wgmma_wait<0>();
        ptx::pin(o);
        state.values.release(lane), state.values.next();
        softmax.correct(o);
        if (lane == 0) ptx::bulk_wait_read<0>();   // the results of the item before have left
        __syncwarp();
        stage_rows(own_out, o, lane);
        ptx::fence_async();
        __syncwarp();
        if (lane == 0) {
            ptx::store_box(&out_map, own_out, row, at.head * P::kPanels, at.b);
            ptx::bulk_commit();
        }
    }
    if (lane == 0) ptx::bulk_wait_read<0>();   // shared memory must outlive the copies
    if (P::kOrdered && group_of_warps == 0) ptx::named_sync<256>(my_turn);   // takes the last arrival away
}

// Math: s_j = softmax_mul q . k_j for j <= t (kDocuments: of t's document); lse = log sum_j exp(s_j);
//       out = sum_j exp(s_j - lse) v_j
// Source: Shah et al., FlashAttention-3, arXiv 2407.08608, algorithms 1 and 2; PTX ISA 9.0, wgmma and
//         cp.async.bulk.tensor.
// Traffic: q read and out, lse written once; k and v read once per block of queries (mostly from the L2 cache).
// Requires: sm_90a; bf16, HS 64 or 128, 16-byte aligned, softmax_mul > 0; dynamic shared memory of kSharedBytes.
// Parallel: a block owns 128 (HS 64: 256) queries of one head after the other (Schedule); its last warpgroup copies,
//           each other one owns 64 queries and meets 128 (64) keys at a time.
template <int HS, bool kDocuments>
__global__ void __launch_bounds__(Forward<HS>::kThreads, 1)
attention_forward_sm90_kernel(const __grid_constant__ ForwardMaps<HS> maps, float* lse, AttentionShape shape,
                              Schedule schedule) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using P = Forward<HS>;
    extern __shared__ __align__(1024) char memory[];
    const ForwardState<HS> state(ptx::shared_address(memory));
    const int group_of_warps = warp_uniform(threadIdx.x / 128);
    if (threadIdx.x == 0) {
        state.queries.init(4 * P::kConsumers);
        state.keys.init(4 * P::kConsumers);
        state.values.init(4 * P::kConsumers);
        ptx::barrier_init_fence();
        ptx::prefetch_map(&maps.queries);
        ptx::prefetch_map(&maps.keys);
        ptx::prefetch_map(&maps.out);
    }
    __syncthreads();
    if (group_of_warps == P::kConsumers) {
        ptx::registers_shrink<P::kProducerRegisters>();
        if (threadIdx.x == 128 * P::kConsumers) produce<HS, kDocuments>(state, maps, shape, schedule);
    } else {
        ptx::registers_grow<P::kConsumerRegisters>();
        consume<HS, kDocuments>(state, group_of_warps, maps.out, lse, shape, schedule);
    }
#endif
}

template <int HS, bool kDocuments>
void launch(Ctx& ctx, const AttentionForwardArgs& args, const AttentionShape& shape) {
    using P = Forward<HS>;
    const int64_t width = shape.row(), out_width = shape.NH * HS;
    const ForwardMaps<HS> maps{panel_map(args.qkv.data, shape.B, shape.T, width, P::kQueries, P::kPanels),
                               panel_map(args.qkv.data, shape.B, shape.T, width, P::kKeys, P::kPanels),
                               panel_map(args.out.data, shape.B, shape.T, out_width, 16, P::kPanels)};
    const Schedule schedule = make_schedule(shape, shape.NH, P::kQueries, true, ctx.sm_count);
    auto* const kernel = attention_forward_sm90_kernel<HS, kDocuments>;
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, P::kSharedBytes));
    const unsigned grid = grid_size(std::min<int64_t>(schedule.items, ctx.sm_count));
    kernel<<<grid, P::kThreads, P::kSharedBytes, stream_of(ctx)>>>(maps, args.lse.as<float>(), shape, schedule);
    CHECK_LAUNCH("attention_forward_sm90_kernel");
}

}  // namespace

void attention_forward_sm90(Ctx& ctx, const AttentionForwardArgs& args, const AttentionShape& shape) {
    CHECK(shape.HS == 64 || shape.HS == 128, "attention_forward_sm90: head size %lld", (long long)shape.HS);
    auto* const with_documents = shape.HS == 64 ? launch<64, true> : launch<128, true>;
    auto* const without = shape.HS == 64 ? launch<64, false> : launch<128, false>;
    (shape.documents ? with_documents : without)(ctx, args, shape);
}

}  // namespace cuda
