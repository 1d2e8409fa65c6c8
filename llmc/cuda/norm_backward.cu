// layernorm and rmsnorm, backward: dx, including the gradient of the residual, and the gradients of weight and bias.
//
// A row stays on the chip between its sums and the result. Rows that are not whole 16-byte vectors, or too long for a
// block, use the loop kernels.
#include "llmc/cuda/norm.cuh"

namespace cuda {
namespace {

// Each thread prefetches kStages rows of up to three tensors into shared memory.
constexpr int kStages = 2;
constexpr int kStreams = 3;

// Math: xhat = (x - mean) rstd, g = dout weight; dx = dresidual + rstd (g - mean_c(g) - xhat mean_c(g xhat));
// partial_w[p], partial_b[p], partial_dx[p] = sums of dout xhat, dout, dx over the rows of partition p.
// rms: mean = mean_c(g) = 0.
// Source: derivative of the forward.
// Traffic: dout, x, dresidual read, dx written, once each; 4 C bytes of each sum written per block.
// Requires: as the forward, and kVecs vectors of at most 16 elements together.
// Parallel: blockDim.x threads own every (gridDim.x blockDim.y)-th row and keep the sums of their columns in
// registers. A thread prefetches its own part of the next kStages rows into shared memory asynchronously, so that the
// statistics of one row never leave the memory idle. dx may alias dresidual or dout.
template <typename T, int kVecs, bool kLayer, bool kSumDx>
__global__ void __launch_bounds__(kNormThreads, kVecs == 1 ? 2 : 1)
    norm_backward_kernel(NormBackward<T> a, float* partial_dx, AmaxOut amax_out, int vectors) {
    extern __shared__ uint4 ring[];
    __shared__ float2 shared[2][kNormLanes];
    wait_for_previous_kernels();
    constexpr int kWidth = kVec<T>;
    const int threads = blockDim.x * blockDim.y;
    const int thread = threadIdx.y * blockDim.x + threadIdx.x;
    const float inv_C = 1.0f / (vectors * kWidth);
    const int64_t first = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
    const int64_t step = int64_t{gridDim.x} * blockDim.y;
    auto slot = [&](int stage, int k, int stream) {
        return ring + ((stage * kVecs + k) * kStreams + stream) * threads + thread;
    };
    auto prefetch = [&](int64_t row, int stage) {
#pragma unroll
        for (int k = 0; k < kVecs; k++) {
            const int v = threadIdx.x + k * blockDim.x;
            if (row >= a.N || v >= vectors) continue;
            const int64_t at = row * a.row_stride + v * kWidth;
            __pipeline_memcpy_async(slot(stage, k, 0), a.dout + at, 16);
            __pipeline_memcpy_async(slot(stage, k, 1), a.x + at, 16);
            if (a.dresidual) __pipeline_memcpy_async(slot(stage, k, 2), a.dresidual + at, 16);
        }
        __pipeline_commit();
    };
    for (int stage = 0; stage < kStages; stage++) prefetch(first + stage * step, stage);

    uint4 w[kVecs] = {};
    NormColumns<T, kVecs> columns;
    uint32_t amax = 0;
    ThreadSums<kVecs> dx_sums{reinterpret_cast<float4*>(ring + kStages * kVecs * kStreams * threads) + thread, threads};
    if constexpr (kSumDx) dx_sums.clear();
#pragma unroll
    for (int k = 0; k < kVecs; k++) {
        const int v = threadIdx.x + k * blockDim.x;
        if (v < vectors) w[k] = load_vec(a.weight + v * kWidth);
    }
    // All rows y of the block iterate equally often; those past the end add nothing.
    const int64_t rounds = (a.N - int64_t{blockIdx.x} * blockDim.y + step - 1) / step;
    int stage = 0;
    for (int64_t round = 0, row = first; round < rounds; round++, row += step) {
        const bool active = row < a.N;
        const float2 statistics =
            active ? make_float2(kLayer ? a.mean[row] : 0.0f, a.rstd[row * a.rstd_stride]) : make_float2(0.0f, 0.0f);
        uint4 d[kVecs] = {}, xs[kVecs] = {}, add[kVecs] = {};
        __pipeline_wait_prior(kStages - 1);
#pragma unroll
        for (int k = 0; k < kVecs; k++) {
            if (!active || threadIdx.x + k * blockDim.x >= vectors) continue;
            d[k] = *slot(stage, k, 0);
            xs[k] = *slot(stage, k, 1);
            if (a.dresidual) add[k] = *slot(stage, k, 2);
        }
        prefetch(row + kStages * step, stage);
        stage = stage + 1 == kStages ? 0 : stage + 1;
        float2 sum = norm_backward_sums<T, kLayer>(columns, d, xs, w, statistics);
        sum = row_sum2(sum, shared[round & 1]);
        const float2 means = make_float2(sum.x * inv_C, sum.y * inv_C);
#pragma unroll
        for (int k = 0; k < kVecs; k++) {
            const int v = threadIdx.x + k * blockDim.x;
            if (!active || v >= vectors) continue;
            const uint4 dx = norm_backward_apply<T, kLayer>(d[k], xs[k], w[k], add[k], statistics, means);
            if (!kSumDx && amax_out.entry) amax = max_pair(amax, amax_pair(dx));
            store_vec(a.dx + row * a.row_stride + v * kWidth, dx);
            if constexpr (kSumDx) dx_sums.add(k, dx);
        }
    }
    if (!kSumDx && amax_out.entry) amax_out.add(amax, amax_out.seen());
    float of_dx[kVecs][8];
    if constexpr (kSumDx) dx_sums.take(of_dx);
    __syncthreads();  // every thread has read its prefetched rows and its sums
    float* sums = reinterpret_cast<float*>(ring);
    write_column_sums<kVecs, kWidth>(a.partial_w, columns.dw, sums, vectors);
    if (kLayer && a.partial_b) write_column_sums<kVecs, kWidth>(a.partial_b, columns.db, sums, vectors);
    if constexpr (kSumDx) write_column_sums<kVecs, 8>(partial_dx, of_dx, sums, vectors);
}

constexpr int kLoopThreads = 256;

// Math: dx of norm_backward_kernel.
// Source: as norm_backward_kernel.
// Traffic: dout and x read twice, dresidual read and dx written once.
// Requires: nothing of C or alignment.
// Parallel: a block owns a row, thread i its elements i, i + 256, ...
template <typename T, bool kLayer>
__global__ void __launch_bounds__(kLoopThreads) norm_backward_loop_kernel(NormBackward<T> a, int64_t C) {
    __shared__ float shared[2][kNormLanes];
    RowSum<false> row_sum{shared};
    const int64_t start = blockIdx.x * C;
    const float rstd = a.rstd[blockIdx.x];
    const float mean = kLayer ? a.mean[blockIdx.x] : 0.0f;
    float sum_g = 0.0f, sum_gx = 0.0f;
    for (int64_t c = threadIdx.x; c < C; c += kLoopThreads) {
        const float g = to_float(a.dout[start + c]) * to_float(a.weight[c]);
        sum_g += g;
        sum_gx += g * (to_float(a.x[start + c]) - mean) * rstd;
    }
    sum_g = kLayer ? row_sum(sum_g) / C : 0.0f;
    sum_gx = row_sum(sum_gx) / C;
    for (int64_t c = threadIdx.x; c < C; c += kLoopThreads) {
        const float g = to_float(a.dout[start + c]) * to_float(a.weight[c]);
        const float xhat = (to_float(a.x[start + c]) - mean) * rstd;
        const float past = a.dresidual ? to_float(a.dresidual[start + c]) : 0.0f;
        a.dx[start + c] = from_float<T>(past + rstd * (g - sum_g - xhat * sum_gx));
    }
}

// Math: the partial sums of norm_backward_kernel.
// Source: as norm_backward_kernel.
// Traffic: dout and x read once, 4 C bytes of each sum written per partition.
// Requires: nothing of C or alignment.
// Parallel: a thread owns one column and the rows p, p + gridDim.y, ... of partition p.
template <typename T, bool kLayer>
__global__ void __launch_bounds__(kLoopThreads) norm_backward_columns_kernel(NormBackward<T> a, int64_t C) {
    const int64_t c = int64_t{blockIdx.x} * kLoopThreads + threadIdx.x;
    if (c >= C) return;
    float dw = 0.0f, db = 0.0f;
    for (int64_t n = blockIdx.y; n < a.N; n += gridDim.y) {
        const float d = to_float(a.dout[n * C + c]);
        dw += d * (to_float(a.x[n * C + c]) - (kLayer ? a.mean[n] : 0.0f)) * a.rstd[n];
        db += d;
    }
    a.partial_w[blockIdx.y * C + c] = dw;
    if (kLayer && a.partial_b) a.partial_b[blockIdx.y * C + c] = db;
}

// What the row kernels have completed of the column sums and of QuantOut.
struct RowsDone {
    int64_t parts = 0;   // partial sums per gradient, in scratch: those of dweight, then dbias, then dx
    bool amax = false, dx_sums = false;
};

template <typename T, bool kLayer>
RowsDone norm_backward_rows(Ctx& ctx, NormBackward<T> a, const QuantOut& quant, int64_t C) {
    constexpr int kMaxVecs = 16 / kVec<T>;
    const RowShape shape = a.vectors_fit(C) ? norm_backward_shape(C / kVec<T>, kMaxVecs) : RowShape{};
    RowsDone done;
    auto place_sums = [&](int64_t parts) {
        done.parts = parts;
        if (a.partial_b) a.partial_b = a.partial_w + parts * C;
    };
    if (shape.vecs == 0) {
        place_sums(std::min(kPartialRows, a.N));
        const dim3 grid(grid_size(ceil_div(C, kLoopThreads)), grid_size(done.parts));
        launch_kernel(ctx, norm_backward_columns_kernel<T, kLayer>, grid, kLoopThreads, a, C);
        launch_kernel(ctx, norm_backward_loop_kernel<T, kLayer>, grid_size(a.N), kLoopThreads, a, C);
        return done;
    }
    done.amax = quant.only_records();
    const size_t vector_bytes = size_t{16} * shape.vecs * shape.block.x * shape.block.y;
    size_t shared_bytes = kStages * kStreams * vector_bytes;
    with_vecs(shape.vecs, [&](auto vecs) {
        constexpr int kVecs = std::min(kMaxVecs, decltype(vecs)::value);
        auto kernel = norm_backward_kernel<T, kVecs, kLayer, false>;
        if constexpr (std::is_same_v<T, bf16>) {
            const auto summing = norm_backward_kernel<T, kVecs, kLayer, true>;
            const size_t with_sums = shared_bytes + 2 * vector_bytes;   // as fp32
            done.dx_sums = quant.only_sums() && shared_memory_fits(ctx, summing, with_sums);
            if (done.dx_sums) kernel = summing, shared_bytes = with_sums;
        }
        // Two resident blocks per multiprocessor, each with one row of partial sums. Three sums share the scratch.
        const int64_t most = std::min<int64_t>(2 * ctx.sm_count, done.dx_sums ? 2 * kPartialRows / 3 : kPartialRows);
        place_sums(std::min<int64_t>(most, ceil_div(a.N, shape.block.y)));
        float* partial_dx = done.dx_sums ? a.partial_w + 2 * done.parts * C : nullptr;
        allow_shared_memory(kernel, shared_bytes);
        launch_early(ctx, kernel, grid_size(done.parts), shape.block, shared_bytes, a, partial_dx, amax_out(quant),
                     C / kVec<T>);
    });
    return done;
}

template <bool kLayer> void norm_backward(Ctx& ctx, const NormBackwardArgs& args, const char* op) {
    const int64_t N = args.N, C = args.C, elems = N * C;
    const QuantOut& quant = args.quant;
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
    if (quant) expect_quant(quant, dtype, N, C, op);
    if (quant && norm_backward_quantize<kLayer>(ctx, args)) return;
    RowsDone done;
    dispatch(dtype, op, [&](auto type) {
        using T = decltype(type);
        done = norm_backward_rows<T, kLayer>(ctx, args, quant, C);
    });
    const float* partial = args.scratch.as<float>();
    const int64_t sum_elems = done.parts * C;
    add_column_sums(ctx, {args.dweight, partial}, {args.dbias, partial + sum_elems}, done.parts, C);
    if (done.dx_sums) add_column_sums(ctx, {quant.dbias, partial + 2 * sum_elems}, {}, done.parts, C);
    if (quant && !done.amax && !done.dx_sums) quantize(ctx, {.quant = quant, .in = args.dx, .N = N, .C = C});
}

}  // namespace

QkNormParts qk_norm_rows_backward(Ctx& ctx, const QkNormBackwardArgs& args) {
    const int64_t C = args.HS, KS = args.KS;
    QkNormParts parts;
    if (args.NH != 1 || args.NKV != 1) return parts;
    dispatch(args.dqkv.dtype, "qk_norm_backward", [&](auto type) {
        using T = decltype(type);
        NormBackward<T> q({.dx = args.dqkv, .dresidual = {}, .dweight = {}, .dbias = {}, .scratch = args.scratch,
                           .dout = args.dqkv, .x = args.in, .mean = {}, .rstd = args.rstd, .weight = args.q_weight,
                           .N = args.N, .C = C});
        q.row_stride = static_cast<int>(args.width()), q.rstd_stride = 2;
        NormBackward<T> k = q;
        k.dx += C, k.dout += C, k.x += C, k.rstd += 1;
        k.weight = args.k_weight.as<T>(), k.partial_w += kPartialRows * C;
        if (!q.vectors_fit(C) || !k.vectors_fit(KS) || norm_backward_shape(C / kVec<T>, 16 / kVec<T>).vecs == 0) return;
        parts.q = norm_backward_rows<T, false>(ctx, q, {}, C).parts;
        parts.k = norm_backward_rows<T, false>(ctx, k, {}, KS).parts;
    });
    return parts;
}

void layernorm_backward(Ctx& ctx, const NormBackwardArgs& args) {
    norm_backward<true>(ctx, args, "layernorm_backward");
}
void rmsnorm_backward(Ctx& ctx, const NormBackwardArgs& args) {
    norm_backward<false>(ctx, args, "rmsnorm_backward");
}

}  // namespace cuda
