// Matmuls of BF16 operands on compute capability 9.0 that compute a list of results: tiles, shared memory, lists.
#pragma once
#include "llmc/cuda/block_pairs_sm90.cuh"
#include "llmc/cuda/wgmma.cuh"

namespace cuda {

// A block computes 128 x 256 results, and each of its two consumer warpgroups 64 x 256 of them. Bytes and cycles of a
// product are those of Int8Tile. Operands are loaded in boxes of 64 rows of 128 bytes: 64 rows or columns of the
// results by 64 of K, whichever of the two is contiguous in memory. Results leave in boxes of 64 x 64.
struct Bf16Tile {
    static constexpr int kConsumers = 2, kBox = 64, kRows = kBox * kConsumers, kColumns = 256, kDepth = 64;
    static constexpr int kThreads = 128 * (kConsumers + 1), kProducerRegisters = 56, kConsumerRegisters = 224;
    static constexpr int kCluster = BlockPairs::kBlocks, kStages = 4, kBuffers = 2;
    static constexpr uint32_t kBoxBytes = kBox * kPanelRowBytes;
    static constexpr uint32_t kRowBytes = kRows / kBox * kBoxBytes, kColumnBytes = kColumns / kBox * kBoxBytes;
    // Shared memory: stages of A | of B | results of each consumer | barriers (`full`, `empty`).
    static constexpr uint32_t kColumnsAt = kStages * kRowBytes, kResultsAt = kColumnsAt + kStages * kColumnBytes;
    static constexpr uint32_t kBarriers = kResultsAt + kConsumers * kBuffers * kBoxBytes;
    // Barriers of results in turns: `written` of all boxes, `free` of each box for each consumer. With one for both,
    // a consumer could take an older turn, whose parity is the same, for the one that it waits for.
    static constexpr int kResultBoxes = kConsumers * kBuffers;
    static constexpr uint32_t kWritten = kBarriers + 16 * kStages, kFree = kWritten + 8;
    static constexpr int kSharedBytes = kFree + 8 * kConsumers * kResultBoxes;
    // Steps by which consumer 0 begins a tile of SymmetricTiles before consumer 1, and named barriers: for that, and of
    // each consumer.
    static constexpr int kLead = 2, kLeadBarrier = 1, kStoreBarrier = 2;
    static_assert(registers_suffice(kConsumers, kProducerRegisters, kConsumerRegisters));
    static_assert(kSharedBytes <= 227 * 1024);
};

// What a block computes of an item of a list: results from (row, column) on, 128 x `columns`.
struct Bf16Place {
    enum class Share { kRows, kColumns, kNothing };
    int row, column, columns;   // columns: 256 or 128
    Share share;                // what the two blocks of a cluster load together
    int depth, k = 0;           // the sum is over [k, k + depth)
    int matrix = 0, end_row = 0;   // the matrix or expert, whose A, B or D it is; the end of its rows
};

// ---- lists. find() is called with ascending items and returns false after the last one. kMatrices: each matrix has an
// A and a B; kWeightsAreB: only a B. in_turns(): whether the boxes of results belong to both consumers in turns, and
// another thread stores them: 1 to 8 % faster, but not for +=.

// The lower triangles of `matrices` n x n results. Items of groups of 256 rows and of 256 columns: the 256 x 256
// results of each pair of different groups; then of each group its 256 rows by its first 128 columns; then of two
// groups, by one block each, the last 128 rows by the last 128 columns. The latter two take half as long, so that the
// items of 4096 x 4096 results take as long as two of 256 x 256 in each of 66 clusters, as long as half of all would.
struct SymmetricTiles {
    static constexpr bool kMatrices = true, kWeightsAreB = false;
    uint32_t matrices, groups;
    int n, depth;
    uint32_t matrix = 0, group = 1;   // of the item before; group: of its rows

    static int64_t items_of(int64_t matrices, int64_t groups) {
        return matrices * groups * (groups - 1) / 2 + matrices * groups + ceil_div(matrices * groups, 2);
    }
    __device__ bool find(uint32_t item, int rank, Bf16Place& at) {
        using Share = Bf16Place::Share;
        const uint32_t pairs = groups * (groups - 1) / 2, all_groups = matrices * groups;
        if (item < matrices * pairs) {
            const uint32_t of = item / pairs, pair = item - of * pairs;
            if (of != matrix) matrix = of, group = 1;
            while (pair >= group * (group + 1) / 2) group++;
            const uint32_t other = pair - group * (group - 1) / 2;
            at = {.row = static_cast<int>(256 * group) + 128 * rank, .column = static_cast<int>(256 * other),
                  .columns = 256, .share = Share::kColumns, .depth = depth, .matrix = static_cast<int>(of)};
            return true;
        }
        item -= matrices * pairs;
        const bool first = item < all_groups;   // of a group's columns
        const uint32_t number = first ? item : 2 * (item - all_groups) + rank;
        const uint32_t of = min(number / groups, matrices - 1);   // an odd number's last block is below the last matrix
        const int own = static_cast<int>(number - of * groups) * 256;
        if (first) at = {own + 128 * rank, own, 128, Share::kColumns, depth};
        else at = {own + 128, own + 128, 128, Share::kNothing, depth};
        at.matrix = static_cast<int>(of);
        return item < all_groups + (all_groups + 1) / 2;
    }
};

// Of each of `matrices` m x n results.
struct MatrixTiles {
    static constexpr bool kMatrices = true, kWeightsAreB = false;
    int matrices, m, n, depth;

    __device__ static bool in_turns() { return true; }
    int64_t items() const { return matrices * ceil_div(m, 256) * ceil_div(n, 256); }
    __device__ bool find(uint32_t item, int rank, Bf16Place& at) const {
        const int rows = (m + 255) / 256, each = rows * ((n + 255) / 256), number = static_cast<int>(item);
        const int matrix = number / each, rest = number % each;
        at = {.row = rest % rows * 256 + 128 * rank, .column = rest / rows * 256, .columns = 256,
              .share = Bf16Place::Share::kColumns, .depth = depth, .matrix = matrix, .end_row = m};
        return matrix < matrices;
    }
};

// Of the rows of each expert all n columns. Items of an expert: 256 rows by 256 columns; of up to 128 rows that are
// left 512 columns, 256 a block. Offsets as in GroupedGemmArgs.
struct ExpertRows {
    static constexpr bool kMatrices = false, kWeightsAreB = true;
    const int32_t* offsets;
    bf16* results;
    int experts, n, depth;
    int expert = -1, begin_row = 0, end_row = 0;   // of the item before
    uint32_t first = 0, end = 0;                   // its expert's items

    __device__ static bool in_turns() { return true; }
    __device__ bool find(uint32_t item, int rank, Bf16Place& at) {
        const uint32_t columns = (n + 255) / 256;
        while (item >= end) {
            if (++expert == experts) return false;
            begin_row = expert == 0 ? offsets[0] : end_row, end_row = offsets[expert + 1];
            const int rows = end_row - begin_row, whole = (rows + 127) / 256;
            first = end, end += whole * columns + (rows > 256 * whole ? (n + 511) / 512 : 0);
        }
        const uint32_t whole = (end_row - begin_row + 127) / 256;
        uint32_t rest = item - first;
        at = {.columns = 256, .depth = depth, .matrix = expert, .end_row = end_row};
        if (rest < whole * columns) {
            at.row = begin_row + static_cast<int>(rest % whole * 256) + 128 * rank;
            at.column = static_cast<int>(rest / whole * 256), at.share = Bf16Place::Share::kColumns;
        } else {
            rest -= whole * columns;
            at.row = begin_row + static_cast<int>(whole * 256);
            at.column = static_cast<int>(rest * 512) + 256 * rank, at.share = Bf16Place::Share::kRows;
        }
        return true;
    }
};

// Of each expert m x n results, sums over its rows.
struct ExpertSums {
    static constexpr bool kMatrices = false, kWeightsAreB = false;
    const int32_t* offsets;
    int experts, m, n;
    bool fp32, accumulate;   // type of the results, otherwise bf16; += instead of =

    __device__ bool in_turns() const { return !fp32 && !accumulate; }
    int64_t items() const { return experts * ceil_div(m, 256) * ceil_div(n, 256); }
    __device__ bool find(uint32_t item, int rank, Bf16Place& at) const {
        const int rows = (m + 255) / 256, each = rows * ((n + 255) / 256), number = static_cast<int>(item);
        const int expert = number / each, rest = number % each;
        if (expert >= experts) return false;
        const int begin = offsets[expert];
        at = {.row = rest % rows * 256 + 128 * rank, .column = rest / rows * 256, .columns = 256,
              .share = Bf16Place::Share::kColumns, .depth = offsets[expert + 1] - begin, .k = begin, .matrix = expert,
              .end_row = m};
        return true;
    }
};

struct Bf16Maps {
    CUtensorMap a, b, d;
};

// The item that this cluster computes in a round. Every second round is in reverse order, so that the cluster which
// computed the first, longest item of a round gets the shortest of the next.
__device__ inline uint32_t item_of(uint32_t round) {
    const uint32_t clusters = BlockPairs::step(), cluster = BlockPairs::first();
    return round * clusters + (round % 2 ? clusters - 1 - cluster : cluster);
}

__device__ inline int bf16_steps(int depth) { return (depth + Bf16Tile::kDepth - 1) / Bf16Tile::kDepth; }

}  // namespace cuda
