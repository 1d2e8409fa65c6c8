// Tiles in shared memory as operands of wgmma: panels of 64 columns (128 bytes a row) as the copy engine lays them down
// with its 128-byte swizzle (tensor_map.h). Every panel begins at a multiple of 1024 bytes.
// Source: NVIDIA, PTX ISA 9.0, "Asynchronous warpgroup-level matrix shared memory layout".
#pragma once
#include "llmc/cuda/common.cuh"
#include "llmc/cuda/ptx.cuh"

namespace cuda {

// 64 rows of results in the registers of a warpgroup: register i of a lane is row 16 warp + 8 half_of(i) + lane / 4,
// column 8 (i / 4) + 2 (lane % 4) + i % 2.
__device__ constexpr int half_of(int i) { return i / 2 % 2; }

inline constexpr uint32_t kPanelRowBytes = 128;
inline constexpr uint32_t kSwizzleRowsBytes = 8 * kPanelRowBytes;   // after which the swizzle repeats

// Byte of chunk c (8 columns) of a row, counted from the first row of a panel.
__device__ inline uint32_t panel_offset(uint32_t row, uint32_t chunk) {
    return row * kPanelRowBytes + ((chunk ^ (row & 7)) << 4);
}

// A descriptor: start address, and the steps in bytes between blocks of 8 rows and between panels, in units of 16
// bytes, and the swizzle (bits 62, 63). Swizzling follows address bits, so that moving the start within a row is enough
// to move along it.
__device__ inline uint64_t tile_descriptor(uint32_t address, uint32_t panel_bytes) {
    const uint64_t low = ((address & 0x3ffff) >> 4) | (panel_bytes >> 4) << 16;
    const uint64_t high = (kSwizzleRowsBytes >> 4) | uint64_t{1} << 30;
    return low | high << 32;
}

// The k-th 16 of the columns summed over (operand whose rows are those of M or N).
__device__ inline uint64_t along_columns(uint64_t tile, int k, uint32_t panel_bytes) {
    return tile + (((k % 4) * 32 + (k / 4) * panel_bytes) >> 4);
}
// The k-th 16 of the rows summed over (operand whose columns are those of M or N).
__device__ inline uint64_t along_rows(uint64_t tile, int k) { return tile + (k * 16 * kPanelRowBytes >> 4); }

// The same of a tile of bytes, one panel: rows of 64 or 128 bytes that the copy engine has laid down with the swizzle
// of their length (tensor_map.h, byte_map); 32 columns are 32 bytes further.
template <uint32_t row_bytes> __device__ inline uint64_t byte_tile_descriptor(uint32_t address) {
    static_assert(row_bytes == 64 || row_bytes == 128);
    const uint64_t low = (address & 0x3ffff) >> 4;
    const uint64_t high = (8 * row_bytes >> 4) | uint64_t{row_bytes == 128 ? 1 : 2} << 30;
    return low | high << 32;
}
__device__ inline uint64_t along_bytes(uint64_t tile, int k) { return tile + (k * 32 >> 4); }

// The sums of columns 16 j .. 16 j + 15, rounded to bf16, as A operand: its layout is that of two blocks of results.
template <int count> __device__ inline void as_operand(uint32_t (&a)[4], const float (&d)[count], int j) {
#pragma unroll
    for (int i = 0; i < 4; i++) a[i] = pack_bf16x2(d[8 * j + 2 * i], d[8 * j + 2 * i + 1]);
}

}  // namespace cuda
