// Tiles in shared memory as operands of wgmma: panels of 64 columns (128 bytes per row) in the layout of TMA's 128-byte
// swizzle (tensor_map.h). Every panel begins at a multiple of 1024 bytes.
// Source: NVIDIA, PTX ISA 9.0, "Asynchronous warpgroup-level matrix shared memory layout".
#pragma once
#include "llmc/cuda/common.cuh"
#include "llmc/cuda/ptx.cuh"

namespace cuda {

// Layout of 64 rows of results in the registers of a warpgroup: register i of a lane is row 16 warp + 8 half_of(i) +
// lane / 4, column 8 (i / 4) + 2 (lane % 4) + i % 2.
__device__ constexpr int half_of(int i) { return i / 2 % 2; }

inline constexpr uint32_t kPanelRowBytes = 128;
inline constexpr uint32_t kSwizzleRowsBytes = 8 * kPanelRowBytes;   // period of the swizzle

// Byte offset of chunk c (8 columns) of a row within a panel.
__device__ inline uint32_t panel_offset(uint32_t row, uint32_t chunk) {
    return row * kPanelRowBytes + ((chunk ^ (row & 7)) << 4);
}

// A descriptor: start address, strides between panels and between blocks of 8 rows, all in units of 16 bytes, and the
// swizzle (bits 62, 63). The swizzle depends on address bits, so moving the start within a row moves along it.
__device__ inline uint64_t tile_descriptor(uint32_t address, uint32_t panel_bytes) {
    const uint64_t low = ((address & 0x3ffff) >> 4) | (panel_bytes >> 4) << 16;
    const uint64_t high = (kSwizzleRowsBytes >> 4) | uint64_t{1} << 30;
    return low | high << 32;
}

// Descriptor of columns 16 k .. 16 k + 15, for an operand that is summed over its columns.
__device__ inline uint64_t along_columns(uint64_t tile, int k, uint32_t panel_bytes) {
    return tile + (((k % 4) * 32 + (k / 4) * panel_bytes) >> 4);
}
// Descriptor of rows 16 k .. 16 k + 15, for an operand that is summed over its rows.
__device__ inline uint64_t along_rows(uint64_t tile, int k) { return tile + (k * 16 * kPanelRowBytes >> 4); }

// As tile_descriptor for a tile of bytes, one panel: rows of 64 or 128 bytes with the swizzle of that length (byte_map
// in tensor_map.h); 32 columns are 32 bytes.
template <uint32_t row_bytes> __device__ inline uint64_t byte_tile_descriptor(uint32_t address) {
    static_assert(row_bytes == 64 || row_bytes == 128);
    const uint64_t low = (address & 0x3ffff) >> 4;
    const uint64_t high = (8 * row_bytes >> 4) | uint64_t{row_bytes == 128 ? 1 : 2} << 30;
    return low | high << 32;
}
__device__ inline uint64_t along_bytes(uint64_t tile, int k) { return tile + (k * 32 >> 4); }

// Columns 16 j .. 16 j + 15 of an accumulator, rounded to bf16, as an A operand, whose layout is that of two results.
template <int count> __device__ inline void as_operand(uint32_t (&a)[4], const float (&d)[count], int j) {
#pragma unroll
    for (int i = 0; i < 4; i++) a[i] = pack_bf16x2(d[8 * j + 2 * i], d[8 * j + 2 * i + 1]);
}

}  // namespace cuda
