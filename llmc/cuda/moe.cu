// Mixtures of experts: permutation of rows, biases, and activations times the experts' weights.
#include "llmc/cuda/quantize_rows.cuh"
#include "llmc/cuda/swiglu.cuh"

namespace cuda {
namespace {

constexpr int kLanes = 32, kWarps = 8, kThreads = kLanes * kWarps;

// The row of a warp, of blocks of kWarps warps.
__device__ inline int64_t warp_row() { return int64_t{blockIdx.x} * kWarps + threadIdx.x / kLanes; }
unsigned warp_grid(int64_t rows) { return grid_size(ceil_div(rows, kWarps)); }

// ---- rows of experts; a warp per row, kWidth elements per access

constexpr int kGatherLoads = 4;   // that a lane has in flight

// The `blocks` scales of rows in FP8: one of each row, then the next.
struct GatheredScales {
    float* out;
    const float* in;
    int blocks;
    int64_t parts;
};

// Math: see GatherRowsArgs.
// Source: none.
// Traffic: in read, out written, once.
// Requires: kWidth > 1 needs aligned rows; K <= 32.
// Parallel: a warp per kGatherLoads loads of a row of in.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    gather_rows_kernel(T* out, const T* in, const int32_t* slot_rows, int64_t R, int64_t N, int K, int64_t C,
                       GatheredScales scales) {
    constexpr int kStep = kLanes * kWidth;
    wait_for_previous_kernels();
    const int64_t parts = (C + kGatherLoads * kStep - 1) / (kGatherLoads * kStep), n = warp_row() / parts;
    const int lane = threadIdx.x % kLanes;
    const int64_t begin = warp_row() % parts * kGatherLoads * kStep, first = begin + lane * kWidth;
    if (n >= N) return;
    const int64_t of_part = N / scales.parts;
    const int32_t mine = lane < K ? slot_rows[n * K + lane] : 0;
    in += n * C;
    Packed<T, kWidth> part[kGatherLoads];
#pragma unroll
    for (int p = 0; p < kGatherLoads; p++)
        if (first + p * kStep < C) part[p].load(in + first + p * kStep);
    for (int k = 0; k < K; k++) {
        const int64_t row = __shfl_sync(0xffffffffu, mine, k);
        if (row < 0) continue;
        T* const to = out + row * C + first;
#pragma unroll
        for (int p = 0; p < kGatherLoads; p++)
            if (first + p * kStep < C)
                *reinterpret_cast<typename Packed<T, kWidth>::Raw*>(to + p * kStep) = part[p].raw;
        for (int b = lane; begin == 0 && b < scales.blocks; b += kLanes)
            scales.out[b * R + row] = scales.in[(n / of_part * scales.blocks + b) * of_part + n % of_part];
    }
}

// kWidth elements of a row as they are in memory, read once.
template <typename T, int kWidth> class RowPart {
public:
    __device__ void load(const T* p) {
#pragma unroll
        for (int i = 0; i < kPieces; i++) {
            if constexpr (kPiece == kVec<T>) piece_[i].raw = load_vec_streaming(p + i * kPiece);
            else piece_[i].load(p + i * kPiece);
        }
    }
    __device__ void add_to(float (&sum)[kWidth]) const {
#pragma unroll
        for (int i = 0; i < kPieces; i++) {
            float value[kPiece];
            piece_[i].unpack_to(value);
#pragma unroll
            for (int j = 0; j < kPiece; j++) sum[i * kPiece + j] += value[j];
        }
    }

private:
    static constexpr int kPiece = std::min(kWidth, kVec<T>), kPieces = kWidth / kPiece;
    Packed<T, kPiece> piece_[kPieces];
};

// A row to be added to its token's sum: its first element, and how many levels of the tree are closed before.
struct CombinedRow {
    int64_t begin;
    int32_t closes;
};
// Writes the rows that the warp's token n has, in order, and returns their number; ends with a barrier of the warp.
__device__ inline int list_rows(CombinedRow* rows, const int32_t* slot_rows, const int32_t* experts, int64_t n,
                                int64_t N, int K, int64_t C, int of_group) {
    const int lane = threadIdx.x % kLanes;
    int32_t row = -1, group = 0;
    if (lane < K) row = experts ? slot_rows[n * K + lane] : static_cast<int32_t>(lane * N + n);
    if (lane < K) group = (experts ? experts[n * K + lane] : lane) / of_group;
    const uint32_t present = __ballot_sync(0xffffffffu, row >= 0), lower = present & ((1u << lane) - 1);
    const int32_t before = __shfl_sync(0xffffffffu, group, lower ? 31 - __clz(static_cast<int>(lower)) : lane);
    if (row >= 0) rows[__popc(lower)] = {row * C, 32 - __clz(group ^ before)};
    __syncwarp();
    return __popc(present);
}

constexpr int kCombineThreads = 128, kCombineLevels = 3;
static_assert(1 << kCombineLevels == kCombineGroups);

// Math: see CombineRowsArgs.
// Source: none.
// Traffic: in read, out (read and) written, once.
// Requires: as gather_rows_kernel; K <= 32.
// Parallel: a warp per row of out; a lane has loads of kAtOnce rows in flight. sums[l] is that of the rows so far that
//           share a node of level l of the tree with the latest one; a child is added to its parent once its last row
//           is in it.
template <typename Out, typename In, int kWidth>
__global__ void __launch_bounds__(kCombineThreads, 5)
    combine_rows_kernel(Out* out, const In* in, const int32_t* slot_rows, const int32_t* experts, int64_t N, int K,
                        int64_t C, int of_group, bool accumulate) {
    constexpr int kAtOnce = kWidth > kVec<In> ? 4 : 8;
    __shared__ CombinedRow all_rows[kCombineThreads / kLanes][kLanes];
    wait_for_previous_kernels();
    const int64_t n = int64_t{blockIdx.x} * (kCombineThreads / kLanes) + threadIdx.x / kLanes;
    if (n >= N) return;
    CombinedRow* const rows = all_rows[threadIdx.x / kLanes];
    const int count = list_rows(rows, slot_rows, experts, n, N, K, C, of_group);
    out += n * C;
    for (int64_t c = threadIdx.x % kLanes * kWidth; c < C; c += kLanes * kWidth) {
        float sums[kCombineLevels + 1][kWidth] = {};
        const auto close = [&](int levels) {
#pragma unroll
            for (int l = 0; l < kCombineLevels; l++) {
                if (l >= levels) break;
#pragma unroll
                for (int i = 0; i < kWidth; i++) sums[l + 1][i] += sums[l][i], sums[l][i] = 0.0f;
            }
        };
        RowPart<Out, kWidth> before;
        if (accumulate) before.load(out + c);
        for (int k = 0; k < count; k += kAtOnce) {
            RowPart<In, kWidth> parts[kAtOnce];
            const auto load = [&](int rows_left) {
#pragma unroll
                for (int j = 0; j < kAtOnce; j++) {
                    if (j >= rows_left) break;
                    parts[j].load(in + rows[k + j].begin + c);
                }
            };
            if (k + kAtOnce <= count) load(kAtOnce);   // without branches between the loads
            else load(count - k);
#pragma unroll
            for (int j = 0; j < kAtOnce; j++) {
                if (k + j >= count) break;
                close(rows[k + j].closes);
                parts[j].add_to(sums[0]);
            }
        }
        close(kCombineLevels);
        if (accumulate) before.add_to(sums[kCombineLevels]);
        store_floats<Out, kWidth>(out + c, sums[kCombineLevels]);
    }
}

// The results of a warp, kWidth adjacent ones of each lane: T, and with kQuant (bf16, 8) also E4M3 in blocks of
// 1 x 128, each of 16 lanes. All lanes call its functions.
template <typename T, int kWidth, bool kQuant> class RowOutput {
public:
    __device__ RowOutput(T* out, const TileOut& quant) : out_(out), quant_(quant) {
        if constexpr (!kQuant) return;
        if (quant.record) seen_ = quant.entry->amax_bits;
        if (quant.counts && blockIdx.x + threadIdx.x == 0)
            atomicAdd(&quant.counts->elems, static_cast<unsigned long long>(quant.N * quant.C));
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
        if (quant_.counts) tally_.flush_to(quant_.counts);
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
        *reinterpret_cast<uint2*>(quant_.rowwise + r * C + c) = codes;
        if (c % kTile == 0) quant_.rowwise_scale_inv[c / kTile * quant_.N + r] = block.scale_inv;
    }

    T* out_;
    const TileOut& quant_;
    uint32_t amax_ = 0, seen_ = ~0u;
    CastTally tally_;
};

// See ExpertBias.
template <typename T> struct RowBias {
    const T* values;
    const int32_t* experts;
    int64_t first;

    // values + the bias of a slot's expert at a column of the 2F; the bias comes from the L2 cache.
    template <int kWidth> __device__ void add_to(float (&x)[kWidth], int32_t slot, int64_t F, int64_t column) const {
        if (!values) return;
        float bias[kWidth];
        load_floats<T, kWidth>(values + (experts[slot] - first) * 2 * F + column, bias);
#pragma unroll
        for (int i = 0; i < kWidth; i++) x[i] += bias[i];
    }
};

// Math: see ExpertActivationForwardArgs.
// Source: the functor's.
// Traffic: in read, out or its codes written, once.
// Requires: as gather_rows_kernel.
// Parallel: a warp per row.
template <typename Function, typename T, int kWidth, bool kQuant>
__global__ void __launch_bounds__(kThreads)
    expert_activation_forward_kernel(T* out, const T* in, const float* weights, const int32_t* row_slots, int64_t R,
                                     int64_t F, RowBias<T> bias, const __grid_constant__ TileOut quant) {
    wait_for_previous_kernels();
    const int64_t r = warp_row();
    if (r >= R) return;
    const int32_t slot = row_slots[r];
    if (slot < 0) return;
    const float weight = weights[slot];
    RowOutput<T, kWidth, kQuant> output(out, quant);
    in += r * 2 * F;
    for (int64_t begin = 0; begin < F; begin += kLanes * kWidth) {
        const int64_t f = begin + threadIdx.x % kLanes * kWidth;
        float gate[kWidth] = {}, up[kWidth] = {};
        if (f < F) load_floats<T, kWidth>(in + f, gate);
        if (f < F) load_floats<T, kWidth>(in + F + f, up);
        if (f < F) bias.add_to(gate, slot, F, f), bias.add_to(up, slot, F, F + f);
#pragma unroll
        for (int i = 0; i < kWidth; i++) gate[i] = Function::template value<T>(gate[i], up[i]) * weight;
        output.put(gate, r, F, f, f < F);
    }
    output.finish();
}

// Math: the functor's gradients of gate and up for dout w; dw = sum of dout times the functor's value.
// Source: derivative of the forward.
// Traffic: in and dout read, din written, once.
// Requires: as gather_rows_kernel; din may alias in unless `split`.
// Parallel: a warp per row. split: where a block of 128 columns has results of both halves of din, a lane keeps only
// those of one half, and every pair is computed twice.
template <typename Function, typename T, int kWidth, bool kQuant>
__global__ void __launch_bounds__(kThreads)
    expert_activation_backward_kernel(T* din, float* dweights, const T* dout, const T* in, const float* weights,
                                      const int32_t* row_slots, int64_t R, int64_t F, RowBias<T> bias,
                                      const __grid_constant__ TileOut quant, bool split) {
    wait_for_previous_kernels();
    const int64_t r = warp_row();
    const int lane = threadIdx.x % kLanes;
    if (r >= R) return;
    const int32_t slot = row_slots[r];
    if (slot < 0) return;
    const float weight = weights[slot];
    RowOutput<T, kWidth, kQuant> output(din, quant);
    in += r * 2 * F, dout += r * F;
    float dweight = 0;
    const int64_t columns = kQuant && split ? 2 * F : F;
    for (int64_t begin = 0; begin < columns; begin += kLanes * kWidth) {
        const int64_t c = begin + lane * kWidth, f = c < F ? c : c - F;
        const bool valid = c < columns;
        float gate[kWidth] = {}, up[kWidth] = {}, d[kWidth] = {};
        if (valid) load_floats<T, kWidth>(in + f, gate);
        if (valid) load_floats<T, kWidth>(in + F + f, up);
        if (valid) load_floats<T, kWidth>(dout + f, d);
        if (valid) bias.add_to(gate, slot, F, f), bias.add_to(up, slot, F, F + f);
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

void gather_rows(Ctx& ctx, const GatherRowsArgs& args) {
    const int64_t R = args.out.elems / args.C;
    expect(args.slot_rows, Dtype::kInt32, args.N * args.K, "gather_rows: slot_rows");
    expect(args.in, args.in.dtype, args.N * args.C, "gather_rows: in");
    expect(args.out, args.in.dtype, R * args.C, "gather_rows: out");
    const bool fp8 = is_fp8(args.in.dtype);   // two codes are copied as a bf16
    const int64_t C = fp8 ? args.C / 2 : args.C, blocks = fp8 ? scale_blocks(args.C) : 0;
    CHECK(!fp8 || (args.C % 16 == 0 && args.in_scale_inv.elems == blocks * args.N
                   && args.out_scale_inv.elems == blocks * R), "gather_rows: FP8 rows of %lld", ll(args.C));
    CHECK(args.K <= kLanes, "gather_rows: %lld experts of a token", ll(args.K));
    const GatheredScales scales{args.out_scale_inv.as<float>(), args.in_scale_inv.as<float>(),
                                static_cast<int>(blocks), args.parts};
    dispatch(fp8 ? Dtype::kBf16 : args.in.dtype, "gather_rows", [&](auto type) {
        using T = decltype(type);
        with_width<T>(vectorizable<T>(C, {args.out.data, args.in.data}), [&](auto width) {
            const int64_t parts = ceil_div(C, int64_t{kGatherLoads * kLanes * width});
            launch_early(ctx, gather_rows_kernel<T, width>, warp_grid(args.N * parts), kThreads, 0,
                         static_cast<T*>(args.out.data), static_cast<const T*>(args.in.data),
                         args.slot_rows.as<int32_t>(), R, args.N, args.K, C, scales);
        });
    });
}

void combine_rows(Ctx& ctx, const CombineRowsArgs& args) {
    for (const Tensor& t : {args.slot_rows, args.experts})
        if (args.experts) expect(t, Dtype::kInt32, args.N * args.K, "combine_rows: slots");
    expect(args.in, args.in.dtype, args.in.elems, "combine_rows: in");
    expect(args.out, args.out.dtype, args.N * args.C, "combine_rows: out");
    CHECK(args.K <= kLanes && (args.experts || (args.E == args.K && args.in.elems == args.N * args.K * args.C)),
          "combine_rows: %lld experts of a token", ll(args.K));
    const auto* const experts = args.experts ? args.experts.as<int32_t>() : nullptr;
    const auto run = [&](auto out_type, auto in_type) {
        using Out = decltype(out_type);
        using In = decltype(in_type);
        const bool vectors = vectorizable<Out>(args.C, {args.out.data}) && vectorizable<In>(args.C, {args.in.data});
        using Wide = std::conditional_t<sizeof(Out) < sizeof(In), Out, In>;
        with_width<Wide>(vectors, [&](auto width) {
            launch_early(ctx, combine_rows_kernel<Out, In, width>,
                         grid_size(ceil_div(args.N, kCombineThreads / kLanes)), kCombineThreads, 0, args.out.as<Out>(),
                         args.in.as<In>(), experts ? args.slot_rows.as<int32_t>() : nullptr, experts, args.N, args.K,
                         args.C, experts_of_group(args.E), args.accumulate);
        });
    };
    dispatch(args.in.dtype, "combine_rows", [&](auto in) {
        dispatch(args.out.dtype, "combine_rows", [&](auto out) { run(out, in); });
    });
}

void expert_activation_forward(Ctx& ctx, const ExpertActivationForwardArgs& args) {
    expect(args.in, args.in.dtype, args.R * 2 * args.F, "expert_activation_forward: in");
    if (!args.quant.copies() || args.out)
        expect(args.out, args.in.dtype, args.R * args.F, "expert_activation_forward: out");
    expect(args.weights, Dtype::kFp32, args.weights.elems, "expert_activation_forward: weights");
    expect_bias(args.bias, args.in, args.weights, args.F, "expert_activation_forward: bias");
    const TileOut quant = rows_quant(args.quant, args.in, args.R, args.F, "expert_activation_forward");
    with_rows(args.kind, args.in.dtype, quant, args.F, {args.out.data, args.in.data, args.bias.values.data},
              [&]<typename Function, typename T, int kWidth, bool kQuant>() {
        launch_early(ctx, expert_activation_forward_kernel<Function, T, kWidth, kQuant>, warp_grid(args.R), kThreads,
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
