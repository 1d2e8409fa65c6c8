// Matmul of blockwise FP8 operands by wgmma, E4M3 x E4M3: forward and dgrad, where B has 128x128 scales, and weight
// gradients, where it has 1x128 scales (`vectors`).
//
// Tensor cores do not apply scales: a product over 128 of K is computed in registers of its own, 4 wgmma of 64 x 128 x
// 32 starting from 0, and then promoted: added to fp32 accumulators with the two scales. Promotion and products compete
// for the register files, whose two banks have the even and the odd registers. The cycles of a forward matmul of 8192 x
// 4096 x 14336 on an H200 are, relative to one without promotion, 1.03 with a product by a scale instead of FFMA, 1.07
// with FFMA that reads product and accumulator from different banks, 1.12 with both in one bank, and 1.15 if FFMA also
// reads the scale every time. The compiler chooses banks well if nothing else forces accumulators into aligned pairs of
// registers (write_panel). Besides, no product may wait: loads of scales between the wgmma cost 300 cycles per step
// before they were moved ahead of them.
#include "llmc/cuda/common.cuh"
#include "llmc/cuda/gemm.h"
#include "llmc/ops/gemm_fp8.h"
#if defined(LLMC_SM90A)   // these use instructions that older devices lack
#include "llmc/cuda/gemm_fp8_blockwise_consumer_sm90.cuh"
#endif

namespace cuda {
#if defined(LLMC_SM90A)
namespace {

// Where B's scales of a block's columns are: a vector of them for each step, or the scales of four 128x128 blocks for
// each four steps.
template <bool vectors> struct BlocksScaleSource {
    const float* at;
    uint32_t bytes;

    // column: the block's first, which may be beyond N; its columns then are zeros times any scale.
    __device__ BlocksScaleSource(const BlocksProblem& p, const BlocksPlace& place, int column) {
        if constexpr (vectors) {
            const int first = min(column, p.N - 16);
            at = p.b_scales + int64_t{place.k / Blocks::kDepth} * p.N + first;
            bytes = 4 * min(Blocks::kColumns, p.N - first);
        } else {
            const int rows = (p.N + Blocks::kColumns - 1) / Blocks::kColumns;   // of scales of an expert
            at = p.b_scales + (int64_t{place.expert} * rows + min(column, p.N - 1) / Blocks::kColumns) * p.scale_row;
            bytes = 16;
        }
    }
    __device__ void next(const BlocksProblem& p, int step) {
        if constexpr (vectors) at += p.N;
        else if (step % 4 == 3) at += 4;
    }
};

// A bool that the compiler knows.
template <bool value> struct Known {
    __device__ constexpr operator bool() const { return value; }
};

// Loads the operands of a step of ExpertRows: A in boxes of 64 rows, shared by the blocks, and 128 or 256 columns of B.
// A `wide` item has them in each other's place; Wide: bool or Known.
template <typename Wide>
__device__ inline void load_expert(const BlocksState& state, const BlocksMaps& maps, const BlocksPlace& at,
                                   uint32_t full, int k, int column, int rank, Wide wide) {
    using B = Blocks;
    constexpr uint16_t kAll = (1 << B::kCluster) - 1;
    const int boxes = wide ? 1 : 2;
    for (int i = rank * boxes; i < (rank + 1) * boxes; i++)
        ptx::load_matrix_box_to_blocks((wide ? state.columns() : state.rows()) + i * B::kHalfBytes, &maps.a, full, k,
                                       at.row + 64 * i, kAll);
    for (int i = 0; i < (wide ? 2 : 1); i++)
        ptx::load_matrix_box((wide ? state.rows() : state.columns()) + i * B::kColumnBytes, &maps.b, full, k,
                             column + B::kColumns * i, at.expert);
}

// The thread that issues TMA loads. Of ExpertRows it knows `wide` in its loop, which saves instructions; see load_item.
template <bool vectors, typename Tiles>
__device__ void load_blocks(BlocksState state, const BlocksMaps& maps, const BlocksProblem& p, const Tiles& tiles) {
    using B = Blocks;
    constexpr bool kExpertRows = std::is_same_v<Tiles, ExpertRows>;
    const int rank = static_cast<int>(BlockPairs::rank());
    constexpr uint16_t kAll = (1 << B::kCluster) - 1;
    for (BlocksItems<Tiles> items(tiles); items.more(); items.next()) {
        const BlocksPlace at = items.place(p);
        const int row = kExpertRows ? at.row / 4 * 4 : at.row;   // of the first scale: TMA needs 16-byte alignment
        const int column = at.column + rank * (at.wide ? 2 : 1) * B::kColumns;
        const uint32_t a_bytes = 4 * min(kExpertRows ? B::kExpertScales : B::kRows, p.M - row);
        const float* a_scales = p.a_scales + int64_t{at.k / B::kDepth} * p.M + row;
        BlocksScaleSource<vectors> b_scales(p, at, column), more_scales(p, at, column + B::kColumns);
        const auto load = [&](int step, auto k, auto wide) {
            const uint32_t full = state.ring.full + 8 * state.ring.stage, scales = state.scales();
            ptx::barrier_wait(state.ring.empty + 8 * state.ring.stage, state.ring.parity ^ 1);
            ptx::barrier_expect(full, B::kRowBytes + B::kColumnBytes + a_bytes + (wide ? 2 : 1) * b_scales.bytes);
            if constexpr (kExpertRows) {
                load_expert(state, maps, at, full, k(), column, rank, wide);
            } else {
                ptx::load_matrix_box_to_blocks(state.rows() + rank * B::kShareBytes, &maps.a, full, k(),
                                               row + rank * B::kShareRows, kAll);
                ptx::load_matrix_box(state.columns(), &maps.b, full, k(), column);
            }
            ptx::bulk_load(scales, a_scales, a_bytes, full);
            a_scales += p.M;
            const uint32_t b_at = scales + 4 * (kExpertRows ? B::kExpertBlocksAt : B::kRows);
            ptx::bulk_load(b_at, b_scales.at, b_scales.bytes, full);
            b_scales.next(p, step);
            if (wide) {
                ptx::bulk_load(b_at + 16, more_scales.at, more_scales.bytes, full);
                more_scales.next(p, step);
            }
            state.ring.next();
        };
        if constexpr (std::is_same_v<Tiles, ExpertSums>) {
            int k = at.k;
#pragma unroll 1
            for (items.count(at.steps); items.left() > 0; items.count(-1), k += B::kDepth)
                load(0, [k] { return k; }, at.wide);
        } else {
            const auto load_all = [&](auto wide) {
#pragma unroll 1
                for (int step = 0; step < at.steps; step++) load(step, [step] { return step * B::kDepth; }, wide);
            };
            if constexpr (!kExpertRows) load_all(at.wide);
            else if (at.wide) load_all(Known<true>{});
            else load_all(Known<false>{});
        }
    }
}

// The warp that puts the scales of columns into the order in which consumers load them as matrices of 8 rows
// (ldmatrix): of 8 columns first the even, then the odd ones.
template <typename Tiles>
__device__ void order_scales(BlocksState state, const BlocksProblem& p, const Tiles& tiles, int lane) {
    for (BlocksItems<Tiles> items(tiles); items.more(); items.next()) {
        const int steps = items.place(p).steps;
#pragma unroll 1
        for (int step = 0; step < steps; step++) {
            state.ring.wait();
            const float4 four = ptx::load_shared4(state.scales() + 4 * Blocks::kRows + 16 * lane);
            const uint32_t to = state.ordered() + lane / 2 * 32 + lane % 2 * 8;
            ptx::store_shared(to, four.x, four.z);
            ptx::store_shared(to + 16, four.y, four.w);
            __syncwarp();
            if (lane == 0) ptx::barrier_arrive(state.ordered_barrier());
            state.ring.next();
        }
    }
}

// Math: D (+)= sum over blocks of 128 of K of sa[k / 128, m] sb[n / 128, k / 128] (sum over the block of a[m, k] b[n,
//       k]) + bias[n], or sa[k / 128, m] sb[k / 128, n] with 1x128 scales of B; a block's sum has the tensor cores'
//       precision, everything else is fp32. A sum that is added to a bf16 D is rounded before, D after the addition.
// Source: DeepSeek-V3, arXiv 2412.19437, section 3.3; PTX ISA 9.0, wgmma of .e4m3.
// Traffic: M K + N K bytes and 4 M K / 128 of scales (and 4 N K / 128 of 1x128 scales of B) read, D written; D also
//          read to accumulate.
// Requires: sm_90a; E4M3 operands, A with 1x128 scales, B with 128x128 or 1x128; M a multiple of 4, N and K of 16; A,
//           B, D and scales 16-byte aligned, as fp8_gemm_error checks; of experts as GroupedGemmArgs says.
// Parallel: a cluster of 2 blocks computes tiles of 256 x 256 (BlocksPlace), each block 128 of the columns. Its last
//           warpgroup issues TMA loads (and orders scales), each other one owns 128 rows in two halves.
template <bool vectors, typename Tiles>
__global__ void __launch_bounds__(Blocks::kThreads, 1)
gemm_fp8_blockwise_sm90_kernel(const __grid_constant__ BlocksMaps maps, const __grid_constant__ BlocksProblem problem,
                        const Tiles tiles) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) char memory[];
    constexpr bool kExpertRows = std::is_same_v<Tiles, ExpertRows>;
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
        ptx::registers_shrink<kExpertRows ? Blocks::kExpertProducerRegisters : Blocks::kProducerRegisters>();
        const int thread = static_cast<int>(threadIdx.x) - 128 * Blocks::kConsumers;
        if (thread == 0) load_blocks<vectors, Tiles>(state, maps, problem, tiles);
        if (vectors && thread / 32 == 1) order_scales(state, problem, tiles, thread % 32);
        __syncwarp();
    } else {
        ptx::registers_grow<kExpertRows ? Blocks::kExpertConsumerRegisters : Blocks::kConsumerRegisters>();
        const int lane = static_cast<int>(threadIdx.x) % 32;
        const uint32_t last_empty = state.ring.empty + 8 * (Blocks::kStages - 1);
        BlocksConsumer<vectors, Tiles> consumer{
            state, group_of_warps, warp_uniform(threadIdx.x / 32) % 4, lane,
            ptx::address_in_block(last_empty, lane % Blocks::kCluster), {}, {}, {}, {}};
        if constexpr (consumer.kExperts) consumer.run_experts(maps, problem, tiles);
        else consumer.run(maps, problem, tiles);
    }
    __cluster_barrier_arrive();   // no block may exit while the other still copies or arrives here
    __cluster_barrier_wait();
#endif
}

template <bool vectors> void launch(Ctx& ctx, const GemmArgs& args) {
    const BlocksMaps maps{matrix_map(args.A.data, args.M, args.K, Blocks::kShareRows),
                          matrix_map(args.B.data, args.N, args.K, Blocks::kColumns),
                          box_map(args.D, args.M, args.N, args.N, 16, 128)};
    const int64_t steps = ceil_div(args.K, Blocks::kDepth);
    const BlocksProblem problem{.a_scales = args.A_scale_inv.as<float>(),
                                .b_scales = args.B_scale_inv.as<float>(),
                                .bias = args.bias ? args.bias.as<bf16>() : nullptr,
                                .M = static_cast<int>(args.M), .N = static_cast<int>(args.N),
                                .steps = static_cast<int>(steps),
                                .scale_row = static_cast<int>(ceil_div(steps, 4) * 4),
                                .fp32 = args.D.dtype == Dtype::kFp32, .accumulate = args.accumulate};
    constexpr auto kKernel = gemm_fp8_blockwise_sm90_kernel<vectors, BlockPairs>;
    launch_block_pairs<kKernel, Blocks::kThreads, Blocks::kSharedBytes>(
        ctx, "gemm_fp8_blockwise", args.M, args.N, maps, problem);
    CHECK_LAUNCH("gemm_fp8_blockwise_sm90_kernel");
}

// The matmuls of experts. B: of one expert (N, K), or of weight gradients the transposed operand.
template <bool vectors, typename Tiles>
void launch_experts(Ctx& ctx, const GroupedGemmArgs& args, int64_t items, int64_t K, int a_box, const Tiles& tiles) {
    constexpr bool kSums = std::is_same_v<Tiles, ExpertSums>;
    const int64_t steps = ceil_div(K, Blocks::kDepth), N = args.N;
    CHECK(!kSums || (items < 1 << kItemBits && steps < 1 << (32 - kItemBits)),
          "grouped_gemm in FP8: %lld tiles of weight gradients, %lld steps", ll(items), ll(steps));
    const BlocksMaps maps{matrix_map(args.A.data, args.M, K, a_box),
                          box_map(args.B, N, K, K, Blocks::kColumns, 128, kSums ? 1 : args.E),
                          box_map(args.D, args.M, N, N, 16, 128, kSums ? args.E : 1)};
    const BlocksProblem problem{.a_scales = args.A_scale_inv.as<float>(), .b_scales = args.B_scale_inv.as<float>(),
                                .bias = nullptr, .M = static_cast<int>(args.M), .N = static_cast<int>(N),
                                .steps = static_cast<int>(steps), .scale_row = static_cast<int>(ceil_div(steps, 4) * 4),
                                .fp32 = args.D.dtype == Dtype::kFp32, .accumulate = args.accumulate};
    constexpr auto kKernel = gemm_fp8_blockwise_sm90_kernel<vectors, Tiles>;
    launch_clusters<kKernel, Blocks::kThreads, Blocks::kSharedBytes>(ctx, "grouped_gemm", items, maps, problem, tiles);
    CHECK_LAUNCH("gemm_fp8_blockwise_sm90_kernel");
}

}  // namespace
#endif

bool gemm_fp8_blockwise_available(const Ctx& ctx) { return kSm90aCode && ctx.sm == 90; }

bool gemm_fp8_blockwise_supports(const Ctx& ctx, const GemmArgs& args) {
    return gemm_fp8_blockwise_available(ctx) && args.A.dtype == Dtype::kE4m3 && args.B.dtype == Dtype::kE4m3
           && args.A_granularity == Granularity::kBlock1x128 && args.B_granularity != Granularity::kTensor;
}

void gemm_fp8_blockwise(Ctx& ctx, const GemmArgs& args) {
    CHECK(gemm_fp8_blockwise_supports(ctx, args) && !fp8_gemm_error(args), "gemm_fp8_blockwise: %s",
          fp8_gemm_error(args) ? fp8_gemm_error(args) : "not a product that it makes, or not on this device");
#if defined(LLMC_SM90A)
    if (args.B_granularity == Granularity::kBlock1x128) launch<true>(ctx, args);
    else launch<false>(ctx, args);
#endif
}

void grouped_gemm_fp8(Ctx& ctx, const GroupedGemmArgs& args) {
    CHECK(gemm_fp8_blockwise_available(ctx),
          "FP8 matmuls of experts need compute capability 9.0 and a build with ARCH=90a");
#if defined(LLMC_SM90A)
    const int32_t* offsets = args.offsets.as<int32_t>();
    const int64_t E = args.E, M = args.M, N = args.N, K = args.K;
    const int experts = static_cast<int>(E), m = static_cast<int>(M), n = static_cast<int>(N);
    if (args.layout == GemmLayout::kWgrad) {
        const ExpertSums tiles{offsets, experts, m, n, args.D.dtype == Dtype::kFp32, args.accumulate};
        return launch_experts<true>(ctx, args, tiles.items(), padded_rows(K, E), Blocks::kShareRows, tiles);
    }
    const ExpertRows tiles{offsets, args.D.as<bf16>(), experts, n, static_cast<int>(K)};
    const int64_t most = (M / 256 + E) * ceil_div(N, int64_t{256});   // items
    launch_experts<false>(ctx, args, most, K, 64, tiles);
#endif
}

}  // namespace cuda
