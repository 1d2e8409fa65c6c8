// Matmul of blockwise FP8 operands on compute capability 9.0: tiles, shared memory, epilogue.
#pragma once
#include "llmc/cuda/gemm_bf16_sm90.cuh"
#include "llmc/ops/ops_moe.h"

namespace cuda {

// A block computes 256 x 128 results, and each of its two consumer warpgroups 128 x 128 of them. A thread holds 128
// fp32 accumulators, and 64 more registers for the product in flight, which is 64 x 128 over 128 elements of K. Larger
// tiles do not fit in registers. Smaller ones need more L2 bandwidth: this one reads 48 KB in 1024 cycles of the tensor
// cores, or 32 KB when two blocks share A.
struct Blocks {
    static constexpr int kConsumers = 2, kHalves = 2, kRows = 64 * kHalves * kConsumers, kColumns = 128, kDepth = 128;
    static constexpr int kThreads = 128 * (kConsumers + 1), kProducerRegisters = 24, kConsumerRegisters = 240;
    // Two blocks adjacent in N form a cluster; each loads half of their A into both.
    static constexpr int kCluster = BlockPairs::kBlocks, kShareRows = kRows / kCluster, kStages = 4;
    static constexpr uint32_t kRowBytes = kRows * kDepth, kColumnBytes = kColumns * kDepth;
    static constexpr uint32_t kShareBytes = kShareRows * kDepth, kHalfBytes = 64 * kDepth;
    static constexpr uint32_t kScaleBytes = 4 * (kRows + kColumns);
    // ExpertRows: A's scales begin at the multiple of 4 before the first row, and B's four or eight stand behind them.
    // The producer needs more registers, and its consumers need fewer.
    static constexpr int kExpertScales = kRows + 4, kExpertBlocksAt = kRows + 8;
    static constexpr int kExpertProducerRegisters = 56, kExpertConsumerRegisters = 224;
    static constexpr uint32_t kWarpBytes = 16 * kPanelRowBytes;
    // Shared memory: stages of A | of B | results of each warp | stages of scales (A's, then B's: those of the columns,
    // or of four adjacent 128x128 blocks along K) | scales of columns in the order of registers | barriers (`full`,
    // `empty`, `ordered`).
    static constexpr uint32_t kColumnsAt = kStages * kRowBytes, kResultsAt = kColumnsAt + kStages * kColumnBytes;
    static constexpr uint32_t kScalesAt = kResultsAt + 4 * kConsumers * kWarpBytes;
    static constexpr uint32_t kOrderedAt = kScalesAt + kStages * kScaleBytes, kOrderedBytes = 4 * kColumns;
    static constexpr uint32_t kBarriers = kOrderedAt + kStages * kOrderedBytes;
    static constexpr int kSharedBytes = kBarriers + 24 * kStages;
    static constexpr int kTurnBarrier = 1;    // the named barriers of the two consumers' turns
    static constexpr int kStoreBarrier = 3;   // and of each consumer
    static_assert(registers_suffice(kConsumers, kProducerRegisters, kConsumerRegisters));
    static_assert(registers_suffice(kConsumers, kExpertProducerRegisters, kExpertConsumerRegisters));
    static_assert(kSharedBytes <= 227 * 1024);
    static_assert(kRows == BlockPairs::kRows && kCluster * kColumns == BlockPairs::kColumns);
};

using BlocksMaps = Bf16Maps;

// Kernel arguments besides the maps.
struct BlocksProblem {
    const float *a_scales, *b_scales;
    const bf16* bias;   // (N) or null
    int M, N, steps;    // steps of 128 along K
    int scale_row;      // elements between B's scales of adjacent 128x128 blocks along N
    bool fp32;          // type of the (M, N) results, otherwise bf16
    bool accumulate;    // += instead of =
};

// What a cluster computes of an item: results from (row, column) on, 256 x 256, of which each block has 128 columns and
// each of its consumers 128 rows; or if `wide` 128 x 512, of which each block has 256 columns and each consumer 128.
struct BlocksPlace {
    int row, column, end_row;   // rows from end_row on are not stored
    int steps, k = 0;           // the sum is over steps of 128 from k on
    int expert = 0;             // whose B (ExpertRows) or D (ExpertSums) it is
    bool wide = false;
};
__device__ inline BlocksPlace blocks_place(const BlockPairs& pairs, const BlocksProblem& p, uint32_t item) {
    const BlockPairs::Place at = pairs.place(item);
    return {.row = at.row, .column = at.column, .end_row = p.M, .steps = p.steps};
}
// `opaque` keeps the compiler from computing what all items have in common beforehand, which would need registers.
__device__ inline bool find_sums(ExpertSums sums, uint32_t item, Bf16Place& at) {
    sums.m = static_cast<int>(ptx::opaque(static_cast<uint32_t>(sums.m)));
    return sums.find(item, 0, at);
}
__device__ inline BlocksPlace blocks_place(const ExpertSums& sums, const BlocksProblem& p, uint32_t item) {
    Bf16Place at = {};
    find_sums(sums, item, at);
    const int steps = (at.depth + Blocks::kDepth - 1) / Blocks::kDepth;
    return {.row = at.row, .column = at.column, .end_row = p.M, .steps = steps,
            .k = static_cast<int>(padded_rows(at.k, at.matrix)), .expert = at.matrix};
}

// The items of this cluster. The steps that are left of an item of ExpertSums are counted in the upper bits of its
// number, since there is no register for both; none are left when the number is used.
inline constexpr int kItemBits = 18;
template <typename Tiles> struct BlocksItems {
    const Tiles& tiles;
    uint32_t item = BlockPairs::first();

    __device__ void count(int steps) { item += static_cast<uint32_t>(steps) << kItemBits; }
    __device__ uint32_t left() const { return item >> kItemBits; }

    __device__ explicit BlocksItems(const Tiles& all) : tiles(all) {}
    __device__ bool more() const {
        Bf16Place at;
        if constexpr (std::is_same_v<Tiles, ExpertSums>) return find_sums(tiles, item, at);
        else return item < tiles.items;
    }
    __device__ void next() { item += BlockPairs::step(); }
    __device__ bool more_sums() const {
        const uint32_t m = ptx::opaque(static_cast<uint32_t>(tiles.m));
        return item < (m + 255) / 256 * ((tiles.n + 255) / 256) * tiles.experts;
    }
    __device__ BlocksPlace place(const BlocksProblem& p) const { return blocks_place(tiles, p, item); }
    // Computes it again, so that it needs no registers until then.
    __device__ BlocksPlace place_again(const BlocksProblem& p) const {
        return blocks_place(tiles, p, ptx::opaque(item));
    }
};
// Those of ExpertRows are found in turn.
template <> struct BlocksItems<ExpertRows> {
    ExpertRows tiles;
    Bf16Place at = {};   // of block 0: the cluster's first row and column
    uint32_t item = BlockPairs::first();
    bool found;

    __device__ explicit BlocksItems(const ExpertRows& all) : tiles(all) { found = tiles.find(item, 0, at); }
    __device__ bool more() const { return found; }
    __device__ void next() { found = tiles.find(item += BlockPairs::step(), 0, at); }
    __device__ BlocksPlace place(const BlocksProblem& p) const {
        return {.row = at.row, .column = at.column, .end_row = at.end_row, .steps = p.steps, .expert = at.matrix,
                .wide = at.share == Bf16Place::Share::kRows};
    }
};

// A block's ring and the addresses of its stages.
struct BlocksState {
    uint32_t shared;
    Ring<Blocks::kStages> ring;

    __device__ explicit BlocksState(uint32_t base)
        : shared(base), ring{base + Blocks::kBarriers, base + Blocks::kBarriers + 8 * Blocks::kStages} {}
    __device__ uint32_t rows() const { return shared + ring.stage * Blocks::kRowBytes; }
    __device__ uint32_t columns() const { return shared + Blocks::kColumnsAt + ring.stage * Blocks::kColumnBytes; }
    __device__ uint32_t scales() const { return shared + Blocks::kScalesAt + ring.stage * Blocks::kScaleBytes; }
    __device__ uint32_t ordered() const { return shared + Blocks::kOrderedAt + ring.stage * Blocks::kOrderedBytes; }
    __device__ uint32_t ordered_barrier() const { return ring.full + 8 * (2 * Blocks::kStages + ring.stage); }
    // Called by one thread before the cluster's barrier. A stage is free when the consumers of both blocks have read
    // it, since each block loads half of A into both.
    __device__ void init() const {
        ring.init(4 * Blocks::kConsumers * Blocks::kCluster);
        for (uint32_t i = 0; i < Blocks::kStages; i++) ptx::barrier_init(ring.full + 8 * (2 * Blocks::kStages + i), 1);
        ptx::barrier_init_fence();
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

// Writes panel c, 128 bytes of each of the warp's 16 rows, to its buffer in shared memory. fp32: single elements are
// stored, since stores of two adjacent ones would need the accumulators in aligned pairs of registers. Those of a
// product are aligned, too, so that FFMA would read both from one bank, which costs 4 % of all cycles.
template <bool fp32>
__device__ inline void write_panel(const float (&d)[64], int c, uint32_t buffer, int lane) {
    if constexpr (fp32) {
        const uint32_t quarter = lane % 4, in_chunk = quarter % 2 * 8;
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const uint32_t at = panel_offset(lane / 4 + 8 * half_of(i), 2 * (i / 4) + quarter / 2);
            ptx::store_shared_alone(buffer + at + in_chunk + i % 2 * 4, d[16 * c + i]);
        }
    } else {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            uint32_t part[4];
            as_operand(part, d, 4 * c + j);
            ptx::store_matrix_x4(buffer + panel_offset(lane & 15, 2 * j + (lane >> 4)), part);
        }
    }
}

// Stores the first `count` rows of a box in the warp's buffer: the others are of the next expert.
__device__ inline void store_rows(bf16* results, int N, int count, uint32_t buffer, int row, int column, int lane) {
    const int chunk = lane % 8;
    if (column + 8 * chunk >= N) return;
    for (int i = lane / 8; i < count; i += 4)
        *reinterpret_cast<float4*>(results + int64_t{row + i} * N + column + 8 * chunk) =
            ptx::load_shared4(buffer + panel_offset(i, chunk));
}

// Stores (=) or, if p.accumulate, adds (+=) by TMA, whose boxes are 16 rows of 128 bytes. A sum is rounded to bf16 and
// added to bf16, which rounds again, as in the library. Each element is added to once, so the result is
// deterministic. (Additions in memory may flush subnormal numbers to 0.) A warp waits until its last box has been read,
// not until it has been written.
template <bool fp32>
__device__ inline void store_boxes(const float (&d)[64], const CUtensorMap& map, const BlocksProblem& p,
                                   const BlocksPlace& at, uint32_t buffer, int row, int column, int lane) {
    constexpr int kWidth = fp32 ? 32 : 64;
#pragma unroll
    for (int c = 0; c < Blocks::kColumns / kWidth; c++) {
        if (lane == 0) ptx::bulk_wait_read<0>();
        __syncwarp();
        write_panel<fp32>(d, c, buffer, lane);
        ptx::fence_async();
        __syncwarp();
        if (lane == 0 && row < at.end_row && column + c * kWidth < p.N) {
            if (p.accumulate) ptx::add_matrix_box(&map, buffer, column + c * kWidth, row);
            else ptx::store_matrix_box(&map, buffer, column + c * kWidth, row);
            ptx::bulk_commit();
        }
    }
}

}  // namespace cuda
