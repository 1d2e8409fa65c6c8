// Mixtures of experts: activations times the experts' weights, their results in FP8, and biases.
#include "llmc/cuda/quantize_rows.cuh"
#include "llmc/cuda/swiglu.cuh"

namespace cuda {
namespace {

constexpr int kLanes = 32, kWarps = 8, kThreads = kLanes * kWarps;

// The row of a warp, of blocks of kWarps warps.
__device__ inline int64_t warp_row() { return int64_t{blockIdx.x} * kWarps + threadIdx.x / kLanes; }
unsigned warp_grid(int64_t rows) { return grid_size(ceil_div(rows, kWarps)); }

// The results of a warp, kWidth adjacent ones of each lane: T, and with kQuant (bf16, 8) also E4M3 in blocks of
// 1 x 128, each of 16 lanes. All lanes call its functions.
template <typename T, int kWidth, bool kQuant> class RowOutput {
public:
    __device__ RowOutput(T* out, const TileOut& quant) : out_(out), quant_(quant) {
        if (kQuant && quant.record) seen_ = quant.entry->amax_bits;
    }
    // Elements of row r of C from column c on; not valid: this lane has none.
    __device__ void put(const float (&x)[kWidth], int64_t r, int64_t C, int64_t c, bool valid) {
        if (valid && out_) store_floats<T, kWidth>(out_ + r * C + c, x);
        if constexpr (kQuant) quantize(valid ? pack<bf16>(x) : make_uint4(0, 0, 0, 0), r, C, c, valid);
    }
    __device__ void finish() const {
        if constexpr (!kQuant) return;
        if (quant_.record || quant_.first_nonfinite)
            AmaxOut{quant_.entry, quant_.first_nonfinite, quant_.event}.add(amax_, seen_);
        if (!quant_.counts) return;
        tally_.flush_to(quant_.counts);
        const uint32_t elems = __reduce_add_sync(0xffffffffu, elems_);
        if (threadIdx.x % kLanes == 0) atomicAdd(&quant_.counts->elems, static_cast<unsigned long long>(elems));
    }

private:
    __device__ void quantize(const uint4& x, int64_t r, int64_t C, int64_t c, bool valid) {
        const uint32_t mine = amax_pair(x);
        uint32_t amax = mine;
        amax_ = max_pair(amax_, mine);
#pragma unroll
        for (int lanes = 8; lanes > 0; lanes /= 2) amax = max_pair(amax, __shfl_xor_sync(0xffffffffu, amax, lanes));
        const BlockScale block = block_scale<Dtype::kE4m3>(larger_of_pair(amax));
        const uint2 codes = to_fp8x8<Dtype::kE4m3>(x, block.scale);
        if (quant_.counts) tally_.add_cast<Dtype::kE4m3>(x, mine, block.scale, codes);
        if (!valid) return;
        elems_ += kWidth;
        *reinterpret_cast<uint2*>(quant_.rowwise + r * C + c) = codes;
        if (c % kTile == 0) quant_.rowwise_scale_inv[c / kTile * quant_.N + r] = block.scale_inv;
    }

    T* out_;
    const TileOut& quant_;
    uint32_t amax_ = 0, seen_ = ~0u, elems_ = 0;
    CastTally tally_;
};

// See ExpertBias.
template <typename T> struct RowBias {
    const T* values;
    const int32_t* experts;
    int64_t first;

    __device__ int32_t expert(int32_t slot) const { return static_cast<int32_t>(experts[slot] - first); }
};

template <typename T, int kWidth> __device__ inline void add(float (&x)[kWidth], const Packed<T, kWidth>& packed) {
    float y[kWidth];
    packed.unpack_to(y);
#pragma unroll
    for (int i = 0; i < kWidth; i++) x[i] += y[i];
}

constexpr int kForwardRows = 8;   // of a warp
constexpr int kBlocksPerSm = 4;   // which leave 64 registers for a thread
// Whether the next elements are loaded before the latest results are stored: where registers suffice.
template <bool kQuant> constexpr bool kEarlyLoads = !kQuant;

// Math: see ExpertActivationForwardArgs.
// Source: the functor's.
// Traffic: in read, out or its codes written, once; biases once for adjacent rows of an expert.
// Requires: as gather_rows_kernel.
// Parallel: a warp per kLanes * kWidth columns of kForwardRows rows; it keeps the biases of the latest expert.
template <typename Function, typename T, int kWidth, bool kQuant>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    expert_activation_forward_kernel(T* out, const T* in, const float* weights, const int32_t* row_slots, int64_t R,
                                     int64_t F, RowBias<T> bias, const __grid_constant__ TileOut quant) {
    constexpr int kStep = kLanes * kWidth;
    wait_for_previous_kernels();
    const int64_t parts = (F + kStep - 1) / kStep, first = warp_row() / parts * kForwardRows;
    const int lane = threadIdx.x % kLanes;
    // int: with a remainder of 64 bits nvcc 13.0 stores 16 bytes as four words.
    const int64_t f = static_cast<int>(warp_row() % parts) * kStep + lane * kWidth;
    if (first >= R) return;
    const int32_t my_slot = lane < kForwardRows && first + lane < R ? row_slots[first + lane] : -1;
    const float my_weight = my_slot < 0 ? 0.0f : weights[my_slot];
    const int32_t my_expert = my_slot < 0 || !bias.values ? 0 : bias.expert(my_slot);
    RowOutput<T, kWidth, kQuant> output(out, quant);
    Packed<T, kWidth> gate_bias = {}, up_bias = {};
    int32_t of_bias = -1;   // its expert
    in += first * 2 * F + f;
    Packed<T, kWidth> next_gate = {}, next_up = {};
    const auto load_first_of = [&](uint32_t rows) {
        const T* const from = in + (__ffs(static_cast<int>(rows)) - 1) * 2 * F;
        if (rows && f < F) next_gate.load(from), next_up.load(from + F);
    };
    uint32_t rows = __ballot_sync(0xffffffffu, my_slot >= 0);   // bits: those to come
    load_first_of(rows);
    while (rows) {
        const int row = __ffs(static_cast<int>(rows)) - 1;
        rows &= rows - 1;
        float gate[kWidth], up[kWidth];
        next_gate.unpack_to(gate), next_up.unpack_to(up);
        if (kEarlyLoads<kQuant>) load_first_of(rows);
        const int32_t expert = __shfl_sync(0xffffffffu, my_expert, row);
        if (bias.values && expert != of_bias) {
            const T* const from = bias.values + expert * 2 * F + f;
            if (f < F) gate_bias.load(from), up_bias.load(from + F);
            of_bias = expert;
        }
        if (bias.values) add(gate, gate_bias), add(up, up_bias);
        const float weight = __shfl_sync(0xffffffffu, my_weight, row);
#pragma unroll
        for (int i = 0; i < kWidth; i++) gate[i] = Function::template value<T>(gate[i], up[i]) * weight;
        output.put(gate, first + row, F, f, f < F);
        if (!kEarlyLoads<kQuant>) load_first_of(rows);
    }
    output.finish();
}

// Elements of a row that a lane of the backward pass reads together, and their biases.
template <typename T, int kWidth> struct RowLoads {
    Packed<T, kWidth> gate, up, dout, gate_bias, up_bias;
};

// Math: the functor's gradients of gate and up for dout w; dw = sum of dout times the functor's value.
// Source: derivative of the forward.
// Traffic: in and dout read, din written, once; biases come from the caches.
// Requires: as gather_rows_kernel; din may alias in unless `split`.
// Parallel: a warp per row. split: where a block of 128 columns has results of both halves of din, a lane keeps only
// those of one half, and every pair is computed twice.
template <typename Function, typename T, int kWidth, bool kQuant>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    expert_activation_backward_kernel(T* din, float* dweights, const T* dout, const T* in, const float* weights,
                                      const int32_t* row_slots, int64_t R, int64_t F, RowBias<T> bias,
                                      const __grid_constant__ TileOut quant, bool split) {
    constexpr int kStep = kLanes * kWidth;
    wait_for_previous_kernels();
    const int64_t r = warp_row();
    const int lane = threadIdx.x % kLanes;
    if (r >= R) return;
    const int32_t slot = row_slots[r];
    if (slot < 0) return;
    const float weight = weights[slot];
    const T* const row_bias = bias.values ? bias.values + bias.expert(slot) * 2 * F : nullptr;
    RowOutput<T, kWidth, kQuant> output(din, quant);
    in += r * 2 * F, dout += r * F;
    float dweight = 0;
    const int64_t columns = kQuant && split ? 2 * F : F;
    const auto column = [&](int64_t c) { return c < F ? c : c - F; };   // of a half
    const auto load = [&](int64_t c) {
        const int64_t f = column(c);
        RowLoads<T, kWidth> loads = {};
        if (c >= columns) return loads;
        loads.gate.load(in + f), loads.up.load(in + F + f), loads.dout.load(dout + f);
        if (row_bias) loads.gate_bias.load(row_bias + f), loads.up_bias.load(row_bias + F + f);
        return loads;
    };
    RowLoads<T, kWidth> next = load(lane * kWidth);
    for (int64_t c = lane * kWidth; c - lane * kWidth < columns; c += kStep) {
        float gate[kWidth], up[kWidth], d[kWidth];
        next.gate.unpack_to(gate), next.up.unpack_to(up), next.dout.unpack_to(d);
        if (row_bias) add(gate, next.gate_bias), add(up, next.up_bias);
        if (kEarlyLoads<kQuant>) next = load(c + kStep);
        const int64_t f = column(c);
        const bool valid = c < columns;
#pragma unroll
        for (int i = 0; i < kWidth; i++) {
            const SigmoidPair s = sigmoid_pair<T>(Function::argument(gate[i]));
            const float value = Function::gradient(s, d[i] * weight, gate[i], up[i]);
            if (c < F) dweight += d[i] * value;
        }
        if (kQuant && split) {
#pragma unroll
            for (int i = 0; i < kWidth; i++) gate[i] = c < F ? gate[i] : up[i];
            output.put(gate, r, 2 * F, c, valid);
        } else {
            output.put(gate, r, 2 * F, f, valid);
            output.put(up, r, 2 * F, F + f, valid);
        }
        if (!kEarlyLoads<kQuant>) next = load(c + kStep);
    }
    output.finish();
    dweight = warp_sum(dweight);
    if (lane == 0) dweights[slot] = dweight;
}

// Math: dbias[e] += the sum of the rows of expert e.
// Source: plain column sums.
// Traffic: dout read once.
// Requires: kWidth > 1 needs C divisible by kWidth and aligned rows.
// Parallel: a block per expert (y) and kLanes * kWidth columns; each of its 8 warps sums every 8th row in registers,
//           then the 8 sums are added in order through shared memory.
template <typename Grad, typename T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    expert_bias_backward_kernel(Grad* dbias, const T* dout, const int32_t* offsets, int64_t C) {
    __shared__ float sums[kWarps][kLanes * kWidth];
    wait_for_previous_kernels();
    const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
    const int64_t left = int64_t{blockIdx.x} * kLanes * kWidth, column = left + lane * kWidth;
    const int64_t begin = offsets[blockIdx.y], end = offsets[blockIdx.y + 1];
    float sum[kWidth] = {};
    if (column < C) {
#pragma unroll 4
        for (int64_t r = begin + warp; r < end; r += kWarps) {
            float x[kWidth];
            load_floats<T, kWidth>(dout + r * C + column, x);
#pragma unroll
            for (int i = 0; i < kWidth; i++) sum[i] += x[i];
        }
    }
#pragma unroll
    for (int i = 0; i < kWidth; i++) sums[warp][lane * kWidth + i] = sum[i];
    __syncthreads();
    const int mine = threadIdx.x;   // kWidth <= kWarps, so that there are threads enough
    if (mine >= kLanes * kWidth || left + mine >= C) return;
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; w++) total += sums[w][mine];
    Grad& out = dbias[blockIdx.y * C + left + mine];
    out = from_float<Grad>(to_float(out) + total);
}

// Checks the QuantOut of a result (R, C).
TileOut rows_quant(const QuantOut& quant, const Tensor& in, int64_t R, int64_t C, const char* op) {
    if (!quant) return {};
    CHECK(in.dtype == Dtype::kBf16 && quant.rowwise && quant.rowwise.dtype == Dtype::kE4m3 && !quant.transposed
              && !quant.dbias && quant.granularity == Granularity::kBlock1x128, "%s: not rowwise codes", op);
    return tile_out(quant, {}, R, C, op);
}
// Calls f<functor, T, width, whether rows are quantized>, for rows of F elements in tensors of the working type.
template <typename F> void with_rows(Activation kind, Dtype dtype, const TileOut& quant, int64_t columns,
                                     std::initializer_list<const void*> tensors, F&& f) {
    const auto with = [&]<typename Function, typename T>(Function, T) {
        const bool vectors = vectorizable<T>(columns, tensors);
        if constexpr (std::is_same_v<T, bf16>) {
            CHECK(!quant.rowwise || vectors, "rows of experts are quantized in whole 16 bytes");
            if (quant.rowwise) return f.template operator()<Function, T, 8, true>();
        }
        with_width<T>(vectors,
                      [&](auto width) { f.template operator()<Function, T, decltype(width)::value, false>(); });
    };
    with_expert_activation(kind, [&](auto function) {
        dispatch(dtype, "rows of experts", [&](auto type) { with(function, type); });
    });
}

template <typename T> RowBias<T> row_bias(const ExpertBias& bias) {
    return {bias.values.as<T>(), bias.experts.as<int32_t>(), bias.first};
}
void expect_bias(const ExpertBias& bias, const Tensor& in, const Tensor& weights, int64_t F, const char* op) {
    if (!bias.values) return;
    expect(bias.values, in.dtype, bias.values.elems / (2 * F) * (2 * F), op);
    expect(bias.experts, Dtype::kInt32, weights.elems, op);
}

}  // namespace

void expert_activation_forward(Ctx& ctx, const ExpertActivationForwardArgs& args) {
    expect(args.in, args.in.dtype, args.R * 2 * args.F, "expert_activation_forward: in");
    if (!args.quant.copies() || args.out)
        expect(args.out, args.in.dtype, args.R * args.F, "expert_activation_forward: out");
    expect(args.weights, Dtype::kFp32, args.weights.elems, "expert_activation_forward: weights");
    expect_bias(args.bias, args.in, args.weights, args.F, "expert_activation_forward: bias");
    const TileOut quant = rows_quant(args.quant, args.in, args.R, args.F, "expert_activation_forward");
    with_rows(args.kind, args.in.dtype, quant, args.F, {args.out.data, args.in.data, args.bias.values.data},
              [&]<typename Function, typename T, int kWidth, bool kQuant>() {
        const int64_t warps = ceil_div(args.R, kForwardRows) * ceil_div(args.F, kLanes * kWidth);
        launch_early(ctx, expert_activation_forward_kernel<Function, T, kWidth, kQuant>, warp_grid(warps), kThreads,
                     0, args.out.as<T>(), args.in.as<T>(), args.weights.as<float>(), args.row_slots.as<int32_t>(),
                     args.R, args.F, row_bias<T>(args.bias), quant);
    });
}

void expert_activation_backward(Ctx& ctx, const ExpertActivationBackwardArgs& args) {
    for (const Tensor& t : {args.in, args.quant.copies() && !args.din ? args.in : args.din})
        expect(t, args.in.dtype, args.R * 2 * args.F, "expert_activation_backward: in");
    expect(args.dout, args.in.dtype, args.R * args.F, "expert_activation_backward: dout");
    for (const Tensor& t : {args.weights, args.dweights})
        expect(t, Dtype::kFp32, args.weights.elems, "expert_activation_backward: weights");
    expect_bias(args.bias, args.in, args.weights, args.F, "expert_activation_backward: bias");
    const auto launch = [&](const Tensor& din, const TileOut& quant, bool split) {
        with_rows(args.kind, args.in.dtype, quant, args.F,
                  {din.data, args.dout.data, args.in.data, args.bias.values.data},
                  [&]<typename Function, typename T, int kWidth, bool kQuant>() {
            launch_early(ctx, expert_activation_backward_kernel<Function, T, kWidth, kQuant>, warp_grid(args.R),
                         kThreads, 0, din.as<T>(), args.dweights.as<float>(), args.dout.as<T>(), args.in.as<T>(),
                         args.weights.as<float>(), args.row_slots.as<int32_t>(), args.R, args.F,
                         row_bias<T>(args.bias), quant, split);
        });
    };
    const TileOut quant = rows_quant(args.quant, args.in, args.R, 2 * args.F, "expert_activation_backward");
    const bool split = quant.rowwise && args.F % kTile != 0;   // din may alias in, so it follows
    launch(split ? Tensor{} : args.din, quant, split);
    if (split && args.din) launch(args.din, {}, false);
}

void expert_bias_backward(Ctx& ctx, const ExpertBiasBackwardArgs& args) {
    expect(args.dbias, args.dbias.dtype, args.E * args.C, "expert_bias_backward: dbias");
    expect(args.dout, args.dout.dtype, args.R * args.C, "expert_bias_backward: dout");
    expect(args.offsets, Dtype::kInt32, args.E + 1, "expert_bias_backward: offsets");
    dispatch(args.dout.dtype, "expert_bias_backward", [&](auto type) {
        using T = decltype(type);
        dispatch(args.dbias.dtype, "expert_bias_backward: dbias", [&](auto of_gradient) {
            using Grad = decltype(of_gradient);
            with_width<T>(vectorizable<T>(args.C, {args.dout.data}), [&](auto width) {
                const dim3 blocks(grid_size(ceil_div(args.C, int64_t{kLanes * width})), grid_size(args.E));
                launch_early(ctx, expert_bias_backward_kernel<Grad, T, width>, blocks, kThreads, 0,
                             args.dbias.as<Grad>(), args.dout.as<T>(), args.offsets.as<int32_t>(), args.C);
            });
        });
    });
}

}  // namespace cuda
