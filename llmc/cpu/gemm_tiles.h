// How a matmul of the CPU runs: both operands packed (converted on the way), tiles of D spread over threads. What is
// done with a packed block, and with finished sums, is the caller's.
#pragma once
#include "llmc/cpu/common.h"
#include "llmc/cpu/gemm_kernel.h"
#include "llmc/cpu/math.h"
#include "llmc/cpu/threads.h"

namespace cpu {

inline constexpr int64_t kTileRows = 96;       // packed A (96 KiB) and the sums (192 KiB) stay in the L2 cache
inline constexpr int64_t kTileColumns = 512;

// How D is cut. Only speed depends on it.
struct Tiling {
    int64_t rows, columns;   // of a tile
    Tiling(int64_t M, int64_t N, int64_t micro_columns) {
        // A few tiles a thread even out cores that are shared with other work.
        int64_t tasks = 4 * thread_count();
        rows = std::min(kTileRows, round_up((M + tasks - 1) / tasks, kMicroRows));
        columns = std::min(kTileColumns, round_up(N, micro_columns));
        // Too few rows to share: cut the columns instead.
        int64_t row_tiles = (M + rows - 1) / rows;
        if (row_tiles < tasks) columns = round_up((columns * row_tiles + tasks - 1) / tasks, micro_columns);
    }
};

// A piece of D with its sums.
template <typename A> struct Tile {
    int64_t top, left, rows, columns;   // rows [top, top + rows) of D, columns likewise
    int64_t stride;                     // elements from one row of sums to the next
    A* sums;
    A* spare;                           // as many elements as sums, for the caller
};

// Calls multiply(tile, k, depth, packed_a, packed_b) for each run of `run` consecutive k, in ascending order, and
// then finish(tile), for every tile of D(M, N).
template <typename A, typename TA, typename TB, typename Multiply, typename Finish>
void run_tiles(const GemmArgs& args, const Operand<TA>& a, const Operand<TB>& b, int64_t run, Multiply&& multiply,
               Finish&& finish) {
    const int64_t M = args.M, N = args.N, K = args.K;
    const Tiling tile(M, N, kMicroColumns<A>);
    const int64_t strip = std::min(kTileColumns, round_up(N, kMicroColumns<A>));   // columns packed at a time
    const int64_t packed_a_elems = round_up(tile.rows * std::min(K, run) + kPanelSlack, 16);
    const int64_t sums_elems = tile.rows * tile.columns, thread_elems = packed_a_elems + 2 * sums_elems;
    auto packed_b = make_buffer<A>(strip * K + kPanelSlack);
    auto private_memory = make_buffer<A>(thread_elems * thread_count());
    const int64_t runs = (K + run - 1) / run, row_tiles = (M + tile.rows - 1) / tile.rows;

#pragma omp parallel if (M * N * K >= 32 * kParallelElems)
    for (int64_t left = 0; left < N; left += strip) {
        const int64_t width = std::min(strip, N - left), padded = round_up(width, kMicroColumns<A>);
        const int64_t panels = padded / kMicroColumns<A>;
#pragma omp for schedule(static)
        for (int64_t task = 0; task < runs * panels; task++) {
            int64_t k = task / panels * run, j = task % panels * kMicroColumns<A>;
            int64_t depth = std::min(run, K - k);
            A* panel = packed_b.get() + k * padded + j * depth;
            pack_panel<kMicroColumns<A>>(panel, b.from(left + j), k, depth);
        }
        A* packed_a = private_memory.get() + thread_elems * thread_index();
        A* sums = packed_a + packed_a_elems;
        const int64_t column_tiles = (width + tile.columns - 1) / tile.columns;
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < row_tiles * column_tiles; task++) {
            int64_t top = task / column_tiles * tile.rows, j = task % column_tiles * tile.columns;
            const Tile<A> piece{top, left + j, std::min(tile.rows, M - top), std::min(tile.columns, width - j),
                                tile.columns, sums, sums + sums_elems};
            Operand<TA> rows = a.from(top);
            rows.count = piece.rows;
            for (int64_t k = 0; k < K; k += run) {
                int64_t depth = std::min(run, K - k);
                pack<kMicroRows>(packed_a, rows, k, depth);
                multiply(piece, k, depth, packed_a, packed_b.get() + k * padded + j * depth);
            }
            finish(piece);
        }
    }
}

// The plain product: sums over all k.
template <typename A>
void add_product(const Tile<A>& tile, int64_t k, int64_t depth, const A* packed_a, const A* packed_b) {
    multiply_packed(tile.rows, tile.columns, depth, packed_a, packed_b, tile.sums, tile.stride, k > 0);
}

// The tile of D from its sums: bias (of type T), gelu, what D was before.
template <typename T, typename D> void finish_tile(const GemmArgs& args, const Tile<Acc<T>>& tile) {
    const bool with_gelu = args.epilogue == GemmEpilogue::kBiasGelu;
    const T* bias = args.bias ? args.bias.as<T>() + tile.left : nullptr;
    for (int64_t row = 0; row < tile.rows; row++) {
        const int64_t begin = (tile.top + row) * args.N + tile.left;
        D* out = args.D.as<D>() + begin;
        D* pre = args.pre ? args.pre.as<D>() + begin : nullptr;
        const Acc<T>* sums = tile.sums + row * tile.stride;
        for_lanes<Acc<T>>(tile.columns, [&](int64_t i, auto n) {
            Vec<Acc<T>> value = load(sums + i, n);
            if (bias) value = value + load(bias + i, n);
            if (pre) store(pre + i, value, n);
            if (with_gelu) value = gelu(value);
            if (args.accumulate) value = load(out + i, n) + value;
            store(out + i, value, n);
        });
    }
}

// The product of FP8 operands; gemm has checked what every matmul demands.
void gemm_fp8(const GemmArgs& args);

}  // namespace cpu
