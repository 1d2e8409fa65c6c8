// Token and position embedding: a gather forward, a sum of scattered rows backward.
#include "llmc/cuda/common.cuh"

namespace cuda {
namespace {

constexpr int kLanes = 32;
constexpr int kWarps = 8;
constexpr int kForwardThreads = 128;

// Math: out[n] = wte[tokens[n]] + wpe[n % T] (period = T).
// Source: table look-up.
// Traffic: one row of wte (and wpe, from L2) read and one row of out written per token.
// Requires: kWidth > 1 needs C a multiple of it and aligned rows.
// Parallel: blockDim.x threads own a row, blockDim.y rows a block; thread x the vectors x, x + blockDim.x...
template <typename T, int kWidth>
__global__ void __launch_bounds__(kForwardThreads)
    embedding_forward_kernel(T* out, const T* wte, const T* wpe, const int32_t* tokens, int32_t* bad_tokens,
                             int64_t N, int64_t period, int64_t C, int64_t V) {
    const int64_t n = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
    if (n >= N) return;
    int64_t token = tokens[n];
    if (token < 0 || token >= V) {
        if (threadIdx.x == 0) atomicAdd(bad_tokens, 1);
        token = 0;
    }
    const T* from = wte + token * C;
    const T* position = wpe ? wpe + n % period * C : nullptr;
#pragma unroll 4
    for (int64_t c = int64_t{threadIdx.x} * kWidth; c < C; c += int64_t{blockDim.x} * kWidth) {
        float value[kWidth];
        load_floats<T, kWidth>(from + c, value);
        if (position) {
            float add[kWidth];
            load_floats<T, kWidth>(position + c, add);
#pragma unroll
            for (int i = 0; i < kWidth; i++) value[i] += add[i];
        }
        store_floats<T, kWidth>(out + n * C + c, value);
    }
}

// Adds the rows of dout with the numbers rows[0], ..., rows[count - 1] to sum, in this order; four are on
// their way at a time.
template <typename T, int kWidth>
__device__ void add_rows(float (&sum)[kWidth], const T* dout, int64_t C, int64_t column, const int32_t* rows,
                         int count) {
    constexpr int kAhead = 4;
    if (column >= C) return;
    for (int r = 0; r < count; r += kAhead) {
        float value[kAhead][kWidth];
#pragma unroll
        for (int j = 0; j < kAhead; j++) {
            if (r + j >= count) continue;
            load_floats<T, kWidth>(dout + int64_t{rows[r + j]} * C + column, value[j]);
        }
#pragma unroll
        for (int j = 0; j < kAhead; j++) {
            if (r + j >= count) continue;
#pragma unroll
            for (int i = 0; i < kWidth; i++) sum[i] += value[j][i];
        }
    }
}

// Math: dwte[v] += sum of dout[n] over the rows n with tokens[n] == v.
// Source: transpose of the gather; the rows come sorted by token.
// Traffic: dout read once, each touched row of dwte read and written once.
// Requires: token_order sorted by token; kWidth > 1 needs C a multiple of it and aligned rows.
// Parallel: a block owns 8 sorted positions of 32 * kWidth columns. A warp whose position begins the run of a
// token adds the run; a run longer than the warp can see (30 rows) is shared by the 8 warps of the block, 32
// rows each in turn, and their sums are added in order. Of 8 positions only one can begin such a run.
template <typename T, typename Grad, int kWidth>
__global__ void __launch_bounds__(kLanes* kWarps, 3)
    embedding_backward_tokens_kernel(Grad* dwte, const T* dout, const int32_t* tokens,
                                     const int32_t* token_order, int64_t N, int64_t C, int64_t V, int tiles) {
    __shared__ bool begins_long_run[kWarps];
    __shared__ float shared[kWarps][kWidth][kLanes];
    const int lane = threadIdx.x, warp = threadIdx.y;
    const int64_t first = int64_t{blockIdx.x / tiles} * kWarps;
    const int64_t column = (int64_t{blockIdx.x % tiles} * kLanes + lane) * kWidth;

    // Lane 0 sees the position before this warp's, lane 1 its own, the others those that follow.
    const int64_t seen = first + warp - 1 + lane;
    const bool exists = seen >= 0 && seen < N;
    const int token_seen = exists ? tokens[token_order[seen]] : -1;
    const int token = __shfl_sync(0xffffffffu, token_seen, 1);
    const unsigned same = __ballot_sync(0xffffffffu, exists && token_seen == token);
    const int run = __popc(same & ~1u);
    const bool begins = first + warp < N && token >= 0 && token < V && !(same & 1u);
    const bool is_long = begins && run == kLanes - 1;
    if (lane == 0) begins_long_run[warp] = is_long;
    if (begins && !is_long && column < C) {
        Grad* to = dwte + int64_t{token} * C + column;
        float sum[kWidth] = {}, old[kWidth];
        add_rows<T, kWidth>(sum, dout, C, column, token_order + first + warp, run);
        load_floats<Grad, kWidth>(to, old);
#pragma unroll
        for (int i = 0; i < kWidth; i++) sum[i] += old[i];
        store_floats<Grad, kWidth>(to, sum);
    }
    __syncthreads();
    for (int owner = 0; owner < kWarps; owner++) {
        if (!begins_long_run[owner]) continue;
        const int long_token = tokens[token_order[first + owner]];
        float sum[kWidth] = {};
        for (int64_t base = first + owner + warp * kLanes;; base += kWarps * kLanes) {
            const bool same_token = base + lane < N && tokens[token_order[base + lane]] == long_token;
            const int count = __popc(__ballot_sync(0xffffffffu, same_token));
            add_rows<T, kWidth>(sum, dout, C, column, token_order + base, count);
            if (count < kLanes) break;
        }
#pragma unroll
        for (int i = 0; i < kWidth; i++) shared[warp][i][lane] = sum[i];
        __syncthreads();
        if (warp < kWidth && column < C) {  // warp y takes element y of each vector (kWidth <= kWarps)
            float total = 0.0f;
#pragma unroll
            for (int w = 0; w < kWarps; w++) total += shared[w][warp][lane];
            Grad* to = dwte + int64_t{long_token} * C + column + warp;
            *to = from_float<Grad>(to_float(*to) + total);
        }
    }
}

// Math: dwpe[t] += sum of dout[n] over n = t, t + period, t + 2 period, ... (period = T).
// Source: plain column sum.
// Traffic: dout read once, dwpe read and written once.
// Requires: kWidth > 1 needs C a multiple of it and aligned rows.
// Parallel: a thread owns kWidth columns of one position.
template <typename T, typename Grad, int kWidth>
__global__ void __launch_bounds__(kLanes* kWarps)
    embedding_backward_positions_kernel(Grad* dwpe, const T* dout, int64_t N, int64_t period, int64_t C,
                                        int tiles) {
    const int64_t t = int64_t{blockIdx.x / tiles} * kWarps + threadIdx.y;
    const int64_t column = (int64_t{blockIdx.x % tiles} * kLanes + threadIdx.x) * kWidth;
    if (t >= period || t >= N || column >= C) return;
    float sum[kWidth] = {}, old[kWidth];
    load_floats<Grad, kWidth>(dwpe + t * C + column, old);
#pragma unroll 8
    for (int64_t n = t; n < N; n += period) {
        float value[kWidth];
        load_floats<T, kWidth>(dout + n * C + column, value);
#pragma unroll
        for (int i = 0; i < kWidth; i++) sum[i] += value[i];
    }
#pragma unroll
    for (int i = 0; i < kWidth; i++) sum[i] += old[i];
    store_floats<Grad, kWidth>(dwpe + t * C + column, sum);
}

}  // namespace

void embedding_forward(Ctx& ctx, const EmbeddingForwardArgs& args) {
    const int64_t N = args.N, C = args.C;
    const Dtype dtype = args.out.dtype;
    expect(args.out, dtype, N * C, "embedding_forward: out");
    expect_at_least(args.wte, dtype, args.V * C, "embedding_forward: wte");
    if (args.wpe) expect_at_least(args.wpe, dtype, std::min(args.T, N) * C, "embedding_forward: wpe");
    CHECK(args.tokens && args.bad_tokens, "embedding_forward without tokens or bad_tokens");
    dispatch(dtype, "embedding_forward", [&](auto type) {
        using T = decltype(type);
        T *out = args.out.as<T>(), *wte = args.wte.as<T>(), *wpe = args.wpe.as<T>();
        with_width<T>(vectorizable<T>(C, {out, wte, wpe}), [&](auto width) {
            constexpr int kWidth = decltype(width)::value;
            const int64_t lanes = ceil_div(C, kLanes * kWidth) * kLanes;
            const unsigned x = static_cast<unsigned>(std::min<int64_t>(kForwardThreads, lanes));
            const dim3 block(x, kForwardThreads / x);
            embedding_forward_kernel<T, kWidth>
                <<<grid_size(ceil_div(N, block.y)), block, 0, stream_of(ctx)>>>(
                    out, wte, wpe, args.tokens, args.bad_tokens, N, args.T, C, args.V);
            CHECK_LAUNCH("embedding_forward_kernel");
        });
    });
}

void embedding_backward(Ctx& ctx, const EmbeddingBackwardArgs& args) {
    const int64_t N = args.N, C = args.C;
    const Dtype grad = args.dwte.dtype;
    expect(args.dout, args.dout.dtype, N * C, "embedding_backward: dout");
    expect_at_least(args.dwte, grad, args.V * C, "embedding_backward: dwte");
    if (args.dwpe) expect_at_least(args.dwpe, grad, std::min(args.T, N) * C, "embedding_backward: dwpe");
    CHECK(args.tokens && args.token_order, "embedding_backward without tokens or token_order");
    dispatch(args.dout.dtype, "embedding_backward", [&](auto type) {
        using T = decltype(type);
        dispatch(grad, "embedding_backward: dwte", [&](auto grad_type) {
            using Grad = decltype(grad_type);
            const T* dout = args.dout.as<T>();
            Grad *dwte = args.dwte.as<Grad>(), *dwpe = args.dwpe.as<Grad>();
            const bool vector = vectorizable<T>(C, {dout, dwte, dwpe});
            with_width<T>(vector, [&](auto width) {
                constexpr int kWidth = decltype(width)::value;
                const int64_t tiles = ceil_div(C, kLanes * kWidth);
                const dim3 block(kLanes, kWarps);
                embedding_backward_tokens_kernel<T, Grad, kWidth>
                    <<<grid_size(ceil_div(N, kWarps) * tiles), block, 0, stream_of(ctx)>>>(
                        dwte, dout, args.tokens, args.token_order, N, C, args.V, static_cast<int>(tiles));
                CHECK_LAUNCH("embedding_backward_tokens_kernel");
                if (!dwpe) return;
                embedding_backward_positions_kernel<T, Grad, kWidth>
                    <<<grid_size(ceil_div(args.T, kWarps) * tiles), block, 0, stream_of(ctx)>>>(
                        dwpe, dout, N, args.T, C, static_cast<int>(tiles));
                CHECK_LAUNCH("embedding_backward_positions_kernel");
            });
        });
    });
}

}  // namespace cuda
