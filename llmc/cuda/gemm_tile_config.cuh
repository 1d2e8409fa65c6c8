// Properties of a variant: tile, shared memory, schedule, kernel parameters.
#pragma once
#include "llmc/cuda/fp8.cuh"
#include "llmc/cuda/gemm_tile_ptx.cuh"
#include "llmc/cuda/pipeline_sm90.cuh"
#include "llmc/cuda/tensor_map.h"
#include "llmc/cuda/wgmma.cuh"

namespace cuda::tiles {

inline constexpr int kConsumers = 2, kThreads = 128 * (kConsumers + 1);
inline constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
static_assert(registers_suffice(kConsumers, kProducerRegisters, kConsumerRegisters));
inline constexpr uint32_t kDepthBytes = 128;   // bytes of K per stage
// Named barriers: two of one per consumer warpgroup each, and one of both.
inline constexpr int kTurnBarrier = 1, kGroupBarrier = 3, kEndBarrier = 5;

// What the two consumer warpgroups do: halves of one tile, or a tile each in turn, so that one stores its results
// while the other multiplies.
enum class Work { kTogether, kTurns };
// What clusters of two blocks share: nothing (no cluster), A (blocks adjacent along N), B (adjacent along M).
enum class Share { kNone, kRows, kColumns };

// group_rows x columns: results of a consumer warpgroup. Each has `panels` buffers of 8 KB for its results on their way
// to memory. promote: elements of K per sum in the tensor cores, or 0.
// SwiGLU: the first half of a tile's columns belongs to gate, the second to the same columns of up.
template <Operands operands, Work work, int group_rows, int columns, Share share, int stages, int panels,
          int promote = 0, bool swiglu = false>
struct Tiles {
    static constexpr Operands kOperands = operands;
    static constexpr Share kShare = share;
    static constexpr bool kPingPong = work == Work::kTurns, kSwiglu = swiglu;
    static constexpr int kGroupRows = group_rows, kColumns = columns, kStages = stages, kPanels = panels;
    static constexpr int kRows = kPingPong ? group_rows : kConsumers * group_rows;
    static constexpr int kCluster = share == Share::kNone ? 1 : 2;
    static constexpr int kPromote = promote, kPromoteBytes = promote * (operands == Operands::kBf16 ? 2 : 1);
    static constexpr int kSpan = promote > 0 ? kPromoteBytes / static_cast<int>(kDepthBytes) : 1;   // stages per sum
    static constexpr int kPartColumns = promote > 0 && columns == 256 ? 128 : columns;
    static constexpr int kColumnParts = columns / kPartColumns;
    static constexpr int kParts = group_rows / 64 * kColumnParts;
    static constexpr uint32_t kRowBytes = kRows * kDepthBytes, kStageBytes = (kRows + kColumns) * kDepthBytes;
    // Shared memory: stages of A | of B | panels | barriers | an amax.
    static constexpr uint32_t kPanelBytes = 64 * 128;
    static constexpr uint32_t kColumnsAt = stages * kRowBytes, kPanelsAt = stages * kStageBytes;
    static constexpr uint32_t kBarriersAt = kPanelsAt + kConsumers * panels * kPanelBytes;
    static constexpr uint32_t kAmaxAt = kBarriersAt + 16 * stages;
    static constexpr int kSharedBytes = static_cast<int>(kAmaxAt + 16);
    static_assert(kSharedBytes <= 227 * 1024);
    static_assert(group_rows % 64 == 0 && columns % kPartColumns == 0 && kRows <= 256 && kColumns <= 256);
    static_assert(promote == 0 || kPromoteBytes == 128 || (kPromoteBytes == 256 && stages > 2));
    static_assert(kParts * kPartColumns / 2 + (promote > 0 ? kPartColumns / 2 : 0) <= 192);
    static_assert(!swiglu || (group_rows == 64 && columns == 256 && promote == 0 && share != Share::kRows));
};

// An item is the results of a cluster; cluster c of G computes items c, c + G, ... Items are ordered in groups of
// `group` in M and within a group along N, so that concurrent items share operands in the L2 cache.
struct Place {
    int row, column;   // the block's first; SwiGLU: of gate's columns
};
template <typename T> struct Schedule {
    uint32_t items, rows, columns, group;   // items in all, in M, in N

    __device__ Place place(uint32_t item) const {
        const uint32_t of_group = item / (group * columns), rest = item - of_group * (group * columns);
        const uint32_t size = min(group, rows - of_group * group);
        uint32_t row = of_group * group + rest % size, column = rest / size;
        if constexpr (T::kShare == Share::kColumns) row = 2 * row + rank();
        if constexpr (T::kShare == Share::kRows) column = 2 * column + rank();
        return {static_cast<int>(row * T::kRows),
                static_cast<int>(column * (T::kSwiglu ? T::kColumns / 2 : T::kColumns))};
    }
    __device__ static uint32_t rank() { return T::kCluster == 1 ? 0 : ptx::block_index() % T::kCluster; }
    __device__ static uint32_t first() { return ptx::block_index() / T::kCluster; }
    __device__ static uint32_t step() { return gridDim.x / T::kCluster; }
};

// TMA maps. SwiGLU: b and d are those of gate, up and d_up those of up.
struct TileMaps {
    CUtensorMap a, b, d, up, d_up, act, act_transposed;
};
struct TileProblem {
    const float *a_scale_inv, *b_scale_inv;   // null: 1
    int M, N, steps;                          // N: of D, SwiGLU: of act; steps of kDepthBytes along K
    bool fp32, accumulate, transposed;
    Fp8Slot* slot;
};

// A block's ring and the addresses of its stages.
template <typename T> struct State {
    uint32_t shared;
    Ring<T::kStages> ring;

    __device__ explicit State(uint32_t base)
        : shared(base), ring{base + T::kBarriersAt, base + T::kBarriersAt + 8 * T::kStages} {}
    __device__ uint32_t rows() const { return shared + ring.stage * T::kRowBytes; }
    __device__ uint32_t columns() const {
        return shared + T::kColumnsAt + ring.stage * (T::kColumns * kDepthBytes);
    }
    // Called by one thread before the first barrier of all threads. A stage is free when its readers in all blocks of
    // the cluster have read it.
    __device__ void init() const {
        ring.init((T::kPingPong ? 4 : 4 * kConsumers) * T::kCluster);
        ptx::barrier_init_fence();
        ptx::store_shared(shared + T::kAmaxAt, uint32_t{0});
    }
    // Moves over the stages of the other warpgroup's tile.
    __device__ void skip(int steps) {
        const uint32_t to = ring.stage + static_cast<uint32_t>(steps);
        ring.parity ^= to / T::kStages & 1;
        ring.stage = to % T::kStages;
    }
};

// ---- host

template <typename T> TileMaps maps_of(const Call& call) {
    const int64_t row_bytes = call.K * dtype_bytes(call.B.dtype), width = T::kSwiglu ? call.N / 2 : call.N;
    const bool halves = T::kSwiglu || T::kShare == Share::kColumns;
    auto of_b = [&](const void* data) {
        return matrix_map(data, width, row_bytes, halves ? T::kColumns / 2 : T::kColumns);
    };
    auto of_d = [&](int64_t column) {
        const int64_t elems = column * dtype_bytes(call.D.dtype);
        return box_map({static_cast<char*>(call.D.data) + elems, call.D.dtype, 1}, call.M, width, call.N, 16, 128);
    };
    TileMaps maps{};
    maps.a = matrix_map(call.A.data, call.M, row_bytes, T::kShare == Share::kRows ? T::kRows / 2 : T::kRows);
    maps.b = of_b(call.B.data), maps.d = of_d(0);
    if constexpr (T::kSwiglu) {
        maps.up = of_b(static_cast<const char*>(call.B.data) + width * row_bytes), maps.d_up = of_d(width);
        maps.act = box_map(call.act, call.M, width, width, 16, 128);
        if (call.act_transposed) maps.act_transposed = box_map(call.act_transposed, width, call.M, call.M, 128, 64);
    }
    return maps;
}
// Steps beyond K, if any, load zeros.
template <typename T> TileProblem problem_of(const Call& call) {
    const bool fp8 = static_cast<bool>(call.a_scale_inv);
    const int64_t step_bytes = kDepthBytes * T::kSpan;
    return {.a_scale_inv = fp8 ? call.a_scale_inv.as<float>() : nullptr,
            .b_scale_inv = fp8 ? call.b_scale_inv.as<float>() : nullptr,
            .M = static_cast<int>(call.M), .N = static_cast<int>(call.act ? call.N / 2 : call.N),
            .steps = static_cast<int>(ceil_div(call.K * dtype_bytes(call.B.dtype), step_bytes) * T::kSpan),
            .fp32 = call.D.dtype == Dtype::kFp32, .accumulate = call.accumulate,
            .transposed = static_cast<bool>(call.act_transposed), .slot = call.slot};
}

}  // namespace cuda::tiles
