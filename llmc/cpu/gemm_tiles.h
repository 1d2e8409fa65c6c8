// Tiled matmul of the CPU: packs and converts both operands and distributes tiles of D over threads. The caller defines
// what to do with a packed block and with finished sums.
#pragma once
#include "llmc/cpu/common.h"
#include "llmc/cpu/gemm_kernel.h"
#include "llmc/cpu/math.h"
#include "llmc/cpu/threads.h"

namespace cpu {

inline constexpr int64_t kTileRows = 96;       // packed A (96 KiB) and the sums (192 KiB) fit into the L2 cache
inline constexpr int64_t kTileColumns = 512;

// Tile size of D; it affects only the speed.
struct Tiling {
    int64_t rows, columns;
    Tiling(int64_t M, int64_t N, int64_t micro_columns) {
        // Several tiles per thread balance the load if cores are shared with other work.
        int64_t tasks = 4 * thread_count();
        rows = std::min(kTileRows, round_up(ceil_div(M, tasks), kMicroRows));
        columns = std::min(kTileColumns, round_up(N, micro_columns));
        // With too few rows the columns are divided instead.
        int64_t row_tiles = ceil_div(M, rows);
        if (row_tiles < tasks) columns = round_up(ceil_div(columns * row_tiles, tasks), micro_columns);
    }
};

// A tile of D with its sums.
template <typename A> struct Tile {
    int64_t top, left, rows, columns;   // rows [top, top + rows) of D, columns likewise
    int64_t stride;                     // elements from one row of sums to the next
    A* sums;
    A* spare;                           // scratch for the caller, as large as sums
};

// For every tile of D(M, N), calls multiply(tile, k, product) for each block of `block` consecutive k in ascending
// order, then finish(tile). product(sums, add) computes sums (as tile.sums) = or += the product over the block.
template <typename A, typename TA, typename TB, typename Multiply, typename Finish>
void run_tiles(const GemmArgs& args, const Operand<TA>& a, const Operand<TB>& b, int64_t block, Multiply&& multiply,
               Finish&& finish) {
    const int64_t M = args.M, N = args.N, K = args.K;
    const Tiling tile(M, N, kMicroColumns<A>);
    const int64_t strip = std::min(kTileColumns, round_up(N, kMicroColumns<A>));   // columns packed at a time
    const int64_t packed_a_elems = round_up(tile.rows * std::min(K, block) + kPanelSlack, 16);
    const int64_t sums_elems = tile.rows * tile.columns, thread_elems = packed_a_elems + 2 * sums_elems;
    auto packed_b = make_buffer<A>(strip * K + kPanelSlack);
    auto private_memory = make_buffer<A>(thread_elems * thread_count());
    const int64_t blocks = ceil_div(K, block), row_tiles = ceil_div(M, tile.rows);

#pragma omp parallel if (M * N * K >= 32 * kParallelElems)
    for (int64_t left = 0; left < N; left += strip) {
        const int64_t width = std::min(strip, N - left), padded = round_up(width, kMicroColumns<A>);
        const int64_t panels = padded / kMicroColumns<A>;
#pragma omp for schedule(static)
        for (int64_t task = 0; task < blocks * panels; task++) {
            int64_t k = task / panels * block, j = task % panels * kMicroColumns<A>;
            int64_t depth = std::min(block, K - k);
            A* panel = packed_b.get() + k * padded + j * depth;
            pack_panel<kMicroColumns<A>>(panel, b.from(left + j), k, depth);
        }
        A* packed_a = private_memory.get() + thread_elems * thread_index();
        A* sums = packed_a + packed_a_elems;
        const int64_t column_tiles = (width + tile.columns - 1) / tile.columns;
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < row_tiles * column_tiles; task++) {
            int64_t top = task / column_tiles * tile.rows, j = task % column_tiles * tile.columns;
            const Tile<A> part{top, left + j, std::min(tile.rows, M - top), std::min(tile.columns, width - j),
                               tile.columns, sums, sums + sums_elems};
            Operand<TA> rows = a.from(top);
            rows.count = part.rows;
            for (int64_t k = 0; k < K; k += block) {
                int64_t depth = std::min(block, K - k);
                pack<kMicroRows>(packed_a, rows, k, depth);
                multiply(part, k, [&](A* to, bool add) {
                    multiply_packed(part.rows, part.columns, depth, packed_a, packed_b.get() + k * padded + j * depth,
                                    to, part.stride, add);
                });
            }
            finish(part);
        }
    }
}

// finish for run_tiles: writes the tile of D from its sums: bias (of type T), += D.
template <typename T, typename D> void finish_tile(const GemmArgs& args, const Tile<Acc<T>>& tile) {
    const T* bias = args.bias ? args.bias.as<T>() + tile.left : nullptr;
    for (int64_t row = 0; row < tile.rows; row++) {
        const int64_t begin = (tile.top + row) * args.N + tile.left;
        D* out = args.D.as<D>() + begin;
        const Acc<T>* sums = tile.sums + row * tile.stride;
        for_lanes<Acc<T>>(tile.columns, [&](int64_t i, auto n) {
            Vec<Acc<T>> value = load(sums + i, n);
            if (bias) value = value + load(bias + i, n);
            if (args.accumulate) value = load(out + i, n) + value;
            store(out + i, value, n);
        });
    }
}

// Matmuls of FP8 and of INT8 operands; gemm has checked the arguments that all matmuls share.
void gemm_fp8(const GemmArgs& args);
void gemm_int8(const GemmArgs& args);

}  // namespace cpu
