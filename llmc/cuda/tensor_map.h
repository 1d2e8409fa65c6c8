// Descriptions of tensors for the copy engine of compute capability 9.0, made on the host.
#pragma once
#include <cuda.h>

#include "llmc/cuda/common.cuh"

namespace cuda {

// Columns of a panel: 128 bytes of bf16, as many as the swizzle of 128 bytes reaches.
inline constexpr int kPanel = 64;

// Heads side by side in the rows of a (B, T, columns) bf16 tensor, as boxes of `rows` rows and `panels` panels of 64
// columns. A box lies in shared memory as its panels one after the other; row r of a panel is 128 bytes, in which the
// 16-byte chunk c lies at c ^ (r % 8). Rows from T on are not those of the next batch row: they are read as zeros and
// not written. Coordinates of a box: (0, first row, first column / 64, batch row).
CUtensorMap panel_map(const void* data, int64_t B, int64_t T, int64_t columns, int rows, int panels);

// Heads one after the other in (B, heads, rows, row_bytes) bytes, as boxes of `box_rows` rows. Rows have 128 bytes and
// lie as in panel_map, or 64 bytes, in which the 16-byte chunk c of row r lies at c ^ (r / 2 % 4). Coordinates of a
// box: (0, first row, head, batch row).
CUtensorMap byte_map(const void* data, int64_t B, int64_t heads, int64_t rows, int row_bytes, int box_rows);

// A (rows, columns) matrix of bytes as boxes of `box_rows` rows and 128 columns that lie as those of byte_map; what is
// beyond the last row or column is read as zero. columns: a multiple of 16. Coordinates of a box: (first column, first
// row, 0, 0).
CUtensorMap matrix_map(const void* data, int64_t rows, int64_t columns, int box_rows);

}  // namespace cuda
