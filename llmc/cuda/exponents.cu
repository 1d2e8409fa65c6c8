// Histograms of binary exponents.
#include "llmc/cuda/fp8.cuh"

namespace cuda {
namespace {

constexpr int kExponentThreads = 128, kExponentBlocksPerSm = 6, kExponentBatch = 4;
// Elements that a thread counts before it adds up its counters, which have a byte each.
constexpr int kMostOfAByte = 255;
constexpr int kCounterRows = static_cast<int>(kExponentBins) / 4, kHalfOfARow = kExponentThreads / 2;
static_assert(kCounterRows == kHalfOfARow);   // two threads add up a row

// The counters of a block: word (bin / 4, thread) has the bytes of four bins of a thread.
using Counters = uint32_t[kCounterRows][kExponentThreads];

// Counts a value of the bits |x|.
__device__ inline void count_exponent(uint8_t* mine, uint32_t bits) {
    const uint32_t bin = bits == 0 ? static_cast<uint32_t>(kZeroValues) : max(bits >> 23, 1u);
    mine[(bin >> 2) * (4 * kExponentThreads) + (bin & 3)]++;
}

template <typename T> __device__ inline uint32_t bf16_bits(float value) {
    // The hardware's conversion would change the bits of a NaN.
    return amax_bits_of(sizeof(T) == 2 ? value : static_cast<float>(bf16(value)));
}

// Adds half a row of the counters to `totals`, the sums of its four bins, and clears it. The threads of a warp read
// different banks.
__device__ inline void add_up(Counters& counters, uint32_t (&totals)[4]) {
    const int row = static_cast<int>(threadIdx.x) / 2, half = static_cast<int>(threadIdx.x) % 2 * kHalfOfARow;
    uint32_t even = 0, odd = 0;   // two sums of 16 bits each; 64 bytes are less than 2^16
    for (int i = 0; i < kHalfOfARow; i++) {
        uint32_t& word = counters[row][half + (i + static_cast<int>(threadIdx.x)) % kHalfOfARow];
        even += word & 0x00ff00ffu;
        odd += word >> 8 & 0x00ff00ffu;
        word = 0;
    }
    totals[0] += even & 0xffffu, totals[1] += odd & 0xffffu;
    totals[2] += even >> 16, totals[3] += odd >> 16;
}

// Math: CountExponentsArgs.
// Source: the private counters of Podlozhnyuk, "Histogram calculation in CUDA". Most values of a tensor have one of a
//     few exponents, so that atomic additions to shared counters would queue up at these.
// Traffic: in read once; at most kExponentBins atomic additions a block of threads. Shared memory: 2.5 accesses an
//     element, which is 60 % of what an SM of an H200 can do while bf16 arrives at 3.5 TB/s.
// Requires: kWidth > 1 needs an aligned start; the remaining elements are processed by the first block.
// Parallel: each thread counts in bytes of its own, which the block adds up before one can overflow; sums of integers
//     have no order.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kExponentThreads, kExponentBlocksPerSm)
    count_exponents_kernel(unsigned long long* bins, uint32_t* amax_bits, const T* in, int64_t elems) {
    // Minus 1, because the first block's threads may also count one of the remaining elements.
    constexpr int kVectors = (kMostOfAByte - 1) / kWidth / kExponentBatch * kExponentBatch;
    __shared__ Counters counters;
    auto* const mine = reinterpret_cast<uint8_t*>(&counters[0][threadIdx.x]);
    for (int row = 0; row < kCounterRows; row++) counters[row][threadIdx.x] = 0;
    wait_for_previous_kernels();
    const uint32_t seen = *amax_bits;
    const int64_t vectors = elems / kWidth, step = int64_t{gridDim.x} * kExponentThreads;
    const int64_t rest = vectors * kWidth + threadIdx.x;
    uint32_t amax = 0, totals[4] = {};
    const auto count = [&](float value) {
        const uint32_t bits = bf16_bits<T>(value);
        amax = max(amax, bits);
        count_exponent(mine, bits);
    };
    if (blockIdx.x == 0 && rest < elems) count(to_float(in[rest]));
    int64_t first = int64_t{blockIdx.x} * kExponentThreads;   // vector of the block's first thread
    do {
        for (int k = 0; k < kVectors && first < vectors; k += kExponentBatch, first += kExponentBatch * step) {
            const int64_t v = first + threadIdx.x;
            Packed<T, kWidth> batch[kExponentBatch] = {};
#pragma unroll
            for (int i = 0; i < kExponentBatch; i++)
                if (v + i * step < vectors) batch[i].load(in + (v + i * step) * kWidth);
#pragma unroll
            for (int i = 0; i < kExponentBatch; i++) {
                if (v + i * step >= vectors) continue;
                float value[kWidth];
                batch[i].unpack_to(value);
#pragma unroll
                for (int j = 0; j < kWidth; j++) count(value[j]);
            }
        }
        __syncthreads();
        add_up(counters, totals);
        __syncthreads();
    } while (first < vectors);
    for (int i = 0; i < 4; i++) {
        const uint32_t total = totals[i] + __shfl_xor_sync(0xffffffffu, totals[i], 1);
        if (threadIdx.x % 2 == 0 && total > 0)
            atomicAdd(&bins[threadIdx.x / 2 * 4 + i], static_cast<unsigned long long>(total));
    }
    amax = __reduce_max_sync(0xffffffffu, amax);
    if (threadIdx.x % 32 == 0) record_amax(amax_bits, amax, seen);
}

}  // namespace

void count_exponents(Ctx& ctx, const CountExponentsArgs& args) {
    const int64_t elems = args.in.elems;
    CHECK(args.bins != nullptr && args.amax_bits != nullptr, "count_exponents: no bins, or no amax");
    if (elems == 0) return;
    dispatch(args.in.dtype, "count_exponents: in", [&](auto type) {
        using T = decltype(type);
        with_width<T>(vectorizable<T>(0, {args.in.data}), [&](auto width) {
            constexpr int kWidth = decltype(width)::value;
            // At least a batch for each thread.
            const int64_t vectors = std::max<int64_t>(elems / kWidth, 1);
            const int64_t blocks = std::min(ceil_div(vectors, int64_t{kExponentBatch} * kExponentThreads),
                                            int64_t{kExponentBlocksPerSm} * ctx.sm_count);
            launch_early(ctx, count_exponents_kernel<T, kWidth>, grid_size(blocks), kExponentThreads, 0, args.bins,
                         args.amax_bits, args.in.as<T>(), elems);
            CHECK_LAUNCH("count_exponents_kernel");
        });
    });
}

}  // namespace cuda
