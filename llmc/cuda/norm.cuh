// Shared by the norm kernels: how threads divide rows, sums along a row, and the formulas. Each formula is here once,
// with explicit roundings, so that the kernel that writes bf16 and the one that writes FP8 agree bit for bit.
#pragma once
#include <cuda_pipeline_primitives.h>

#include "llmc/cuda/quantize_rows.cuh"
#include "llmc/cuda/reduce.cuh"

namespace cuda {

constexpr int kNormLanes = 32;
constexpr int kNormThreads = 512;   // maximum per block

// How the threads of a block divide rows: block.x threads share a row, block.y rows at a time.
struct RowShape {
    int vecs = 0;   // vectors of a row per thread: 1, 2 or 4; 0: the row needs the loop kernels
    dim3 block;
};

// Forward: a warp per row up to 128 vectors (C = 1024 in bf16), else a block per row.
inline RowShape norm_forward_shape(int64_t vectors, unsigned warp_rows) {
    for (int vecs = 1; vecs <= 4; vecs *= 2) {
        if (vectors <= vecs * kNormLanes) return {vecs, dim3(kNormLanes, warp_rows)};
    }
    for (int vecs = 2; vecs <= 4; vecs *= 2) {
        const int64_t threads = ceil_div(ceil_div(vectors, vecs), kNormLanes) * kNormLanes;
        if (threads <= kNormThreads) return {vecs, dim3(static_cast<unsigned>(threads))};
    }
    return {};
}

// Backward: few columns per thread, whose sums stay in registers over all rows of the block.
inline RowShape norm_backward_shape(int64_t vectors, int max_vecs) {
    for (int vecs = 1; vecs <= max_vecs; vecs *= 2) {
        const int64_t threads = ceil_div(ceil_div(vectors, vecs), kNormLanes) * kNormLanes;
        if (threads > kNormThreads) continue;
        return {vecs, dim3(static_cast<unsigned>(threads), static_cast<unsigned>(kNormThreads / threads))};
    }
    return {};
}

template <typename F> void with_vecs(int vecs, F&& f) {
    if (vecs == 1) f(std::integral_constant<int, 1>{});
    else if (vecs == 2) f(std::integral_constant<int, 2>{});
    else f(std::integral_constant<int, 4>{});
}

// Arguments of the operations in the kernels' form; optional pointers may be null. norm_forward_kernel and
// norm_backward_kernel alone take rows that are parts of longer ones: row_stride elements apart, rstd rstd_stride.
template <typename T> struct NormForward {
    T *out, *residual_out;
    float *mean, *rstd;
    const T *in, *residual, *weight, *bias, *stream;
    int64_t N;
    float eps;
    int row_stride, rstd_stride = 1;

    NormForward(const NormForwardArgs& args)
        : out(args.out.as<T>()), residual_out(args.residual_out.as<T>()), mean(args.mean.as<float>()),
          rstd(args.rstd.as<float>()), in(args.in.as<T>()), residual(args.residual.as<T>()),
          weight(args.weight.as<T>()), bias(args.bias.as<T>()), stream(args.stream.as<T>()), N(args.N), eps(args.eps),
          row_stride(static_cast<int>(args.C)) {}
    bool vectors_fit(int64_t C) const {
        return vectorizable<T>(C, {out, residual_out, in, residual, weight, bias, stream});
    }
};
template <typename T> struct NormBackward {
    T* dx;
    float *partial_w, *partial_b;
    const T *dresidual, *dout, *x;
    const float *mean, *rstd;
    const T* weight;
    int64_t N;
    int row_stride, rstd_stride = 1;

    // partial_b is only a flag until the number of partial sums is known.
    NormBackward(const NormBackwardArgs& args)
        : dx(args.dx.as<T>()), partial_w(args.scratch.as<float>()), partial_b(args.dbias ? partial_w : nullptr),
          dresidual(args.dresidual.as<T>()), dout(args.dout.as<T>()), x(args.x.as<T>()), mean(args.mean.as<float>()),
          rstd(args.rstd.as<float>()), weight(args.weight.as<T>()), N(args.N),
          row_stride(static_cast<int>(args.C)) {}
    bool vectors_fit(int64_t C) const {
        return vectorizable<T>(C, {dx, dresidual, dout, x, weight, partial_w});
    }
};

// Run the operation with quantized outputs in one pass, and return true, where 32 rows of bytes fit in shared memory;
// else do nothing and return false.
template <bool kLayer> bool norm_forward_quantize(Ctx& ctx, const NormForwardArgs& args);
template <bool kLayer> bool norm_backward_quantize(Ctx& ctx, const NormBackwardArgs& args);

// Rows of partial sums in scratch, those of K kPartialRows rows of HS behind those of Q.
struct QkNormParts {
    int64_t q = 0, k = 0;
};
// Run qk-norm over all heads (NH = NKV = 1) in the kernels for rows of whole vectors, and return true, or the number of
// partial sums; else do nothing and return false, or no sums. The caller adds these sums and quantizes dqkv.
bool qk_norm_rows_forward(Ctx& ctx, const QkNormForwardArgs& args);
QkNormParts qk_norm_rows_backward(Ctx& ctx, const QkNormBackwardArgs& args);

// ---- sums along a row

// Sums over the threads x of each row y of a block; all threads of the row get the sum. Two alternating buffers save a
// barrier per sum. Rows of several warps use the block's barrier, so all of them must call this equally often.
template <bool kWarpPerRow> struct RowSum {
    float (*shared)[kNormLanes];   // two buffers
    int buffer = 0;
    __device__ float operator()(float value) {
        if constexpr (kWarpPerRow) {
            return warp_sum(value);
        } else {
            const int warps = blockDim.x / kNormLanes;
            float* own = shared[buffer] + threadIdx.y * warps;
            buffer ^= 1;
            return block_sum(value, own, threadIdx.x / kNormLanes, threadIdx.x % kNormLanes, warps);
        }
    }
};

// Sums two values over a row; shared: one float2 per warp, not overwritten before another barrier. kRowBarrier: the
// warps of a row use a barrier of their own, so rows do not wait for each other; at most 15 rows of several warps.
template <bool kRowBarrier = false>
__device__ inline float2 row_sum2(float2 value, float2* shared) {
    value.x = warp_sum(value.x);
    value.y = warp_sum(value.y);
    const int warps = blockDim.x / kNormLanes, lane = threadIdx.x % kNormLanes;
    if (warps == 1) return value;
    if (lane == 0) shared[threadIdx.y * warps + threadIdx.x / kNormLanes] = value;
    if constexpr (kRowBarrier) __barrier_sync_count(1 + threadIdx.y, blockDim.x);
    else __syncthreads();
    if (warps <= 8) {
        // Sums eight lanes in the order of a sum over all 32 lanes in which the other 24 hold 0.
        value = lane % 8 < warps ? shared[threadIdx.y * warps + lane % 8] : make_float2(0.0f, 0.0f);
        return make_float2(warp_sum<8>(value.x), warp_sum<8>(value.y));
    }
    value = lane < warps ? shared[threadIdx.y * warps + lane] : make_float2(0.0f, 0.0f);
    return make_float2(warp_sum(value.x), warp_sum(value.y));
}

// Sums the threads' column sums over the rows y of the block, in order, and writes them once.
// columns: (blockDim.y, C) floats of shared memory that may be overwritten.
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

// A thread's column sums over rows, kept in shared memory to save registers; private to the thread.
template <int kVecs> struct ThreadSums {   // kVecs vectors of 8 columns
    float4* memory;                        // 2 kVecs per thread, `threads` apart
    int threads;

    __device__ void clear() const {
#pragma unroll
        for (int i = 0; i < 2 * kVecs; i++) memory[i * threads] = make_float4(0, 0, 0, 0);
    }
    __device__ void add(int k, const uint4& row) const {
        float value[8];
        unpack<bf16>(row, value);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float4& sum = memory[(2 * k + i) * threads];
            sum = make_float4(sum.x + value[4 * i], sum.y + value[4 * i + 1], sum.z + value[4 * i + 2],
                              sum.w + value[4 * i + 3]);
        }
    }
    __device__ void take(float (&sums)[kVecs][8]) const {
#pragma unroll
        for (int i = 0; i < 2 * kVecs; i++) {
            const float4 sum = memory[i * threads];
            float* to = &sums[i / 2][i % 2 * 4];
            to[0] = sum.x, to[1] = sum.y, to[2] = sum.z, to[3] = sum.w;
        }
    }
};

// ---- forward, of a row whose thread x holds vectors x, x + blockDim.x, ... below `vectors`

// x += residual, rounded to T.
template <typename T> __device__ inline uint4 norm_add(const uint4& x, const uint4& residual) {
    float value[kVec<T>], other[kVec<T>];
    unpack<T>(x, value);
    unpack<T>(residual, other);
#pragma unroll
    for (int i = 0; i < kVec<T>; i++) value[i] = __fadd_rn(value[i], other[i]);
    return pack<T>(value);
}

// Returns the mean (0 for rms) and 1 / sqrt(variance + eps); vectors of x past the end are 0.
template <typename T, bool kLayer, int kVecs, typename Sum>
__device__ inline float2 norm_statistics(const uint4 (&x)[kVecs], int vectors, float eps, Sum& row_sum) {
    const float C = static_cast<float>(vectors * kVec<T>);
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < kVecs; k++) {
        float value[kVec<T>];
        unpack<T>(x[k], value);
#pragma unroll
        for (int i = 0; i < kVec<T>; i++) {
            sum = kLayer ? __fadd_rn(sum, value[i]) : __fmaf_rn(value[i], value[i], sum);
        }
    }
    sum = row_sum(sum);
    float mean = 0.0f;
    if constexpr (kLayer) {
        mean = sum / C;
        float squares = 0.0f;
#pragma unroll
        for (int k = 0; k < kVecs; k++) {
            if (threadIdx.x + k * blockDim.x >= vectors) continue;
            float value[kVec<T>];
            unpack<T>(x[k], value);
#pragma unroll
            for (int i = 0; i < kVec<T>; i++) {
                const float off = __fsub_rn(value[i], mean);
                squares = __fmaf_rn(off, off, squares);
            }
        }
        sum = row_sum(squares);
    }
    return make_float2(mean, 1.0f / sqrtf(sum / C + eps));
}

// (x - mean) rstd weight + bias, statistics = (mean, rstd).
template <bool kLayer>
__device__ inline float norm_value(float x, float2 statistics, float weight, float bias) {
    if constexpr (kLayer) x = __fsub_rn(x, statistics.x);
    x = __fmul_rn(x, statistics.y);
    return kLayer ? __fmaf_rn(x, weight, bias) : __fmul_rn(x, weight);
}
template <typename T, bool kLayer>
__device__ inline uint4 norm_apply(const uint4& x, float2 statistics, const float (&weight)[kVec<T>],
                                   const float (&bias)[kVec<T>]) {
    float value[kVec<T>];
    unpack<T>(x, value);
#pragma unroll
    for (int i = 0; i < kVec<T>; i++) value[i] = norm_value<kLayer>(value[i], statistics, weight[i], bias[i]);
    return pack<T>(value);
}
template <typename T, bool kLayer>
__device__ inline uint4 norm_apply(const uint4& x, float2 statistics, const uint4& weight, const uint4& bias) {
    float weights[kVec<T>], offset[kVec<T>];
    unpack<T>(weight, weights);
    unpack<T>(bias, offset);
    return norm_apply<T, kLayer>(x, statistics, weights, offset);
}

// ---- backward, of the same rows

// A thread's column sums: dweight, dbias.
template <typename T, int kVecs> struct NormColumns {
    float dw[kVecs][kVec<T>] = {}, db[kVecs][kVec<T>] = {};
};

// Adds a row to the column sums and returns this thread's part of (sum of g, sum of g xhat), g = dout weight.
template <typename T, bool kLayer, int kVecs>
__device__ inline float2 norm_backward_sums(NormColumns<T, kVecs>& columns, const uint4 (&dout)[kVecs],
                                            const uint4 (&x)[kVecs], const uint4 (&weight)[kVecs], float2 statistics) {
    float2 sum = {};
#pragma unroll
    for (int k = 0; k < kVecs; k++) {
        float dv[kVec<T>], xv[kVec<T>], wv[kVec<T>];
        unpack<T>(dout[k], dv);
        unpack<T>(x[k], xv);
        unpack<T>(weight[k], wv);
#pragma unroll
        for (int i = 0; i < kVec<T>; i++) {
            const float xhat = __fmul_rn(kLayer ? __fsub_rn(xv[i], statistics.x) : xv[i], statistics.y);
            const float g = __fmul_rn(dv[i], wv[i]);
            if (kLayer) sum.x = __fadd_rn(sum.x, g);
            sum.y = __fmaf_rn(g, xhat, sum.y);
            columns.dw[k][i] = __fmaf_rn(dv[i], xhat, columns.dw[k][i]);
            if (kLayer) columns.db[k][i] = __fadd_rn(columns.db[k][i], dv[i]);
        }
    }
    return sum;
}

// dx = dresidual + rstd (g - means.x - xhat means.y), means = those of g and of g xhat over the row.
template <typename T, bool kLayer>
__device__ inline uint4 norm_backward_apply(const uint4& dout, const uint4& x, const uint4& weight,
                                            const uint4& dresidual, float2 statistics, float2 means) {
    float dv[kVec<T>], xv[kVec<T>], wv[kVec<T>], result[kVec<T>];
    unpack<T>(dout, dv);
    unpack<T>(x, xv);
    unpack<T>(weight, wv);
    unpack<T>(dresidual, result);
#pragma unroll
    for (int i = 0; i < kVec<T>; i++) {
        const float xhat = __fmul_rn(kLayer ? __fsub_rn(xv[i], statistics.x) : xv[i], statistics.y);
        float inner = kLayer ? __fmaf_rn(dv[i], wv[i], -means.x) : __fmul_rn(dv[i], wv[i]);
        inner = __fmaf_rn(-xhat, means.y, inner);
        result[i] = __fmaf_rn(statistics.y, inner, result[i]);
    }
    return pack<T>(result);
}

}  // namespace cuda
