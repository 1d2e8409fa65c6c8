// Matmul of INT8 operands by wgmma, with a scale per row of A and of B.
//
// INT32 sums are exact, so the tensor cores accumulate over all of K, without promotion, and a product of the next step
// is always queued behind the one that runs. Between two tiles a consumer scales, rounds and stores for about as long
// as the tensor cores take for two of its steps alone. Consumer 1 begins each tile two steps after consumer 0, so that
// each of them stores while the other has the tensor cores for itself.
#include "llmc/cuda/common.cuh"
#include "llmc/cuda/gemm.h"
#include "llmc/ops/gemm_fp8.h"
#if defined(LLMC_SM90A)   // these use instructions that older devices lack
#include "llmc/cuda/gemm_int8_sm90.cuh"
#endif

namespace cuda {
#if defined(LLMC_SM90A)
namespace {

// The thread that issues TMA loads.
__device__ void load_int8(Int8State state, const Int8Maps& maps, const Int8Problem& p, const BlockPairs& pairs) {
    using T = Int8Tile;
    const int rank = static_cast<int>(BlockPairs::rank()), steps = int8_steps(p.K);
    constexpr uint16_t kAll = (1 << T::kCluster) - 1;
    for (uint32_t item = BlockPairs::first(); item < pairs.items; item += BlockPairs::step()) {
        const BlockPairs::Place at = pairs.place(item);
#pragma unroll 1
        for (int step = 0; step < steps; step++) {
            const uint32_t full = state.ring.claim(T::kRowBytes + T::kColumnBytes);
            ptx::load_matrix_box(state.rows(), &maps.a, full, step * T::kDepth, at.row + rank * T::kRows);
            ptx::load_matrix_box_to_blocks(state.columns() + rank * T::kShareBytes, &maps.b, full, step * T::kDepth,
                                           at.column + rank * T::kShareColumns, kAll);
            state.ring.next();
        }
    }
}

// One consumer warpgroup.
struct Int8Consumer {
    using T = Int8Tile;
    Int8State state;
    const int consumer, warp, lane;   // warp: of the warpgroup
    int sums[128];

    // Starts sums (+)= the product over 32 * `products` of K, `add` for the first of them.
    template <int products> __device__ void multiply(bool add) {
        const uint64_t a = byte_tile_descriptor<T::kDepth>(state.rows() + consumer * T::kConsumerBytes);
        const uint64_t b = byte_tile_descriptor<T::kDepth>(state.columns());
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < products; i++)
            ptx::wgmma_int8(sums, along_bytes(a, i), along_bytes(b, i), i > 0 || add);
        ptx::wgmma_commit();
    }
    // Frees a stage in both blocks, since each loads half of B into both.
    __device__ void release(uint32_t stage) const {
        if (lane < T::kCluster) ptx::barrier_arrive_in_block(ptx::address_in_block(state.ring.empty + 8 * stage, lane));
    }
    // Starts the sums of a tile; at the end the last step is in flight, and its stage, `before`, not yet released.
    __device__ uint32_t start_tile(int K) {
        const int steps = int8_steps(K);
        // If the steps were fewer than the stages, consumer 0 could signal again before consumer 1 has waited.
        const bool in_turn = steps >= T::kStages;
        if (in_turn && consumer == 1) ptx::named_sync<128 * T::kConsumers>(T::kLeadBarrier);
        uint32_t before = 0;
#pragma unroll 1
        for (int step = 0; step < steps; step++) {
            state.ring.wait();
            if (K - step * T::kDepth > T::kDepth / 2) multiply<T::kDepth / 32>(step > 0);
            else multiply<T::kDepth / 64>(step > 0);   // the rest are zeros
            if (in_turn && consumer == 0 && step + 1 == T::kLead)
                ptx::named_arrive<128 * T::kConsumers>(T::kLeadBarrier);
            if (step > 0) {
                ptx::wgmma_wait<1>();
                release(before);
            }
            before = state.ring.stage;
            state.ring.next();
        }
        return before;
    }
    // Scales of the thread's columns, two of each 8; of those from N on 0.
    __device__ void load_scales(float2 (&of_columns)[32], const Int8Problem& p, int column) const {
#pragma unroll
        for (int j = 0; j < 32; j++) {
            const auto* from = reinterpret_cast<const float2*>(p.b_scales + column + 8 * j + 2 * (lane % 4));
            of_columns[j] = column + 8 * j < p.N ? *from : float2{};
        }
    }
    // Biases of the thread's columns of box c, two of each 8.
    template <bool with_bias>
    __device__ void load_bias(uint32_t (&bias)[8], const Int8Problem& p, int column, int c) const {
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const int at = column + c * T::kBoxColumns + 8 * j;
            bias[j] = with_bias && at < p.N ? *reinterpret_cast<const uint32_t*>(p.bias + at + 2 * (lane % 4)) : 0;
        }
    }
    // The results of columns 8 j .. 8 j + 7, as GemmArgs defines them.
    template <bool with_bias>
    __device__ void scale(float* results, int j, const float (&of_rows)[2], float2 of_columns, uint32_t bias) const {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float both = __fmul_rn(of_rows[half_of(i)], i % 2 ? of_columns.y : of_columns.x);
            const float sum = __int2float_rn(sums[4 * j + i]);
            results[i] = with_bias ? __fmaf_rn(sum, both, __uint_as_float(i % 2 ? bias & 0xffff0000u : bias << 16))
                                   : __fmul_rn(sum, both);
        }
    }
    // Stores the tile by TMA. A warp waits until the box before the last has been read, not until it has been written.
    template <bool with_bias>
    __device__ void store(const Int8Maps& maps, const Int8Problem& p, int row, int column, const float (&of_rows)[2],
                          const float2 (&of_columns)[32]) const {
        uint32_t bias[2][8];   // of this box, and of the next one, so that no result waits for them
        load_bias<with_bias>(bias[0], p, column, 0);
#pragma unroll
        for (int c = 0; c < T::kBoxes; c++) {
            const uint32_t buffer = state.shared + T::kResultsAt + (4 * consumer + warp) * T::kWarpBytes
                                    + c % T::kBuffers * T::kBoxBytes;
            if (c + 1 < T::kBoxes) load_bias<with_bias>(bias[(c + 1) % 2], p, column, c + 1);
            if (lane == 0) ptx::bulk_wait_read<T::kBuffers - 1>();
            __syncwarp();
#pragma unroll
            for (int j = 0; j < 8; j += 2) {
                float results[8];
                uint32_t part[4];
#pragma unroll
                for (int k = 0; k < 2; k++)
                    scale<with_bias>(results + 4 * k, 8 * c + j + k, of_rows, of_columns[8 * c + j + k],
                                     bias[c % 2][j + k]);
                as_operand(part, results, 0);
                ptx::store_matrix_x4(buffer + panel_offset(lane & 15, j + (lane >> 4)), part);
            }
            ptx::fence_async();
            __syncwarp();
            if (lane == 0) {
                if (row < p.M && column + c * T::kBoxColumns < p.N)
                    ptx::store_matrix_box(&maps.d, buffer, column + c * T::kBoxColumns, row);
                ptx::bulk_commit();   // also an empty group, because the wait counts groups
            }
        }
    }
    __device__ void run(const Int8Maps& maps, const Int8Problem& p, const BlockPairs& pairs) {
        for (uint32_t item = BlockPairs::first(); item < pairs.items; item += BlockPairs::step()) {
            const BlockPairs::Place at = pairs.place(item);
            const int row = at.row + static_cast<int>(BlockPairs::rank()) * T::kRows + 64 * consumer + 16 * warp;
            const uint32_t last = start_tile(p.K);
            float of_rows[2];
            float2 of_columns[32];
#pragma unroll
            for (int i = 0; i < 2; i++)
                of_rows[i] = row + lane / 4 + 8 * i < p.M ? p.a_scales[row + lane / 4 + 8 * i] : 0;
            load_scales(of_columns, p, at.column);   // while the last products run
            ptx::wgmma_wait<0>();
            ptx::pin(sums);
            release(last);
            if (p.bias) store<true>(maps, p, row, at.column, of_rows, of_columns);
            else store<false>(maps, p, row, at.column, of_rows, of_columns);
        }
        if (lane == 0) ptx::bulk_wait_read<0>();   // shared memory must outlive the copies
    }
};

// Math: D[m, n] = float(sum over k of a[m, k] b[n, k]) * (sa[m] * sb[n]) (+ bias[n] in an fma), every step rounded to
//       nearest even, in fp32 and last to bf16.
// Source: Jouppi et al., arXiv 1704.04760 (INT32 sums of INT8 products); PTX ISA 9.0, wgmma of .s8.
// Traffic: M K + N K bytes read, 2 M N written.
// Requires: sm_90a; N and K multiples of 16, K <= 2^17; all 16-byte aligned, as int8_gemm_error checks.
// Parallel: a cluster of 2 blocks computes tiles of 256 x 256 (BlockPairs), each block 128 of the rows. Its last
//           warpgroup issues TMA loads, each other one owns 64 rows.
__global__ void __launch_bounds__(Int8Tile::kThreads, 1)
gemm_int8_sm90_kernel(const __grid_constant__ Int8Maps maps, const __grid_constant__ Int8Problem problem,
                      const BlockPairs pairs) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) char memory[];
    const Int8State state(ptx::shared_address(memory));
    const int group_of_warps = warp_uniform(threadIdx.x / 128);
    if (threadIdx.x == 0) {
        state.ring.init(4 * Int8Tile::kConsumers * Int8Tile::kCluster);
        ptx::barrier_init_fence();
        ptx::prefetch_map(&maps.a);
        ptx::prefetch_map(&maps.b);
    }
    __cluster_barrier_arrive();   // no block may copy into another or free its stages before its barriers exist
    __cluster_barrier_wait();
    if (group_of_warps == Int8Tile::kConsumers) {
        ptx::registers_shrink<Int8Tile::kProducerRegisters>();
        if (threadIdx.x == 128 * Int8Tile::kConsumers) load_int8(state, maps, problem, pairs);
        __syncwarp();
    } else {
        ptx::registers_grow<Int8Tile::kConsumerRegisters>();
        Int8Consumer consumer{state, group_of_warps, warp_uniform(threadIdx.x / 32) % 4,
                              static_cast<int>(threadIdx.x) % 32, {}};
        consumer.run(maps, problem, pairs);
    }
    __cluster_barrier_arrive();   // no block may exit while the other still copies or arrives here
    __cluster_barrier_wait();
#endif
}

}  // namespace
#endif

bool gemm_int8_available(const Ctx& ctx) { return kSm90aCode && ctx.sm == 90; }

void gemm_int8([[maybe_unused]] Ctx& ctx, [[maybe_unused]] const GemmArgs& args) {
#if defined(LLMC_SM90A)
    using T = Int8Tile;
    const Int8Maps maps{matrix_map(args.A.data, args.M, args.K, T::kRows),
                        matrix_map(args.B.data, args.N, args.K, T::kShareColumns),
                        box_map(args.D, args.M, args.N, args.N, 16, 128)};
    const Int8Problem problem{.a_scales = args.A_scale_inv.as<float>(), .b_scales = args.B_scale_inv.as<float>(),
                              .bias = args.bias ? args.bias.as<bf16>() : nullptr,
                              .M = static_cast<int>(args.M), .N = static_cast<int>(args.N),
                              .K = static_cast<int>(args.K)};
    launch_block_pairs<gemm_int8_sm90_kernel, T::kThreads, T::kSharedBytes>(ctx, "gemm_int8", args.M, args.N, maps,
                                                                           problem);
    CHECK_LAUNCH("gemm_int8_sm90_kernel");
#endif
}

}  // namespace cuda
