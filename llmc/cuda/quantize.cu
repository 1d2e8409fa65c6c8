// Quantization as an operation of its own, and the state of delayed scaling.
#include "llmc/cuda/quantize.cuh"

namespace cuda {
namespace {

// Passes `in`, rounded to bf16, to quantize_tiles.
template <typename T> struct CopyProducer {
    static constexpr int kOutputs = 1, kBlocksPerSm = 4, kParts = 8 / kVec<T>;
    struct Raw {
        uint4 part[kParts];
    };
    struct Columns {};
    const T* in;
    int64_t C;

    __device__ void columns(int64_t, Columns&) const {}
    __device__ void load(const TileThread& t, int r, Raw& raw) const {
#pragma unroll
        for (int p = 0; p < kParts; p++) raw.part[p] = load_vec(t.at(in, r, C) + p * kVec<T>);
    }
    __device__ void compute(const Raw& raw, const Columns&, uint4 (&x)[1]) const {
        if constexpr (std::is_same_v<T, bf16>) {
            x[0] = raw.part[0];
        } else {
            float value[8];
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const uint4& part = raw.part[i / 4];
                const uint32_t word[4] = {part.x, part.y, part.z, part.w};
                value[i] = __uint_as_float(word[i % 4]);
            }
            x[0] = pack<bf16>(value);
        }
    }
};

// The same for many small matrices in one launch, each as quantize_tile_kernel does it.
// Math: see there.
// Source: fp8.h for casts and scales.
// Traffic: in read, 1 byte per element and FP8 output written; all once.
// Requires: blocks of 128 x 128; N and C multiples of 16, aligned tensors.
// Parallel: a block owns a tile of a matrix; blockIdx.z counts the matrices of a group of row tiles first.
template <typename T, typename Kind>
__global__ void __launch_bounds__(kTileThreads<1>, Kind::kCount ? 2 : CopyProducer<T>::kBlocksPerSm)
    quantize_matrices_kernel(const T* in, const __grid_constant__ TileOut first, unsigned matrices) {
    __shared__ TileShared<1> shared;
    wait_for_previous_kernels();
    const int64_t row_tile = int64_t{blockIdx.z / matrices} * kTileGroup + blockIdx.x, m = blockIdx.z % matrices;
    if (row_tile * kTile >= first.N || (first.state != nullptr && first.state->skip)) return;
    TileOut out = first;
    if (out.rowwise) out.rowwise += m * out.N * out.C;
    if (out.transposed) out.transposed += m * out.N * out.C;
    if (out.rowwise) out.rowwise_scale_inv += m * scale_inv_elems(Granularity::kBlock128x128, out.N, out.C);
    if (out.transposed) out.transposed_scale_inv += m * scale_inv_elems(Granularity::kBlock128x128, out.C, out.N);
    const TileThread t = tile_thread(row_tile, blockIdx.y, out.N, out.C);
    TileValues<1> value;
    produce_tile(CopyProducer<T>{in + m * out.N * out.C, out.C}, t, value);
    write_tile<Kind, 1>(out, t, value, shared);
}

constexpr int kAmaxThreads = 256;
constexpr int kAmaxBatch = 4;   // vectors in flight per thread

// Math: entry->amax_bits = max with the bits of every |in rounded to bf16|.
// Source: rounding is monotonic, so only the amax of a block is rounded.
// Traffic: in read once.
// Requires: kWidth > 1 needs an aligned start; the remaining elements are processed one by one.
// Parallel: a thread takes every (256 gridDim.x)-th vector; at most one atomic per block.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kAmaxThreads) amax_kernel(ScaleEntry* entry, const T* in, int64_t elems) {
    __shared__ uint32_t shared[kAmaxThreads / 32];
    wait_for_previous_kernels();
    const int64_t vectors = elems / kWidth, step = int64_t{gridDim.x} * kAmaxThreads;
    const int64_t thread = int64_t{blockIdx.x} * kAmaxThreads + threadIdx.x;
    const uint32_t seen = entry->amax_bits;
    uint32_t amax = 0;
    for (int64_t v = thread; v < vectors; v += kAmaxBatch * step) {
        Packed<T, kWidth> batch[kAmaxBatch] = {};
#pragma unroll
        for (int k = 0; k < kAmaxBatch; k++) {
            if (v + k * step < vectors) batch[k].load(in + (v + k * step) * kWidth);
        }
#pragma unroll
        for (int k = 0; k < kAmaxBatch; k++) {
            float value[kWidth];
            batch[k].unpack_to(value);
#pragma unroll
            for (int i = 0; i < kWidth; i++) amax = max(amax, amax_bits_of(value[i]));
        }
    }
    const int64_t rest = vectors * kWidth + thread;
    if (rest < elems) amax = max(amax, amax_bits_of(to_float(in[rest])));
    record_block_amax<kAmaxThreads>(&entry->amax_bits, __uint_as_float(amax), shared, seen);
}

// Math: amax_bits = 0, step_amax_bits too if `step`.
// Source: Fp8ClearArgs.
// Traffic: every entry written.
// Requires: nothing.
// Parallel: one thread per entry.
__global__ void fp8_clear_kernel(ScaleEntry* entries, int64_t count, bool step, const StepState* state) {
    wait_for_previous_kernels();
    const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (i >= count || (state != nullptr && state->skip)) return;
    entries[i].step_amax_bits = step ? 0 : max(entries[i].step_amax_bits, entries[i].amax_bits);
    entries[i].amax_bits = 0;
}

constexpr int kUpdateThreads = 128;

// Math: Fp8UpdateArgs.
// Source: TransformerEngine's delayed scaling.
// Traffic: per tensor, the amax history read, one entry and the entry written.
// Requires: nothing.
// Parallel: one block per tensor, whose threads share the maximum over the history.
__global__ void __launch_bounds__(kUpdateThreads) fp8_update_kernel(const Fp8UpdateArgs args) {
    __shared__ uint32_t shared[kUpdateThreads / 32];
    wait_for_previous_kernels();
    const int64_t tensor = blockIdx.x;
    ScaleEntry& entry = args.entries[tensor];
    float* ring = args.history + tensor * args.length;
    const uint32_t last = entry.amax_bits;
    const int32_t updates = args.updates[tensor];
    const bool first_thread = threadIdx.x == 0;
    __syncthreads();   // all threads have read what the first thread now overwrites
    if (first_thread) {
        entry.step_amax_bits = max(entry.step_amax_bits, last);
        entry.amax_bits = 0;
    }
    if ((args.state != nullptr && args.state->skip) || last == 0) return;
    const int64_t newest = updates % args.length;
    uint32_t amax = last;
    for (int64_t i = threadIdx.x; i < args.length && !args.most_recent; i += kUpdateThreads) {
        if (i != newest) amax = max(amax, amax_bits_of(ring[i]));   // the value of `last` replaces entry `newest`
    }
    amax = __reduce_max_sync(0xffffffffu, amax);
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = amax;
    __syncthreads();
    if (!first_thread) return;
    for (uint32_t other : shared) amax = max(amax, other);
    ring[newest] = __uint_as_float(last);
    if (updates % args.interval == 0 && amax > 0 && amax < kInfinityBits) {
        entry.scale = scale_of(amax, args.largest[tensor]);
    }
    args.updates[tensor] = updates + 1;
}

constexpr int kCountThreads = 256;
static_assert(kCountThreads == kScaleBins);   // a thread adds up a bin

// The blocks of a quantized matrix: kRows 1, or 128 for square ones, whose scale_inv have another order.
template <int kRows> struct CodeBlocks {
    const uint8_t* codes;
    int64_t R, K, columns;   // columns: of blocks

    __host__ __device__ CodeBlocks(const uint8_t* codes_, int64_t R_, int64_t K_)
        : codes(codes_), R(R_), K(K_), columns(scale_blocks(K_)) {}
    __host__ __device__ int64_t count() const { return (R + kRows - 1) / kRows * columns; }
    // Block `i`, counted in the order of scale_inv without its padding.
    __device__ int64_t row(int64_t i) const { return kRows == 1 ? i % R : i / columns * kRows; }
    __device__ int64_t column(int64_t i) const { return kRows == 1 ? i / R : i % columns; }
    __device__ int64_t scale_at(int64_t i) const {
        return kRows == 1 ? i : i / columns * ((columns + 3) / 4 * 4) + i % columns;
    }
    __device__ bool zeros(int64_t i) const {
        const int64_t first = row(i), end = min(R, first + kRows);
        const int64_t left = column(i) * kScaleBlock, right = min(K, left + kScaleBlock);
        for (int64_t r = first; r < end; r++)
            for (int64_t k = left; k < right; k += 16) {
                const uint4 v = load_vec(codes + r * K + k);
                if (((v.x | v.y | v.z | v.w) & 0x7f7f7f7fu) != 0) return false;   // -0 is a zero, too
            }
        return true;
    }
};

// Math: bins[e] += number of blocks whose scale_inv has the exponent bits e, or kZeroBlocks for blocks of zeros.
// Source: ops.h, CountScalesArgs.
// Traffic: scale_inv read once; in blocks of scale 1, which blocks of zeros have, the codes up to the first one that is
//     not zero; at most kScaleBins atomic additions a block of threads.
// Requires: K a multiple of 16, codes aligned to 16 bytes; kScaleBins threads.
// Parallel: blocks of threads stride over those of a matrix and count in shared memory; sums of integers have no order.
//     blockIdx.y is the number of the matrix.
template <int kRows>
__global__ void __launch_bounds__(kCountThreads)
    count_scales_kernel(unsigned long long* bins, CodeBlocks<kRows> blocks, const float* scale_inv) {
    __shared__ unsigned int counts[kScaleBins];
    counts[threadIdx.x] = 0;
    __syncthreads();
    wait_for_previous_kernels();
    constexpr Granularity kBlocks = kRows == 1 ? Granularity::kBlock1x128 : Granularity::kBlock128x128;
    blocks.codes += blockIdx.y * blocks.R * blocks.K;
    scale_inv += blockIdx.y * scale_inv_elems(kBlocks, blocks.R, blocks.K);
    const int64_t step = int64_t{gridDim.x} * kCountThreads;
    for (int64_t i = int64_t{blockIdx.x} * kCountThreads + threadIdx.x; i < blocks.count(); i += step) {
        const uint32_t bits = __float_as_uint(scale_inv[blocks.scale_at(i)]);
        const uint32_t bin = bits >> 23 & 0xff;
        atomicAdd(&counts[bin == 127 && blocks.zeros(i) ? static_cast<uint32_t>(kZeroBlocks) : bin], 1u);
    }
    __syncthreads();
    const unsigned int count = counts[threadIdx.x];
    if (count > 0) atomicAdd(&bins[threadIdx.x], static_cast<unsigned long long>(count));
}

}  // namespace

TileOut tile_out(const QuantOut& quant, const Tensor& out, int64_t N, int64_t C, const char* op) {
    CHECK(C % 8 == 0, "%s: rows of %lld elements quantized, not a multiple of 8", op, (long long)C);
    CHECK(!quant.copies() || C % 16 == 0, "%s: rows of %lld elements quantized, not a multiple of 16", op,
          (long long)C);
    CHECK(!quant.transposed || N % 16 == 0, "%s: %lld rows transposed, not a multiple of 16", op, (long long)N);
    const bool tensor = quant.granularity == Granularity::kTensor;
    CHECK(quant.entry != nullptr || !(quant.record || (quant.copies() && tensor)), "%s: quantized without an entry",
          op);
    const Dtype format = quant.rowwise ? quant.rowwise.dtype : quant.transposed.dtype;
    if (quant.rowwise) expect(quant.rowwise, format, N * C, op);
    if (quant.transposed) expect(quant.transposed, format, N * C, op);
    if (quant.rowwise && !tensor) {
        expect(quant.rowwise_scale_inv, Dtype::kFp32, scale_inv_elems(quant.granularity, N, C), op);
    }
    if (quant.transposed && !tensor) {
        expect(quant.transposed_scale_inv, Dtype::kFp32, scale_inv_elems(quant.granularity, C, N), op);
    }
    if (quant.dbias) {
        expect(quant.dbias, quant.dbias.dtype, C, op);
        expect_at_least(quant.dbias_scratch, Dtype::kFp32, quant_partial_rows(N) * C, op);
    }
    if (out) expect(out, Dtype::kBf16, N * C, op);
    for (const Tensor* t : {&quant.rowwise, &quant.transposed, &out}) expect_aligned(*t, op);
    const bool current = quant.scaling == Scaling::kCurrent;
    return {.out = out.as<bf16>(), .rowwise = codes_of(quant.rowwise), .transposed = codes_of(quant.transposed),
            .rowwise_scale_inv = tensor || !quant.rowwise ? nullptr : quant.rowwise_scale_inv.as<float>(),
            .transposed_scale_inv = tensor || !quant.transposed ? nullptr : quant.transposed_scale_inv.as<float>(),
            .entry = quant.entry, .counts = quant.copies() ? quant.counts : nullptr,
            .first_nonfinite = quant.first_nonfinite,
            .dbias_partial = quant.dbias ? quant.dbias_scratch.as<float>() : nullptr, .state = nullptr, .N = N, .C = C,
            .event = quant.event, .current = current, .record = quant.record && !(quant.copies() && current)};
}

static void quantize_matrices(Ctx& ctx, const QuantizeArgs& args) {
    const int64_t N = args.N, C = args.C, groups = ceil_div(N, kTile * kTileGroup);
    const QuantOut& quant = args.quant;
    CHECK(quant.copies() && !quant.record && !quant.first_nonfinite && !quant.dbias && N < (1 << 24) && C < (1 << 23),
          "quantize: %lld matrices of %lld x %lld, or not only copies", ll(args.matrices), ll(N), ll(C));
    TileOut tile = tile_out(of_matrix(quant, 0, args.matrices), {}, N, C, "quantize");
    tile.state = args.state;
    const dim3 grid(kTileGroup, grid_size(ceil_div(C, kTile)), grid_size(groups * args.matrices));
    dispatch(args.in.dtype, "quantize: in", [&](auto type) {
        using T = decltype(type);
        with_tile_kind<cast_bit(TileCast::kBlock128x128)>(quant, "quantize: matrices", [&](auto kind) {
            launch_early(ctx, quantize_matrices_kernel<T, decltype(kind)>, grid, kTileThreads<1>, 0, args.in.as<T>(),
                         tile, static_cast<unsigned>(args.matrices));
        });
    });
}

void quantize(Ctx& ctx, const QuantizeArgs& args) {
    const int64_t N = args.N, C = args.C;
    expect(args.in, args.in.dtype, args.matrices * N * C, "quantize: in");
    expect_aligned(args.in, "quantize: in");
    CHECK(args.state == nullptr || !args.quant.dbias, "quantize: dbias of a step that may be skipped");
    if (args.matrices > 1) return quantize_matrices(ctx, args);
    dispatch(args.in.dtype, "quantize: in", [&](auto type) {
        using T = decltype(type);
        quantize_tiles<kAllCasts>(ctx, CopyProducer<T>{args.in.as<T>(), C}, args.quant, {}, N, C, "quantize",
                                  args.state);
    });
}

void amax(Ctx& ctx, const AmaxArgs& args) {
    const int64_t elems = args.in.elems;
    CHECK(args.entry != nullptr, "amax without a scale entry");
    if (elems == 0) return;
    dispatch(args.in.dtype, "amax: in", [&](auto type) {
        using T = decltype(type);
        with_width<T>(vectorizable<T>(0, {args.in.data}), [&](auto width) {
            constexpr int kWidth = decltype(width)::value;
            const int64_t vectors = std::max<int64_t>(elems / kWidth, 1);
            const int64_t blocks = std::min(ceil_div(vectors, kAmaxThreads), int64_t{8} * ctx.sm_count);
            launch_early(ctx, amax_kernel<T, kWidth>, grid_size(blocks), kAmaxThreads, 0, args.entry, args.in.as<T>(),
                         elems);
        });
    });
}

void fp8_clear(Ctx& ctx, const Fp8ClearArgs& args) {
    if (args.count == 0) return;
    CHECK(args.entries != nullptr, "fp8_clear without entries");
    launch_early(ctx, fp8_clear_kernel, grid_size(ceil_div(args.count, 128)), 128, 0, args.entries, args.count,
                 args.step, args.state);
}

void count_scales(Ctx& ctx, const CountScalesArgs& args) {
    CHECK(is_fp8(args.codes.dtype) && args.R > 0 && args.K > 0 && args.K % 16 == 0, "count_scales: %lld x %lld of %s",
          (long long)args.R, (long long)args.K, dtype_name(args.codes.dtype));
    CHECK(args.bins != nullptr && args.granularity != Granularity::kTensor, "count_scales: no bins, or no blocks");
    expect(args.codes, args.codes.dtype, args.matrices * args.R * args.K, "count_scales: codes");
    expect_aligned(args.codes, "count_scales: codes");
    expect(args.scale_inv, Dtype::kFp32, args.matrices * scale_inv_elems(args.granularity, args.R, args.K),
           "count_scales: scale_inv");
    auto launch = [&](auto blocks, auto kernel) {
        const int64_t grid = std::min(ceil_div(blocks.count(), int64_t{4} * kCountThreads), int64_t{8} * ctx.sm_count);
        launch_early(ctx, kernel, dim3(grid_size(grid), grid_size(args.matrices)), kCountThreads, 0, args.bins, blocks,
                     args.scale_inv.as<float>());
    };
    const auto* codes = static_cast<const uint8_t*>(args.codes.data);
    if (args.granularity == Granularity::kBlock1x128)
        launch(CodeBlocks<1>(codes, args.R, args.K), count_scales_kernel<1>);
    else launch(CodeBlocks<128>(codes, args.R, args.K), count_scales_kernel<128>);
}

void fp8_update(Ctx& ctx, const Fp8UpdateArgs& args) {
    if (args.count == 0) return;
    CHECK(args.entries && args.history && args.updates && args.largest && args.length > 0 && args.interval > 0,
          "fp8_update: an argument is missing");
    launch_early(ctx, fp8_update_kernel, grid_size(args.count), kUpdateThreads, 0, args);
}

}  // namespace cuda
