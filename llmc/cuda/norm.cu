// layernorm and rmsnorm with the residual addition inside, forward and backward.
//
// A row is held on the chip between the statistics and the result, so that every tensor is touched once.
// Rows that 16-byte vectors do not fit, or longer than a block can hold, take the loop kernels at the end.
#include <cuda_pipeline_primitives.h>

#include "llmc/cuda/reduce.cuh"

namespace cuda {
namespace {

constexpr int kLanes = 32;
constexpr int kMaxThreads = 512;
constexpr int kForwardRows = 4;   // rows of a block in the forward when a warp has one row

// How the threads of a block divide rows: block.x threads share a row, block.y rows at a time.
struct RowShape {
    int vecs = 0;   // vectors of a row that a thread holds: 1, 2 or 4; 0: the row needs the loop kernels
    dim3 block;
};

// Forward: a warp per row up to 128 vectors (C = 1024 in bf16), else a block per row.
RowShape forward_shape(int64_t vectors) {
    for (int vecs = 1; vecs <= 4; vecs *= 2) {
        if (vectors <= vecs * kLanes) return {vecs, dim3(kLanes, kForwardRows)};
    }
    for (int vecs = 2; vecs <= 4; vecs *= 2) {
        const int64_t threads = ceil_div(ceil_div(vectors, vecs), kLanes) * kLanes;
        if (threads <= kMaxThreads) return {vecs, dim3(static_cast<unsigned>(threads))};
    }
    return {};
}

// Backward: few columns a thread, whose sums live in registers over all rows of the block.
RowShape backward_shape(int64_t vectors, int max_vecs) {
    for (int vecs = 1; vecs <= max_vecs; vecs *= 2) {
        const int64_t threads = ceil_div(ceil_div(vectors, vecs), kLanes) * kLanes;
        if (threads > kMaxThreads) continue;
        return {vecs, dim3(static_cast<unsigned>(threads), static_cast<unsigned>(kMaxThreads / threads))};
    }
    return {};
}

template <typename F> void with_vecs(int vecs, F&& f) {
    if (vecs == 1) f(std::integral_constant<int, 1>{});
    else if (vecs == 2) f(std::integral_constant<int, 2>{});
    else f(std::integral_constant<int, 4>{});
}

template <bool kWarpPerRow> __device__ float row_sum(float value, float* shared) {
    if constexpr (kWarpPerRow) return warp_sum(value);
    else return block_sum(value, shared, threadIdx.x / kLanes, threadIdx.x % kLanes, blockDim.x / kLanes);
}

// ---- forward

// Math: x = in + residual, rounded to T; out = (x - mean) rstd weight + bias; rms: mean = 0.
// Source: Ba et al. 2016 (layernorm; variance in a second pass over registers), Zhang, Sennrich 2019 (rms).
// Traffic: in, residual read; residual_out, out written; once each (weight and bias from L2).
// Requires: C a multiple of 16 bytes, aligned rows, C <= 4 * 512 vectors.
// Parallel: blockDim.x threads own a row, thread x its vectors x, x + blockDim.x, ... (kVecs of them).
template <typename T, int kVecs, bool kLayer, bool kWarpPerRow>
__global__ void __launch_bounds__(kWarpPerRow ? kLanes * kForwardRows : kMaxThreads)
    norm_forward_kernel(T* out, T* residual_out, float* mean_out, float* rstd_out, const T* in,
                        const T* residual, const T* weight, const T* bias, int64_t N, int vectors,
                        float eps) {
    __shared__ float shared[2][kLanes];
    const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
    if (kWarpPerRow && row >= N) return;
    constexpr int kWidth = kVec<T>;
    const int C = vectors * kWidth;
    const int64_t start = row * C;

    uint4 x[kVecs] = {}, add[kVecs], w[kVecs] = {}, b[kVecs];
#pragma unroll
    for (int k = 0; k < kVecs; k++) {
        const int v = threadIdx.x + k * blockDim.x;
        if (v < vectors) x[k] = load_vec(in + start + v * kWidth);
        if (v < vectors && residual) add[k] = load_vec(residual + start + v * kWidth);
    }
#pragma unroll
    for (int k = 0; k < kVecs; k++) {
        const int v = threadIdx.x + k * blockDim.x;
        if (v < vectors) w[k] = load_vec(weight + v * kWidth);
        if (v < vectors && kLayer && bias) b[k] = load_vec(bias + v * kWidth);
    }
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < kVecs; k++) {
        const int v = threadIdx.x + k * blockDim.x;
        if (v >= vectors) continue;
        float value[kWidth];
        unpack<T>(x[k], value);
        if (residual) {
            float other[kWidth];
            unpack<T>(add[k], other);
#pragma unroll
            for (int i = 0; i < kWidth; i++) value[i] += other[i];
            x[k] = pack<T>(value);
            unpack<T>(x[k], value);
        }
        if (residual_out) store_vec(residual_out + start + v * kWidth, x[k]);
#pragma unroll
        for (int i = 0; i < kWidth; i++) sum += kLayer ? value[i] : value[i] * value[i];
    }
    sum = row_sum<kWarpPerRow>(sum, shared[0]);
    float mean = 0.0f;
    if constexpr (kLayer) {
        mean = sum / C;
        sum = 0.0f;
#pragma unroll
        for (int k = 0; k < kVecs; k++) {
            if (threadIdx.x + k * blockDim.x >= vectors) continue;
            float value[kWidth];
            unpack<T>(x[k], value);
#pragma unroll
            for (int i = 0; i < kWidth; i++) sum += (value[i] - mean) * (value[i] - mean);
        }
        sum = row_sum<kWarpPerRow>(sum, shared[1]);
    }
    const float rstd = 1.0f / sqrtf(sum / C + eps);
    if (threadIdx.x == 0) {
        if (kLayer) mean_out[row] = mean;
        rstd_out[row] = rstd;
    }
#pragma unroll
    for (int k = 0; k < kVecs; k++) {
        const int v = threadIdx.x + k * blockDim.x;
        if (v >= vectors) continue;
        float value[kWidth], weights[kWidth], offset[kWidth] = {};
        unpack<T>(x[k], value);
        unpack<T>(w[k], weights);
        if (kLayer && bias) unpack<T>(b[k], offset);
#pragma unroll
        for (int i = 0; i < kWidth; i++) value[i] = (value[i] - mean) * rstd * weights[i] + offset[i];
        store_vec(out + start + v * kWidth, pack<T>(value));
    }
}

// ---- backward

// Bytes of shared memory that a backward thread prefetches into: kStages rows of up to three tensors.
constexpr int kStages = 2;
constexpr int kStreams = 3;

// Sum of two values over the threads of each row of the block; all threads of the row get it. Rows of several
// warps meet at the block's barrier, so all rows of a block must come here equally often. shared: one float2
// a warp, not written again before another barrier.
__device__ inline float2 row_sum2(float2 value, float2* shared) {
    value.x = warp_sum(value.x);
    value.y = warp_sum(value.y);
    const int warps = blockDim.x / kLanes, lane = threadIdx.x % kLanes;
    if (warps == 1) return value;
    if (lane == 0) shared[threadIdx.y * warps + threadIdx.x / kLanes] = value;
    __syncthreads();
    value = lane < warps ? shared[threadIdx.y * warps + lane] : make_float2(0.0f, 0.0f);
    return make_float2(warp_sum(value.x), warp_sum(value.y));
}

// Column sums of a block from the registers of its threads: sums over its rows y in order, written once.
// columns: (blockDim.y, C) floats of shared memory, free to be written when this is called.
template <int kVecs, int kWidth>
__device__ void write_column_sums(float* partial, float (&sums)[kVecs][kWidth], float* columns, int vectors) {
    const int C = vectors * kWidth;
#pragma unroll
    for (int k = 0; k < kVecs; k++) {
        const int v = threadIdx.x + k * blockDim.x;
        if (v < vectors) store_floats<float, kWidth>(columns + threadIdx.y * C + v * kWidth, sums[k]);
    }
    __syncthreads();
    for (int c = threadIdx.y * blockDim.x + threadIdx.x; c < C; c += blockDim.x * blockDim.y) {
        float sum = columns[c];
        for (int y = 1; y < blockDim.y; y++) sum += columns[y * C + c];
        partial[int64_t{blockIdx.x} * C + c] = sum;
    }
    __syncthreads();
}

// Math: xhat = (x - mean) rstd, g = dout weight; dx = dresidual + rstd (g - mean_c(g) - xhat mean_c(g xhat));
// partial_w[p], partial_b[p] = sums of dout xhat, dout over the rows of part p. rms: mean = mean_c(g) = 0.
// Source: derivative of the forward.
// Traffic: dout, x, dresidual read, dx written, once each; 4 C (8 C) bytes a block of partial sums written.
// Requires: as the forward, and kVecs vectors of at most 16 elements together.
// Parallel: blockDim.x threads own the rows p, p + gridDim.x, ... of their y, and keep the sums of their
// columns in registers. A thread copies its own part of the next kStages rows into shared memory
// asynchronously: the statistics of one row never leave the memory idle. dx may be dresidual.
template <typename T, int kVecs, bool kLayer>
__global__ void __launch_bounds__(kMaxThreads, kVecs == 1 ? 2 : 1)
    norm_backward_kernel(T* dx, const T* dresidual, float* partial_w, float* partial_b, const T* dout,
                         const T* x, const float* mean_in, const float* rstd_in, const T* weight, int64_t N,
                         int vectors) {
    extern __shared__ uint4 ring[];
    __shared__ float2 shared[2][kLanes];
    constexpr int kWidth = kVec<T>;
    const int C = vectors * kWidth, threads = blockDim.x * blockDim.y;
    const int thread = threadIdx.y * blockDim.x + threadIdx.x;
    const float inv_C = 1.0f / C;
    const int64_t first = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
    const int64_t step = int64_t{gridDim.x} * blockDim.y;
    auto slot = [&](int stage, int k, int stream) {
        return ring + ((stage * kVecs + k) * kStreams + stream) * threads + thread;
    };
    auto prefetch = [&](int64_t row, int stage) {
#pragma unroll
        for (int k = 0; k < kVecs; k++) {
            const int v = threadIdx.x + k * blockDim.x;
            if (row >= N || v >= vectors) continue;
            const int64_t at = row * C + v * kWidth;
            __pipeline_memcpy_async(slot(stage, k, 0), dout + at, 16);
            __pipeline_memcpy_async(slot(stage, k, 1), x + at, 16);
            if (dresidual) __pipeline_memcpy_async(slot(stage, k, 2), dresidual + at, 16);
        }
        __pipeline_commit();
    };
    for (int stage = 0; stage < kStages; stage++) prefetch(first + stage * step, stage);

    uint4 w[kVecs] = {};
    float dw[kVecs][kWidth] = {}, db[kVecs][kWidth] = {};
#pragma unroll
    for (int k = 0; k < kVecs; k++) {
        const int v = threadIdx.x + k * blockDim.x;
        if (v < vectors) w[k] = load_vec(weight + v * kWidth);
    }
    // All rows y of the block go round equally often; those past the end add nothing.
    const int64_t rounds = (N - int64_t{blockIdx.x} * blockDim.y + step - 1) / step;
    int stage = 0;
    for (int64_t round = 0, row = first; round < rounds; round++, row += step) {
        const bool active = row < N;
        const float rstd = active ? rstd_in[row] : 0.0f;
        const float mean = kLayer && active ? mean_in[row] : 0.0f;
        uint4 d[kVecs] = {}, xs[kVecs] = {}, add[kVecs] = {};
        __pipeline_wait_prior(kStages - 1);
#pragma unroll
        for (int k = 0; k < kVecs; k++) {
            if (!active || threadIdx.x + k * blockDim.x >= vectors) continue;
            d[k] = *slot(stage, k, 0);
            xs[k] = *slot(stage, k, 1);
            if (dresidual) add[k] = *slot(stage, k, 2);
        }
        prefetch(row + kStages * step, stage);
        stage = stage + 1 == kStages ? 0 : stage + 1;
        float2 sum = {};  // of g and g xhat
#pragma unroll
        for (int k = 0; k < kVecs; k++) {
            float dv[kWidth], xv[kWidth], wv[kWidth];
            unpack<T>(d[k], dv);
            unpack<T>(xs[k], xv);
            unpack<T>(w[k], wv);
#pragma unroll
            for (int i = 0; i < kWidth; i++) {
                const float xhat = (xv[i] - mean) * rstd;
                const float g = dv[i] * wv[i];
                if (kLayer) sum.x += g;
                sum.y += g * xhat;
                dw[k][i] += dv[i] * xhat;
                if (kLayer) db[k][i] += dv[i];
            }
        }
        sum = row_sum2(sum, shared[round & 1]);
        const float mean_g = sum.x * inv_C, mean_gx = sum.y * inv_C;
#pragma unroll
        for (int k = 0; k < kVecs; k++) {
            const int v = threadIdx.x + k * blockDim.x;
            if (!active || v >= vectors) continue;
            float dv[kWidth], xv[kWidth], wv[kWidth], result[kWidth];
            unpack<T>(d[k], dv);
            unpack<T>(xs[k], xv);
            unpack<T>(w[k], wv);
            unpack<T>(add[k], result);
#pragma unroll
            for (int i = 0; i < kWidth; i++) {
                const float xhat = (xv[i] - mean) * rstd;
                result[i] += rstd * (dv[i] * wv[i] - mean_g - xhat * mean_gx);
            }
            store_vec(dx + row * C + v * kWidth, pack<T>(result));
        }
    }
    __syncthreads();  // every thread has read its last prefetched row
    float* columns = reinterpret_cast<float*>(ring);
    write_column_sums<kVecs, kWidth>(partial_w, dw, columns, vectors);
    if (kLayer && partial_b) write_column_sums<kVecs, kWidth>(partial_b, db, columns, vectors);
}

// ---- any shape

constexpr int kLoopThreads = 256;

__device__ float loop_sum(float value, float* shared) {
    __syncthreads();  // the values of the sum before this one have been read
    return block_sum(value, shared, threadIdx.x / kLanes, threadIdx.x % kLanes, kLoopThreads / kLanes);
}

// Math: as norm_forward_kernel.
// Source: as norm_forward_kernel.
// Traffic: in, residual read and residual_out written once, x read two or three times (L2), out written.
// Requires: nothing of C or alignment.
// Parallel: a block owns a row, thread i its elements i, i + 256, ...
template <typename T, bool kLayer>
__global__ void __launch_bounds__(kLoopThreads)
    norm_forward_loop_kernel(T* out, T* residual_out, float* mean_out, float* rstd_out, const T* in,
                             const T* residual, const T* weight, const T* bias, int64_t C, float eps) {
    __shared__ float shared[kLanes];
    const int64_t start = blockIdx.x * C;
    auto x_at = [&](int64_t c) {
        const float value = to_float(in[start + c]);
        return residual ? rounded<T>(value + to_float(residual[start + c])) : value;
    };
    float sum = 0.0f;
    for (int64_t c = threadIdx.x; c < C; c += kLoopThreads) sum += kLayer ? x_at(c) : x_at(c) * x_at(c);
    sum = loop_sum(sum, shared);
    float mean = 0.0f;
    if constexpr (kLayer) {
        mean = sum / C;
        sum = 0.0f;
        for (int64_t c = threadIdx.x; c < C; c += kLoopThreads) sum += (x_at(c) - mean) * (x_at(c) - mean);
        sum = loop_sum(sum, shared);
    }
    const float rstd = 1.0f / sqrtf(sum / C + eps);
    if (threadIdx.x == 0) {
        if (kLayer) mean_out[blockIdx.x] = mean;
        rstd_out[blockIdx.x] = rstd;
    }
    for (int64_t c = threadIdx.x; c < C; c += kLoopThreads) {
        const float x = x_at(c);
        if (residual_out) residual_out[start + c] = from_float<T>(x);
        const float offset = kLayer && bias ? to_float(bias[c]) : 0.0f;
        out[start + c] = from_float<T>((x - mean) * rstd * to_float(weight[c]) + offset);
    }
}

// Math: dx of norm_backward_kernel.
// Source: as norm_backward_kernel.
// Traffic: dout and x read twice, dresidual read and dx written once.
// Requires: nothing of C or alignment.
// Parallel: a block owns a row, thread i its elements i, i + 256, ...
template <typename T, bool kLayer>
__global__ void __launch_bounds__(kLoopThreads)
    norm_backward_loop_kernel(T* dx, const T* dresidual, const T* dout, const T* x, const float* mean_in,
                              const float* rstd_in, const T* weight, int64_t C) {
    __shared__ float shared[kLanes];
    const int64_t start = blockIdx.x * C;
    const float rstd = rstd_in[blockIdx.x];
    const float mean = kLayer ? mean_in[blockIdx.x] : 0.0f;
    float sum_g = 0.0f, sum_gx = 0.0f;
    for (int64_t c = threadIdx.x; c < C; c += kLoopThreads) {
        const float g = to_float(dout[start + c]) * to_float(weight[c]);
        sum_g += g;
        sum_gx += g * (to_float(x[start + c]) - mean) * rstd;
    }
    sum_g = kLayer ? loop_sum(sum_g, shared) / C : 0.0f;
    sum_gx = loop_sum(sum_gx, shared) / C;
    for (int64_t c = threadIdx.x; c < C; c += kLoopThreads) {
        const float g = to_float(dout[start + c]) * to_float(weight[c]);
        const float xhat = (to_float(x[start + c]) - mean) * rstd;
        const float past = dresidual ? to_float(dresidual[start + c]) : 0.0f;
        dx[start + c] = from_float<T>(past + rstd * (g - sum_g - xhat * sum_gx));
    }
}

// Math: the partial sums of norm_backward_kernel.
// Source: as norm_backward_kernel.
// Traffic: dout and x read once, 4 C (8 C) bytes a part written.
// Requires: nothing of C or alignment.
// Parallel: a thread owns one column and the rows p, p + gridDim.y, ... of part p.
template <typename T, bool kLayer>
__global__ void __launch_bounds__(kLoopThreads)
    norm_backward_columns_kernel(float* partial_w, float* partial_b, const T* dout, const T* x,
                                 const float* mean_in, const float* rstd_in, int64_t N, int64_t C) {
    const int64_t c = int64_t{blockIdx.x} * kLoopThreads + threadIdx.x;
    if (c >= C) return;
    float dw = 0.0f, db = 0.0f;
    for (int64_t n = blockIdx.y; n < N; n += gridDim.y) {
        const float d = to_float(dout[n * C + c]);
        dw += d * (to_float(x[n * C + c]) - (kLayer ? mean_in[n] : 0.0f)) * rstd_in[n];
        db += d;
    }
    partial_w[blockIdx.y * C + c] = dw;
    if (kLayer && partial_b) partial_b[blockIdx.y * C + c] = db;
}

// ---- launchers

template <bool kLayer> void norm_forward(Ctx& ctx, const NormForwardArgs& args, const char* op) {
    const int64_t N = args.N, C = args.C, elems = N * C;
    const Dtype dtype = args.out.dtype;
    expect(args.out, dtype, elems, op);
    expect(args.in, dtype, elems, op);
    expect(args.weight, dtype, C, op);
    expect(args.rstd, Dtype::kFp32, N, op);
    if (kLayer) expect(args.mean, Dtype::kFp32, N, op);
    if (args.bias) expect(args.bias, dtype, C, op);
    if (args.residual) expect(args.residual, dtype, elems, op);
    if (args.residual_out) expect(args.residual_out, dtype, elems, op);
    CHECK(!args.residual || args.residual_out, "%s with a residual needs residual_out", op);
    CHECK(kLayer || !args.bias, "%s has no bias", op);
    dispatch(dtype, op, [&](auto type) {
        using T = decltype(type);
        T *out = args.out.as<T>(), *residual_out = args.residual_out.as<T>();
        const T *in = args.in.as<T>(), *residual = args.residual.as<T>(), *weight = args.weight.as<T>();
        const T* bias = args.bias.as<T>();
        float *mean = args.mean.as<float>(), *rstd = args.rstd.as<float>();
        const bool vector = vectorizable<T>(C, {out, residual_out, in, residual, weight, bias});
        const RowShape shape = vector ? forward_shape(C / kVec<T>) : RowShape{};
        if (shape.vecs == 0) {
            norm_forward_loop_kernel<T, kLayer><<<grid_size(N), kLoopThreads, 0, stream_of(ctx)>>>(
                out, residual_out, mean, rstd, in, residual, weight, bias, C, args.eps);
            CHECK_LAUNCH("norm_forward_loop_kernel");
            return;
        }
        const unsigned grid = grid_size(ceil_div(N, shape.block.y));
        with_vecs(shape.vecs, [&](auto vecs) {
            constexpr int kVecs = decltype(vecs)::value;
            auto kernel = shape.block.x == kLanes ? norm_forward_kernel<T, kVecs, kLayer, true>
                                                 : norm_forward_kernel<T, kVecs, kLayer, false>;
            kernel<<<grid, shape.block, 0, stream_of(ctx)>>>(out, residual_out, mean, rstd, in, residual,
                                                             weight, bias, N,
                                                             static_cast<int>(C / kVec<T>), args.eps);
            CHECK_LAUNCH("norm_forward_kernel");
        });
    });
}

template <bool kLayer> void norm_backward(Ctx& ctx, const NormBackwardArgs& args, const char* op) {
    const int64_t N = args.N, C = args.C, elems = N * C;
    const Dtype dtype = args.dx.dtype;
    expect(args.dx, dtype, elems, op);
    expect(args.dout, dtype, elems, op);
    expect(args.x, dtype, elems, op);
    expect(args.weight, dtype, C, op);
    expect(args.rstd, Dtype::kFp32, N, op);
    if (kLayer) expect(args.mean, Dtype::kFp32, N, op);
    if (args.dresidual) expect(args.dresidual, dtype, elems, op);
    expect_at_least(args.scratch, Dtype::kFp32, 2 * kPartialRows * C, op);
    CHECK(kLayer || !args.dbias, "%s has no bias", op);
    float* partial_w = args.scratch.as<float>();
    float* partial_b = args.dbias ? partial_w + kPartialRows * C : nullptr;
    int64_t parts = 0;
    dispatch(dtype, op, [&](auto type) {
        using T = decltype(type);
        T* dx = args.dx.as<T>();
        const T *dresidual = args.dresidual.as<T>(), *dout = args.dout.as<T>(), *x = args.x.as<T>();
        const T* weight = args.weight.as<T>();
        const float *mean = args.mean.as<float>(), *rstd = args.rstd.as<float>();
        const bool vector = vectorizable<T>(C, {dx, dresidual, dout, x, weight, partial_w});
        constexpr int kMaxVecs = 16 / kVec<T>;
        const RowShape shape = vector ? backward_shape(C / kVec<T>, kMaxVecs) : RowShape{};
        if (shape.vecs == 0) {
            parts = std::min(kPartialRows, N);
            norm_backward_columns_kernel<T, kLayer>
                <<<dim3(grid_size(ceil_div(C, kLoopThreads)), grid_size(parts)), kLoopThreads, 0,
                   stream_of(ctx)>>>(partial_w, partial_b, dout, x, mean, rstd, N, C);
            CHECK_LAUNCH("norm_backward_columns_kernel");
            norm_backward_loop_kernel<T, kLayer><<<grid_size(N), kLoopThreads, 0, stream_of(ctx)>>>(
                dx, dresidual, dout, x, mean, rstd, weight, C);
            CHECK_LAUNCH("norm_backward_loop_kernel");
            return;
        }
        // Two blocks a multiprocessor, all resident; each leaves one row of partial sums.
        parts = std::min(kPartialRows, std::min<int64_t>(2 * ctx.sm_count, ceil_div(N, shape.block.y)));
        const unsigned threads = shape.block.x * shape.block.y;
        const size_t shared_bytes = size_t{16} * kStages * kStreams * shape.vecs * threads;
        with_vecs(shape.vecs, [&](auto vecs) {
            constexpr int kVecs = std::min(kMaxVecs, decltype(vecs)::value);
            auto kernel = norm_backward_kernel<T, kVecs, kLayer>;
            allow_shared_memory(kernel, shared_bytes);
            kernel<<<grid_size(parts), shape.block, shared_bytes, stream_of(ctx)>>>(
                dx, dresidual, partial_w, partial_b, dout, x, mean, rstd, weight, N,
                static_cast<int>(C / kVec<T>));
            CHECK_LAUNCH("norm_backward_kernel");
        });
    });
    add_column_sums(ctx, {args.dweight, partial_w}, {args.dbias, partial_b}, parts, C);
}

}  // namespace

void layernorm_forward(Ctx& ctx, const NormForwardArgs& args) {
    norm_forward<true>(ctx, args, "layernorm_forward");
}
void layernorm_backward(Ctx& ctx, const NormBackwardArgs& args) {
    norm_backward<true>(ctx, args, "layernorm_backward");
}
void rmsnorm_forward(Ctx& ctx, const NormForwardArgs& args) {
    norm_forward<false>(ctx, args, "rmsnorm_forward");
}
void rmsnorm_backward(Ctx& ctx, const NormBackwardArgs& args) {
    norm_backward<false>(ctx, args, "rmsnorm_backward");
}

}  // namespace cuda
