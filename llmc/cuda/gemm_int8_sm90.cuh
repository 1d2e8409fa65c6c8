// Matmul of INT8 operands on compute capability 9.0: tiles, shared memory.
#pragma once
#include "llmc/cuda/block_pairs_sm90.cuh"
#include "llmc/cuda/wgmma.cuh"

namespace cuda {

// A block computes 128 x 256 results, and each of its two consumer warpgroups 64 x 256 of them, in 128 INT32 registers
// per thread. A product of 64 x 256 over 32 of K takes 128 cycles of the tensor cores, in which it reads 2 KB of A and
// 8 KB of B from shared memory: 80 bytes a cycle of the 128 that shared memory has, and the loads of the next stages
// write 48. With 256 x 128 results, products of 64 x 128 would read 96. Of what is loaded, two blocks adjacent in M
// share B, so that L2 delivers 32 bytes a cycle to each block.
struct Int8Tile {
    static constexpr int kConsumers = 2, kRows = 64 * kConsumers, kColumns = 256, kDepth = 128;
    static constexpr int kThreads = 128 * (kConsumers + 1), kProducerRegisters = 24, kConsumerRegisters = 240;
    // Each of the two blocks loads half of their B into both.
    static constexpr int kCluster = BlockPairs::kBlocks, kShareColumns = kColumns / kCluster, kStages = 4;
    static constexpr uint32_t kRowBytes = kRows * kDepth, kColumnBytes = kColumns * kDepth;
    static constexpr uint32_t kConsumerBytes = 64 * kDepth, kShareBytes = kShareColumns * kDepth;
    // Results leave in boxes of 16 rows and 64 columns, each warp's from two buffers.
    static constexpr int kBuffers = 2, kBoxColumns = 64, kBoxes = kColumns / kBoxColumns;
    static constexpr uint32_t kBoxBytes = 16 * kPanelRowBytes, kWarpBytes = kBuffers * kBoxBytes;
    // Shared memory: stages of A | of B | results of each warp | barriers (`full`, `empty`).
    static constexpr uint32_t kColumnsAt = kStages * kRowBytes, kResultsAt = kColumnsAt + kStages * kColumnBytes;
    static constexpr uint32_t kBarriers = kResultsAt + 4 * kConsumers * kWarpBytes;
    static constexpr int kSharedBytes = kBarriers + 16 * kStages;
    // Steps by which consumer 0 begins a tile before consumer 1, and the named barrier for that.
    static constexpr int kLead = 2, kLeadBarrier = 1;
    static_assert(registers_suffice(kConsumers, kProducerRegisters, kConsumerRegisters));
    static_assert(kSharedBytes <= 227 * 1024);
    static_assert(kCluster * kRows == BlockPairs::kRows && kColumns == BlockPairs::kColumns);
};

struct Int8Maps {
    CUtensorMap a, b, d;
};

// Kernel arguments besides the maps.
struct Int8Problem {
    const float *a_scales, *b_scales;   // (M), (N)
    const bf16* bias;                   // (N) or null
    int M, N, K;
};

__device__ inline int int8_steps(int K) { return (K + Int8Tile::kDepth - 1) / Int8Tile::kDepth; }

using Int8State = TileState<Int8Tile>;

}  // namespace cuda
