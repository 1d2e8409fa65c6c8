// Attention forward on the tensor cores (mma.sync, bf16), head dim 64 and 128.
#include "llmc/cuda/attention_mma.cuh"

namespace cuda {
namespace {

// Tile shapes. A warp with two slabs of 16 queries reads each K and V operand from shared memory half as often as with
// one; HS 128 then fills the register file with 2 blocks of 4 warps. On an H200 these are the fastest or within noise
// of the fastest among 1 or 2 slabs, 32, 48, 64 and 128 keys, and 8 warps; one slab is 20 % slower.
template <int HS> struct ForwardTiles;
template <> struct ForwardTiles<64> {
    static constexpr int kWarps = 4, kSlabs = 2, kKeys = 64, kBlocks = 3;
};
template <> struct ForwardTiles<128> {
    static constexpr int kWarps = 4, kSlabs = 2, kKeys = 64, kBlocks = 2;
};
// With borders (documents, a window) a warp has one slab, since the masks need registers. So has the largest score with
// HS 128: 12 bytes would spill.
template <int HS, bool kBorders, bool kLogits> struct Forward : ForwardTiles<HS> {
    using Tiles = ForwardTiles<HS>;
    static constexpr int kThreads = 32 * Tiles::kWarps, kSlabs = kBorders || (kLogits && HS == 128) ? 1 : Tiles::kSlabs;
    static constexpr int kWarpQueries = 16 * kSlabs;
    static constexpr int kQueries = Tiles::kWarps * kWarpQueries;
    static constexpr int kKeyBytes = kTileBytes<HS, Tiles::kKeys>;
    static constexpr int kSharedBytes = kTileBytes<HS, kQueries> + 4 * kKeyBytes;   // q, 2 stages of k and v
};

// How far (as a power of two) a score may exceed the reference before the accumulators are rescaled to a new one. Every
// reference gives the same quotient; not following small growth saves most of the multiplications.
constexpr float kHeadroom = 8;
// The reference before the first score: below any score, and finite, because a row may be masked throughout a tile.
constexpr float kNoReference = -1e30f;

// Online softmax state of a warp's rows 8 half + lane / 4 of each slab.
template <int slabs> struct Softmax {
    float reference[slabs][2];   // subtracted from the scaled scores, log2 units
    float sum[slabs][2];         // over this lane's columns
};

// kLogits: raises largest_score to the scores, in log2 units.
// Sets new references where scores outgrew the old ones, and rescales sum and O. each_row: only in those rows, so that
// the bits of a row do not depend on the other rows of its tile.
template <bool each_row, bool kLogits, int slabs, int columns, int outputs>
__device__ void update_reference(Softmax<slabs>& softmax, float (&o)[slabs][outputs][4],
                                 const float (&s)[slabs][columns][4], float mul, float& largest_score) {
    float largest[slabs][2];
    bool outgrown = false;
#pragma unroll
    for (int m = 0; m < slabs; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float most = fmaxf(s[m][0][2 * half], s[m][0][2 * half + 1]);
#pragma unroll
            for (int n = 1; n < columns; n++) {
                most = fmaxf(most, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
            }
            largest[m][half] = warp_max<4>(most) * mul;
            if (kLogits) largest_score = fmaxf(largest_score, largest[m][half]);
            outgrown |= largest[m][half] > softmax.reference[m][half] + kHeadroom;
        }
    }
    if (!__any_sync(0xffffffffu, outgrown)) return;
#pragma unroll
    for (int m = 0; m < slabs; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float reference = fmaxf(softmax.reference[m][half], largest[m][half]);
            if (each_row && largest[m][half] <= softmax.reference[m][half] + kHeadroom)
                reference = softmax.reference[m][half];
            const float correction = exp2_approx(softmax.reference[m][half] - reference);
            softmax.reference[m][half] = reference;
            softmax.sum[m][half] *= correction;
#pragma unroll
            for (int n = 0; n < outputs; n++) {
                o[m][n][2 * half] *= correction;
                o[m][n][2 * half + 1] *= correction;
            }
        }
    }
}

// Math: s_j = softmax_mul q . k_j for j <= t (kBorders: from t's first key on); lse = log (exp(sink) + sum_j exp(s_j));
//       out = sum_j exp(s_j - lse) v_j; kLogits: max_logits[head] = max(itself, s_j)
// Source: Dao, FlashAttention-2, arXiv 2307.08691, algorithm 1; PTX ISA 9.0, mma.m16n8k16.
// Traffic: q read and out, lse written once; k and v read once per 128 queries (mostly from the L2 cache).
// Requires: bf16, HS 64 or 128, 16-byte aligned, softmax_mul > 0; dynamic shared memory of kSharedBytes.
// Parallel: a block owns 128 queries of one head, a warp 32 of them (kBorders: 64 and 16), and loops over 64 keys at
//           a time, double buffered.
template <int HS, bool kBorders, bool kLogits>
__global__ void __launch_bounds__(Forward<HS, kBorders, kLogits>::kThreads, Forward<HS, kBorders, kLogits>::kBlocks)
attention_forward_mma_kernel(bf16* out, float* lse, float* max_logits, const bf16* qkv, AttentionShape shape) {
    using P = Forward<HS, kBorders, kLogits>;
    constexpr int kSlabs = P::kSlabs, kKeys = P::kKeys;
    extern __shared__ __align__(1024) char memory[];
    const uint32_t queries = ptx::shared_address(memory), keys = queries + kTileBytes<HS, P::kQueries>,
                   values = keys + 2 * P::kKeyBytes;
    const int warp = uniform(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x) % 32;
    const int T = static_cast<int>(shape.T);
    auto place = [&] { return tile_place(shape, shape.NH, (T + P::kQueries - 1) / P::kQueries, true); };
    const TilePlace at = place();
    const int64_t kv = at.head / shape.group(), stride = shape.row();
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
    load_keys(first_tile);

    const uint32_t q_operand = queries + warp * kTileBytes<HS, P::kWarpQueries> + operand_by_rows<HS>(lane);
    const float mul = shape.softmax_mul * kLog2e;
    float o[kSlabs][HS / 8][4] = {};
    Softmax<kSlabs> softmax;
    float largest_score = 0;   // log2 units
#pragma unroll
    for (int m = 0; m < kSlabs; m++) {
        softmax.reference[m][0] = softmax.reference[m][1] = kNoReference;
        softmax.sum[m][0] = softmax.sum[m][1] = 0;
    }
    for (int tile = first_tile, ahead = warp_query - first_tile * kKeys; tile < tiles; tile++, ahead -= kKeys) {
        ptx::cp_async_wait<0>();
        __syncthreads();   // this tile has arrived, and no thread reads the other stage any more
        if (tile + 1 < tiles) load_keys(tile + 1);
        if (ahead <= -P::kWarpQueries) continue;   // every key lies in this warp's future
        const uint32_t stage = (tile & 1) * P::kKeyBytes;
        float s[kSlabs][kKeys / 8][4] = {};
        multiply_tiles<HS>(s, q_operand, keys + stage + operand_by_columns<HS>(lane));
        if (ahead < kKeys) mask_future(s, ahead);
        if (kBorders && tile * kKeys < latest_start)
            mask_before_first(s, shape, place().b, tile * kKeys + ahead, tile * kKeys);
        update_reference<kBorders, kLogits>(softmax, o, s, mul, largest_score);
        const uint32_t v_operand = values + stage + operand_by_rows<HS>(lane);
#pragma unroll
        for (int j = 0; j < kKeys / 16; j++) {
            uint32_t p[kSlabs][4];
#pragma unroll
            for (int m = 0; m < kSlabs; m++) {
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    float& x = s[m][2 * j + i / 4][i % 4];
                    x = exp2_approx(fmaf(x, mul, -softmax.reference[m][i / 2 % 2]));
                    softmax.sum[m][i / 2 % 2] += x;
                }
                as_operand(p[m], s[m][2 * j], s[m][2 * j + 1]);
            }
            multiply_rows<HS>(o, p, v_operand, j);
        }
    }

    const TilePlace to = place();
    if (kLogits) record_logit(max_logits + to.head, largest_score);
    const int out_warp = uniform(ptx::thread_index() / 32);
    const int out_lane = static_cast<int>(ptx::thread_index()) % 32;
    const int first_out = to.tile * P::kQueries + out_warp * P::kWarpQueries;
#pragma unroll
    for (int m = 0; m < kSlabs; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            // The sum is > 2^-8: every row attends to itself.
            const RowEnd end(1.0f, softmax.reference[m][half], warp_sum<4>(softmax.sum[m][half]),
                             shape.sink<bf16>(to.head));
#pragma unroll
            for (int n = 0; n < HS / 8; n++) {
                o[m][n][2 * half] *= end.mul;
                o[m][n][2 * half + 1] *= end.mul;
            }
            const int query = first_out + 16 * m + 8 * half + out_lane / 4;
            if (out_lane % 4 == 0 && query < T) lse[shape.stat(to.b, query, to.head)] = end.lse;
        }
    }
    store_results<HS>(out + shape.output(to.b, first_out, to.head), shape.NH * HS, T - first_out, o, 1.0f,
                      memory + out_warp * kTileBytes<HS, P::kWarpQueries>);
}

template <int HS, bool kBorders, bool kLogits>
void launch(Ctx& ctx, const AttentionForwardArgs& args, const AttentionShape& shape) {
    using P = Forward<HS, kBorders, kLogits>;
    auto* const kernel = attention_forward_mma_kernel<HS, kBorders, kLogits>;
    allow_shared_memory(kernel, P::kSharedBytes);
    const unsigned grid = grid_size(ceil_div(shape.T, P::kQueries) * shape.B * shape.NH);
    kernel<<<grid, P::kThreads, P::kSharedBytes, stream_of(ctx)>>>(
        args.out.as<bf16>(), args.lse.as<float>(), args.max_logits, args.qkv.as<bf16>(), shape);
    CHECK_LAUNCH("attention_forward_mma_kernel");
}
template <int HS> void launch(Ctx& ctx, const AttentionForwardArgs& args, const AttentionShape& shape) {
    auto* const with_borders = args.max_logits ? launch<HS, true, true> : launch<HS, true, false>;
    auto* const without = args.max_logits ? launch<HS, false, true> : launch<HS, false, false>;
    (shape.has_borders() ? with_borders : without)(ctx, args, shape);
}

}  // namespace

void attention_forward_mma(Ctx& ctx, const AttentionForwardArgs& args, const AttentionShape& shape) {
    (shape.HS == 64 ? launch<64> : launch<128>)(ctx, args, shape);
}

}  // namespace cuda
