// Attention on the CUDA cores: any even head dim up to 256, fp32 and bf16, all arithmetic in fp32. A warp owns a row (a
// query, or a key in dK and dV) and loops over the other side in tiles of 32 rows in shared memory: a lane first
// computes the dot product with one of the 32 rows, then sums its share of the head's elements over all 32.
#include "llmc/cuda/attention.cuh"

namespace cuda {
namespace {

constexpr int kWarps = 16;          // rows per block
constexpr int kTileRows = 32;       // rows of the other side in shared memory, one per lane
constexpr int kThreads = 32 * kWarps;

// Bytes of two tiles, with rows padded by one float so that lanes that read one column use different banks, and of two
// rows per warp.
int64_t shared_bytes(int64_t HS) { return 4 * (2 * kTileRows * (HS + 1) + 2 * kWarps * HS); }

// Views of the dynamic shared memory.
struct PlainShared {
    float *first, *second;   // (32, HS + 1) tiles
    float *own_a, *own_b;    // (HS) rows of this warp
};
__device__ PlainShared plain_shared(int HS, int warp) {
    extern __shared__ __align__(16) float memory[];
    PlainShared shared;
    shared.first = memory;
    shared.second = memory + kTileRows * (HS + 1);
    shared.own_a = memory + 2 * kTileRows * (HS + 1) + 2 * warp * HS;
    shared.own_b = shared.own_a + HS;
    return shared;
}

// Copies rows [0, rows) of the source into the tile and zeros below.
template <typename T>
__device__ void load_tile(float* tile, const T* source, int64_t stride, int64_t rows, int HS) {
    for (int i = threadIdx.x; i < kTileRows * HS; i += kThreads) {
        int row = i / HS, column = i % HS;
        tile[row * (HS + 1) + column] = row < rows ? to_float(source[row * stride + column]) : 0.0f;
    }
}
template <typename T> __device__ void load_row(float* row, const T* source, int HS, int lane) {
    for (int i = lane; i < HS; i += 32) row[i] = to_float(source[i]);
    __syncwarp();
}

__device__ float dot(const float* a, const float* b, int HS) {
    float sum = 0;
    for (int i = 0; i < HS; i++) sum = fmaf(a[i], b[i], sum);
    return sum;
}

// Adds elements lane, lane + 32, ... of sum_j weight_j tile_j to sum; lane j passes weight_j.
template <int kShare>
__device__ void add_weighted_rows(float (&sum)[kShare], float weight, const float* tile, int HS, int lane) {
    for (int j = 0; j < kTileRows; j++) {
        float w = __shfl_sync(0xffffffffu, weight, j);
#pragma unroll
        for (int i = 0; i < kShare; i++) {
            if (lane + 32 * i < HS) sum[i] = fmaf(w, tile[j * (HS + 1) + lane + 32 * i], sum[i]);
        }
    }
}
template <typename T, int kShare>
__device__ void store_row(T* row, const float (&value)[kShare], float mul, int HS, int lane) {
#pragma unroll
    for (int i = 0; i < kShare; i++) {
        if (lane + 32 * i < HS) row[lane + 32 * i] = from_float<T>(value[i] * mul);
    }
}

// The rows that a block owns: consecutive ones of one head. The tiles with the most work start first.
struct Place {
    int64_t b, head, row;   // row: of this warp; >= T: the warp only helps to load tiles
    int64_t first_row;      // of the block
};
__device__ Place place(int64_t T, int64_t heads, int64_t B, bool last_rows_first, int warp) {
    int64_t tiles = (T + kWarps - 1) / kWarps;
    int64_t tile = blockIdx.x / (B * heads), rest = blockIdx.x % (B * heads);
    if (last_rows_first) tile = tiles - 1 - tile;
    return {rest / heads, rest % heads, tile * kWarps + warp, tile * kWarps};
}

// The first tile of keys of a block of queries: its first query's keys begin before those of the others.
__device__ int64_t first_tile(const AttentionShape& shape, const Place& at) {
    return shape.first_key(at.b, at.first_row) / kTileRows * kTileRows;
}

// Math: s_j = softmax_mul q . k_j for j <= t (kCap: softcap tanh(that / softcap));
//       lse = log (exp(sink) + sum_j exp(s_j)); out = sum_j exp(s_j - lse) v_j
// Source: Dao, FlashAttention-2, arXiv 2307.08691, algorithm 1.
// Traffic: qkv read once per 16 queries (mostly from the L2 cache); out and lse written once.
// Requires: HS even, at most 32 * kShare; dynamic shared memory of shared_bytes(HS).
// Parallel: a block owns 16 queries of one head, a warp one query.
template <typename T, int kShare, bool kCap>
__global__ void __launch_bounds__(kThreads, 1)
attention_forward_plain_kernel(T* out, float* lse, float* max_logits, const T* qkv, AttentionShape shape) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, HS = static_cast<int>(shape.HS);
    const Place at = place(shape.T, shape.NH, shape.B, true, warp);
    const int64_t kv = at.head / shape.group();
    const PlainShared shared = plain_shared(HS, warp);
    const auto scores = shape.scores<T, kCap>();
    const bool active = at.row < shape.T;
    if (active) load_row(shared.own_a, qkv + shape.query(at.b, at.row, at.head), HS, lane);

    float sum[kShare] = {}, max = -INFINITY, weight_sum = 0;   // weight_sum: over this lane's keys
    const int64_t end = min(at.first_row + kWarps, shape.T), first = active ? shape.first_key(at.b, at.row) : 0;
    for (int64_t key = first_tile(shape, at); key < end; key += kTileRows) {
        __syncthreads();
        load_tile(shared.first, qkv + shape.key(at.b, key, kv), shape.row(), shape.T - key, HS);
        load_tile(shared.second, qkv + shape.value(at.b, key, kv), shape.row(), shape.T - key, HS);
        __syncthreads();
        if (!active || key > at.row || key + kTileRows <= first) continue;
        float score = scores.of(dot(shared.own_a, shared.first + lane * (HS + 1), HS)) * scores.mul;
        if (key + lane > at.row || key + lane < first) score = -INFINITY;
        float new_max = fmaxf(max, warp_max(score));
        float weight = expf(score - new_max), correction = expf(max - new_max);
        max = new_max;
        weight_sum = weight_sum * correction + weight;
#pragma unroll
        for (int i = 0; i < kShare; i++) sum[i] *= correction;
        add_weighted_rows(sum, weight, shared.second, HS, lane);
    }
    if (!active) return;
    const float sink = shape.sink<T>(at.head), most = fmaxf(max, sink), keep = expf(max - most);
    weight_sum = warp_sum(weight_sum) * keep + expf(sink - most);
    store_row(out + shape.output(at.b, at.row, at.head), sum, keep / weight_sum, HS, lane);
    if (lane == 0) lse[shape.stat(at.b, at.row, at.head)] = most + logf(weight_sum);
    if (lane == 0 && max_logits) raise_logit(max_logits + at.head, fmaxf(max, 0.0f));
}

// Math: delta = dout . out; p_j = exp(s_j - lse); ds_j = p_j (dout . v_j - delta) (kCap: times 1 - (s_j / softcap)^2);
//       dq = softmax_mul sum_j ds_j k_j
// Source: Dao, FlashAttention-2, arXiv 2307.08691, algorithm 2.
// Traffic: qkv read once per 16 queries, dout, out and lse once; dq and delta written once.
// Requires: HS even, at most 32 * kShare; dynamic shared memory of shared_bytes(HS).
// Parallel: a block owns 16 queries of one head, a warp one query.
template <typename T, int kShare, bool kCap>
__global__ void __launch_bounds__(kThreads, 1)
attention_backward_query_plain_kernel(T* dqkv, float* delta_out, const T* dout, const T* out,
                                      const float* lse, const T* qkv, AttentionShape shape) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, HS = static_cast<int>(shape.HS);
    const Place at = place(shape.T, shape.NH, shape.B, true, warp);
    const int64_t kv = at.head / shape.group();
    const PlainShared shared = plain_shared(HS, warp);
    const auto scores = shape.scores<T, kCap>();
    const bool active = at.row < shape.T;
    float row_lse = 0, delta = 0;
    if (active) {
        load_row(shared.own_a, qkv + shape.query(at.b, at.row, at.head), HS, lane);
        load_row(shared.own_b, dout + shape.output(at.b, at.row, at.head), HS, lane);
        const T* out_row = out + shape.output(at.b, at.row, at.head);
        for (int i = lane; i < HS; i += 32) delta = fmaf(shared.own_b[i], to_float(out_row[i]), delta);
        delta = warp_sum(delta);
        row_lse = lse[shape.stat(at.b, at.row, at.head)];
        if (lane == 0) delta_out[shape.stat(at.b, at.row, at.head)] = delta;
    }

    float dq[kShare] = {};
    const int64_t end = min(at.first_row + kWarps, shape.T), first = active ? shape.first_key(at.b, at.row) : 0;
    for (int64_t key = first_tile(shape, at); key < end; key += kTileRows) {
        __syncthreads();
        load_tile(shared.first, qkv + shape.key(at.b, key, kv), shape.row(), shape.T - key, HS);
        load_tile(shared.second, qkv + shape.value(at.b, key, kv), shape.row(), shape.T - key, HS);
        __syncthreads();
        if (!active || key > at.row || key + kTileRows <= first) continue;
        const float unit = scores.of(dot(shared.own_a, shared.first + lane * (HS + 1), HS));
        float dweight = dot(shared.own_b, shared.second + lane * (HS + 1), HS);
        float weight = key + lane > at.row || key + lane < first ? 0.0f : expf(unit * scores.mul - row_lse);
        add_weighted_rows(dq, weight * (dweight - delta) * scores.slope(unit), shared.first, HS, lane);
    }
    if (active) store_row(dqkv + shape.query(at.b, at.row, at.head), dq, shape.softmax_mul, HS, lane);
}

// Math: dv_j = sum_t p_tj dout_t; dk_j = softmax_mul sum_t ds_tj q_t, over the queries t >= j of every query
//       head that reads this key head (p, ds as above).
// Source: Dao, FlashAttention-2, arXiv 2307.08691, algorithm 2.
// Traffic: q and dout of the group read once per 16 keys; dk and dv written once.
// Requires: delta; HS even, at most 32 * kShare; dynamic shared memory of shared_bytes(HS).
// Parallel: a block owns 16 keys of one key head, a warp one key.
template <typename T, int kShare, bool kCap>
__global__ void __launch_bounds__(kThreads, 1)
attention_backward_key_plain_kernel(T* dqkv, const float* delta, const T* dout, const float* lse,
                                    const T* qkv, AttentionShape shape) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, HS = static_cast<int>(shape.HS);
    const Place at = place(shape.T, shape.NKV, shape.B, false, warp);
    const PlainShared shared = plain_shared(HS, warp);
    const bool active = at.row < shape.T;
    if (active) {
        load_row(shared.own_a, qkv + shape.key(at.b, at.row, at.head), HS, lane);
        load_row(shared.own_b, qkv + shape.value(at.b, at.row, at.head), HS, lane);
    }

    float dk[kShare] = {}, dv[kShare] = {};
    // The last key's queries end latest, so they bound the loop of the whole block.
    const int64_t end = active ? shape.end_query(at.b, at.row) : 0;
    const int64_t block_end = shape.end_query(at.b, min(at.first_row + kWarps, shape.T) - 1);
    for (int64_t h = at.head * shape.group(); h < (at.head + 1) * shape.group(); h++) {
        for (int64_t t = at.first_row / kTileRows * kTileRows; t < block_end; t += kTileRows) {
            __syncthreads();
            load_tile(shared.first, qkv + shape.query(at.b, t, h), shape.row(), shape.T - t, HS);
            load_tile(shared.second, dout + shape.output(at.b, t, h), shape.NH * HS, shape.T - t, HS);
            __syncthreads();
            if (!active || t >= end) continue;
            const int64_t query = t + lane;
            float weight = 0, dscore = 0;
            float score = dot(shared.own_a, shared.first + lane * (HS + 1), HS) * shape.softmax_mul, slope = 1;
            if constexpr (kCap) {
                const SoftCap<T, true> cap(1, shape.softcap);
                score = cap.of(score), slope = cap.slope(score), score *= cap.mul;
            }
            float dweight = dot(shared.own_b, shared.second + lane * (HS + 1), HS);
            if (query < end && query >= at.row) {
                weight = expf(score - lse[shape.stat(at.b, query, h)]);
                dscore = weight * (dweight - delta[shape.stat(at.b, query, h)]);
                if (kCap) dscore *= slope;
            }
            add_weighted_rows(dv, weight, shared.second, HS, lane);
            add_weighted_rows(dk, dscore, shared.first, HS, lane);
        }
    }
    if (!active) return;
    store_row(dqkv + shape.key(at.b, at.row, at.head), dk, shape.softmax_mul, HS, lane);
    store_row(dqkv + shape.value(at.b, at.row, at.head), dv, 1.0f, HS, lane);
}

// Calls f(T{}, std::integral_constant<int, share>, std::bool_constant<cap>) for the element type, the number of head
// elements per lane and whether there is a soft cap.
template <typename F> void dispatch_share(Dtype dtype, const AttentionShape& shape, const char* what, F&& f) {
    dispatch(dtype, what, [&](auto t) {
        const auto with_cap = [&](auto share) {
            if (shape.softcap > 0) f(t, share, std::true_type{});
            else f(t, share, std::false_type{});
        };
        if (shape.HS <= 64) with_cap(std::integral_constant<int, 2>{});
        else if (shape.HS <= 128) with_cap(std::integral_constant<int, 4>{});
        else with_cap(std::integral_constant<int, 8>{});
    });
}

template <typename... Params, typename... Args>
void launch(Ctx& ctx, void (*kernel)(Params...), const AttentionShape& shape, int64_t heads, Args... args) {
    const auto bytes = static_cast<size_t>(shared_bytes(shape.HS));
    allow_shared_memory(kernel, bytes);
    const unsigned grid = grid_size(ceil_div(shape.T, kWarps) * shape.B * heads);
    kernel<<<grid, kThreads, bytes, stream_of(ctx)>>>(args..., shape);
    CHECK_LAUNCH("attention_plain_kernel");
}

}  // namespace

void attention_forward_plain(Ctx& ctx, const AttentionForwardArgs& args, const AttentionShape& shape) {
    dispatch_share(args.qkv.dtype, shape, "attention_forward", [&](auto t, auto share, auto cap) {
        using T = decltype(t);
        launch(ctx, attention_forward_plain_kernel<T, share.value, cap.value>, shape, args.NH, args.out.as<T>(),
               args.lse.as<float>(), args.max_logits, static_cast<const T*>(args.qkv.as<T>()));
    });
}

void attention_backward_plain(Ctx& ctx, const AttentionBackwardArgs& args, const AttentionShape& shape) {
    dispatch_share(args.qkv.dtype, shape, "attention_backward", [&](auto t, auto share, auto cap) {
        using T = decltype(t);
        const T *qkv = args.qkv.as<T>(), *dout = args.dout.as<T>(), *out = args.out.as<T>();
        const float* lse = args.lse.as<float>();
        float* delta = args.delta.as<float>();
        launch(ctx, attention_backward_query_plain_kernel<T, share.value, cap.value>, shape, args.NH, args.dqkv.as<T>(),
               delta, dout, out, lse, qkv);
        launch(ctx, attention_backward_key_plain_kernel<T, share.value, cap.value>, shape, args.NKV, args.dqkv.as<T>(),
               static_cast<const float*>(delta), dout, lse, qkv);
    });
}

}  // namespace cuda
