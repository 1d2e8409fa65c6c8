// Attention backward on the tensor cores (mma.sync, bf16), head dim 64 and 128, in two kernels without atomics: one
// owns queries and sums over keys (dQ), the other owns keys and sums over queries (dK, dV). Computing S and dP twice
// costs 7 products instead of 5; in return every sum has one owner and a fixed order.
#include "llmc/cuda/attention_mma.cuh"

namespace cuda {
namespace {

// Tile shapes of the query kernel: 16 kSlabs queries per warp, kKeys keys per iteration. On an H200, one slab with 64
// keys is 20 % (HS 128) and 16 % (HS 64) slower, 8 warps 7 %, 48 or 64 keys 8 to 12 %.
template <int HS> struct QueryTiles;
template <> struct QueryTiles<64> {
    static constexpr int kWarps = 4, kSlabs = 2, kKeys = 32, kBlocks = 3;
};
template <> struct QueryTiles<128> {
    static constexpr int kWarps = 4, kSlabs = 2, kKeys = 32, kBlocks = 2;
};
// With borders (documents, a window) a warp has one slab, since the masks need registers.
template <int HS, bool kBorders> struct QueryKernel : QueryTiles<HS> {
    using Tiles = QueryTiles<HS>;
    static constexpr int kThreads = 32 * Tiles::kWarps, kSlabs = kBorders ? 1 : Tiles::kSlabs;
    static constexpr int kWarpQueries = 16 * kSlabs;
    static constexpr int kQueries = Tiles::kWarps * kWarpQueries;
    static constexpr int kKeyBytes = kTileBytes<HS, Tiles::kKeys>;
    static constexpr int kSharedBytes = 2 * kTileBytes<HS, kQueries> + 4 * kKeyBytes;   // q, dout, 2 k, 2 v
};

// Tile shapes of the key kernel: 16 kSlabs keys per warp, kQueries queries per iteration. dK and dV of two slabs would
// fill the register file at HS 128; with one slab, shared memory is the limit (87 % busy on an H200). At HS 64, one
// slab with 64 queries is 12 % slower, 8 warps 18 %.
template <int HS> struct KeyTiles;
template <> struct KeyTiles<64> {
    static constexpr int kWarps = 4, kSlabs = 2, kQueries = 32, kBlocks = 2;
};
template <> struct KeyTiles<128> {
    static constexpr int kWarps = 4, kSlabs = 1, kQueries = 64, kBlocks = 2;
};
// With borders a tile has fewer queries, since the masks need registers.
template <int HS, bool kBorders> struct KeyKernel : KeyTiles<HS> {
    using Tiles = KeyTiles<HS>;
    static constexpr int kThreads = 32 * Tiles::kWarps;
    static constexpr int kSlabs = kBorders ? 1 : Tiles::kSlabs, kQueries = kBorders ? 32 : Tiles::kQueries;
    static constexpr int kWarpKeys = 16 * kSlabs;
    static constexpr int kKeys = Tiles::kWarps * kWarpKeys;
    static constexpr int kQueryBytes = kTileBytes<HS, kQueries>;
    static constexpr int kStatBytes = 4 * kQueries;
    // k, v, 2 q, 2 dout, 2 lse, 2 delta
    static constexpr int kSharedBytes = 2 * kTileBytes<HS, kKeys> + 4 * kQueryBytes + 4 * kStatBytes;
    static_assert(kQueries <= kThreads);   // a thread loads at most one row of lse and delta
};

// delta = rowsum(dO * O) of a warp's queries, 16 bytes per lane, to global memory and to shared memory at `own`.
template <int HS>
__device__ void row_products(float* delta, float* own, const bf16* dout, const bf16* out, int64_t stride,
                             int rows, int rows_left) {
    constexpr int kChunks = HS / 8, kRowsAtOnce = 32 / kChunks;
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll 4
    for (int row = lane / kChunks; row < rows; row += kRowsAtOnce) {
        float sum = 0;
        if (row < rows_left) {
            float a[8], b[8];
            unpack<bf16>(load_vec(dout + row * stride + lane % kChunks * 8), a);
            unpack<bf16>(load_vec(out + row * stride + lane % kChunks * 8), b);
#pragma unroll
            for (int i = 0; i < 8; i++) sum = fmaf(a[i], b[i], sum);
        }
        sum = warp_sum<kChunks>(sum);
        if (lane % kChunks == 0) {
            own[row] = sum;
            if (row < rows_left) delta[row] = sum;
        }
    }
    __syncwarp();
}

// Math: delta = dout . out; p_j = exp(s_j - lse); ds_j = p_j (dout . v_j - delta);
//       dq = softmax_mul sum_j ds_j k_j (kBorders: keys from the query's first one on)
// Source: Dao, FlashAttention-2, arXiv 2307.08691, algorithm 2; PTX ISA 9.0, mma.m16n8k16.
// Traffic: q, lse, out read and dq, delta written once, dout read twice; k and v read once per 128 queries (mostly L2).
// Requires: bf16, HS 64 or 128, 16-byte aligned; dynamic shared memory of kSharedBytes.
// Parallel: a block owns 128 queries of one head, a warp 32 of them (kBorders: 64 and 16), and loops over 32 keys at
//           a time, double buffered.
template <int HS, bool kBorders>
__global__ void __launch_bounds__(QueryKernel<HS, kBorders>::kThreads, QueryKernel<HS, kBorders>::kBlocks)
attention_backward_query_mma_kernel(bf16* dqkv, float* delta, const bf16* dout, const bf16* out,
                                    const float* lse, const bf16* qkv, AttentionShape shape) {
    using P = QueryKernel<HS, kBorders>;
    constexpr int kSlabs = P::kSlabs, kKeys = P::kKeys;
    extern __shared__ __align__(1024) char memory[];
    const uint32_t queries = ptx::shared_address(memory), douts = queries + kTileBytes<HS, P::kQueries>,
                   keys = douts + kTileBytes<HS, P::kQueries>, values = keys + 2 * P::kKeyBytes;
    const int warp = uniform(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x) % 32;
    const int T = static_cast<int>(shape.T);
    auto place = [&] { return tile_place(shape, shape.NH, (T + P::kQueries - 1) / P::kQueries, true); };
    const TilePlace at = place();
    const int64_t kv = at.head / shape.group(), stride = shape.row(), out_stride = shape.NH * HS;
    const int block_query = at.tile * P::kQueries, warp_query = block_query + warp * P::kWarpQueries;
    const int tiles = (min(T, block_query + P::kQueries) + kKeys - 1) / kKeys;
    // Keys begin earliest for the block's first query and, within a warp, latest for the last query.
    const int first_tile = kBorders ? uniform(shape.first_key(at.b, block_query) / kKeys) : 0;
    const int latest_start =
        kBorders && warp_query < T
            ? uniform(shape.first_key(at.b, min(T, warp_query + P::kWarpQueries) - 1)) : 0;

    using KeyCopy = TileCopy<HS, kKeys, P::kThreads>;
    using QueryCopy = TileCopy<HS, P::kQueries, P::kThreads>;
    const bf16* next_keys = KeyCopy::source(qkv + shape.key(at.b, first_tile * kKeys, kv), stride);
    const int to_values = static_cast<int>(shape.NKV) * HS;
    auto load_keys = [&](int tile) {
        const uint32_t stage = (tile & 1) * P::kKeyBytes;
        KeyCopy::copy(keys + stage, next_keys, stride, T - tile * kKeys);
        KeyCopy::copy(values + stage, next_keys + to_values, stride, T - tile * kKeys);
        ptx::cp_async_commit();
        next_keys += kKeys * stride;
    };
    QueryCopy::copy(queries, QueryCopy::source(qkv + shape.query(at.b, block_query, at.head), stride), stride,
                    T - block_query);
    QueryCopy::copy(douts, QueryCopy::source(dout + shape.output(at.b, block_query, at.head), out_stride),
                    out_stride, T - block_query);
    load_keys(first_tile);

    __shared__ float own_delta[P::kQueries];
    const int64_t own_out = shape.output(at.b, warp_query, at.head);
    row_products<HS>(delta + shape.stat(at.b, warp_query, at.head), own_delta + warp * P::kWarpQueries,
                     dout + own_out, out + own_out, out_stride, P::kWarpQueries, T - warp_query);
    float minus_delta[kSlabs][2], minus_lse[kSlabs][2];   // of rows 8 half + lane / 4; lse in log2 units
#pragma unroll
    for (int m = 0; m < kSlabs; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = 16 * m + 8 * half + lane / 4;
            minus_delta[m][half] = -own_delta[warp * P::kWarpQueries + row];
            minus_lse[m][half] = -INFINITY;   // P = 0 in rows past the end
            if (warp_query + row < T) {
                minus_lse[m][half] = -kLog2e * lse[shape.stat(at.b, warp_query + row, at.head)];
            }
        }
    }

    const uint32_t own_rows = warp * kTileBytes<HS, P::kWarpQueries> + operand_by_rows<HS>(lane);
    const float mul = shape.softmax_mul * kLog2e;
    float dq[kSlabs][HS / 8][4] = {};
    for (int tile = first_tile, ahead = warp_query - first_tile * kKeys; tile < tiles; tile++, ahead -= kKeys) {
        ptx::cp_async_wait<0>();
        __syncthreads();   // this tile has arrived, and no thread reads the other stage any more
        if (tile + 1 < tiles) load_keys(tile + 1);
        if (ahead <= -P::kWarpQueries) continue;   // every key lies in this warp's future
        const uint32_t stage = (tile & 1) * P::kKeyBytes;
        float s[kSlabs][kKeys / 8][4] = {}, ds[kSlabs][kKeys / 8][4];
        multiply_tiles<HS>(s, queries + own_rows, keys + stage + operand_by_columns<HS>(lane));
        if (ahead < kKeys) mask_future(s, ahead);
        if (kBorders && tile * kKeys < latest_start)
            mask_before_first(s, shape, place().b, tile * kKeys + ahead, tile * kKeys);
#pragma unroll
        for (int m = 0; m < kSlabs; m++) {
#pragma unroll
            for (int n = 0; n < kKeys / 8; n++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    s[m][n][i] = exp2_approx(fmaf(s[m][n][i], mul, minus_lse[m][i / 2]));
                    ds[m][n][i] = minus_delta[m][i / 2];
                }
            }
        }
        multiply_tiles<HS>(ds, douts + own_rows, values + stage + operand_by_columns<HS>(lane));
#pragma unroll
        for (int j = 0; j < kKeys / 16; j++) {
            uint32_t a[kSlabs][4];
#pragma unroll
            for (int m = 0; m < kSlabs; m++) {
#pragma unroll
                for (int i = 0; i < 8; i++) ds[m][2 * j + i / 4][i % 4] *= s[m][2 * j + i / 4][i % 4];
                as_operand(a[m], ds[m][2 * j], ds[m][2 * j + 1]);
            }
            multiply_rows<HS>(dq, a, keys + stage + operand_by_rows<HS>(lane), j);
        }
    }

    const TilePlace to = place();
    const int out_warp = uniform(ptx::thread_index() / 32);
    const int first_out = to.tile * P::kQueries + out_warp * P::kWarpQueries;
    store_results<HS>(dqkv + shape.query(to.b, first_out, to.head), stride, T - first_out, dq,
                      shape.softmax_mul, memory + out_warp * kTileBytes<HS, P::kWarpQueries>);
}

// Math: dv_j = sum_t p_tj dout_t; dk_j = softmax_mul sum_t ds_tj q_t, over the queries t >= j of every query
//       head that reads this key head, kBorders: those that attend to j (p, ds as above).
// Source: Dao, FlashAttention-2, arXiv 2307.08691, algorithm 2; PTX ISA 9.0, mma.m16n8k16.
// Traffic: k, v read and dk, dv written once; q, dout, lse and delta of the group read once per key tile (mostly L2).
// Requires: delta; bf16, HS 64 or 128, 16-byte aligned; dynamic shared memory of kSharedBytes.
// Parallel: a block owns 64 or 128 keys of one key head (KeyTiles), a warp a quarter of them; it loops over the queries
//           of all heads of the group, double buffered. S is computed transposed (rows are keys), so that its
//           registers are already operands of dK and dV.
template <int HS, bool kBorders>
__global__ void __launch_bounds__(KeyKernel<HS, kBorders>::kThreads, KeyKernel<HS, kBorders>::kBlocks)
attention_backward_key_mma_kernel(bf16* dqkv, const float* delta, const bf16* dout, const float* lse,
                                  const bf16* qkv, AttentionShape shape) {
    using P = KeyKernel<HS, kBorders>;
    constexpr int kSlabs = P::kSlabs, kQueries = P::kQueries;
    extern __shared__ __align__(1024) char memory[];
    const uint32_t keys = ptx::shared_address(memory), values = keys + kTileBytes<HS, P::kKeys>,
                   queries = values + kTileBytes<HS, P::kKeys>, douts = queries + 2 * P::kQueryBytes,
                   stats = douts + 2 * P::kQueryBytes;   // per stage: lse, delta
    const int warp = uniform(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x) % 32;
    const int T = static_cast<int>(shape.T);
    auto place = [&] { return tile_place(shape, shape.NKV, (T + P::kKeys - 1) / P::kKeys, false); };
    const TilePlace at = place();
    const int64_t stride = shape.row(), out_stride = shape.NH * HS;
    const int group = static_cast<int>(shape.group());
    const int block_key = at.tile * P::kKeys, warp_key = block_key + warp * P::kWarpKeys;
    // Queries end latest for the block's last key and, within a warp, earliest for the first key.
    const int end = kBorders ? shape.end_query(at.b, min(T, block_key + P::kKeys) - 1) : T;
    const int earliest_end = kBorders && warp_key < T ? shape.end_query(at.b, warp_key) : T;
    const int tiles = (end - block_key + kQueries - 1) / kQueries;   // per head

    using KeyCopy = TileCopy<HS, P::kKeys, P::kThreads>;
    using QueryCopy = TileCopy<HS, kQueries, P::kThreads>;
    // The next loads of this thread: all tiles of a head, then those of the next head.
    const int64_t first_head = static_cast<int64_t>(at.head) * group;
    const bf16* next_q = QueryCopy::source(qkv + shape.query(at.b, block_key, first_head), stride);
    const bf16* next_dout = QueryCopy::source(dout + shape.output(at.b, block_key, first_head), out_stride);
    int64_t next_row = shape.stat(at.b, block_key, first_head) + threadIdx.x % kQueries;
    // Rows past the end are zero in all four tiles: there P = 1 and its factors in dV and dK are 0.
    auto load_queries = [&](int rows_left, uint32_t stage) {
        QueryCopy::copy(queries + stage * P::kQueryBytes, next_q, stride, rows_left);
        QueryCopy::copy(douts + stage * P::kQueryBytes, next_dout, out_stride, rows_left);
        const int thread = static_cast<int>(ptx::thread_index());
        if (thread < kQueries) {
            const uint32_t to = stats + stage * 2 * P::kStatBytes + 4 * thread;
            ptx::cp_async_4(to, lse + next_row, thread < rows_left);
            ptx::cp_async_4(to + P::kStatBytes, delta + next_row, thread < rows_left);
        }
        ptx::cp_async_commit();
    };
    auto advance = [&](int rows, int heads) {
        next_q += rows * stride + heads * HS;
        next_dout += rows * out_stride + heads * HS;
        next_row += rows + heads * T;
    };
    const bf16* first_keys = KeyCopy::source(qkv + shape.key(at.b, block_key, at.head), stride);
    KeyCopy::copy(keys, first_keys, stride, T - block_key);
    KeyCopy::copy(values, first_keys + shape.NKV * HS, stride, T - block_key);
    load_queries(T - block_key, 0);

    const uint32_t own_rows = warp * kTileBytes<HS, P::kWarpKeys> + operand_by_rows<HS>(lane);
    const float mul = shape.softmax_mul * kLog2e;
    float dk[kSlabs][HS / 8][4] = {}, dv[kSlabs][HS / 8][4] = {};
    uint32_t stage = 0;
    for (int left = group * tiles, t = 0; left > 0; left--, stage ^= 1) {
        ptx::cp_async_wait<0>();
        __syncthreads();   // this tile has arrived, and no thread reads the other stage any more
        const int behind = t * kQueries - warp * P::kWarpKeys;   // its first query minus the warp's first key
        const bool last = ++t == tiles;
        if (last) t = 0;
        if (left > 1) {
            advance(last ? -(tiles - 1) * kQueries : kQueries, last ? 1 : 0);
            load_queries(T - block_key - t * kQueries, stage ^ 1);
        }
        if (behind <= -kQueries) continue;   // every query precedes this warp's keys
        const char* stage_stats = memory + (stats - keys) + stage * 2 * P::kStatBytes;
        const float* row_stats = reinterpret_cast<const float*>(stage_stats) + 2 * (lane % 4);
        const uint32_t q_tile = queries + stage * P::kQueryBytes, dout_tile = douts + stage * P::kQueryBytes;
        float p[kSlabs][kQueries / 8][4] = {}, ds[kSlabs][kQueries / 8][4];
        multiply_tiles<HS>(p, keys + own_rows, q_tile + operand_by_columns<HS>(lane));
        if (behind < P::kWarpKeys) mask_past(p, behind);
        if (kBorders && warp_key + behind + kQueries > earliest_end)
            mask_after_end(p, shape, at.b, warp_key, warp_key + behind);
#pragma unroll
        for (int n = 0; n < kQueries / 8; n++) {
            const float2 row_lse = *reinterpret_cast<const float2*>(row_stats + 8 * n);
            const float2 row_delta = *reinterpret_cast<const float2*>(row_stats + kQueries + 8 * n);
#pragma unroll
            for (int m = 0; m < kSlabs; m++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float minus_lse = -kLog2e * (i % 2 ? row_lse.y : row_lse.x);
                    p[m][n][i] = exp2_approx(fmaf(p[m][n][i], mul, minus_lse));
                    ds[m][n][i] = -(i % 2 ? row_delta.y : row_delta.x);
                }
            }
        }
        multiply_tiles<HS>(ds, values + own_rows, dout_tile + operand_by_columns<HS>(lane));
#pragma unroll
        for (int j = 0; j < kQueries / 16; j++) {
            uint32_t a[kSlabs][4];
#pragma unroll
            for (int m = 0; m < kSlabs; m++) as_operand(a[m], p[m][2 * j], p[m][2 * j + 1]);
            multiply_rows<HS>(dv, a, dout_tile + operand_by_rows<HS>(lane), j);
        }
#pragma unroll
        for (int j = 0; j < kQueries / 16; j++) {
            uint32_t a[kSlabs][4];
#pragma unroll
            for (int m = 0; m < kSlabs; m++) {
#pragma unroll
                for (int i = 0; i < 8; i++) ds[m][2 * j + i / 4][i % 4] *= p[m][2 * j + i / 4][i % 4];
                as_operand(a[m], ds[m][2 * j], ds[m][2 * j + 1]);
            }
            multiply_rows<HS>(dk, a, q_tile + operand_by_rows<HS>(lane), j);
        }
    }

    const TilePlace to = place();
    const int out_warp = uniform(ptx::thread_index() / 32);
    const int first_out = to.tile * P::kKeys + out_warp * P::kWarpKeys;
    char* own = memory + out_warp * kTileBytes<HS, P::kWarpKeys>;
    store_results<HS>(dqkv + shape.key(to.b, first_out, to.head), stride, T - first_out, dk, shape.softmax_mul, own);
    store_results<HS>(dqkv + shape.value(to.b, first_out, to.head), stride, T - first_out, dv, 1.0f,
                      own + kTileBytes<HS, P::kKeys>);
}

template <int HS, bool kBorders>
void launch(Ctx& ctx, const AttentionBackwardArgs& args, const AttentionShape& shape) {
    using Q = QueryKernel<HS, kBorders>;
    using K = KeyKernel<HS, kBorders>;
    const bf16 *qkv = args.qkv.as<bf16>(), *dout = args.dout.as<bf16>(), *out = args.out.as<bf16>();
    const float* lse = args.lse.as<float>();
    float* delta = args.delta.as<float>();
    bf16* dqkv = args.dqkv.as<bf16>();
    auto* const query_kernel = attention_backward_query_mma_kernel<HS, kBorders>;
    auto* const key_kernel = attention_backward_key_mma_kernel<HS, kBorders>;
    allow_shared_memory(query_kernel, Q::kSharedBytes);
    allow_shared_memory(key_kernel, K::kSharedBytes);
    const unsigned query_grid = grid_size(ceil_div(shape.T, Q::kQueries) * shape.B * shape.NH);
    query_kernel<<<query_grid, Q::kThreads, Q::kSharedBytes, stream_of(ctx)>>>(dqkv, delta, dout, out, lse, qkv, shape);
    CHECK_LAUNCH("attention_backward_query_mma_kernel");
    const unsigned key_grid = grid_size(ceil_div(shape.T, K::kKeys) * shape.B * shape.NKV);
    key_kernel<<<key_grid, K::kThreads, K::kSharedBytes, stream_of(ctx)>>>(dqkv, delta, dout, lse, qkv, shape);
    CHECK_LAUNCH("attention_backward_key_mma_kernel");
}

}  // namespace

void attention_backward_mma(Ctx& ctx, const AttentionBackwardArgs& args, const AttentionShape& shape) {
    auto* const with_borders = shape.HS == 64 ? launch<64, true> : launch<128, true>;
    auto* const without = shape.HS == 64 ? launch<64, false> : launch<128, false>;
    (shape.has_borders() ? with_borders : without)(ctx, args, shape);
}

}  // namespace cuda
