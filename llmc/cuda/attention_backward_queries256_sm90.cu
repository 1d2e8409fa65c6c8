// dQ of the attention backward at head dim 256 on compute capability 9.0.
#include "llmc/cuda/attention_backward_sm90.cuh"

namespace cuda {
namespace {

constexpr int kDim = 256, kConsumers = 2, kThreads = 128 * (kConsumers + 1), kQueries = 64 * kConsumers, kKeys = 64;
constexpr int kKeyStages = 2, kProducerRegisters = 24, kConsumerRegisters = 240;
constexpr uint32_t kQueryPanel = kQueries * kPanelRowBytes, kKeyPanel = kKeys * kPanelRowBytes;
constexpr uint32_t kQueryBytes = kDim / kPanel * kQueryPanel, kKeyBytes = kDim / kPanel * kKeyPanel;
// Shared memory: Q (later dQ) and dO of an item | stages of K | V | barriers.
constexpr uint32_t kKeysAt = 2 * kQueryBytes, kValuesAt = kKeysAt + kKeyStages * kKeyBytes;
constexpr uint32_t kBarriers = kValuesAt + kKeyBytes;
constexpr int kSharedBytes = kBarriers + 8 * (2 + 2 * kKeyStages + 2);
static_assert(registers_suffice(kConsumers, kProducerRegisters, kConsumerRegisters) && kSharedBytes <= 227 * 1024);
using Panels = HeadPanels<kDim>;

struct QueryMaps {
    CUtensorMap queries, douts, keys, dqueries;   // queries, douts, keys: tiles; dqueries: a warp's rows
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900   // as in ptx.cuh

// Rings of a block and the current position in each. V needs one buffer: the next V is loaded while dQ of these keys
// and S of the next ones are computed.
struct QueryState {
    uint32_t shared;
    Ring<1> queries;   // with dO
    Ring<kKeyStages> keys;
    Ring<1> values;

    __device__ explicit QueryState(uint32_t base)
        : shared(base), queries{base + kBarriers, base + kBarriers + 8},
          keys{base + kBarriers + 16, base + kBarriers + 16 + 8 * kKeyStages},
          values{base + kBarriers + 16 * (1 + kKeyStages), base + kBarriers + 16 * (1 + kKeyStages) + 8} {}
    __device__ void init() const {
        queries.init(4 * kConsumers);
        keys.init(4 * kConsumers);
        values.init(4 * kConsumers);
        ptx::barrier_init_fence();
    }
    __device__ uint32_t key_tile() const { return shared + kKeysAt + keys.stage * kKeyBytes; }
    __device__ uint32_t value_tile() const { return shared + kValuesAt; }
    // Called by consumers: releases a tile unread.
    __device__ void skip_tile(int lane) {
        keys.wait(), keys.release(lane), keys.next();
        values.wait(), values.release(lane), values.next();
    }
};

// The tiles of keys that `count` queries from `first` on attend to: from the last one down to the first.
struct KeyRange {
    int last, first;

    template <bool kBorders> __device__ static KeyRange of(const AttentionShape& shape, int b, int first, int count) {
        const int last = min(static_cast<int>(shape.T), first + count) - 1;
        return {last / kKeys, kBorders ? shape.first_key(b, first) / kKeys : 0};
    }
};

// The thread that issues TMA loads: for every item Q and dO, then tiles of keys in the order of their use, K one tile
// ahead of V.
template <bool kBorders>
__device__ void load_tiles(QueryState state, const QueryMaps& maps, const AttentionShape& shape,
                           const Schedule& schedule) {
    const int NH = static_cast<int>(shape.NH), NKV = static_cast<int>(shape.NKV);
    for (uint32_t round = 0;; round++) {
        const uint32_t item = schedule.item(round, blockIdx.x, gridDim.x);
        if (item >= schedule.items) return;
        const Schedule::Place at = schedule.place(item);
        const int first = at.tile * kQueries, key_head = NH + at.head / schedule.group;
        const KeyRange range = KeyRange::of<kBorders>(shape, at.b, first, kQueries);
        auto load_keys = [&](int tile) {
            if (tile < range.first) return;
            const uint32_t full = state.keys.claim(kKeyBytes);
            Panels::load<kKeys>(state.key_tile(), maps.keys, full, tile * kKeys, key_head * Panels::kPlaces, at.b);
            state.keys.next();
        };
        load_keys(range.last);   // while the results of the previous item are stored
        const uint32_t full = state.queries.claim(2 * kQueryBytes);
        const int place = at.head * Panels::kPlaces;
        Panels::load<kQueries>(state.shared, maps.queries, full, first, place, at.b);
        Panels::load<kQueries>(state.shared + kQueryBytes, maps.douts, full, first, place, at.b);
        state.queries.next();
        load_keys(range.last - 1);
        for (int tile = range.last; tile >= range.first; tile--) {
            const uint32_t values_full = state.values.claim(kKeyBytes);
            Panels::load<kKeys>(state.value_tile(), maps.keys, values_full, tile * kKeys,
                                (key_head + NKV) * Panels::kPlaces, at.b);
            state.values.next();
            load_keys(tile - 2);
        }
    }
}

// Starts s = 64 rows of Q or dO, times K^T or V^T.
__device__ void start_scores(float (&s)[kKeys / 2], uint32_t queries, uint32_t keys) {
    const uint64_t q = tile_descriptor(queries, kQueryPanel), k = tile_descriptor(keys, kKeyPanel);
    ptx::pin(s);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kDim / 16; i++)
        ptx::wgmma<kKeys, false, false>(s, along_columns(q, i, kQueryPanel), along_columns(k, i, kKeyPanel), i > 0);
    ptx::wgmma_commit();
}

// One consumer warpgroup, which owns 64 queries. While it computes dS, products of the other one run.
template <bool kBorders, bool kCap>
__device__ void consume(QueryState state, int consumer, const QueryMaps& maps, const float* lse, const float* delta,
                        const AttentionShape& shape, const Schedule& schedule) {
    const int warp = warp_uniform(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x) % 32;
    const int T = static_cast<int>(shape.T);
    const auto scores = shape.scores<bf16, kCap>();
    const float mul = scores.mul * kLog2e;
    const uint32_t queries = state.shared + consumer * 64 * kPanelRowBytes;
    for (uint32_t round = 0;; round++) {
        const uint32_t item = schedule.item(round, blockIdx.x, gridDim.x);
        if (item >= schedule.items) break;
        const Schedule::Place at = schedule.place(item);
        const int first = at.tile * kQueries + consumer * 64, row = first + warp % 4 * 16;
        const KeyRange range = KeyRange::of<kBorders>(shape, at.b, at.tile * kQueries, kQueries);
        KeyRange own{range.first - 1, range.first};   // no tile, if these rows do not exist
        if (first < T) own = KeyRange::of<kBorders>(shape, at.b, first, 64);
        const std::conditional_t<kBorders, FirstKeys, NoBorders> borders(shape, at.b, row, lane);
        float scaled_lse[2] = {}, own_delta[2] = {};
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int query = row + 8 * half + lane / 4;
            if (query >= T) continue;
            scaled_lse[half] = lse[shape.stat(at.b, query, at.head)] * kLog2e;
            own_delta[half] = delta[shape.stat(at.b, query, at.head)];
        }
        float dq[kDim / 2], s[kKeys / 2], dp[kKeys / 2];
#pragma unroll
        for (float& x : dq) x = 0;
        state.queries.wait();
        int tile = range.last;
        for (; tile > own.last; tile--) state.skip_tile(lane);
        for (; tile >= own.first; tile--) {
            state.keys.wait();
            start_scores(s, queries, state.key_tile());
            state.values.wait();
            start_scores(dp, queries + kQueryBytes, state.value_tile());
            ptx::wgmma_wait<1>();   // dP is still in flight
            ptx::pin(s);
            cap_scores(s, scores);
            const int ahead = row - tile * kKeys;
            if (ahead < kKeys - 1) mask_future(s, ahead, lane);
            borders.mask(s, ahead, lane);
#pragma unroll
            for (int i = 0; i < kKeys / 2; i++)
                s[i] = exp2_approx(fmaf(s[i], mul, -scaled_lse[half_of(i)])) * scores.slope(s[i]);
            ptx::wgmma_wait<0>();
            ptx::pin(dp);
            state.values.release(lane), state.values.next();
            uint32_t ds[kKeys / 16][4];
#pragma unroll
            for (int i = 0; i < kKeys / 2; i++) dp[i] = s[i] * (dp[i] - own_delta[half_of(i)]);
#pragma unroll
            for (int j = 0; j < kKeys / 16; j++) as_operand(ds[j], dp, j);
            const uint64_t keys = tile_descriptor(state.key_tile(), kKeyPanel);
            ptx::pin(dq);
            ptx::wgmma_fence();
#pragma unroll
            for (int j = 0; j < kKeys / 16; j++) ptx::wgmma<kDim, true>(dq, ds[j], along_rows(keys, j), true);
            ptx::wgmma_commit();
            ptx::wgmma_wait<0>();
            ptx::pin(dq);
#pragma unroll
            for (auto& four : ds) {   // operands keep their registers until here
#pragma unroll
                for (uint32_t& x : four) x = ptx::opaque(x);
            }
            state.keys.release(lane), state.keys.next();
        }
        for (; tile >= range.first; tile--) state.skip_tile(lane);
#pragma unroll
        for (float& x : dq) x *= shape.softmax_mul;
        ptx::named_sync<128>(1 + consumer);   // no warp's products read the queries any more
        const uint32_t own_rows = queries + warp % 4 * 16 * kPanelRowBytes;
        stage_rows<kQueryPanel>(own_rows, dq, lane);
        ptx::fence_async();
        __syncwarp();
        if (lane == 0) {
            for (int p = 0; p < Panels::kPanels; p++)
                Panels::store(maps.dqueries, own_rows + p * kQueryPanel, row, at.head * Panels::kPlaces, p, at.b);
            ptx::bulk_commit();
            ptx::bulk_wait_read<0>();
        }
        state.queries.release(lane), state.queries.next();
    }
}

#endif

// Math: dq_t = softmax_mul sum_j ds_tj k_j over the keys j <= t (kBorders: from t's first key on);
//       ds_tj = exp(s_tj - lse_t) (dout_t . v_j - delta_t) (kCap: times 1 - (s_tj / softcap)^2)
// Source: Dao, FlashAttention-2, arXiv 2307.08691, algorithm 2; PTX ISA 9.0, wgmma and cp.async.bulk.tensor.
// Traffic: q, dout, lse, delta read and dq written once; k and v read once per block of queries (mostly L2).
// Requires: delta; sm_90a; bf16, HS 256, 16-byte aligned; dynamic shared memory of kSharedBytes.
// Parallel: a block processes tiles of 128 queries of one head (Schedule); its last warpgroup issues TMA loads, each
//           other one owns 64 queries and loops over 64 keys at a time.
template <bool kBorders, bool kCap>
__global__ void __launch_bounds__(kThreads, 1)
attention_backward_queries_sm90_kernel(const __grid_constant__ QueryMaps maps, const float* lse, const float* delta,
                                       AttentionShape shape, Schedule schedule) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) char memory[];
    const QueryState state(ptx::shared_address(memory));
    const int consumer = warp_uniform(threadIdx.x / 128);
    if (threadIdx.x == 0) state.init();
    __syncthreads();
    if (consumer == kConsumers) {
        ptx::registers_shrink<kProducerRegisters>();
        if (threadIdx.x == 128 * kConsumers) load_tiles<kBorders>(state, maps, shape, schedule);
    } else {
        ptx::registers_grow<kConsumerRegisters>();
        consume<kBorders, kCap>(state, consumer, maps, lse, delta, shape, schedule);
    }
#endif
}

template <bool kBorders, bool kCap>
void launch(Ctx& ctx, const AttentionBackwardArgs& args, const AttentionShape& shape) {
    const QueryMaps maps{Panels::map(args.qkv, shape, shape.row(), kQueries),
                         Panels::map(args.dout, shape, shape.NH * shape.HS, kQueries),
                         Panels::map(args.qkv, shape, shape.row(), kKeys),
                         Panels::map(args.dqkv, shape, shape.row(), 16, 1)};
    const Schedule schedule = make_schedule(shape, shape.NH, kQueries, true, ctx.sm_count);
    auto* const kernel = attention_backward_queries_sm90_kernel<kBorders, kCap>;
    allow_shared_memory(kernel, kSharedBytes);
    const unsigned grid = grid_size(std::min<int64_t>(schedule.items, ctx.sm_count));
    kernel<<<grid, kThreads, kSharedBytes, stream_of(ctx)>>>(maps, args.lse.as<float>(), args.delta.as<float>(), shape,
                                                            schedule);
    CHECK_LAUNCH("attention_backward_queries_sm90_kernel");
}

}  // namespace

void attention_backward_queries_sm90(Ctx& ctx, const AttentionBackwardArgs& args, const AttentionShape& shape) {
    if (shape.softcap > 0) (shape.has_borders() ? launch<true, true> : launch<false, true>)(ctx, args, shape);
    else (shape.has_borders() ? launch<true, false> : launch<false, false>)(ctx, args, shape);
}

}  // namespace cuda
