// Products of blockwise FP8 operands by wgmma, E4M3 by E4M3.
//
// Tensor cores know no factors: a product over 128 of K is made in registers of its own, 4 wgmma of 64 x 128 x 32 that
// start at 0, and then added to fp32 sums with the two factors. Cycles of a 64 x 128 x 128 product on one of the four
// schedulers, by count of instructions: the tensor core 256; the addition 64 where B has one factor for 128 columns,
// 115 where both factors are vectors (40 products of factors that no register was left for earlier, and their reads);
// some 100 of waits and barriers. While one warpgroup adds, the other multiplies: they hand over turns to start, so
// that the tensor core has a product waiting as long as an addition with its waits takes less than the other's product.
// What that predicts, not yet measured: two bounds stand before the tensor cores' 8192 floating-point operations a
// cycle. Shared memory: wgmma reads 96 bytes a cycle and 48 are written, of 128 (89 %). The end of a tile, where
// nothing hides the stores: 1500 cycles of 32,768 (K = 4096, bf16) or 2500 of 65,536 (K = 8192, fp32). With 97 % of
// the clusters at work in the last round 82 % are left: 1290 TFLOP/s at 1.45 GHz, about what 700 W leave at such loads.
#include "llmc/cuda/gemm_blocks_sm90.cuh"

#include "llmc/cuda/fp8.cuh"
#include "llmc/gemm_fp8.h"

namespace cuda {

#if defined(LLMC_SM90A)
namespace {

struct BlocksMaps {
    CUtensorMap a, b;
};

// The one thread that orders copies.
template <bool kVectors>
__device__ void load_blocks(BlocksState state, const BlocksMaps& maps, const BlocksProblem& p,
                            const BlocksSchedule& schedule) {
    using B = Blocks;
    const int rank = static_cast<int>(BlocksSchedule::rank());
    constexpr uint16_t kAll = (1 << B::kCluster) - 1;
    for (uint32_t item = BlocksSchedule::first(); item < schedule.items; item += BlocksSchedule::step()) {
        const BlocksSchedule::Place at = schedule.place(item);
        const int row = at.row, column = at.column + rank * B::kColumns;
        const uint32_t a_bytes = 4 * min(B::kRows, p.M - row);
        // The last columns may be beyond N: zeros times any factor.
        const uint32_t b_bytes = kVectors ? 4 * max(0, min(B::kColumns, p.N - column)) : 16;
        const float *a_factors = p.a_factors + row, *b_factors = p.b_factors;
        b_factors += kVectors ? column : int64_t{min(column, p.N - 1) / B::kColumns} * p.factor_row;
#pragma unroll 1
        for (int step = 0; step < p.steps; step++) {
            const uint32_t full = state.ring.full + 8 * state.ring.stage, factors = state.shared + state.factors_at();
            ptx::barrier_wait(state.ring.empty + 8 * state.ring.stage, state.ring.parity ^ 1);
            ptx::barrier_expect(full, B::kRowBytes + B::kColumnBytes + a_bytes + b_bytes);
            ptx::load_matrix_box_to_blocks(state.rows() + rank * B::kShareBytes, &maps.a, full, step * B::kDepth,
                                           row + rank * B::kShareRows, kAll);
            ptx::load_matrix_box(state.columns(), &maps.b, full, step * B::kDepth, column);
            ptx::bulk_load(factors, a_factors, a_bytes, full);
            a_factors += p.M;
            if (b_bytes > 0) ptx::bulk_load(factors + 4 * B::kRows, b_factors, b_bytes, full);
            if (kVectors) b_factors += p.N;
            else if (step % 4 == 3) b_factors += 4;
            state.ring.next();
        }
    }
}

// What a thread multiplies its part of a product with: two rows, and B's one factor or those of 32 columns. The
// products of factors that it has registers for are made while the tensor cores work.
template <bool kVectors> struct BlocksFactors;
template <> struct BlocksFactors<false> {
    float of_row[2];

    __device__ void load(const float* of_a, const float* of_b, int step, int) {
#pragma unroll
        for (int i = 0; i < 2; i++) of_row[i] = of_a[8 * i] * of_b[step % 4];
        evaluate_now(of_row);
    }
    __device__ void promote(float (&sums)[64], const float (&part)[64]) const {
#pragma unroll
        for (int i = 0; i < 64; i++) sums[i] = fmaf(part[i], of_row[half_of(i)], sums[i]);
    }
};
template <> struct BlocksFactors<true> {
    static constexpr int kEarly = 6;   // blocks of 8 columns
    float of_row[2], early[4 * kEarly];
    const float2* of_columns;   // side by side; those of this thread in the next 8 columns are 4 further

    __device__ float product(int i, float2 b) const { return of_row[half_of(i)] * (i % 2 ? b.y : b.x); }
    __device__ void load(const float* of_a, const float* of_b, int, int lane) {
        of_row[0] = of_a[0], of_row[1] = of_a[8];
        of_columns = reinterpret_cast<const float2*>(of_b) + lane % 4;
#pragma unroll
        for (int i = 0; i < 4 * kEarly; i++) early[i] = product(i, of_columns[4 * (i / 4)]);
        evaluate_now(early);   // or ptxas puts them off until the tensor cores are done
    }
    __device__ void promote(float (&sums)[64], const float (&part)[64]) const {
#pragma unroll
        for (int i = 0; i < 64; i++) {
            const float factor = i < 4 * kEarly ? early[i % (4 * kEarly)] : product(i, of_columns[4 * (i / 4)]);
            sums[i] = fmaf(part[i], factor, sums[i]);
        }
    }
};

// One consumer warpgroup.
template <bool kVectors, BlocksTurns kTurns> struct BlocksConsumer {
    using B = Blocks;
    BlocksState state;
    const char* const memory;
    const int consumer, warp, lane;   // warp: of the warpgroup
    const uint32_t empty_there;       // the barriers of free stages in the block of the cluster that the lane tells
    float sums[B::kHalves][64], part[64];

    __device__ int my_turn() const { return 1 + consumer; }
    __device__ int next_turn() const { return 1 + (consumer + 1) % B::kConsumers; }

    // part = the product of 64 rows, over 128 of K; and what can be done meanwhile.
    template <typename Meanwhile> __device__ void multiply(int half, Meanwhile meanwhile) {
        const uint32_t rows = state.rows() + (consumer * B::kHalves + half) * B::kHalfBytes;
        const uint64_t a = byte_tile_descriptor<B::kDepth>(rows);
        const uint64_t b = byte_tile_descriptor<B::kDepth>(state.columns());
        if (kTurns != BlocksTurns::kFree) ptx::named_sync<256>(my_turn());
        ptx::pin(part);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < B::kDepth / 32; i++) {
            ptx::wgmma_e4m3<B::kColumns>(part, along_bytes(a, i), along_bytes(b, i), i > 0);
            if (kTurns == BlocksTurns::kHalfway && i == 1) ptx::wgmma_commit();
        }
        ptx::wgmma_commit();
        if (kTurns == BlocksTurns::kIssued) ptx::named_arrive<256>(next_turn());
        meanwhile();
        if (kTurns == BlocksTurns::kHalfway) {
            ptx::wgmma_wait<1>();
            ptx::named_arrive<256>(next_turn());
        }
        ptx::wgmma_wait<0>();
        ptx::pin(part);
    }
    // Stages go back once what was read of them has arrived: an arrival at a barrier does not wait for loads before it,
    // and the copy engine is not ordered with them. Where promote() reads, that is when the tensor cores have been told
    // to overwrite the product that it used.
    __device__ void step(int number, bool very_first) {
        state.ring.wait();
        const auto* of_a = reinterpret_cast<const float*>(memory + state.factors_at());
        const float* const of_b = of_a + B::kRows;
        of_a += consumer * 64 * B::kHalves + 16 * warp + lane / 4;
#pragma unroll
        for (int half = 0; half < B::kHalves; half++) {
            BlocksFactors<kVectors> factors;
            multiply(half, [&] {
                if (kVectors && half == 0 && !very_first) state.release(state.ring.before(), empty_there, lane);
                factors.load(of_a + 64 * half, of_b, number, lane);
            });
            if (!kVectors && half == B::kHalves - 1) state.release(state.ring.stage, empty_there, lane);
            factors.promote(sums[half], part);
        }
        state.ring.next();
    }
    __device__ void store(const BlocksProblem& p, int first_row, int column) {
#pragma unroll
        for (int half = 0; half < B::kHalves; half++) {
            const int row = first_row + 64 * half + 16 * warp + lane / 4;
            if (p.bias) add_bias(sums[half], p, column, lane);
            if (p.fp32) store_fp32(sums[half], p, row, column, lane);
            else store_bf16(sums[half], p, row, column, lane);
        }
        __syncwarp();
    }
    __device__ void run(const BlocksProblem& p, const BlocksSchedule& schedule) {
        // The first turn is that of the first warpgroup.
        if (kTurns != BlocksTurns::kFree && consumer == B::kConsumers - 1) ptx::named_arrive<256>(next_turn());
        for (uint32_t item = BlocksSchedule::first(); item < schedule.items; item += BlocksSchedule::step()) {
            const BlocksSchedule::Place at = schedule.place(item);
            const int column = at.column + static_cast<int>(BlocksSchedule::rank()) * B::kColumns;
#pragma unroll
            for (int half = 0; half < B::kHalves; half++)
#pragma unroll
                for (int i = 0; i < 64; i++) sums[half][i] = 0;
#pragma unroll 1
            for (int number = 0; number < p.steps; number++)
                step(number, number == 0 && item == BlocksSchedule::first());
            store(p, at.row + consumer * 64 * B::kHalves, column);
        }
        // Takes the last arrival away.
        if (kTurns != BlocksTurns::kFree && consumer == 0) ptx::named_sync<256>(my_turn());
    }
};

// Math: D (+)= sum over blocks of 128 of K of fa[k / 128, m] fb[k / 128, n] (sum over the block of a[m, k] b[n, k]) +
//       bias[n], or with fb[n / 128, k / 128]; the sum of a block as tensor cores make it, all else in fp32, D rounded
//       once.
// Source: DeepSeek-V3, arXiv 2412.19437, section 3.3; PTX ISA 9.0, wgmma of .e4m3.
// Traffic: M K + N K bytes, 4 (M + N) K / 128 of factors (128x128 ones: M), D written; a bf16 D that is added to read.
// Requires: sm_90a; operands E4M3, A of 1x128 factors, B of 1x128 (kVectors) or 128x128; M a multiple of 4, N and K of
//           16; A, B, D and factors 16-byte aligned, as fp8_gemm_error demands.
// Parallel: a cluster of 2 blocks owns 256 x 256 results, item after item (BlocksSchedule), a block 128 of the columns;
//           its last warpgroup copies, each other one owns 128 rows, in two halves.
template <bool kVectors, BlocksTurns kTurns>
__global__ void __launch_bounds__(Blocks::kThreads, 1)
gemm_blocks_sm90_kernel(const __grid_constant__ BlocksMaps maps, const __grid_constant__ BlocksProblem problem,
                        const BlocksSchedule schedule) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) char memory[];
    const BlocksState state(ptx::shared_address(memory));
    const int group_of_warps = warp_uniform(threadIdx.x / 128);
    if (threadIdx.x == 0) {
        state.init();
        ptx::prefetch_map(&maps.a);
        ptx::prefetch_map(&maps.b);
    }
    __cluster_barrier_arrive();   // nobody copies into a block, or frees its stages, before its barriers are there
    __cluster_barrier_wait();
    if (group_of_warps == Blocks::kConsumers) {
        ptx::registers_shrink<Blocks::kProducerRegisters>();
        if (threadIdx.x == 128 * Blocks::kConsumers) load_blocks<kVectors>(state, maps, problem, schedule);
        __syncwarp();
    } else {
        ptx::registers_grow<Blocks::kConsumerRegisters>();
        const int lane = static_cast<int>(threadIdx.x) % 32;
        BlocksConsumer<kVectors, kTurns> consumer{
            state, memory, group_of_warps, warp_uniform(threadIdx.x / 32) % 4, lane,
            ptx::address_in_block(state.ring.empty, lane % Blocks::kCluster), {}, {}};
        consumer.run(problem, schedule);
    }
    __cluster_barrier_arrive();   // nobody ends while the other block copies or arrives here
    __cluster_barrier_wait();
#endif
}

template <bool kVectors, BlocksTurns kTurns> void launch(Ctx& ctx, const GemmArgs& args) {
    const auto kernel = gemm_blocks_sm90_kernel<kVectors, kTurns>;
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = Blocks::kCluster;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.blockDim = dim3(Blocks::kThreads);
    config.dynamicSmemBytes = Blocks::kSharedBytes;
    config.stream = stream_of(ctx);
    config.attrs = &attribute;
    config.numAttrs = 1;
    config.gridDim = dim3(grid_size(ctx.sm_count / Blocks::kCluster * Blocks::kCluster));
    static const int resident = [&] {   // clusters; what comes after them would wait until one has done all its items
        int clusters = 0;
        allow_shared_memory(kernel, Blocks::kSharedBytes);
        CUDA_CHECK(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config));
        CHECK(clusters > 0, "gemm_blocks_sm90: no room for a cluster");
        return clusters;
    }();
    const int64_t rows = ceil_div(args.M, Blocks::kRows);
    const int64_t columns = ceil_div(args.N, Blocks::kCluster * Blocks::kColumns), items = rows * columns;
    CHECK(args.M < (1 << 30) && args.N < (1 << 30) && items < (1 << 30), "gemm_blocks_sm90: M %lld, N %lld",
          (long long)args.M, (long long)args.N);
    config.gridDim.x = grid_size(Blocks::kCluster * std::min<int64_t>(items, resident));
    const BlocksMaps maps{matrix_map(args.A.data, args.M, args.K, Blocks::kShareRows),
                          matrix_map(args.B.data, args.N, args.K, Blocks::kColumns)};
    const int64_t steps = ceil_div(args.K, Blocks::kDepth);
    const BlocksProblem problem{.a_factors = args.A_grid.as<const float>(),
                                .b_factors = args.B_grid.as<const float>(),
                                .result = args.D.data,
                                .bias = args.bias ? args.bias.as<const bf16>() : nullptr,
                                .M = static_cast<int>(args.M), .N = static_cast<int>(args.N),
                                .steps = static_cast<int>(steps),
                                .factor_row = kVectors ? 0 : static_cast<int>(ceil_div(steps, 4) * 4),
                                .fp32 = args.D.dtype == Dtype::kFp32, .accumulate = args.accumulate};
    const BlocksSchedule schedule{static_cast<uint32_t>(items), static_cast<uint32_t>(rows),
                                  static_cast<uint32_t>(columns)};
    CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, maps, problem, schedule));
    CHECK_LAUNCH("gemm_blocks_sm90_kernel");
}

}  // namespace
#endif

bool gemm_blocks_on(const Ctx& ctx) {
#if defined(LLMC_SM90A)   // machine code for compute capability 9.0 alone, and the device is one
    return ctx.gemm->own_blocks && ctx.sm == 90;
#else
    return ctx.gemm->own_blocks && false;
#endif
}

bool gemm_blocks_fits(const Ctx& ctx, const GemmArgs& args) {
    return gemm_blocks_on(ctx) && args.A.dtype == Dtype::kE4m3 && args.B.dtype == Dtype::kE4m3
           && args.A_granularity == Granularity::kBlock1x128 && args.epilogue != GemmEpilogue::kBiasGelu;
}

void gemm_blocks([[maybe_unused]] Ctx& ctx, [[maybe_unused]] const GemmArgs& args) {
    CHECK(!fp8_gemm_error(args), "gemm_blocks: %s", fp8_gemm_error(args));
#if defined(LLMC_SM90A)
    constexpr BlocksTurns kFree = BlocksTurns::kFree, kIssued = BlocksTurns::kIssued, kHalfway = BlocksTurns::kHalfway;
    const bool vectors = args.B_granularity == Granularity::kBlock1x128;
    switch (ctx.gemm->turns) {
        case kFree: return (vectors ? launch<true, kFree> : launch<false, kFree>)(ctx, args);
        case kIssued: return (vectors ? launch<true, kIssued> : launch<false, kIssued>)(ctx, args);
        case kHalfway: return (vectors ? launch<true, kHalfway> : launch<false, kHalfway>)(ctx, args);
    }
#endif
}

}  // namespace cuda
