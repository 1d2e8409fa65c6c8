// gelu, swiglu, and the gradient of a bias. gelu and swiglu exist twice: as plain kernels, and as producers of
// quantised tiles; both take the arithmetic of one element from the same functions, so their bf16 bits agree.
#include "llmc/cuda/ptx.cuh"
#include "llmc/cuda/quantize.cuh"

namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kLanes = 32;

// 1 / (1 + e^-x). bf16 results forgive the fast exponential and reciprocal (errors near 2^-21).
constexpr float kLog2E = 1.4426950408889634f;
template <typename T> __device__ inline float sigmoid(float x) {
    if constexpr (std::is_same_v<T, bf16>) return reciprocal_approx(1.0f + exp2_approx(-kLog2E * x));
    else return 1.0f / (1.0f + expf(-x));
}
// 1 - sigmoid(x), without the cancellation where that shows.
template <typename T> __device__ inline float sigmoid_complement(float x, float sigmoid_of_x) {
    if constexpr (std::is_same_v<T, bf16>) return 1.0f - sigmoid_of_x;
    else return 1.0f / (1.0f + expf(x));
}

// gelu in its tanh form is x sigmoid(2 sqrt(2/pi) (x + 0.044715 x^3)), since 1 + tanh(u) = 2 sigmoid(2u).
constexpr float kGeluCubic = 0.044715f;
constexpr float kGeluSlope = 1.5957691216057308f;  // 2 sqrt(2/pi)
__device__ inline float gelu_argument(float x, float mul) {   // times mul, a constant
    return x * fmaf(mul * kGeluSlope * kGeluCubic, x * x, mul * kGeluSlope);
}
template <typename T> __device__ inline float gelu_sigmoid(float x) {
    if constexpr (std::is_same_v<T, bf16>) return reciprocal_approx(1.0f + exp2_approx(gelu_argument(x, -kLog2E)));
    else return sigmoid<T>(gelu_argument(x, 1.0f));
}
template <typename T> __device__ inline float gelu(float x) { return x * gelu_sigmoid<T>(x); }
template <typename T> __device__ inline float gelu_derivative(float x) {
    const float s = gelu_sigmoid<T>(x), complement = sigmoid_complement<T>(gelu_argument(x, 1.0f), s);
    const float slope = fmaf(3.0f * kGeluSlope * kGeluCubic, x * x, kGeluSlope);
    return fmaf(x * s * complement, slope, s);
}

template <typename T> __device__ inline float swiglu(float gate, float up) {
    return up * (gate * sigmoid<T>(gate));
}
// s = sigmoid(gate); dup = dout gate s; dgate = dout up s (1 + gate (1 - s)).
template <typename T> __device__ inline void swiglu_derivative(float dout, float& gate, float& up) {
    const float s = sigmoid<T>(gate), dup = dout * gate * s;
    gate = dout * up * s * (1.0f + gate * sigmoid_complement<T>(gate, s));
    up = dup;
}

// Math: out = gelu(in); see gelu above.
// Source: Hendrycks, Gimpel, arXiv 1606.08415.
// Traffic: in read, out written, once.
// Requires: kWidth > 1 needs aligned tensors; the odd elements at the end go one by one.
// Parallel: a thread owns 2 vectors, a block's width apart.
constexpr int kVecsPerThread = 2;
template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads) gelu_forward_kernel(T* out, const T* in, int64_t elems) {
    const int64_t vectors = elems / kWidth;
    const int64_t first = int64_t{blockIdx.x} * kThreads * kVecsPerThread + threadIdx.x;
    float value[kVecsPerThread][kWidth];
#pragma unroll
    for (int k = 0; k < kVecsPerThread; k++) {
        const int64_t v = first + k * kThreads;
        if (v < vectors) load_floats<T, kWidth>(in + v * kWidth, value[k]);
    }
#pragma unroll
    for (int k = 0; k < kVecsPerThread; k++) {
        const int64_t v = first + k * kThreads;
        if (v >= vectors) continue;
#pragma unroll
        for (int i = 0; i < kWidth; i++) value[k][i] = gelu<T>(value[k][i]);
        store_floats<T, kWidth>(out + v * kWidth, value[k]);
    }
    const int64_t rest = vectors * kWidth + threadIdx.x;
    if (blockIdx.x == 0 && rest < elems) out[rest] = from_float<T>(gelu<T>(to_float(in[rest])));
}

// Math: din = dout gelu'(in).
// Source: derivative of the forward.
// Traffic: dout, in read, din written, once.
// Requires: as gelu_forward_kernel; din may be in.
// Parallel: a thread owns 2 vectors, a block's width apart.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    gelu_backward_kernel(T* din, const T* dout, const T* in, int64_t elems) {
    const int64_t vectors = elems / kWidth;
    const int64_t first = int64_t{blockIdx.x} * kThreads * kVecsPerThread + threadIdx.x;
    float value[kVecsPerThread][kWidth], grad[kVecsPerThread][kWidth];
#pragma unroll
    for (int k = 0; k < kVecsPerThread; k++) {
        const int64_t v = first + k * kThreads;
        if (v < vectors) load_floats<T, kWidth>(in + v * kWidth, value[k]);
        if (v < vectors) load_floats<T, kWidth>(dout + v * kWidth, grad[k]);
    }
#pragma unroll
    for (int k = 0; k < kVecsPerThread; k++) {
        const int64_t v = first + k * kThreads;
        if (v >= vectors) continue;
#pragma unroll
        for (int i = 0; i < kWidth; i++) grad[k][i] *= gelu_derivative<T>(value[k][i]);
        store_floats<T, kWidth>(din + v * kWidth, grad[k]);
    }
    const int64_t rest = vectors * kWidth + threadIdx.x;
    if (blockIdx.x == 0 && rest < elems) {
        din[rest] = from_float<T>(to_float(dout[rest]) * gelu_derivative<T>(to_float(in[rest])));
    }
}

// Math: out = gate sigmoid(gate) up.
// Source: Shazeer, arXiv 2002.05202.
// Traffic: gate, up read, out written, once.
// Requires: kWidth > 1 needs F a multiple of it and aligned tensors.
// Parallel: a thread owns kWidth columns of kRows rows; a block kThreads * kWidth columns of them.
constexpr int kRows = 2;
template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    swiglu_forward_kernel(T* out, const T* in, int64_t N, int64_t F, int tiles) {
    const int64_t row = int64_t{blockIdx.x / tiles} * kRows;
    const int64_t column = (int64_t{blockIdx.x % tiles} * kThreads + threadIdx.x) * kWidth;
    if (column >= F) return;
    float gate[kRows][kWidth], up[kRows][kWidth];
#pragma unroll
    for (int r = 0; r < kRows; r++) {
        const T* from = in + (row + r) * 2 * F + column;
        if (row + r < N) load_floats<T, kWidth>(from, gate[r]);
        if (row + r < N) load_floats<T, kWidth>(from + F, up[r]);
    }
#pragma unroll
    for (int r = 0; r < kRows; r++) {
        if (row + r >= N) continue;
#pragma unroll
        for (int i = 0; i < kWidth; i++) up[r][i] = swiglu<T>(gate[r][i], up[r][i]);
        store_floats<T, kWidth>(out + (row + r) * F + column, up[r]);
    }
}

// Math: swiglu_derivative above.
// Source: derivative of the forward.
// Traffic: dout, gate, up read, dgate, dup written, once.
// Requires: as swiglu_forward_kernel; din may be in.
// Parallel: as swiglu_forward_kernel.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    swiglu_backward_kernel(T* din, const T* dout, const T* in, int64_t N, int64_t F, int tiles) {
    const int64_t row = int64_t{blockIdx.x / tiles} * kRows;
    const int64_t column = (int64_t{blockIdx.x % tiles} * kThreads + threadIdx.x) * kWidth;
    if (column >= F) return;
    float gate[kRows][kWidth], up[kRows][kWidth], grad[kRows][kWidth];
#pragma unroll
    for (int r = 0; r < kRows; r++) {
        const T* from = in + (row + r) * 2 * F + column;
        if (row + r < N) load_floats<T, kWidth>(from, gate[r]);
        if (row + r < N) load_floats<T, kWidth>(from + F, up[r]);
        if (row + r < N) load_floats<T, kWidth>(dout + (row + r) * F + column, grad[r]);
    }
#pragma unroll
    for (int r = 0; r < kRows; r++) {
        if (row + r >= N) continue;
#pragma unroll
        for (int i = 0; i < kWidth; i++) swiglu_derivative<T>(grad[r][i], gate[r][i], up[r][i]);
        T* to = din + (row + r) * 2 * F + column;
        store_floats<T, kWidth>(to, gate[r]);
        store_floats<T, kWidth>(to + F, up[r]);
    }
}

// Math: partial[p, c] = sum of dout[n, c] over the rows n of part p.
// Source: plain column sum.
// Traffic: N C elements read once; gridDim.y C floats written.
// Requires: kWidth = 16 bytes of T needs C a multiple of it and aligned rows, else kWidth = 1.
// Parallel: a block owns 32 * kWidth columns and every gridDim.y-th group of 8 rows; its 8 warps each add
// their own row of a group in registers, and the 8 sums are added through shared memory in order.
constexpr int kBiasWarps = 8;
template <typename T, int kWidth>
__global__ void __launch_bounds__(kLanes* kBiasWarps)
    bias_backward_kernel(float* partial, const T* dout, int64_t N, int64_t C) {
    __shared__ float shared[kBiasWarps][kWidth][kLanes];
    const int64_t column = (int64_t{blockIdx.x} * kLanes + threadIdx.x) * kWidth;
    float sum[kWidth] = {};
    if (column < C) {
        const int64_t step = int64_t{gridDim.y} * kBiasWarps;
#pragma unroll 4
        for (int64_t n = int64_t{blockIdx.y} * kBiasWarps + threadIdx.y; n < N; n += step) {
            float value[kWidth];
            load_floats<T, kWidth>(dout + n * C + column, value);
#pragma unroll
            for (int i = 0; i < kWidth; i++) sum[i] += value[i];
        }
    }
#pragma unroll
    for (int i = 0; i < kWidth; i++) shared[threadIdx.y][i][threadIdx.x] = sum[i];
    __syncthreads();
    // Thread y takes element y of each vector (kWidth <= kBiasWarps).
    if (threadIdx.y < kWidth && column < C) {
        float total = 0.0f;
#pragma unroll
        for (int warp = 0; warp < kBiasWarps; warp++) total += shared[warp][threadIdx.y][threadIdx.x];
        partial[blockIdx.y * C + column + threadIdx.y] = total;
    }
}

// ---- producers of quantised tiles (quantize.cuh): 8 columns of a row each

struct NoColumns {};

struct GeluProducer {
    static constexpr int kOutputs = 1, kBlocksPerSm = 4, kParts = 1;
    enum : unsigned { kStagedCasts = kActivationCasts & ~cast_bit(TileCast::kNone) };
    struct Raw {
        uint4 part[1];
    };
    using Columns = NoColumns;
    const bf16* in;
    int64_t F;

    __device__ void columns(int64_t, Columns&) const {}
    __device__ const bf16* part(const TileThread& t, int r, int) const { return t.at(in, r, F); }
    __device__ void compute(const Raw& raw, const Columns&, uint4 (&x)[1]) const {
        float value[8];
        unpack<bf16>(raw.part[0], value);
#pragma unroll
        for (int i = 0; i < 8; i++) value[i] = gelu<bf16>(value[i]);
        x[0] = pack<bf16>(value);
    }
};

struct GeluBackwardProducer {
    static constexpr int kOutputs = 1, kBlocksPerSm = 4;
    struct Raw {
        uint4 in, dout;
    };
    using Columns = NoColumns;
    const bf16 *dout, *in;
    int64_t F;

    __device__ void columns(int64_t, Columns&) const {}
    __device__ void load(const TileThread& t, int r, Raw& raw) const {
        raw.in = load_vec(t.at(in, r, F));
        raw.dout = load_vec(t.at(dout, r, F));
    }
    __device__ void compute(const Raw& raw, const Columns&, uint4 (&x)[1]) const {
        float value[8], grad[8];
        unpack<bf16>(raw.in, value);
        unpack<bf16>(raw.dout, grad);
#pragma unroll
        for (int i = 0; i < 8; i++) grad[i] *= gelu_derivative<bf16>(value[i]);
        x[0] = pack<bf16>(grad);
    }
};

struct SwigluProducer {
    static constexpr int kOutputs = 1, kBlocksPerSm = 4, kParts = 2;
    enum : unsigned { kStagedCasts = kActivationCasts & ~cast_bit(TileCast::kNone) };
    struct Raw {
        uint4 part[2];   // gate, up
    };
    using Columns = NoColumns;
    const bf16* in;
    int64_t F;

    __device__ void columns(int64_t, Columns&) const {}
    __device__ const bf16* part(const TileThread& t, int r, int p) const { return t.at(in + p * F, r, 2 * F); }
    __device__ void compute(const Raw& raw, const Columns&, uint4 (&x)[1]) const {
        float gate[8], up[8];
        unpack<bf16>(raw.part[0], gate);
        unpack<bf16>(raw.part[1], up);
#pragma unroll
        for (int i = 0; i < 8; i++) up[i] = swiglu<bf16>(gate[i], up[i]);
        x[0] = pack<bf16>(up);
    }
};

// Both halves of din = [dgate | dup] at once, or, where the border between the halves cuts blocks of 128 columns
// (outputs = 1), the half that a column belongs to, at the price of computing both twice.
template <int outputs> struct SwigluBackwardProducer {
    static constexpr int kOutputs = outputs, kBlocksPerSm = 2;
    struct Raw {
        uint4 gate, up, dout;
    };
    struct Columns {
        bool second;   // half, with one output
    };
    const bf16 *dout, *in;
    int64_t F;

    __device__ void columns(int64_t column, Columns& to) const { to.second = outputs == 1 && column >= F; }
    __device__ void load(const TileThread& t, int r, Raw& raw) const {
        const int64_t left = outputs == 1 && t.column() >= F ? F : 0;
        raw.gate = load_vec(t.at(in, r, 2 * F) - left);
        raw.up = load_vec(t.at(in, r, 2 * F) - left + F);
        raw.dout = load_vec(t.at(dout, r, F) - left);
    }
    __device__ void compute(const Raw& raw, const Columns& half, uint4 (&x)[outputs]) const {
        float gate[8], up[8], grad[8];
        unpack<bf16>(raw.gate, gate);
        unpack<bf16>(raw.up, up);
        unpack<bf16>(raw.dout, grad);
#pragma unroll
        for (int i = 0; i < 8; i++) swiglu_derivative<bf16>(grad[i], gate[i], up[i]);
        if constexpr (outputs == 2) x[0] = pack<bf16>(gate), x[1] = pack<bf16>(up);
        else x[0] = half.second ? pack<bf16>(up) : pack<bf16>(gate);
    }
};

// ---- launchers

// What the tiles read, 16 bytes at a time.
void check_quant_input(const Tensor& in, int64_t elems, const char* op) {
    expect(in, Dtype::kBf16, elems, op);
    CHECK(reinterpret_cast<uintptr_t>(in.data) % 16 == 0, "%s: quantised from tensors off 16 bytes", op);
}

void check_shapes(const Tensor& wide, const Tensor& narrow, const Tensor& in, int64_t wide_elems,
                  int64_t narrow_elems, const char* op) {
    expect(in, in.dtype, wide_elems, op);
    expect(wide, in.dtype, wide_elems, op);
    expect(narrow, in.dtype, narrow_elems, op);
}

unsigned flat_blocks(int64_t elems, int width) {
    return grid_size(ceil_div(std::max<int64_t>(elems / width, 1), kThreads * kVecsPerThread));
}

}  // namespace

void gelu_forward(Ctx& ctx, const ActivationForwardArgs& args) {
    const int64_t elems = args.N * args.F;
    if (args.quant) {
        check_quant_input(args.in, elems, "gelu_forward");
        return quantize_tiles(ctx, GeluProducer{args.in.as<bf16>(), args.F}, args.quant, args.out, args.N, args.F,
                              "gelu_forward");
    }
    check_shapes(args.in, args.out, args.in, elems, elems, "gelu_forward");
    dispatch(args.in.dtype, "gelu_forward", [&](auto type) {
        using T = decltype(type);
        T *out = args.out.as<T>(), *in = args.in.as<T>();
        with_width<T>(vectorizable<T>(0, {out, in}), [&](auto width) {
            constexpr int kWidth = decltype(width)::value;
            gelu_forward_kernel<T, kWidth>
                <<<flat_blocks(elems, kWidth), kThreads, 0, stream_of(ctx)>>>(out, in, elems);
            CHECK_LAUNCH("gelu_forward_kernel");
        });
    });
}

void gelu_backward(Ctx& ctx, const ActivationBackwardArgs& args) {
    const int64_t elems = args.N * args.F;
    if (args.quant) {
        check_quant_input(args.in, elems, "gelu_backward");
        check_quant_input(args.dout, elems, "gelu_backward");
        return quantize_tiles(ctx, GeluBackwardProducer{args.dout.as<bf16>(), args.in.as<bf16>(), args.F}, args.quant,
                              args.din, args.N, args.F, "gelu_backward");
    }
    check_shapes(args.din, args.dout, args.in, elems, elems, "gelu_backward");
    dispatch(args.in.dtype, "gelu_backward", [&](auto type) {
        using T = decltype(type);
        T *din = args.din.as<T>(), *dout = args.dout.as<T>(), *in = args.in.as<T>();
        with_width<T>(vectorizable<T>(0, {din, dout, in}), [&](auto width) {
            constexpr int kWidth = decltype(width)::value;
            gelu_backward_kernel<T, kWidth>
                <<<flat_blocks(elems, kWidth), kThreads, 0, stream_of(ctx)>>>(din, dout, in, elems);
            CHECK_LAUNCH("gelu_backward_kernel");
        });
    });
}

void swiglu_forward(Ctx& ctx, const ActivationForwardArgs& args) {
    const int64_t N = args.N, F = args.F;
    if (args.quant) {
        check_quant_input(args.in, N * 2 * F, "swiglu_forward");
        return quantize_tiles(ctx, SwigluProducer{args.in.as<bf16>(), F}, args.quant, args.out, N, F,
                              "swiglu_forward");
    }
    check_shapes(args.in, args.out, args.in, N * 2 * F, N * F, "swiglu_forward");
    dispatch(args.in.dtype, "swiglu_forward", [&](auto type) {
        using T = decltype(type);
        T *out = args.out.as<T>(), *in = args.in.as<T>();
        with_width<T>(vectorizable<T>(F, {out, in}), [&](auto width) {
            constexpr int kWidth = decltype(width)::value;
            const int64_t tiles = ceil_div(F, kThreads * kWidth);
            swiglu_forward_kernel<T, kWidth>
                <<<grid_size(ceil_div(N, kRows) * tiles), kThreads, 0, stream_of(ctx)>>>(
                    out, in, N, F, static_cast<int>(tiles));
            CHECK_LAUNCH("swiglu_forward_kernel");
        });
    });
}

// Whether nothing is left to do: where the halves of din share a block of 128 columns, the tiles of one half are read
// while others are written, so the bf16 copy, perhaps in place, waits for the plain kernel.
static bool quantised_swiglu_backward(Ctx& ctx, const ActivationBackwardArgs& args) {
    const int64_t N = args.N, F = args.F;
    check_quant_input(args.in, N * 2 * F, "swiglu_backward");
    check_quant_input(args.dout, N * F, "swiglu_backward");
    const bf16 *dout = args.dout.as<bf16>(), *in = args.in.as<bf16>();
    if (args.quant.granularity != Granularity::kBlock1x128 || !args.quant.copies() || F % kTile == 0) {
        quantize_tiles(ctx, SwigluBackwardProducer<2>{dout, in, F}, args.quant, args.din, N, 2 * F, "swiglu_backward");
        return true;
    }
    constexpr unsigned kCasts = cast_bit(TileCast::kBlock1x128);
    quantize_tiles<kCasts>(ctx, SwigluBackwardProducer<1>{dout, in, F}, args.quant, {}, N, 2 * F, "swiglu_backward");
    return !args.din;
}

void swiglu_backward(Ctx& ctx, const ActivationBackwardArgs& args) {
    const int64_t N = args.N, F = args.F;
    if (args.quant && quantised_swiglu_backward(ctx, args)) return;
    check_shapes(args.din, args.dout, args.in, N * 2 * F, N * F, "swiglu_backward");
    dispatch(args.in.dtype, "swiglu_backward", [&](auto type) {
        using T = decltype(type);
        T *din = args.din.as<T>(), *dout = args.dout.as<T>(), *in = args.in.as<T>();
        with_width<T>(vectorizable<T>(F, {din, dout, in}), [&](auto width) {
            constexpr int kWidth = decltype(width)::value;
            const int64_t tiles = ceil_div(F, kThreads * kWidth);
            swiglu_backward_kernel<T, kWidth>
                <<<grid_size(ceil_div(N, kRows) * tiles), kThreads, 0, stream_of(ctx)>>>(
                    din, dout, in, N, F, static_cast<int>(tiles));
            CHECK_LAUNCH("swiglu_backward_kernel");
        });
    });
}

void bias_backward(Ctx& ctx, const BiasBackwardArgs& args) {
    const int64_t N = args.N, C = args.C;
    expect(args.dbias, args.dbias.dtype, C, "bias_backward: dbias");
    expect_at_least(args.scratch, Dtype::kFp32, kPartialRows * C, "bias_backward: scratch");
    expect(args.dout, args.dout.dtype, N * C, "bias_backward: dout");
    float* partial = args.scratch.as<float>();
    int64_t parts = 0;
    dispatch(args.dout.dtype, "bias_backward", [&](auto type) {
        using T = decltype(type);
        with_width<T>(vectorizable<T>(C, {args.dout.data}), [&](auto width) {
            constexpr int kWidth = decltype(width)::value;
            const int64_t tiles = ceil_div(C, kLanes * kWidth);
            // About 8 blocks of 256 threads a multiprocessor.
            parts = std::min(ceil_div(int64_t{8} * ctx.sm_count, tiles), ceil_div(N, kBiasWarps));
            parts = std::min(parts, kPartialRows);
            dim3 grid(grid_size(tiles), grid_size(parts));
            bias_backward_kernel<T, kWidth><<<grid, dim3(kLanes, kBiasWarps), 0, stream_of(ctx)>>>(
                partial, args.dout.as<T>(), N, C);
            CHECK_LAUNCH("bias_backward_kernel");
        });
    });
    add_column_sums(ctx, {args.dbias, partial}, {}, parts, C);
}

}  // namespace cuda
