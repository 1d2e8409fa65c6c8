// FP8 element formats and their exact casts in software. Includes nothing of llmc but check.h and dtype.h.
//   E4M3 (fn): largest 448, smallest normal 2^-6, smallest subnormal 2^-9; NaN is 0x7f / 0xff, no infinities
//   E5M2:      largest 57344, smallest normal 2^-14, smallest subnormal 2^-16; NaN and infinities as in IEEE
// Source: Micikevicius et al., "FP8 Formats for Deep Learning", arXiv 2209.05433.
#pragma once
#include <cstdint>

#include "llmc/base/dtype.h"

constexpr bool is_fp8(Dtype dtype) { return dtype == Dtype::kE4m3 || dtype == Dtype::kE5m2; }

// Largest finite number of the format.
HOST_DEVICE constexpr float fp8_largest(Dtype format) { return format == Dtype::kE4m3 ? 448.0f : 57344.0f; }

// The numbers of all 256 codes; fp8_cast.h has the way to a code.
const float* fp8_values(Dtype format);
inline float from_fp8(Dtype format, uint8_t code) { return fp8_values(format)[code]; }

// ---- scales. A scale is largest / amax; its inverse, scale_inv, is stored with the bytes.

// Elements along a side of a scale block, and of the tiles in which tensors are quantized.
inline constexpr int64_t kScaleBlock = 128;
HOST_DEVICE constexpr int64_t scale_blocks(int64_t elems) { return (elems + kScaleBlock - 1) / kScaleBlock; }

// Bits of |x|. As unsigned integers they are ordered like the numbers, with infinity and then NaN above all, so that a
// maximum of them keeps a NaN.
HOST_DEVICE inline uint32_t amax_bits_of(float value) { return bf16::to_bits(value) & 0x7fffffffu; }
inline constexpr uint32_t kInfinityBits = 0x7f800000u;   // larger bits are NaN

HOST_DEVICE inline float float_of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

// Returns largest / amax, or the largest float if that overflows, or 1 if amax is 0 or not finite. `largest` is the
// largest number of the format, divided by 2^margin if there is a margin.
HOST_DEVICE inline float scale_of(uint32_t amax_bits, float largest) {
    if (amax_bits == 0 || amax_bits >= kInfinityBits) return 1.0f;
    const float scale = largest / float_of_bits(amax_bits);
    return scale <= 3.402823466e38f ? scale : 3.402823466e38f;
}

// Returns the scale of a block: scale_of rounded down to a power of two, so that nothing overflows.
HOST_DEVICE inline float block_scale_of(uint32_t amax_bits, float largest) {
    const float scale = scale_of(amax_bits, largest);
    return float_of_bits(bf16::to_bits(scale) & 0x7f800000u);
}

// Returns the scale of a block of a head for FP8 attention: block_scale_of for E4M3, 127 / amax for INT8 (Q and K), at
// most 2^32, so that products and quotients of scales stay within fp32; NaN if a value is not finite, which makes the
// whole block NaN.
HOST_DEVICE inline float head_scale_of(uint32_t amax_bits, bool int8) {
    if (amax_bits >= kInfinityBits) return float_of_bits(0x7fc00000u);
    const float scale = int8 ? 127 / float_of_bits(amax_bits) : block_scale_of(amax_bits, fp8_largest(Dtype::kE4m3));
    return scale < 0x1p32f ? scale : 0x1p32f;
}

// Returns the scale of a chunk of a gradient that is communicated in E4M3: scale_of(amax), or the next smaller float if
// the rounded product would exceed the largest number, so that nothing saturates. NaN if a value is not finite, which
// makes the whole chunk NaN.
struct ChunkScale {
    float scale, scale_inv;
};
HOST_DEVICE inline ChunkScale chunk_scale(uint32_t amax_bits) {
    constexpr float kLargest = fp8_largest(Dtype::kE4m3);
    if (amax_bits >= kInfinityBits) return {float_of_bits(0x7fc00000u), float_of_bits(0x7fc00000u)};
    const float nearest = scale_of(amax_bits, kLargest);
    const bool beyond = float_of_bits(amax_bits) * nearest > kLargest;
    const float scale = float_of_bits(bf16::to_bits(nearest) - (beyond ? 1 : 0));
    return {scale, 1.0f / scale};
}
