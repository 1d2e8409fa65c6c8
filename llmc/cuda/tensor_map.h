// TMA descriptors of tensors, encoded on the host.
#pragma once
#include <cuda.h>

#include "llmc/cuda/common.h"

namespace cuda {

// Columns of a panel: 128 bytes of bf16, the span of the 128-byte swizzle.
inline constexpr int kPanel = 64;

// A map of adjacent heads in the rows of a (B, T, columns) bf16 tensor, with boxes of `rows` rows and `panels` panels
// of 64 columns. In shared memory the panels of a box follow each other; row r of a panel is 128 bytes with the 16-byte
// chunk c at c ^ (r % 8). Rows from T on do not reach into the next batch row: they are read as zeros and not written.
// Coordinates of a box: (0, first row, first column / 64, batch row).
CUtensorMap panel_map(const void* data, int64_t B, int64_t T, int64_t columns, int rows, int panels);

// As panel_map with boxes of one panel, for heads of `head_dim` columns, a multiple of 8: a head's panels have zeros
// beyond its last column, and nothing is written there. Coordinates of a box: (first column of the head, first row,
// head, batch row).
CUtensorMap head_map(const void* data, int64_t B, int64_t T, int64_t columns, int rows, int64_t head_dim);

// A map of consecutive heads in (B, heads, rows, row_bytes) bytes, with boxes of `box_rows` rows. In shared memory rows
// of 128 bytes are as in panel_map; rows of 64 bytes have the 16-byte chunk c of row r at c ^ (r / 2 % 4). Coordinates
// of a box: (0, first row, head, batch row).
CUtensorMap byte_map(const void* data, int64_t B, int64_t heads, int64_t rows, int row_bytes, int box_rows);

// A map of a (rows, columns) matrix of bytes with boxes of `box_rows` rows and 128 columns, laid out as in byte_map;
// beyond the last row or column zeros are read. columns: a multiple of 16. Coordinates of a box: (first column, first
// row, 0, 0).
CUtensorMap matrix_map(const void* data, int64_t rows, int64_t columns, int box_rows);

// A map of a (rows, columns) matrix of bf16, fp32 or bytes with `stride` elements from row to row, with boxes of
// `box_rows` rows and 64 or 128 bytes, laid out as in byte_map. Stores do not write beyond the last row or column. It
// begins at matrix.data; matrix.elems is not read. Coordinates of a box: (first column, first row, number of the
// matrix, 0), if there are several, one after the other.
CUtensorMap box_map(const Tensor& matrix, int64_t rows, int64_t columns, int64_t stride, int box_rows, int box_bytes,
                    int64_t matrices = 1);

}  // namespace cuda
