// Building blocks of the mma.sync attention kernels: tiles in shared memory, operands of mma.m16n8k16 from them, and
// results through shared memory.
//
// A tile is a number of rows of HS bf16. The 16-byte chunk c of row r is stored at chunk c ^ (r % 8) of its row, so
// that the 8 rows that one phase of ldmatrix reads at equal c use different banks.
#pragma once
#include "llmc/cuda/attention.cuh"

namespace cuda {

template <int HS> inline constexpr int kTileRowBytes = 2 * HS;
template <int HS, int rows> inline constexpr int kTileBytes = rows * kTileRowBytes<HS>;

template <int HS> __device__ inline uint32_t tile_offset(int row, int chunk) {
    return static_cast<uint32_t>(row * kTileRowBytes<HS> + ((chunk ^ (row & 7)) << 4));
}

// How `threads` threads copy `rows` rows of a tile: thread t copies chunk t % kChunks of every kRowsAtOnce-th row.
template <int HS, int rows, int threads> struct TileCopy {
    static constexpr int kChunks = HS / 8, kRowsAtOnce = threads / kChunks;
    static_assert(kRowsAtOnce % 8 == 0 && rows % kRowsAtOnce == 0);

    // The first element that this thread copies, from a source with row stride `stride` (elements).
    __device__ static const bf16* source(const bf16* first_row, int64_t stride) {
        return first_row + threadIdx.x / kChunks * stride + threadIdx.x % kChunks * 8;
    }
    // Copies rows [0, min(rows, rows_left)) into the tile and zeros below, asynchronously. from: from source().
    __device__ static void copy(uint32_t tile, const bf16* from, int64_t stride, int rows_left) {
        const uint32_t thread = ptx::thread_index(), chunk = thread % kChunks;
        const int row = static_cast<int>(thread / kChunks);
        const uint32_t to = tile + tile_offset<HS>(row, static_cast<int>(chunk));
#pragma unroll
        for (int i = 0; i < rows; i += kRowsAtOnce) {
            ptx::cp_async_16(to + i * kTileRowBytes<HS>, from + i * stride, i < rows_left - row);
        }
    }
};

// A value that is the same in all lanes; the shuffle lets the compiler keep what depends on it in uniform registers.
__device__ inline int uniform(uint32_t value) { return __shfl_sync(0xffffffffu, static_cast<int>(value), 0); }

// The address that this lane passes to ldmatrix for 16 rows and 2 chunks of a tile.
// operand_by_rows: matrices in the order (rows 0-7, chunk 0), (8-15, 0), (0-7, 1), (8-15, 1). Loaded plain they are one
// A operand (rows = M, columns = K); loaded transposed, two adjacent B operands (rows = K, columns = N).
// operand_by_columns: (0-7, 0), (0-7, 1), (8-15, 0), (8-15, 1): two B operands (rows = N, columns = K).
template <int HS> __device__ inline uint32_t operand_by_rows(int lane) {
    return tile_offset<HS>(lane & 15, lane >> 4);
}
template <int HS> __device__ inline uint32_t operand_by_columns(int lane) {
    return tile_offset<HS>(((lane >> 4) << 3) | (lane & 7), (lane >> 3) & 1);
}
// The address of the same operand 2 * pair chunks to the right. The swizzle xors the low bits of a chunk's number, so
// they cannot be added.
__device__ inline uint32_t right_by(uint32_t address, int pair) {
    return (address ^ static_cast<uint32_t>((pair & 3) << 5)) + static_cast<uint32_t>((pair >> 2) * 128);
}

// c(16 slabs, 8 columns) += A B^T over HS: A rows of a tile from `a` on, B rows of a tile from `b` on.
// a: tile + operand_by_rows of the first row; b: tile + operand_by_columns.
template <int HS, int slabs, int columns>
__device__ inline void multiply_tiles(float (&c)[slabs][columns][4], uint32_t a, uint32_t b) {
    constexpr int kRow16 = 16 * kTileRowBytes<HS>;
#pragma unroll
    for (int k = 0; k < HS / 16; k++) {
        uint32_t left[slabs][4];
#pragma unroll
        for (int m = 0; m < slabs; m++) ptx::load_matrix_x4(left[m], right_by(a, k) + m * kRow16);
#pragma unroll
        for (int n = 0; n < columns / 2; n++) {
            uint32_t right[4];
            ptx::load_matrix_x4(right, right_by(b, k) + n * kRow16);
#pragma unroll
            for (int m = 0; m < slabs; m++) {
                ptx::mma_bf16(c[m][2 * n], left[m], right[0], right[1]);
                ptx::mma_bf16(c[m][2 * n + 1], left[m], right[2], right[3]);
            }
        }
    }
}

// c(16 slabs, HS) += a(16 slabs, 16) B with B = rows 16 k .. 16 k + 15 of a tile. b: tile + operand_by_rows.
template <int HS, int slabs>
__device__ inline void multiply_rows(float (&c)[slabs][HS / 8][4], const uint32_t (&a)[slabs][4], uint32_t b, int k) {
#pragma unroll
    for (int n = 0; n < HS / 16; n++) {
        uint32_t right[4];
        ptx::load_matrix_x4_transposed(right, right_by(b, n) + k * 16 * kTileRowBytes<HS>);
#pragma unroll
        for (int m = 0; m < slabs; m++) {
            ptx::mma_bf16(c[m][2 * n], a[m], right[0], right[1]);
            ptx::mma_bf16(c[m][2 * n + 1], a[m], right[2], right[3]);
        }
    }
}

// 16 adjacent columns of an accumulator (left 8, right 8) as a bf16 A operand, whose layout is that of two results.
__device__ inline void as_operand(uint32_t (&a)[4], const float (&left)[4], const float (&right)[4]) {
    a[0] = pack_bf16x2(left[0], left[1]);
    a[1] = pack_bf16x2(left[2], left[3]);
    a[2] = pack_bf16x2(right[0], right[1]);
    a[3] = pack_bf16x2(right[2], right[3]);
}

// Sets s = -inf where the column (a key) comes after the row (a query). ahead: first row minus first column.
template <int slabs, int columns>
__device__ inline void mask_future(float (&s)[slabs][columns][4], int ahead) {
    const int lane = static_cast<int>(ptx::thread_index()) % 32;
    const int last = ahead + lane / 4 - 2 * (lane % 4);   // last visible column, relative to this lane's
#pragma unroll
    for (int m = 0; m < slabs; m++) {
#pragma unroll
        for (int n = 0; n < columns; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if (8 * n + (i & 1) - 16 * m - 8 * (i >> 1) > last) s[m][n][i] = -INFINITY;
            }
        }
    }
}

// Sets s = -inf where the column (a query) comes before the row (a key). behind: first column minus first row.
template <int slabs, int columns>
__device__ inline void mask_past(float (&s)[slabs][columns][4], int behind) {
    const int lane = static_cast<int>(ptx::thread_index()) % 32;
    const int first = lane / 4 - 2 * (lane % 4) - behind;   // first visible column, relative to this lane's
#pragma unroll
    for (int m = 0; m < slabs; m++) {
#pragma unroll
        for (int n = 0; n < columns; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if (8 * n + (i & 1) - 16 * m - 8 * (i >> 1) < first) s[m][n][i] = -INFINITY;
            }
        }
    }
}

// Sets s = -inf where the column (a key) comes before the first key of the row (a query). First keys are computed again
// for every tile that needs this mask: such tiles are few, and registers are short. query, key: first row of the warp,
// first column.
template <int slabs, int columns>
__device__ inline void mask_before_first(float (&s)[slabs][columns][4], const AttentionShape& shape, int b,
                                         int query, int key) {
    const int lane = static_cast<int>(ptx::thread_index()) % 32;
#pragma unroll
    for (int m = 0; m < slabs; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = query + 16 * m + 8 * half + lane / 4;
            const int first = (row < shape.T ? shape.first_key(b, row) : 0) - key - 2 * (lane % 4);
#pragma unroll
            for (int n = 0; n < columns; n++) {
                if (8 * n < first) s[m][n][2 * half] = -INFINITY;
                if (8 * n + 1 < first) s[m][n][2 * half + 1] = -INFINITY;
            }
        }
    }
}

// Sets s = -inf where the column (a query) comes after the last query that attends to the row (a key).
template <int slabs, int columns>
__device__ inline void mask_after_end(float (&s)[slabs][columns][4], const AttentionShape& shape, int b,
                                      int key, int query) {
    const int lane = static_cast<int>(ptx::thread_index()) % 32;
#pragma unroll
    for (int m = 0; m < slabs; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = key + 16 * m + 8 * half + lane / 4;
            const int64_t end = (row < shape.T ? shape.end_query(b, row) : shape.T) - query - 2 * (lane % 4);
#pragma unroll
            for (int n = 0; n < columns; n++) {
                if (8 * n >= end) s[m][n][2 * half] = -INFINITY;
                if (8 * n + 1 >= end) s[m][n][2 * half + 1] = -INFINITY;
            }
        }
    }
}

// Stores rows [0, rows_left) of this warp's results times mul as bf16 to global memory with row stride `stride`
// (elements), through the warp's own rows (`tile`) of a shared-memory tile that is no longer read, so that global
// memory gets whole 16-byte chunks.
template <int HS, int slabs>
__device__ inline void store_results(bf16* to, int64_t stride, int rows_left,
                                     const float (&c)[slabs][HS / 8][4], float mul, char* tile) {
    constexpr int kChunks = HS / 8, kRowsAtOnce = 32 / kChunks;
    const int lane = static_cast<int>(ptx::thread_index()) % 32;
    __syncwarp();
#pragma unroll
    for (int m = 0; m < slabs; m++) {
#pragma unroll
        for (int n = 0; n < HS / 8; n++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int row = 16 * m + 8 * half + lane / 4;
                *reinterpret_cast<uint32_t*>(tile + tile_offset<HS>(row, n) + 4 * (lane % 4)) =
                    pack_bf16x2(c[m][n][2 * half] * mul, c[m][n][2 * half + 1] * mul);
            }
        }
    }
    __syncwarp();
    const int row = lane / kChunks, chunk = lane % kChunks;
#pragma unroll 4
    for (int i = row; i < min(16 * slabs, rows_left); i += kRowsAtOnce) {
        store_vec(to + i * stride + chunk * 8, *reinterpret_cast<const uint4*>(tile + tile_offset<HS>(i, chunk)));
    }
}

// The tile and head that a block owns. Blocks with equal work are adjacent over all heads (with heads of a group next
// to each other, to share K and V in L2); the longest tiles start first.
struct TilePlace {
    int b, head, tile;
};
__device__ inline TilePlace tile_place(const AttentionShape& shape, int64_t heads, int tiles, bool last_first) {
    const uint32_t columns = static_cast<uint32_t>(shape.B * heads), block = ptx::block_index();
    const uint32_t rest = block % columns;
    const int tile = uniform(block / columns);
    return {uniform(rest / static_cast<uint32_t>(heads)), uniform(rest % static_cast<uint32_t>(heads)),
            last_first ? tiles - 1 - tile : tile};
}

}  // namespace cuda
