// Tiles of 128 x 128 bytes that kernels transpose through shared memory: a block of 256 threads puts words of 4 rows of
// a column, and stores columns as rows of `out`, 16 bytes per lane.
#pragma once
#include "llmc/cuda/common.cuh"

namespace cuda {

// The block's tile of an (R, C) matrix, or of number `matrix` of several. No rows: nothing to do.
struct TransposeTile {
    static constexpr int kSide = 128, kThreads = 256;
    static constexpr int kGroup = 8;   // row tiles that run concurrently: 1024 bytes of a row of out at a time
    static constexpr int kWords = kSide * kSide / 4;
    unsigned matrix;
    int64_t first_row, first_column;
    int rows, columns;

    __device__ TransposeTile(int64_t R, int64_t C, unsigned matrices = 1)
        : matrix(blockIdx.z % matrices),
          first_row((int64_t{blockIdx.z / matrices} * kGroup + blockIdx.x) * kSide),
          first_column(int64_t{blockIdx.y} * kSide),
          rows(static_cast<int>(max(int64_t{0}, min(R - first_row, int64_t{kSide})))),
          columns(static_cast<int>(min(C - first_column, int64_t{kSide}))) {}
    static dim3 grid(int64_t R, int64_t C, int64_t matrices = 1) {
        return dim3(kGroup, grid_size(ceil_div(C, kSide)), grid_size(ceil_div(R, kSide * kGroup) * matrices));
    }
    // Index of word w (rows 4w to 4w + 3) of a column in shared memory. One instruction writes 8 groups of 16 columns
    // with 4 adjacent w, or reads 16 bytes per lane with 8 lanes per column; both use all 32 banks.
    __device__ static int word(int column, int w) { return column * 32 + (w ^ column / 16 * 4); }
    // Stores the columns as rows of out (C, R); R is a multiple of 16.
    __device__ void store(uint8_t* out, const uint32_t* words, int64_t R) const {
        const int part = static_cast<int>(threadIdx.x % 8);
#pragma unroll
        for (int pass = 0; pass < 4; pass++) {
            const int c = static_cast<int>(threadIdx.x / 8) + pass * 32;
            if (c >= columns || part * 16 >= rows) continue;
            store_vec(out + (first_column + c) * R + first_row + part * 16, load_vec(words + word(c, part * 4)));
        }
    }
};

}  // namespace cuda
