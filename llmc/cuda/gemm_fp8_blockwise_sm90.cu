// Matmul of blockwise FP8 operands by wgmma, E4M3 x E4M3, with 128x128 scales for B: forward and dgrad.
//
// Tensor cores do not apply scales: a product over 128 of K is computed in registers of its own, 4 wgmma of 64 x 128 x
// 32 starting from 0, and then promoted: added to fp32 accumulators with the two scales. On an H200, both kinds of work
// compete for the register files. While one warpgroup promotes (90 cycles for 64 results per thread), the other's
// product runs at 38 % of its speed, so that an instruction of all four warps costs the tensor cores 0.87 cycles,
// regardless of when it is issued. A step of 256 x 128 x 128 should take 1024 + 4 * 64 * 0.87 = 1247 cycles, and takes
// 1210. So the kernel minimises instructions besides the products, and no product may wait: loads of scales between the
// wgmma cost 300 cycles per step before they were moved ahead of them. At 700 W the clock drops to 1290 MHz and the
// kernel reaches 1150 TFLOP/s (1280 without promotion). With 1x128 scales on both sides (weight gradients) promotion
// takes twice the instructions, 1610 cycles per step: no faster than the library, which therefore runs those.
#include "llmc/cuda/common.cuh"
#include "llmc/cuda/gemm.h"
#include "llmc/ops/gemm_fp8.h"
#if defined(LLMC_SM90A)   // these use instructions that older devices lack
#include "llmc/cuda/gemm_fp8_blockwise_sm90.cuh"
#endif

namespace cuda {
#if defined(LLMC_SM90A)
namespace {

struct BlocksMaps {
    CUtensorMap a, b, d;   // d: of bf16 results that are not accumulated
};

// The thread that issues TMA loads.
__device__ void load_blocks(BlocksState state, const BlocksMaps& maps, const BlocksProblem& p,
                            const BlocksSchedule& schedule) {
    using B = Blocks;
    const int rank = static_cast<int>(BlocksSchedule::rank());
    constexpr uint16_t kAll = (1 << B::kCluster) - 1;
    for (uint32_t item = BlocksSchedule::first(); item < schedule.items; item += BlocksSchedule::step()) {
        const BlocksSchedule::Place at = schedule.place(item);
        const int row = at.row, column = at.column + rank * B::kColumns;
        const uint32_t a_bytes = 4 * min(B::kRows, p.M - row);
        const float* a_scales = p.a_scales + row;
        // The last columns may be beyond N: zeros times any scale.
        const float* b_scales = p.b_scales + int64_t{min(column, p.N - 1) / B::kColumns} * p.scale_row;
#pragma unroll 1
        for (int step = 0; step < p.steps; step++) {
            const uint32_t full = state.ring.full + 8 * state.ring.stage, scales = state.shared + state.scales_at();
            ptx::barrier_wait(state.ring.empty + 8 * state.ring.stage, state.ring.parity ^ 1);
            ptx::barrier_expect(full, B::kRowBytes + B::kColumnBytes + a_bytes + 16);
            ptx::load_matrix_box_to_blocks(state.rows() + rank * B::kShareBytes, &maps.a, full, step * B::kDepth,
                                           row + rank * B::kShareRows, kAll);
            ptx::load_matrix_box(state.columns(), &maps.b, full, step * B::kDepth, column);
            ptx::bulk_load(scales, a_scales, a_bytes, full);
            a_scales += p.M;
            ptx::bulk_load(scales + 4 * B::kRows, b_scales, 16, full);
            if (step % 4 == 3) b_scales += 4;
            state.ring.next();
        }
    }
}

// The scales of a thread's part of a step: its rows' scales of A, and B's.
struct BlocksScales {
    float of_row[Blocks::kHalves][2], of_columns;

    // Starts to load from the stage's scales at `at`, in this order. row: the thread's first row.
    __device__ void load(uint32_t at, int row, int step) {
#pragma unroll
        for (int half = 0; half < Blocks::kHalves; half++)
#pragma unroll
            for (int i = 0; i < 2; i++) of_row[half][i] = ptx::load_shared(at + 4 * (row + 64 * half + 8 * i));
        of_columns = ptx::load_shared(at + 4 * (Blocks::kRows + step % 4));
    }
    __device__ void promote(float (&sums)[64], const float (&part)[64], int half) const {
        const float both[2] = {of_row[half][0] * of_columns, of_row[half][1] * of_columns};
#pragma unroll
        for (int i = 0; i < 64; i++) sums[i] = fmaf(part[i], both[half_of(i)], sums[i]);
    }
};

// One consumer warpgroup.
struct BlocksConsumer {
    using B = Blocks;
    BlocksState state;
    const int consumer, warp, lane;   // warp: of the warpgroup
    const uint32_t empty_there;       // `empty` barriers of the one block in the cluster that this lane signals
    float sums[B::kHalves][64], part[64];
    BlocksScales scales;   // of the step

    // The thread's first row in its warpgroup's half 0, relative to the block.
    __device__ int first_row() const { return consumer * 64 * B::kHalves + 16 * warp + lane / 4; }

    // part = the product of 64 rows over 128 of K; calls meanwhile() while it runs.
    template <typename Meanwhile> __device__ void multiply(int half, Meanwhile meanwhile) {
        const uint32_t rows = state.rows() + (consumer * B::kHalves + half) * B::kHalfBytes;
        const uint64_t a = byte_tile_descriptor<B::kDepth>(rows);
        const uint64_t b = byte_tile_descriptor<B::kDepth>(state.columns());
        ptx::pin(part);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < B::kDepth / 32; i++)
            ptx::wgmma_e4m3<B::kColumns>(part, along_bytes(a, i), along_bytes(b, i), i > 0);
        ptx::wgmma_commit();
        meanwhile();
        ptx::wgmma_wait<0>();
        ptx::pin(part);
    }
    __device__ void load_scales(BlocksScales& to, const BlocksState& from, int number) const {
        from.ring.wait();
        to.load(from.shared + from.scales_at(), first_row(), number);
    }
    // Scales are loaded one step ahead, so that no wgmma waits for them. A stage may be released only after the loads
    // from it have completed: neither an arrival at a barrier nor TMA is ordered with them. They have completed once
    // the first half's promotion has used the scale that was loaded last.
    __device__ void step(int number, bool last) {
        BlocksScales next;
        multiply(0, [] {});
        scales.promote(sums[0], part, 0);
        multiply(1, [&] {
            if (last) return;
            BlocksState ahead = state;
            ahead.ring.next();
            load_scales(next, ahead, number + 1);
        });
        state.release(empty_there, lane);
        scales.promote(sums[1], part, 1);
        scales = next;
        state.ring.next();
    }
    // Recomputes its indices rather than keep them in registers across the steps of a tile.
    __device__ void store(const BlocksMaps& maps, const BlocksProblem& p, const BlocksSchedule& schedule,
                          uint32_t item) {
        const BlocksSchedule::Place at = schedule.place(ptx::opaque(item));
        const int thread = static_cast<int>(ptx::thread_index()), of_group = thread % 128, lane = thread % 32;
        const int first = at.row + thread / 128 * 64 * B::kHalves + of_group / 32 * 16, row = first + lane / 4;
        const uint32_t buffer = state.shared + B::kResultsAt + thread / 32 * B::kWarpBytes;
        const int column = at.column + static_cast<int>(BlocksSchedule::rank()) * B::kColumns;
#pragma unroll
        for (int half = 0; half < B::kHalves; half++) {
            if (p.bias) add_bias(sums[half], p, column, lane);
            if (p.fp32) store_fp32(sums[half], p, row + 64 * half, column, lane);
            else if (p.accumulate) add_bf16(sums[half], p, row + 64 * half, column, lane);
            else store_boxes(sums[half], maps.d, p, buffer, first + 64 * half, column, lane);
        }
        __syncwarp();
    }
    __device__ void run(const BlocksMaps& maps, const BlocksProblem& p, const BlocksSchedule& schedule) {
        for (uint32_t item = BlocksSchedule::first(); item < schedule.items; item += BlocksSchedule::step()) {
#pragma unroll
            for (int half = 0; half < B::kHalves; half++)
#pragma unroll
                for (int i = 0; i < 64; i++) sums[half][i] = 0;
            load_scales(scales, state, 0);
#pragma unroll 1
            for (int number = 0; number < p.steps; number++) step(number, number + 1 == p.steps);
            store(maps, p, schedule, item);
        }
        if (lane == 0) ptx::bulk_wait_read<0>();   // shared memory must outlive the copies
    }
};

// Math: D (+)= sum over blocks of 128 of K of sa[k / 128, m] sb[n / 128, k / 128] (sum over the block of a[m, k] b[n,
//       k]) + bias[n]; a block's sum has the tensor cores' precision, everything else is fp32, and D is rounded once.
// Source: DeepSeek-V3, arXiv 2412.19437, section 3.3; PTX ISA 9.0, wgmma of .e4m3.
// Traffic: M K + N K bytes and 4 M K / 128 of scales read, D written; D also read to accumulate in bf16.
// Requires: sm_90a; E4M3 operands, A with 1x128 scales, B with 128x128; M a multiple of 4, N and K of 16; A, B, D and
//           scales 16-byte aligned, as fp8_gemm_error checks.
// Parallel: a cluster of 2 blocks computes tiles of 256 x 256 (BlocksSchedule), each block 128 of the columns. Its last
//           warpgroup issues TMA loads, each other one owns 128 rows in two halves.
__global__ void __launch_bounds__(Blocks::kThreads, 1)
gemm_fp8_blockwise_sm90_kernel(const __grid_constant__ BlocksMaps maps, const __grid_constant__ BlocksProblem problem,
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
    __cluster_barrier_arrive();   // no block may copy into another or free its stages before its barriers exist
    __cluster_barrier_wait();
    if (group_of_warps == Blocks::kConsumers) {
        ptx::registers_shrink<Blocks::kProducerRegisters>();
        if (threadIdx.x == 128 * Blocks::kConsumers) load_blocks(state, maps, problem, schedule);
        __syncwarp();
    } else {
        ptx::registers_grow<Blocks::kConsumerRegisters>();
        const int lane = static_cast<int>(threadIdx.x) % 32;
        BlocksConsumer consumer{
            state, group_of_warps, warp_uniform(threadIdx.x / 32) % 4, lane,
            ptx::address_in_block(state.ring.empty, lane % Blocks::kCluster), {}, {}, {}};
        consumer.run(maps, problem, schedule);
    }
    __cluster_barrier_arrive();   // no block may exit while the other still copies or arrives here
    __cluster_barrier_wait();
#endif
}

void launch(Ctx& ctx, const GemmArgs& args) {
    const auto kernel = gemm_fp8_blockwise_sm90_kernel;
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
    static const int resident = [&] {   // clusters; any more would wait until another has finished all its items
        int clusters = 0;
        allow_shared_memory(kernel, Blocks::kSharedBytes);
        CUDA_CHECK(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config));
        CHECK(clusters > 0, "gemm_fp8_blockwise: no room for a cluster");
        return clusters;
    }();
    const int64_t rows = ceil_div(args.M, Blocks::kRows);
    const int64_t columns = ceil_div(args.N, Blocks::kCluster * Blocks::kColumns), items = rows * columns;
    CHECK(args.M < (1 << 30) && args.N < (1 << 30) && items < (1 << 30), "gemm_fp8_blockwise: M %lld, N %lld",
          (long long)args.M, (long long)args.N);
    config.gridDim.x = grid_size(Blocks::kCluster * std::min<int64_t>(items, resident));
    BlocksMaps maps{matrix_map(args.A.data, args.M, args.K, Blocks::kShareRows),
                    matrix_map(args.B.data, args.N, args.K, Blocks::kColumns), {}};
    if (args.D.dtype == Dtype::kBf16 && !args.accumulate) maps.d = box_map(args.D, args.M, args.N, args.N, 16, 128);
    const int64_t steps = ceil_div(args.K, Blocks::kDepth);
    const BlocksProblem problem{.a_scales = args.A_scale_inv.as<float>(),
                                .b_scales = args.B_scale_inv.as<float>(),
                                .result = args.D.data,
                                .bias = args.bias ? args.bias.as<bf16>() : nullptr,
                                .M = static_cast<int>(args.M), .N = static_cast<int>(args.N),
                                .steps = static_cast<int>(steps),
                                .scale_row = static_cast<int>(ceil_div(steps, 4) * 4),
                                .fp32 = args.D.dtype == Dtype::kFp32, .accumulate = args.accumulate};
    const BlocksSchedule schedule{static_cast<uint32_t>(items), static_cast<uint32_t>(rows),
                                  static_cast<uint32_t>(columns)};
    CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, maps, problem, schedule));
    CHECK_LAUNCH("gemm_fp8_blockwise_sm90_kernel");
}

}  // namespace
#endif

bool gemm_fp8_blockwise_available(const Ctx& ctx) { return kSm90aCode && ctx.sm == 90; }

bool gemm_fp8_blockwise_supports(const Ctx& ctx, const GemmArgs& args) {
    return gemm_fp8_blockwise_available(ctx) && args.A.dtype == Dtype::kE4m3 && args.B.dtype == Dtype::kE4m3
           && args.A_granularity == Granularity::kBlock1x128 && args.B_granularity == Granularity::kBlock128x128
           && args.epilogue != GemmEpilogue::kBiasGelu;
}

void gemm_fp8_blockwise(Ctx& ctx, const GemmArgs& args) {
    CHECK(gemm_fp8_blockwise_supports(ctx, args) && !fp8_gemm_error(args), "gemm_fp8_blockwise: %s",
          fp8_gemm_error(args) ? fp8_gemm_error(args) : "not a product that it makes, or not on this device");
#if defined(LLMC_SM90A)
    launch(ctx, args);
#endif
}

}  // namespace cuda
