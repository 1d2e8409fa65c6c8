// Matmul of blockwise FP8 operands on compute capability 9.0: tiles, shared memory, schedule, epilogue.
#pragma once
#include "llmc/cuda/pipeline_sm90.cuh"
#include "llmc/cuda/tensor_map.h"
#include "llmc/cuda/wgmma.cuh"

namespace cuda {

// A block computes 256 x 128 results, and each of its two consumer warpgroups 128 x 128 of them. A thread holds 128
// fp32 accumulators, and 64 more registers for the product in flight, which is 64 x 128 over 128 elements of K. Larger
// tiles do not fit in registers. Smaller ones need more L2 bandwidth: this one reads 48 KB in 1024 cycles of the tensor
// cores, or 32 KB when two blocks share A.
struct Blocks {
    static constexpr int kConsumers = 2, kHalves = 2, kRows = 64 * kHalves * kConsumers, kColumns = 128, kDepth = 128;
    static constexpr int kThreads = 128 * (kConsumers + 1), kProducerRegisters = 24, kConsumerRegisters = 240;
    // Two blocks adjacent in N form a cluster; each loads half of their A into both.
    static constexpr int kCluster = 2, kShareRows = kRows / kCluster, kStages = 4;
    static constexpr uint32_t kRowBytes = kRows * kDepth, kColumnBytes = kColumns * kDepth;
    static constexpr uint32_t kShareBytes = kShareRows * kDepth, kHalfBytes = 64 * kDepth;
    static constexpr uint32_t kScaleBytes = 4 * (kRows + 4);
    static constexpr uint32_t kWarpBytes = 16 * kPanelRowBytes;   // 16 rows of 64 columns of bf16
    // Shared memory: stages of A | of B | results of each warp | stages of scales (A's, then B's of the four 128x128
    // blocks that contain the stage) | barriers.
    static constexpr uint32_t kColumnsAt = kStages * kRowBytes, kResultsAt = kColumnsAt + kStages * kColumnBytes;
    static constexpr uint32_t kScalesAt = kResultsAt + 4 * kConsumers * kWarpBytes;
    static constexpr uint32_t kBarriers = kScalesAt + kStages * kScaleBytes;
    static constexpr int kSharedBytes = kBarriers + 16 * kStages;
    static_assert(registers_suffice(kConsumers, kProducerRegisters, kConsumerRegisters));
    static_assert(kSharedBytes <= 227 * 1024);
};

// Schedule. An item is the 256 x 256 results of a cluster; cluster c of G computes items c, c + G, ... Items are
// ordered in groups of 8 in M and within a group along N, so that concurrent items form roughly a square and share
// operands in the L2 cache.
struct BlocksSchedule {
    static constexpr uint32_t kGroup = 8;
    uint32_t items, rows, columns;   // items in all, in M, in N

    struct Place {
        int row, column;   // the cluster's first
    };
    __device__ Place place(uint32_t item) const {
        const uint32_t group = item / (kGroup * columns), rest = item - group * (kGroup * columns);
        const uint32_t size = min(kGroup, rows - group * kGroup);
        return {static_cast<int>((group * kGroup + rest % size) * Blocks::kRows),
                static_cast<int>(rest / size * (Blocks::kCluster * Blocks::kColumns))};
    }
    __device__ static uint32_t rank() { return ptx::block_index() % Blocks::kCluster; }
    __device__ static uint32_t first() { return ptx::block_index() / Blocks::kCluster; }
    __device__ static uint32_t step() { return gridDim.x / Blocks::kCluster; }
};

// Kernel arguments besides the maps of A and B.
struct BlocksProblem {
    const float *a_scales, *b_scales;
    void* result;        // (M, N) fp32 or bf16: = or, if accumulate, +=
    const bf16* bias;    // (N) or null
    int M, N, steps;     // steps of 128 along K
    int scale_row;      // elements between B's scales of adjacent blocks of 128 rows
    bool fp32, accumulate;
};

// A block's ring and the addresses of its stages.
struct BlocksState {
    uint32_t shared;
    Ring<Blocks::kStages> ring;

    __device__ explicit BlocksState(uint32_t base)
        : shared(base), ring{base + Blocks::kBarriers, base + Blocks::kBarriers + 8 * Blocks::kStages} {}
    __device__ uint32_t rows() const { return shared + ring.stage * Blocks::kRowBytes; }
    __device__ uint32_t columns() const { return shared + Blocks::kColumnsAt + ring.stage * Blocks::kColumnBytes; }
    __device__ uint32_t scales_at() const { return Blocks::kScalesAt + ring.stage * Blocks::kScaleBytes; }
    // Called by one thread before the cluster's barrier. A stage is free when the consumers of both blocks have read
    // it, since each block loads half of A into both.
    __device__ void init() const {
        ring.init(4 * Blocks::kConsumers * Blocks::kCluster);
        ptx::barrier_init_fence();
    }
    // Called by consumers when the warp has read the stage. empty_there: the `empty` barriers of the block that
    // this lane signals.
    __device__ void release(uint32_t empty_there, int lane) const {
        __syncwarp();
        if (lane < Blocks::kCluster) ptx::barrier_arrive_in_block(empty_there + 8 * ring.stage);
    }
};

// ---- epilogue. Of 64 x 128 results, a thread holds d[4 j + i] = column 8 j + 2 (lane % 4) + i % 2 of row `row` (i <
// 2) or row + 8 (wgmma's layout). N is a multiple of 16, so 16 adjacent columns are either all inside or all outside.

__device__ inline void add_bias(float (&d)[64], const BlocksProblem& p, int column, int lane) {
#pragma unroll
    for (int j = 0; j < 16; j++) {
        if (column + 8 * j >= p.N) return;
        const auto* from = reinterpret_cast<const __nv_bfloat162*>(p.bias + column + 8 * j + 2 * (lane % 4));
        const float2 bias = __bfloat1622float2(*from);
        d[4 * j] += bias.x, d[4 * j + 1] += bias.y, d[4 * j + 2] += bias.x, d[4 * j + 3] += bias.y;
    }
}

// Four lanes store 32 bytes of a row at once. Accumulation uses atomics to avoid a read; each element is added to once,
// so the result is deterministic. (Atomics flush subnormals to 0.)
__device__ inline void store_fp32(const float (&d)[64], const BlocksProblem& p, int row, int column, int lane) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        if (row + 8 * half >= p.M) return;
        float* const to = static_cast<float*>(p.result) + int64_t{row + 8 * half} * p.N + column + 2 * (lane % 4);
#pragma unroll
        for (int j = 0; j < 16; j++) {
            if (column + 8 * j >= p.N) break;
            const float2 sums = make_float2(d[4 * j + 2 * half], d[4 * j + 2 * half + 1]);
            if (p.accumulate) atomicAdd(reinterpret_cast<float2*>(to + 8 * j), sums);
            else *reinterpret_cast<float2*>(to + 8 * j) = sums;
        }
    }
}

// Stores bf16 (=) by TMA, from the warp's buffer in shared memory; the map's boxes are 16 rows of 64 columns. A warp
// waits until the last box has been read, not until it has been written.
__device__ inline void store_boxes(const float (&d)[64], const CUtensorMap& map, const BlocksProblem& p,
                                   uint32_t buffer, int row, int column, int lane) {
#pragma unroll
    for (int c = 0; c < 64 / 32; c++) {
        if (lane == 0) ptx::bulk_wait_read<0>();
        __syncwarp();
#pragma unroll
        for (int j = 0; j < 4; j++) {
            uint32_t part[4];
            as_operand(part, d, 4 * c + j);
            ptx::store_matrix_x4(buffer + panel_offset(lane & 15, 2 * j + (lane >> 4)), part);
        }
        ptx::fence_async();
        __syncwarp();
        if (lane == 0 && row < p.M && column + 64 * c < p.N) {
            ptx::store_matrix_box(&map, buffer, column + 64 * c, row);
            ptx::bulk_commit();
        }
    }
}

// Adds to bf16 (+=), as store_fp32; even lanes exchange with their odd neighbours to get 4 adjacent columns of the
// first or second 8.
__device__ inline void add_bf16(float (&d)[64], const BlocksProblem& p, int row, int column, int lane) {
    const bool odd = lane % 2;
    const int own = 2 * (lane % 4), first = 8 * (lane % 2) + 2 * (lane & 2);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const bool inside = row + 8 * half < p.M;
        bf16* const to = static_cast<bf16*>(p.result) + int64_t{row + 8 * half} * p.N + column;
        if (inside) {
#pragma unroll
            for (int j = 0; j < 16; j++) {
                if (column + 8 * j >= p.N) break;
                const float2 old = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(to + 8 * j + own));
                d[4 * j + 2 * half] += old.x, d[4 * j + 2 * half + 1] += old.y;
            }
        }
        __syncwarp();
#pragma unroll
        for (int j = 0; j < 16; j += 2) {
            if (column + 8 * j >= p.N) break;
            const uint32_t a = pack_bf16x2(d[4 * j + 2 * half], d[4 * j + 2 * half + 1]);
            const uint32_t b = pack_bf16x2(d[4 * j + 4 + 2 * half], d[4 * j + 5 + 2 * half]);
            const uint32_t other = __shfl_xor_sync(0xffffffffu, odd ? a : b, 1);
            const uint2 four = odd ? make_uint2(other, b) : make_uint2(a, other);
            if (inside) *reinterpret_cast<uint2*>(to + 8 * j + first) = four;
        }
    }
}

}  // namespace cuda
