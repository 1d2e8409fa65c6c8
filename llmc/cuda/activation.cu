// Activation functions and bias gradients. Each activation has a plain kernel and a producer for quantize_tiles; both
// call the same functor, so their bf16 bits agree.
#include "llmc/cuda/quantize.cuh"
#include "llmc/cuda/swiglu.cuh"

namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kLanes = 32;

// gelu in its tanh form is x sigmoid(2 sqrt(2/pi) (x + 0.044715 x^3)), since 1 + tanh(u) = 2 sigmoid(2u).
constexpr float kGeluCubic = 0.044715f;
constexpr float kGeluSlope = 1.5957691216057308f;  // 2 sqrt(2/pi)
__device__ inline float gelu_argument(float x, float mul) {   // mul times the argument; mul: a constant
    return x * fmaf(mul * kGeluSlope * kGeluCubic, x * x, mul * kGeluSlope);
}
template <typename T> __device__ inline float gelu_sigmoid(float x) {
    if constexpr (std::is_same_v<T, bf16>) return reciprocal_approx(1.0f + exp2_approx(gelu_argument(x, -kLog2E)));
    else return sigmoid<T>(gelu_argument(x, 1.0f));
}

// ---- one functor per activation function; float arithmetic for results of type T. Plain: value(x) and derivative(x).
// Gated: value(gate, up) and gradient(dout, gate, up), which overwrites gate and up with their gradients.

// Source: Hendrycks, Gimpel, arXiv 1606.08415.
struct Gelu {
    template <typename T> __device__ static float value(float x) { return x * gelu_sigmoid<T>(x); }
    template <typename T> __device__ static float derivative(float x) {
        const float s = gelu_sigmoid<T>(x), complement = sigmoid_complement<T>(gelu_argument(x, 1.0f), s);
        const float slope = fmaf(3.0f * kGeluSlope * kGeluCubic, x * x, kGeluSlope);
        return fmaf(x * s * complement, slope, s);
    }
};

// Source: Shazeer, arXiv 2002.05202.
struct Geglu {
    template <typename T> __device__ static float value(float gate, float up) { return up * Gelu::value<T>(gate); }
    template <typename T> __device__ static void gradient(float dout, float& gate, float& up) {
        const float dup = dout * Gelu::value<T>(gate);
        gate = dout * up * Gelu::derivative<T>(gate);
        up = dup;
    }
};

// Source: So et al., arXiv 2109.08668. NaN propagates.
struct Relu2 {
    __device__ static float relu(float x) { return x <= 0.0f ? 0.0f : x; }
    template <typename T> __device__ static float value(float x) { return relu(x) * relu(x); }
    template <typename T> __device__ static float derivative(float x) { return 2.0f * relu(x); }
};

template <typename Call> void with_activation(Activation kind, Call&& call) {
    switch (kind) {
        case Activation::kGelu: return call(Gelu{});
        case Activation::kSwiglu: return call(Swiglu{});
        case Activation::kRelu2: return call(Relu2{});
        case Activation::kGeglu: return call(Geglu{});
        case Activation::kClampedSwiglu: return call(ClampedSwiglu{});
    }
}
template <typename F>
constexpr bool is_gated = requires { F::template value<float>(0.0f, 0.0f); };

// Math: out = F(in).
// Source: the functor's.
// Traffic: in read, out written, once.
// Requires: kWidth > 1 needs aligned tensors; the remaining elements are processed one by one.
// Parallel: a thread owns 2 vectors, kThreads vectors apart.
constexpr int kVecsPerThread = 2;
template <typename F, typename T, int kWidth>
__global__ void __launch_bounds__(kThreads) activation_forward_kernel(T* out, const T* in, int64_t elems) {
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
        for (int i = 0; i < kWidth; i++) value[k][i] = F::template value<T>(value[k][i]);
        store_floats<T, kWidth>(out + v * kWidth, value[k]);
    }
    const int64_t rest = vectors * kWidth + threadIdx.x;
    if (blockIdx.x == 0 && rest < elems) out[rest] = from_float<T>(F::template value<T>(to_float(in[rest])));
}

// Math: din = dout F'(in).
// Source: derivative of the forward.
// Traffic: dout, in read, din written, once.
// Requires: as activation_forward_kernel; din may alias in.
// Parallel: as activation_forward_kernel.
template <typename F, typename T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    activation_backward_kernel(T* din, const T* dout, const T* in, int64_t elems) {
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
        for (int i = 0; i < kWidth; i++) grad[k][i] *= F::template derivative<T>(value[k][i]);
        store_floats<T, kWidth>(din + v * kWidth, grad[k]);
    }
    const int64_t rest = vectors * kWidth + threadIdx.x;
    if (blockIdx.x == 0 && rest < elems) {
        din[rest] = from_float<T>(to_float(dout[rest]) * F::template derivative<T>(to_float(in[rest])));
    }
}

// Math: out = F(gate, up), where row = [gate | up].
// Source: the functor's.
// Traffic: gate, up read, out written, once.
// Requires: kWidth > 1 needs a width divisible by kWidth and aligned tensors.
// Parallel: a thread owns kWidth columns of kRows rows; a block owns kThreads * kWidth columns of the same rows.
constexpr int kRows = 2;
template <typename F, typename T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    gated_forward_kernel(T* out, const T* in, int64_t N, int64_t width, int tiles) {
    const int64_t row = int64_t{blockIdx.x / tiles} * kRows;
    const int64_t column = (int64_t{blockIdx.x % tiles} * kThreads + threadIdx.x) * kWidth;
    if (column >= width) return;
    float gate[kRows][kWidth], up[kRows][kWidth];
#pragma unroll
    for (int r = 0; r < kRows; r++) {
        const T* from = in + (row + r) * 2 * width + column;
        if (row + r < N) load_floats<T, kWidth>(from, gate[r]);
        if (row + r < N) load_floats<T, kWidth>(from + width, up[r]);
    }
#pragma unroll
    for (int r = 0; r < kRows; r++) {
        if (row + r >= N) continue;
#pragma unroll
        for (int i = 0; i < kWidth; i++) up[r][i] = F::template value<T>(gate[r][i], up[r][i]);
        store_floats<T, kWidth>(out + (row + r) * width + column, up[r]);
    }
}

// Math: the gradients of gate and up.
// Source: derivative of the forward.
// Traffic: dout, gate, up read, dgate, dup written, once.
// Requires: as gated_forward_kernel; din may alias in.
// Parallel: as gated_forward_kernel.
template <typename F, typename T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    gated_backward_kernel(T* din, const T* dout, const T* in, int64_t N, int64_t width, int tiles) {
    const int64_t row = int64_t{blockIdx.x / tiles} * kRows;
    const int64_t column = (int64_t{blockIdx.x % tiles} * kThreads + threadIdx.x) * kWidth;
    if (column >= width) return;
    float gate[kRows][kWidth], up[kRows][kWidth], grad[kRows][kWidth];
#pragma unroll
    for (int r = 0; r < kRows; r++) {
        const T* from = in + (row + r) * 2 * width + column;
        if (row + r < N) load_floats<T, kWidth>(from, gate[r]);
        if (row + r < N) load_floats<T, kWidth>(from + width, up[r]);
        if (row + r < N) load_floats<T, kWidth>(dout + (row + r) * width + column, grad[r]);
    }
#pragma unroll
    for (int r = 0; r < kRows; r++) {
        if (row + r >= N) continue;
#pragma unroll
        for (int i = 0; i < kWidth; i++) F::template gradient<T>(grad[r][i], gate[r][i], up[r][i]);
        T* to = din + (row + r) * 2 * width + column;
        store_floats<T, kWidth>(to, gate[r]);
        store_floats<T, kWidth>(to + width, up[r]);
    }
}

// Math: partial[p, c] = sum of dout[n, c] over the rows n of partition p.
// Source: plain column sum.
// Traffic: N C elements read once; gridDim.y C floats written.
// Requires: kWidth = 16 bytes of T needs C divisible by kWidth and aligned rows, else kWidth = 1.
// Parallel: a block owns 32 * kWidth columns and every gridDim.y-th group of 8 rows. Each of its 8 warps sums one row
// of every group in registers; then the 8 sums are added in order through shared memory.
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
    // Thread y sums element y of each vector (kWidth <= kBiasWarps).
    if (threadIdx.y < kWidth && column < C) {
        float total = 0.0f;
#pragma unroll
        for (int warp = 0; warp < kBiasWarps; warp++) total += shared[warp][threadIdx.y][threadIdx.x];
        partial[blockIdx.y * C + column + threadIdx.y] = total;
    }
}

// ---- producers for quantize_tiles (quantize.cuh): 8 columns of a row each

template <typename F> struct Producer {
    static constexpr int kOutputs = 1, kBlocksPerSm = 4;
    using Raw = uint4;
    struct Columns {};
    const bf16* in;
    int64_t width;

    __device__ void columns(int64_t, Columns&) const {}
    __device__ void load(const TileThread& t, int r, Raw& raw) const { raw = load_vec(t.at(in, r, width)); }
    __device__ void compute(const Raw& raw, const Columns&, uint4 (&x)[1]) const {
        float value[8];
        unpack<bf16>(raw, value);
#pragma unroll
        for (int i = 0; i < 8; i++) value[i] = F::template value<bf16>(value[i]);
        x[0] = pack<bf16>(value);
    }
};

template <typename F> struct BackwardProducer {
    static constexpr int kOutputs = 1, kBlocksPerSm = 4;
    struct Raw {
        uint4 in, dout;
    };
    struct Columns {};
    const bf16 *dout, *in;
    int64_t width;

    __device__ void columns(int64_t, Columns&) const {}
    __device__ void load(const TileThread& t, int r, Raw& raw) const {
        raw.in = load_vec(t.at(in, r, width));
        raw.dout = load_vec(t.at(dout, r, width));
    }
    __device__ void compute(const Raw& raw, const Columns&, uint4 (&x)[1]) const {
        float value[8], grad[8];
        unpack<bf16>(raw.in, value);
        unpack<bf16>(raw.dout, grad);
#pragma unroll
        for (int i = 0; i < 8; i++) grad[i] *= F::template derivative<bf16>(value[i]);
        x[0] = pack<bf16>(grad);
    }
};

template <typename F> struct GatedProducer {
    static constexpr int kOutputs = 1, kBlocksPerSm = 4;
    struct Raw {
        uint4 gate, up;
    };
    struct Columns {};
    const bf16* in;
    int64_t width;

    __device__ void columns(int64_t, Columns&) const {}
    __device__ void load(const TileThread& t, int r, Raw& raw) const {
        raw.gate = load_vec(t.at(in, r, 2 * width)), raw.up = load_vec(t.at(in + width, r, 2 * width));
    }
    __device__ void compute(const Raw& raw, const Columns&, uint4 (&x)[1]) const {
        float gate[8], up[8];
        unpack<bf16>(raw.gate, gate);
        unpack<bf16>(raw.up, up);
#pragma unroll
        for (int i = 0; i < 8; i++) up[i] = F::template value<bf16>(gate[i], up[i]);
        x[0] = pack<bf16>(up);
    }
};

// outputs = 2 computes both halves of din = [dgate | dup]. outputs = 1, for halves that share a block of 128 columns,
// computes only the half that the column belongs to, so every pair is computed twice.
template <typename F, int outputs> struct GatedBackwardProducer {
    static constexpr int kOutputs = outputs, kBlocksPerSm = 2;
    struct Raw {
        uint4 gate, up, dout;
    };
    struct Columns {
        bool second;   // with one output: the column belongs to dup
    };
    const bf16 *dout, *in;
    int64_t width;

    __device__ void columns(int64_t column, Columns& to) const { to.second = outputs == 1 && column >= width; }
    __device__ void load(const TileThread& t, int r, Raw& raw) const {
        const int64_t left = outputs == 1 && t.column() >= width ? width : 0;
        raw.gate = load_vec(t.at(in, r, 2 * width) - left), raw.up = load_vec(t.at(in, r, 2 * width) - left + width);
        raw.dout = load_vec(t.at(dout, r, width) - left);
    }
    __device__ void compute(const Raw& raw, const Columns& half, uint4 (&x)[outputs]) const {
        float gate[8], up[8], grad[8];
        unpack<bf16>(raw.gate, gate);
        unpack<bf16>(raw.up, up);
        unpack<bf16>(raw.dout, grad);
#pragma unroll
        for (int i = 0; i < 8; i++) F::template gradient<bf16>(grad[i], gate[i], up[i]);
        if constexpr (outputs == 2) x[0] = pack<bf16>(gate), x[1] = pack<bf16>(up);
        else x[0] = half.second ? pack<bf16>(up) : pack<bf16>(gate);
    }
};

// ---- launchers

// The tiles read 16 bytes at a time.
void check_quant_input(const Tensor& in, int64_t elems, const char* op) {
    expect(in, Dtype::kBf16, elems, op);
    expect_aligned(in, op);
}

template <typename F> void forward(Ctx& ctx, const ActivationForwardArgs& args) {
    constexpr const char* kOp = "activation_forward";
    const int64_t N = args.N, columns = args.F, elems = N * columns, in_elems = is_gated<F> ? 2 * elems : elems;
    if (args.quant) {
        using P = std::conditional_t<is_gated<F>, GatedProducer<F>, Producer<F>>;
        check_quant_input(args.in, in_elems, kOp);
        return quantize_tiles(ctx, P{args.in.as<bf16>(), columns}, args.quant, args.out, N, columns, kOp);
    }
    expect(args.in, args.in.dtype, in_elems, kOp);
    expect(args.out, args.in.dtype, elems, kOp);
    dispatch(args.in.dtype, kOp, [&](auto type) {
        using T = decltype(type);
        T *out = args.out.as<T>(), *in = args.in.as<T>();
        with_width<T>(vectorizable<T>(is_gated<F> ? columns : 0, {out, in}), [&](auto width) {
            constexpr int kWidth = decltype(width)::value;
            if constexpr (is_gated<F>) {
                const int64_t tiles = ceil_div(columns, kThreads * kWidth);
                const unsigned blocks = grid_size(ceil_div(N, kRows) * tiles);
                launch_kernel(ctx, gated_forward_kernel<F, T, kWidth>, blocks, kThreads, out, in, N, columns, tiles);
            } else {
                const unsigned blocks = flat_blocks(elems, kWidth, kThreads * kVecsPerThread);
                launch_kernel(ctx, activation_forward_kernel<F, T, kWidth>, blocks, kThreads, out, in, elems);
            }
        });
    });
}

// Returns whether din is complete. Where the halves of din share a block of 128 columns, tiles of one half are read
// while others are written, so the plain kernel writes the bf16 din (which may alias in) afterwards.
template <typename F> bool quantized_backward(Ctx& ctx, const ActivationBackwardArgs& args, const char* op) {
    const int64_t N = args.N, columns = args.F;
    const bf16 *dout = args.dout.as<bf16>(), *in = args.in.as<bf16>();
    check_quant_input(args.in, (is_gated<F> ? 2 : 1) * N * columns, op);
    check_quant_input(args.dout, N * columns, op);
    if constexpr (!is_gated<F>) {
        quantize_tiles(ctx, BackwardProducer<F>{dout, in, columns}, args.quant, args.din, N, columns, op);
    } else if (args.quant.granularity != Granularity::kBlock1x128 || !args.quant.copies() || columns % kTile == 0) {
        quantize_tiles(ctx, GatedBackwardProducer<F, 2>{dout, in, columns}, args.quant, args.din, N, 2 * columns, op);
    } else {
        constexpr unsigned kCasts = cast_bit(TileCast::kBlock1x128);
        quantize_tiles<kCasts>(ctx, GatedBackwardProducer<F, 1>{dout, in, columns}, args.quant, {}, N, 2 * columns, op);
        return !args.din;
    }
    return true;
}

template <typename F> void backward(Ctx& ctx, const ActivationBackwardArgs& args) {
    constexpr const char* kOp = "activation_backward";
    const int64_t N = args.N, columns = args.F, elems = N * columns, in_elems = is_gated<F> ? 2 * elems : elems;
    if (args.quant && quantized_backward<F>(ctx, args, kOp)) return;
    expect(args.in, args.in.dtype, in_elems, kOp);
    expect(args.din, args.in.dtype, in_elems, kOp);
    expect(args.dout, args.in.dtype, elems, kOp);
    dispatch(args.in.dtype, kOp, [&](auto type) {
        using T = decltype(type);
        T *din = args.din.as<T>(), *dout = args.dout.as<T>(), *in = args.in.as<T>();
        with_width<T>(vectorizable<T>(is_gated<F> ? columns : 0, {din, dout, in}), [&](auto width) {
            constexpr int kWidth = decltype(width)::value;
            if constexpr (is_gated<F>) {
                const int64_t tiles = ceil_div(columns, kThreads * kWidth);
                const unsigned blocks = grid_size(ceil_div(N, kRows) * tiles);
                launch_kernel(ctx, gated_backward_kernel<F, T, kWidth>, blocks, kThreads, din, dout, in, N, columns,
                              tiles);
            } else {
                const unsigned blocks = flat_blocks(elems, kWidth, kThreads * kVecsPerThread);
                launch_kernel(ctx, activation_backward_kernel<F, T, kWidth>, blocks, kThreads, din, dout, in, elems);
            }
        });
    });
}

}  // namespace

void activation_forward(Ctx& ctx, const ActivationForwardArgs& args) {
    with_activation(args.kind, [&](auto function) { forward<decltype(function)>(ctx, args); });
}

void activation_backward(Ctx& ctx, const ActivationBackwardArgs& args) {
    with_activation(args.kind, [&](auto function) { backward<decltype(function)>(ctx, args); });
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
            // About 8 blocks of 256 threads per multiprocessor.
            parts = std::min(ceil_div(int64_t{8} * ctx.sm_count, tiles), ceil_div(N, kBiasWarps));
            parts = std::min(parts, kPartialRows);
            launch_kernel(ctx, bias_backward_kernel<T, kWidth>, dim3(grid_size(tiles), grid_size(parts)),
                          dim3(kLanes, kBiasWarps), partial, args.dout.as<T>(), N, C);
        });
    });
    add_column_sums(ctx, {args.dbias, partial}, {}, parts, C);
}

}  // namespace cuda
