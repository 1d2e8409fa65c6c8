// layernorm and rmsnorm with fused residual addition, forward.
//
// A row stays on the chip between the statistics and the result, so that every tensor is accessed once. Rows that are
// not whole 16-byte vectors, or too long for a block, use the loop kernel.
//
// Quantized outputs are written in one pass where norm_quantize.cu supports it. Elsewhere a second pass quantizes `out`
// or, without `out`, the result that it recomputes from x and the statistics.
#include "llmc/cuda/norm.cuh"

namespace cuda {
namespace {

constexpr int kWarpRows = 4;   // rows per block with one warp per row

// Math: x = in + residual, rounded to T; out = (x - mean) rstd weight + bias; rms: mean = 0. kStream: out, rounded to
// T, + stream.
// Source: Ba et al. 2016 (layernorm; variance in a second pass over registers), Zhang, Sennrich 2019 (rms).
// Traffic: in, residual read; residual_out, out written; once each (weight and bias from L2).
// Requires: C a multiple of 16 bytes, aligned rows, C <= 4 * 512 vectors.
// Parallel: blockDim.x threads own a row, thread x its vectors x, x + blockDim.x, ... (kVecs of them).
template <typename T, int kVecs, bool kLayer, bool kWarpPerRow, bool kStream = false>
__global__ void __launch_bounds__(kWarpPerRow ? kNormLanes * kWarpRows : kNormThreads)
    norm_forward_kernel(NormForward<T> a, AmaxOut amax_out, int vectors) {
    __shared__ float shared[2][kNormLanes];
    wait_for_previous_kernels();
    const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
    if (kWarpPerRow && row >= a.N) return;
    constexpr int kWidth = kVec<T>;
    const int64_t start = row * a.row_stride;

    uint4 x[kVecs] = {}, add[kVecs], w[kVecs] = {}, b[kVecs] = {};
#pragma unroll
    for (int k = 0; k < kVecs; k++) {
        const int v = threadIdx.x + k * blockDim.x;
        if (v < vectors) x[k] = load_vec(a.in + start + v * kWidth);
        if (v < vectors && (kStream || a.residual))
            add[k] = load_vec((kStream ? a.stream : a.residual) + start + v * kWidth);
    }
#pragma unroll
    for (int k = 0; k < kVecs; k++) {
        const int v = threadIdx.x + k * blockDim.x;
        if (v < vectors && a.out) w[k] = load_vec(a.weight + v * kWidth);
        if (v < vectors && kLayer && a.bias) b[k] = load_vec(a.bias + v * kWidth);
    }
#pragma unroll
    for (int k = 0; k < kVecs; k++) {
        const int v = threadIdx.x + k * blockDim.x;
        if (v >= vectors) continue;
        if (!kStream && a.residual) x[k] = norm_add<T>(x[k], add[k]);
        if (!kStream && a.residual_out) store_vec(a.residual_out + start + v * kWidth, x[k]);
    }
    const uint32_t seen = amax_out.seen();
    RowSum<kWarpPerRow> row_sum{shared};
    const float2 statistics = norm_statistics<T, kLayer>(x, vectors, a.eps, row_sum);
    if (threadIdx.x == 0) {
        if (kLayer) a.mean[row] = statistics.x;
        a.rstd[row * a.rstd_stride] = statistics.y;
    }
    if (a.out == nullptr) return;
    uint32_t amax = 0;
#pragma unroll
    for (int k = 0; k < kVecs; k++) {
        const int v = threadIdx.x + k * blockDim.x;
        if (v >= vectors) continue;
        uint4 out = norm_apply<T, kLayer>(x[k], statistics, w[k], b[k]);
        if constexpr (kStream) out = norm_add<T>(out, add[k]);
        if (amax_out.entry) amax = max_pair(amax, amax_pair(out));
        store_vec(a.out + start + v * kWidth, out);
    }
    if (amax_out.entry) amax_out.add(amax, seen);
}

constexpr int kLoopThreads = 256;

// Math: as norm_forward_kernel.
// Source: as norm_forward_kernel.
// Traffic: in, residual read and residual_out written once, x read two or three times (L2), out written.
// Requires: any C and alignment.
// Parallel: a block owns a row, thread i its elements i, i + 256, ...
template <typename T, bool kLayer>
__global__ void __launch_bounds__(kLoopThreads) norm_forward_loop_kernel(NormForward<T> a, int64_t C) {
    __shared__ float shared[2][kNormLanes];
    RowSum<false> row_sum{shared};
    const int64_t start = blockIdx.x * C;
    auto x_at = [&](int64_t c) {
        const float value = to_float(a.in[start + c]);
        return a.residual ? rounded<T>(value + to_float(a.residual[start + c])) : value;
    };
    float sum = 0.0f;
    for (int64_t c = threadIdx.x; c < C; c += kLoopThreads) sum += kLayer ? x_at(c) : x_at(c) * x_at(c);
    sum = row_sum(sum);
    float mean = 0.0f;
    if constexpr (kLayer) {
        mean = sum / C;
        sum = 0.0f;
        for (int64_t c = threadIdx.x; c < C; c += kLoopThreads) sum += (x_at(c) - mean) * (x_at(c) - mean);
        sum = row_sum(sum);
    }
    const float rstd = 1.0f / sqrtf(sum / C + a.eps);
    if (threadIdx.x == 0) {
        if (kLayer) a.mean[blockIdx.x] = mean;
        a.rstd[blockIdx.x] = rstd;
    }
    for (int64_t c = threadIdx.x; c < C; c += kLoopThreads) {
        const float x = x_at(c);
        if (a.residual_out) a.residual_out[start + c] = from_float<T>(x);
        if (a.out == nullptr) continue;
        const float offset = kLayer && a.bias ? to_float(a.bias[c]) : 0.0f;
        const float2 statistics = make_float2(mean, rstd);
        const T out = from_float<T>(norm_value<kLayer>(x, statistics, to_float(a.weight[c]), offset));
        a.out[start + c] = a.stream ? from_float<T>(to_float(out) + to_float(a.stream[start + c])) : out;
    }
}

// Writes `out` if present, else only the statistics and residual_out; returns whether the amax was recorded.
template <typename T, bool kLayer>
bool norm_forward_rows(Ctx& ctx, const NormForward<T>& a, const AmaxOut& amax, int64_t C) {
    const RowShape shape = a.vectors_fit(C) ? norm_forward_shape(C / kVec<T>, kWarpRows) : RowShape{};
    if (shape.vecs == 0) {
        launch_kernel(ctx, norm_forward_loop_kernel<T, kLayer>, grid_size(a.N), kLoopThreads, a, C);
        return false;
    }
    const unsigned grid = grid_size(ceil_div(a.N, shape.block.y));
    with_vecs(shape.vecs, [&](auto vecs) {
        constexpr int kVecs = decltype(vecs)::value;
        auto kernel = shape.block.x == kNormLanes ? norm_forward_kernel<T, kVecs, kLayer, true>
                                                  : norm_forward_kernel<T, kVecs, kLayer, false>;
        if constexpr (!kLayer) {
            if (a.stream)
                kernel = shape.block.x == kNormLanes ? norm_forward_kernel<T, kVecs, kLayer, true, true>
                                                     : norm_forward_kernel<T, kVecs, kLayer, false, true>;
        }
        launch_early(ctx, kernel, grid, shape.block, 0, a, amax, C / kVec<T>);
    });
    return true;
}

// Recomputes the result from x and its statistics, for quantize_tiles.
template <bool kLayer> struct NormApplyProducer {
    static constexpr int kOutputs = 1, kBlocksPerSm = 3;
    struct Raw {
        uint4 x;
        float2 statistics;
    };
    struct Columns {
        uint4 weight, bias;
    };
    const bf16 *x, *weight, *bias;
    const float *mean, *rstd;
    int64_t C;

    __device__ void columns(int64_t column, Columns& to) const {
        to.weight = load_vec(weight + column);
        to.bias = kLayer && bias ? load_vec(bias + column) : uint4{};
    }
    __device__ void load(const TileThread& t, int r, Raw& raw) const {
        raw.x = load_vec_streaming(t.at(x, r, C));
        raw.statistics = make_float2(kLayer ? mean[t.row(r)] : 0.0f, rstd[t.row(r)]);
    }
    __device__ void compute(const Raw& raw, const Columns& columns, uint4 (&to)[1]) const {
        to[0] = norm_apply<bf16, kLayer>(raw.x, raw.statistics, columns.weight, columns.bias);
    }
};

// Recomputes the result and quantizes it.
template <bool kLayer>
void quantize_recomputed(Ctx& ctx, const NormForward<bf16>& a, const NormForwardArgs& args, const char* op) {
    CHECK(vectorizable<bf16>(args.C, {a.residual_out, a.in, a.weight, a.bias}), "%s: tensors are not aligned", op);
    const NormApplyProducer<kLayer> producer{.x = a.residual_out ? a.residual_out : a.in, .weight = a.weight,
                                             .bias = a.bias, .mean = a.mean, .rstd = a.rstd, .C = args.C};
    quantize_tiles(ctx, producer, args.quant, {}, args.N, args.C, op);
}

template <bool kLayer> void norm_forward(Ctx& ctx, const NormForwardArgs& args, const char* op) {
    const int64_t N = args.N, C = args.C, elems = N * C;
    const QuantOut& quant = args.quant;
    const Dtype dtype = args.in.dtype;
    if (args.out || !quant.copies()) expect(args.out, dtype, elems, op);
    expect(args.in, dtype, elems, op);
    expect(args.weight, dtype, C, op);
    expect(args.rstd, Dtype::kFp32, N, op);
    if (kLayer) expect(args.mean, Dtype::kFp32, N, op);
    if (args.bias) expect(args.bias, dtype, C, op);
    if (args.residual) expect(args.residual, dtype, elems, op);
    if (args.residual_out) expect(args.residual_out, dtype, elems, op);
    if (args.stream) expect(args.stream, dtype, elems, op);
    CHECK(!args.stream || (!kLayer && !args.residual_out && !quant), "%s after a branch", op);
    CHECK(!args.residual || args.residual_out, "%s with a residual needs residual_out", op);
    CHECK(kLayer || !args.bias, "%s has no bias", op);
    if (!quant) {
        return dispatch(dtype, op, [&](auto type) {
            using T = decltype(type);
            norm_forward_rows<T, kLayer>(ctx, args, {}, C);
        });
    }
    expect_quant(quant, dtype, N, C, op);
    if (norm_forward_quantize<kLayer>(ctx, args)) return;
    const NormForward<bf16> a(args);
    const bool recorded = norm_forward_rows<bf16, kLayer>(ctx, a, amax_out(quant), C) && quant.only_records();
    if (recorded) return;
    if (args.out) quantize(ctx, {.quant = quant, .in = args.out, .N = N, .C = C});
    else quantize_recomputed<kLayer>(ctx, a, args, op);
}

}  // namespace

bool qk_norm_rows_forward(Ctx& ctx, const QkNormForwardArgs& args) {
    const int64_t C = args.HS, KS = args.KS;
    bool done = false;
    if (args.NH != 1 || args.NKV != 1) return done;
    dispatch(args.out.dtype, "qk_norm_forward", [&](auto type) {
        using T = decltype(type);
        NormForward<T> q({.out = args.out, .residual_out = {}, .mean = {}, .rstd = args.rstd, .in = args.in,
                          .residual = {}, .weight = args.q_weight, .bias = {}, .N = args.N, .C = C, .eps = args.eps});
        q.row_stride = static_cast<int>(args.width()), q.rstd_stride = 2;
        NormForward<T> k = q, v = q;
        k.out += C, k.in += C, k.rstd += 1, k.weight = args.k_weight.as<T>();
        // V is copied as a residual; its rstd is overwritten by that of Q.
        v.in += C + KS, v.residual_out = q.out + C + KS, v.out = nullptr;
        done = q.vectors_fit(C) && k.vectors_fit(KS) && norm_forward_shape(C / kVec<T>, kWarpRows).vecs > 0;
        if (!done) return;
        norm_forward_rows<T, false>(ctx, v, {}, KS);
        norm_forward_rows<T, false>(ctx, q, {}, C);
        norm_forward_rows<T, false>(ctx, k, {}, KS);
    });
    return done;
}

void layernorm_forward(Ctx& ctx, const NormForwardArgs& args) {
    norm_forward<true>(ctx, args, "layernorm_forward");
}
void rmsnorm_forward(Ctx& ctx, const NormForwardArgs& args) {
    norm_forward<false>(ctx, args, "rmsnorm_forward");
}

}  // namespace cuda
