// Gradients between ranks: FP8 chunks for communication, sums in rank order, and the distance between two reductions.
#include <cuda_fp16.h>

#include "llmc/cuda/fp8.cuh"
#include "llmc/cuda/reduce.cuh"

namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kLaneElems = 4;   // elements per lane and access; a warp accesses a chunk
static_assert(kGradCommChunk == 32 * kLaneElems);

// ---- quantize_chunks

constexpr int kChunks = 8;   // in flight per warp

__device__ inline uint32_t amax_of(const float (&value)[kLaneElems]) {
    const uint32_t low = max(amax_bits_of(value[0]), amax_bits_of(value[1]));
    return max(low, max(amax_bits_of(value[2]), amax_bits_of(value[3])));
}

// Math: scales = scale_inv of chunk_scale of each chunk's amax, out = to_fp8(in * scale); counts.
// Source: fp8.h for casts and scales.
// Traffic: in read, 1 byte per element and 4 per chunk written, once.
// Requires: in aligned to 4 elements, out to 4 bytes.
// Parallel: a warp processes 8 chunks in order, with all their loads issued first; lane k computes the scale of chunk
// k, since its two divisions cost as much as a dozen casts.
template <typename T, bool kCount>
__global__ void __launch_bounds__(kThreads, 4)
    quantize_chunks_kernel(uint8_t* out, float* scales, const T* in, Fp8Counts* counts, int64_t chunks) {
    wait_for_previous_kernels();
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int64_t first = (int64_t{blockIdx.x} * kWarps + threadIdx.x / 32) * kChunks;
    if (first >= chunks) return;
    const int count = static_cast<int>(min(chunks - first, int64_t{kChunks}));
    const int64_t begin = first * kGradCommChunk + lane * kLaneElems;
    Packed<T, kLaneElems> raw[kChunks] = {};
#pragma unroll
    for (int k = 0; k < kChunks; k++) {
        if (k >= count) break;   // a branch: with predicates the assembler delays half of the loads
        raw[k].load(in + begin + k * kGradCommChunk);
    }
    uint32_t amax = 0;   // of chunk `lane`
#pragma unroll
    for (int k = 0; k < kChunks; k++) {
        float value[kLaneElems];
        raw[k].unpack_to(value);
        const uint32_t of_chunk = __reduce_max_sync(0xffffffffu, amax_of(value));
        amax = lane == k ? of_chunk : amax;
    }
    const ChunkScale chunk = chunk_scale(amax);
    if (lane < count) scales[first + lane] = chunk.scale_inv;
    CastTally tally;
#pragma unroll
    for (int k = 0; k < kChunks; k++) {
        const float scale = __shfl_sync(0xffffffffu, chunk.scale, k);
        float v[kLaneElems];
        raw[k].unpack_to(v);
        if constexpr (kCount) {   // chunks past the end are zeros, which count nothing
#pragma unroll
            for (int i = 0; i < kLaneElems; i++) tally.add<Dtype::kE4m3>(v[i], scale);
        }
        if (k >= count) continue;
        *reinterpret_cast<uint32_t*>(out + begin + k * kGradCommChunk) =
            to_fp8x4<Dtype::kE4m3>(v[0] * scale, v[1] * scale, v[2] * scale, v[3] * scale);
    }
    if constexpr (kCount) {
        tally.flush_to(counts);
        if (first == 0 && lane == 0)
            atomicAdd(&counts->elems, static_cast<unsigned long long>(chunks * kGradCommChunk));
    }
}

template <typename T> void launch_chunks(Ctx& ctx, const QuantizeChunksArgs& args) {
    const int64_t chunks = args.in.elems / kGradCommChunk;
    auto launch = [&](auto kernel) {
        launch_early(ctx, kernel, grid_size(ceil_div(chunks, kWarps * kChunks)), kThreads, 0,
                     static_cast<uint8_t*>(args.out.data), args.scales.as<float>(), args.in.as<T>(), args.counts,
                     chunks);
    };
    if (args.counts) launch(quantize_chunks_kernel<T, true>);
    else launch(quantize_chunks_kernel<T, false>);
}

// ---- sum_ranks

struct E4m3 {
    uint8_t code;
};

// kWidth elements sent by a rank, unconverted.
template <typename T, int kWidth> struct Sent {
    Packed<T, kWidth> raw;
    __device__ void load(const T* in, const float*, int64_t i) { raw.load(in + i); }
    __device__ void values(float (&value)[kWidth]) const { raw.unpack_to(value); }
};
template <> struct Sent<E4m3, kLaneElems> {
    uint32_t codes;
    float scale;
    __device__ void load(const E4m3* in, const float* scales, int64_t i) {
        codes = *reinterpret_cast<const uint32_t*>(in + i);
        scale = scales[i / kGradCommChunk];
    }
    __device__ void values(float (&value)[kLaneElems]) const {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const auto pair = static_cast<__nv_fp8x2_storage_t>(codes >> 16 * half);
            const float2 wide = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3)));
            value[2 * half] = __fmul_rn(wide.x, scale);
            value[2 * half + 1] = __fmul_rn(wide.y, scale);
        }
    }
};

constexpr int kRankBatch = 4;   // ranks with loads in flight together

// Math: out[i] (+)= sum over r of in[r, i], each times the scale_inv of its chunk if there is one; in the order of r,
// with one rounding per product and per sum, and one more to bf16. in[own_rank] is at `own`.
// Source: plain sum.
// Traffic: in and scales read, out written, once; to accumulate, out read as well.
// Requires: kWidth = 4 needs n a multiple of 4, out, in and own aligned to 4 elements.
// Parallel: a thread owns kGroups groups of kWidth elements, a block's width apart, over all ranks.
template <typename Out, typename T, int kWidth, int kGroups>
__global__ void __launch_bounds__(kThreads, 3)
    sum_ranks_kernel(Out* out, const T* in, const float* scales, const T* own, int own_rank, int64_t n, int ranks,
                     bool accumulate) {
    wait_for_previous_kernels();
    const int64_t first = (int64_t{blockIdx.x} * kGroups * kThreads + threadIdx.x) * kWidth;
    constexpr int kStep = kThreads * kWidth;
    float sum[kGroups][kWidth];
#pragma unroll
    for (int k = 0; k < kGroups; k++) {
#pragma unroll
        for (int i = 0; i < kWidth; i++) sum[k][i] = -0.0f;   // -0 + x is x for every x
    }
    for (int rank = 0; rank < ranks; rank += kRankBatch) {
        Sent<T, kWidth> sent[kRankBatch][kGroups];
#pragma unroll
        for (int r = 0; r < kRankBatch; r++) {
            const T* from = rank + r == own_rank ? own : in + (rank + r) * n;
            const float* scales_from = scales + (rank + r) * (n / kGradCommChunk);
#pragma unroll
            for (int k = 0; k < kGroups; k++) {
                const int64_t i = first + k * kStep;
                if (rank + r < ranks && i < n) sent[r][k].load(from, scales_from, i);
            }
        }
#pragma unroll
        for (int r = 0; r < kRankBatch; r++) {
            if (rank + r >= ranks) break;
#pragma unroll
            for (int k = 0; k < kGroups; k++) {
                float value[kWidth];
                sent[r][k].values(value);
#pragma unroll
                for (int i = 0; i < kWidth; i++) sum[k][i] = __fadd_rn(sum[k][i], value[i]);
            }
        }
    }
#pragma unroll
    for (int k = 0; k < kGroups; k++) {
        const int64_t i = first + k * kStep;
        if (i >= n) break;
        if (accumulate) {
            Packed<Out, kWidth> raw;
            raw.load(out + i);
            float before[kWidth];
            raw.unpack_to(before);
#pragma unroll
            for (int j = 0; j < kWidth; j++) sum[k][j] = __fadd_rn(before[j], sum[k][j]);
        }
        store_floats<Out, kWidth>(out + i, sum[k]);
    }
}

template <typename T, int kWidth, int kGroups> void launch_sum(Ctx& ctx, const SumRanksArgs& args) {
    const int64_t n = args.out.elems;
    const T* in = static_cast<const T*>(args.in.data);
    const T* own = args.own ? static_cast<const T*>(args.own.data) : in + args.own_rank * n;
    dispatch(args.out.dtype, "sum_ranks: out", [&](auto type) {
        using Out = decltype(type);
        launch_early(ctx, sum_ranks_kernel<Out, T, kWidth, kGroups>,
                     grid_size(ceil_div(n, int64_t{kGroups} * kThreads * kWidth)), kThreads, 0, args.out.as<Out>(), in,
                     args.scales.as<float>(), own, static_cast<int>(args.own_rank), n, args.ranks, args.accumulate);
    });
}

// ---- compare_sums

struct PairSums {
    double aa = 0, bb = 0, ab = 0, dd = 0;
    __device__ void add(float a, float b) {
        const double x = a, y = b, difference = x - y;
        aa = fma(x, x, aa), bb = fma(y, y, bb), ab = fma(x, y, ab), dd = fma(difference, difference, dd);
    }
};

constexpr int64_t kCompareBlocks = 512;   // all resident, 4 per multiprocessor
constexpr int kPairBatch = 4;             // vectors in flight per tensor
static_assert(kCompareBlocks <= kPartialSums);

// Math: partial[s, block] = sums of a a, b b, a b and (a - b)^2 over the block's vectors, in fp64.
// Source: plain sums.
// Traffic: a and b read once.
// Requires: kWidth > 1 needs 16-byte aligned starts; the remaining elements are read one by one.
// Parallel: a thread adds every (256 gridDim.x)-th vector, 4 pairs in flight; block sums through shared memory.
template <int kWidth>
__global__ void __launch_bounds__(kThreads, 4)
    compare_sums_kernel(double* partial, const float* a, const float* b, int64_t n) {
    __shared__ double shared[4][32];
    wait_for_previous_kernels();
    const int64_t vectors = n / kWidth, step = int64_t{gridDim.x} * kThreads;
    const int64_t thread = int64_t{blockIdx.x} * kThreads + threadIdx.x;
    PairSums sums;
    for (int64_t first = thread; first < vectors; first += kPairBatch * step) {
        Packed<float, kWidth> raw_a[kPairBatch] = {}, raw_b[kPairBatch] = {};   // zeros add nothing
#pragma unroll
        for (int j = 0; j < kPairBatch; j++) {
            const int64_t v = first + j * step;
            if (v < vectors) raw_a[j].load(a + v * kWidth), raw_b[j].load(b + v * kWidth);
        }
#pragma unroll
        for (int j = 0; j < kPairBatch; j++) {
            float x[kWidth], y[kWidth];
            raw_a[j].unpack_to(x), raw_b[j].unpack_to(y);
#pragma unroll
            for (int i = 0; i < kWidth; i++) sums.add(x[i], y[i]);
        }
    }
    const int64_t rest = vectors * kWidth + thread;
    if (rest < n) sums.add(a[rest], b[rest]);
    const double mine[4] = {sums.aa, sums.bb, sums.ab, sums.dd};
#pragma unroll
    for (int s = 0; s < 4; s++) {
        const double total = block_sum(mine[s], shared[s], threadIdx.x / 32, threadIdx.x % 32, kWarps);
        if (threadIdx.x == 0) partial[s * kPartialSums + blockIdx.x] = total;
    }
}

}  // namespace

void quantize_chunks(Ctx& ctx, const QuantizeChunksArgs& args) {
    const int64_t n = args.in.elems;
    CHECK(n % kGradCommChunk == 0, "quantize_chunks: %lld elements, no multiple of %lld", (long long)n,
          (long long)kGradCommChunk);
    if (n == 0) return;
    expect(args.out, Dtype::kE4m3, n, "quantize_chunks: out");
    expect(args.scales, Dtype::kFp32, n / kGradCommChunk, "quantize_chunks: scales");
    CHECK(aligned(args.in, kLaneElems) && aligned(args.out, kLaneElems), "quantize_chunks: tensors off %d elements",
          kLaneElems);
    dispatch(args.in.dtype, "quantize_chunks: in", [&](auto type) { launch_chunks<decltype(type)>(ctx, args); });
}

void sum_ranks(Ctx& ctx, const SumRanksArgs& args) {
    const int64_t n = args.out.elems;
    CHECK(args.ranks > 0 && args.ranks < (1 << 20), "sum_ranks: %lld ranks", (long long)args.ranks);
    if (n == 0) return;
    expect(args.out, args.out.dtype, n, "sum_ranks: out");
    expect(args.in, args.in.dtype, args.ranks * n, "sum_ranks: in");
    CHECK(args.own_rank >= 0 && args.own_rank < args.ranks, "sum_ranks: rank %lld of %lld", (long long)args.own_rank,
          (long long)args.ranks);
    if (args.own) expect(args.own, args.in.dtype, n, "sum_ranks: own");
    const bool vector = n % kLaneElems == 0 && aligned(args.out, kLaneElems) && aligned(args.in, kLaneElems) &&
                        aligned(args.own, kLaneElems);
    if (args.in.dtype == Dtype::kE4m3) {
        CHECK(n % kGradCommChunk == 0 && vector, "sum_ranks: %lld elements in chunks, or off the alignment",
              (long long)n);
        CHECK(!args.own, "sum_ranks: a block of codes is not in `in`");
        expect(args.scales, Dtype::kFp32, args.ranks * (n / kGradCommChunk), "sum_ranks: scales");
        return launch_sum<E4m3, kLaneElems, 4>(ctx, args);
    }
    dispatch(args.in.dtype, "sum_ranks: in", [&](auto type) {
        using T = decltype(type);
        if (vector) launch_sum<T, kLaneElems, 8 / sizeof(T)>(ctx, args);
        else launch_sum<T, 1, 4>(ctx, args);
    });
}

void compare_sums(Ctx& ctx, const CompareSumsArgs& args) {
    const int64_t n = args.a.elems;
    if (n == 0) return;
    expect(args.a, Dtype::kFp32, n, "compare_sums: a");
    expect(args.b, Dtype::kFp32, n, "compare_sums: b");
    expect_at_least(args.scratch, Dtype::kFp64, 4 * kPartialSums, "compare_sums: scratch");
    double* partial = args.scratch.as<double>();
    // Depends on n only, so that the order of additions is the same on every GPU.
    const int64_t blocks = std::min(kCompareBlocks, ceil_div(n, int64_t{kPairBatch} * kVec<float> * kThreads));
    with_width<float>(vectorizable<float>(0, {args.a.data, args.b.data}), [&](auto width) {
        launch_early(ctx, compare_sums_kernel<decltype(width)::value>, grid_size(blocks), kThreads, 0, partial,
                     args.a.as<float>(), args.b.as<float>(), n);
    });
    add_partial_sums(ctx, args.sums, partial, blocks, 4);
}

}  // namespace cuda
