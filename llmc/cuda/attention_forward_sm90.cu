// Attention forward on compute capability 9.0, bf16, head dims 64, 128 and 256, and 72 to 96, which are padded
// to 128: S then takes 96 / 128 of the products of head dim 128, P V as many.
#include "llmc/cuda/attention_forward_sm90.cuh"

namespace cuda {
namespace {

template <int dim> struct ForwardTiles;   // kHeadSize: dim in whole panels
template <> struct ForwardTiles<128> {   // registers of a consumer: O 64, S 64, P 32
    static constexpr int kHeadSize = 128, kElemBytes = 2;
    static constexpr int kConsumers = 2, kKeys = 128, kStages = 2, kProducerRegisters = 24, kConsumerRegisters = 240;
    static constexpr bool kOrdered = true;
};
// Registers of a consumer: O 32, S 32, P 16. On an H200, three consumers with 128 keys are 8 % slower, two 10 %.
template <> struct ForwardTiles<64> {
    static constexpr int kHeadSize = 64, kElemBytes = 2;
    static constexpr int kConsumers = 4, kKeys = 64, kStages = 6, kProducerRegisters = 24, kConsumerRegisters = 112;
    static constexpr bool kOrdered = false;
};
template <> struct ForwardTiles<96> : ForwardTiles<128> {};
// Registers of a consumer: O 128, S 40, P 20. 80 keys fill shared memory; with 64, reading operands of S would take all
// of its bandwidth.
template <> struct ForwardTiles<256> {
    static constexpr int kHeadSize = 256, kElemBytes = 2;
    static constexpr int kConsumers = 2, kKeys = 80, kStages = 2, kProducerRegisters = 24, kConsumerRegisters = 240;
    static constexpr bool kOrdered = false;
};
template <int dim> using Tiles = Forward<ForwardTiles<dim>>;
template <int dim> inline constexpr uint32_t kQueryPanel = Tiles<dim>::kQueries * kPanelRowBytes;
template <int dim> inline constexpr uint32_t kKeyPanel = Tiles<dim>::kKeys * kPanelRowBytes;

template <int dim> struct ForwardMaps {
    CUtensorMap queries, keys, out;
};

// TMA loads of panels from the packed projections.
template <int dim> struct PanelCopies {
    using Panels = HeadPanels<dim>;
    const ForwardMaps<dim>& maps;
    int NH, NKV;

    __device__ void queries(uint32_t shared, uint32_t barrier, int first, int head, int b) const {
        Panels::template load<Tiles<dim>::kQueries>(shared, maps.queries, barrier, first, head * Panels::kPlaces, b);
    }
    __device__ void keys(uint32_t shared, uint32_t barrier, int tile, int head, int b) const {
        constexpr int kKeys = Tiles<dim>::kKeys;
        Panels::template load<kKeys>(shared, maps.keys, barrier, tile * kKeys, (NH + head) * Panels::kPlaces, b);
    }
    __device__ void values(uint32_t shared, uint32_t barrier, int tile, int head, int b) const {
        keys(shared, barrier, tile, NKV + head, b);
    }
};

// Starts s = q k^T.
template <int dim, int count>
__device__ void start_scores(float (&s)[count], uint32_t queries, uint32_t keys) {
    const uint64_t q = tile_descriptor(queries, kQueryPanel<dim>), k = tile_descriptor(keys, kKeyPanel<dim>);
    ptx::pin(s);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < dim / 16; i++) {
        ptx::wgmma<2 * count, false, false>(s, along_columns(q, i, kQueryPanel<dim>),
                                            along_columns(k, i, kKeyPanel<dim>), i > 0);
    }
    ptx::wgmma_commit();
}

// Starts o += p v.
template <int dim, int count, int steps>
__device__ void start_sums(float (&o)[count], const uint32_t (&p)[steps][4], uint32_t values) {
    const uint64_t v = tile_descriptor(values, kKeyPanel<dim>);
    ptx::pin(o);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < steps; i++) ptx::wgmma<2 * count, true>(o, p[i], along_rows(v, i), true);
    ptx::wgmma_commit();
}

template <int count> __device__ void as_weights(uint32_t (&p)[count / 8][4], const float (&s)[count]) {
#pragma unroll
    for (int j = 0; j < count / 8; j++) as_operand(p[j], s, j);
}

// One consumer warpgroup.
template <int dim, bool kBorders, bool kLogits, bool kCap>
__device__ void consume(ForwardState<Tiles<dim>> state, int group_of_warps, const CUtensorMap& out_map, float* lse,
                        float* max_logits, const AttentionShape& shape, const Schedule& schedule) {
    using P = Tiles<dim>;
    const int warp = warp_uniform(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x) % 32;
    const int T = static_cast<int>(shape.T);
    const auto scores = shape.scores<bf16, kCap>();
    const float mul = scores.mul * kLog2e;
    const uint32_t own_out = state.shared + P::kOut + warp * P::kOutBytes;
    const int my_turn = 1 + group_of_warps, next_turn = 1 + (group_of_warps + 1) % P::kConsumers;
    if (P::kOrdered && group_of_warps == P::kConsumers - 1) ptx::named_arrive<256>(next_turn);

    for (uint32_t round = 0;; round++) {
        const uint32_t item = schedule.item(round, blockIdx.x, gridDim.x);
        if (item >= schedule.items) break;
        const Schedule::Place at = schedule.place(item);
        const int first = at.tile * P::kQueries + group_of_warps * 64, row = first + warp % 4 * 16;
        int tile = P::last_tile(at.tile * P::kQueries, T);
        const int begin = P::template first_tile<kBorders>(shape, at.b, at.tile * P::kQueries);
        const int own_begin =   // keys of these rows may begin later; ordered warpgroups must visit equal tiles
            !P::kOrdered && first < T ? P::template first_tile<kBorders>(shape, at.b, first) : begin;
        const std::conditional_t<kBorders, FirstKeys, NoBorders> borders(shape, at.b, row, lane);
        state.queries.wait();
        const uint32_t queries = state.query_tile() + group_of_warps * 64 * kPanelRowBytes;
        if (!P::kOrdered) {   // skips tiles that only later warpgroups attend to; all tiles if these rows do not exist
            const int own_last = P::kAligned ? first : min(T, first + 64) - 1;
            for (const int own = first < T ? own_last / P::kKeys : begin - 1; tile > own; tile--) state.skip_tile(lane);
        }
        if (tile < begin) {
            state.queries.release(lane), state.queries.next();
            continue;
        }

        float s[P::kKeys / 2], o[P::HS / 2];
        uint32_t p[P::kKeys / 16][4];
        RowSoftmax<kLogits> softmax;
        if (!P::kAligned) softmax.reference[0] = softmax.reference[1] = -1e30f;   // rows may see no key of a tile
        state.keys.wait();
        start_scores<dim>(s, queries, state.key_tile());
#pragma unroll
        for (float& sum : o) sum = 0;
        ptx::wgmma_wait<0>();
        ptx::pin(s);
        state.keys.release(lane), state.keys.next();
        cap_scores(s, scores);
        mask_future(s, row - tile * P::kKeys, lane);   // if aligned, every row attends at least to itself
        borders.mask(s, row - tile * P::kKeys, lane);
        softmax.grow(s, mul);
        softmax.exponentials(s, mul);
        as_weights(p, s);
        for (; tile > own_begin; tile--) {
            state.keys.wait();
            if (P::kOrdered) ptx::named_sync<256>(my_turn);
            start_scores<dim>(s, queries, state.key_tile());
            state.values.wait();
            start_sums<dim>(o, p, state.value_tile());
            if (P::kOrdered) ptx::named_arrive<256>(next_turn);
            ptx::wgmma_wait<1>();
            ptx::pin(s);
            state.keys.release(lane), state.keys.next();
            cap_scores(s, scores);
            const int ahead = row - (tile - 1) * P::kKeys;
            if (!P::kAligned && ahead < P::kKeys - 1) mask_future(s, ahead, lane);
            borders.mask(s, ahead, lane);
            const bool grown = softmax.grow(s, mul);
            softmax.exponentials(s, mul);
            softmax.evaluate();   // while the products run
            ptx::wgmma_wait<0>();
            ptx::pin(o);
            state.values.release(lane), state.values.next();
            if (grown) softmax.correct(o);
            as_weights(p, s);
        }
        if (!P::kOutInQueries) state.queries.release(lane), state.queries.next();
        state.values.wait();
        start_sums<dim>(o, p, state.value_tile());
#pragma unroll
        for (int half = 0; half < 2; half++) {
            // The sum is > 2^-8: the reference was within the headroom.
            const RowEnd end(1.0f, softmax.reference[half], warp_sum<4>(softmax.sum[half]), shape.sink<bf16>(at.head));
            softmax.correction[half] = end.mul;
            const int query = row + 8 * half + lane / 4;
            if (lane % 4 == 0 && query < T) lse[shape.stat(at.b, query, at.head)] = end.lse;
        }
        if (kLogits) record_logit(max_logits + at.head, softmax.largest_score);
        ptx::wgmma_wait<0>();
        ptx::pin(o);
        state.values.release(lane), state.values.next();
        if (!P::kOrdered) {   // skips tiles that only earlier warpgroups attend to
            for (; tile > begin; tile--) state.skip_tile(lane);
        }
        softmax.correct(o);
        if (P::kOutInQueries) ptx::named_sync<128>(my_turn);   // no warp's products read the queries any more
        send_rows<dim, P::kOutPanelBytes>(out_map, own_out, o, row, at.head, at.b, lane);
        if (P::kOutInQueries) {
            if (lane == 0) ptx::bulk_wait_read<0>();
            state.queries.release(lane), state.queries.next();
        }
    }
    if (lane == 0) ptx::bulk_wait_read<0>();   // shared memory must outlive the copies
    if (P::kOrdered && group_of_warps == 0) ptx::named_sync<256>(my_turn);   // consumes the last arrival
}

// Math: s_j = softmax_mul q . k_j for j <= t (kBorders: from t's first key on; kCap: softcap tanh(that / softcap));
//       lse = log (exp(sink) + sum_j exp(s_j)); out = sum_j exp(s_j - lse) v_j;
//       kLogits: max_logits[head] = max(itself, s_j)
// Source: Shah et al., FlashAttention-3, arXiv 2407.08608, algorithms 1 and 2; PTX ISA 9.0, wgmma and
//         cp.async.bulk.tensor.
// Traffic: q read and out, lse written once; k and v read once per block of queries (mostly from the L2 cache).
// Requires: sm_90a; bf16, HS 64, 72 to 96 by 8, 128 or 256, 16-byte aligned, softmax_mul > 0; dynamic shared memory of
//           kSharedBytes.
// Parallel: a block processes tiles of 128 (HS 64: 256) queries of one head (Schedule); its last warpgroup issues TMA
//           loads, each other one owns 64 queries and loops over 128 (HS 64: 64, HS 256: 80) keys at a time.
template <int dim, bool kBorders, bool kLogits, bool kCap>
__global__ void __launch_bounds__(Tiles<dim>::kThreads, 1)
attention_forward_sm90_kernel(const __grid_constant__ ForwardMaps<dim> maps, float* lse, float* max_logits,
                              AttentionShape shape, Schedule schedule) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using P = Tiles<dim>;
    extern __shared__ __align__(1024) char memory[];
    const ForwardState<P> state(ptx::shared_address(memory));
    const int group_of_warps = warp_uniform(threadIdx.x / 128);
    if (threadIdx.x == 0) {
        state.init();
        ptx::prefetch_map(&maps.queries);
        ptx::prefetch_map(&maps.keys);
        ptx::prefetch_map(&maps.out);
    }
    __syncthreads();
    if (group_of_warps == P::kConsumers) {
        ptx::registers_shrink<P::kProducerRegisters>();
        const PanelCopies<dim> copies{maps, static_cast<int>(shape.NH), static_cast<int>(shape.NKV)};
        if (threadIdx.x == 128 * P::kConsumers) produce<P, kBorders>(state, copies, shape, schedule);
    } else {
        ptx::registers_grow<P::kConsumerRegisters>();
        consume<dim, kBorders, kLogits, kCap>(state, group_of_warps, maps.out, lse, max_logits, shape, schedule);
    }
#endif
}

template <int dim, bool kBorders>
void launch(Ctx& ctx, const AttentionForwardArgs& args, const AttentionShape& shape) {
    using P = Tiles<dim>;
    using Panels = HeadPanels<dim>;
    const ForwardMaps<dim> maps{Panels::map(args.qkv, shape, shape.row(), P::kQueries),
                                Panels::map(args.qkv, shape, shape.row(), P::kKeys),
                                Panels::map(args.out, shape, shape.NH * shape.HS, 16,
                                            P::kOutInQueries ? 1 : P::kOutPanels)};
    auto* kernel = args.max_logits ? attention_forward_sm90_kernel<dim, kBorders, true, false>
                                   : attention_forward_sm90_kernel<dim, kBorders, false, false>;
    if constexpr (dim >= 128) {
        if (shape.softcap > 0) kernel = attention_forward_sm90_kernel<dim, kBorders, false, true>;
    }
    launch_forward(ctx, kernel, P::kThreads, P::kSharedBytes,
                   make_schedule(shape, shape.NH, P::kQueries, true, ctx.sm_count), maps, args.lse.as<float>(),
                   args.max_logits, shape);
    CHECK_LAUNCH("attention_forward_sm90_kernel");
}

}  // namespace

void attention_forward_sm90(Ctx& ctx, const AttentionForwardArgs& args, const AttentionShape& shape) {
    by_head_dim(shape.HS, [&](auto dim) {
        (shape.has_borders() ? launch<dim.value, true> : launch<dim.value, false>)(ctx, args, shape);
    });
}

}  // namespace cuda
