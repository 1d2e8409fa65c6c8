// Moments in fp8 (moment_codes.h) on the device: what a lane has of a block, codes of four consecutive elements.
#pragma once
#include "llmc/cuda/fp8.cuh"
#include "llmc/ops/moment_codes.h"

namespace cuda {

// The highest bytes of four words.
__device__ inline uint32_t high_bytes(const uint32_t (&word)[4]) {
    return __byte_perm(__byte_perm(word[0], word[1], 0x0073), __byte_perm(word[2], word[3], 0x0073), 0x5410);
}
// The low `count` bytes of a word.
__device__ inline uint32_t load_bytes(const uint8_t* p, int count) {
    uint32_t word = 0;
    for (int j = 0; j < count; j++) word |= uint32_t{p[j]} << (8 * j);
    return word;
}
__device__ inline void store_bytes(uint8_t* p, uint32_t word, int count) {
    for (int j = 0; j < count; j++) p[j] = static_cast<uint8_t>(word >> (8 * j));
}

// decode_m of four codes.
__device__ inline void decode_m4(uint32_t codes, float scale_inv, float (&m)[4]) {
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
        const float2 pair = from_fp8x2<Dtype::kE4m3>(codes >> (8 * j));
        m[j] = pair.x * scale_inv, m[j + 1] = pair.y * scale_inv;
    }
}
// encode_m by the low half of each random word; 0 where the scale is 0: the block is NaN.
__device__ inline uint32_t encode_m4(const float (&m)[4], float scale, const uint32_t (&random)[4]) {
    uint32_t codes[4];
#pragma unroll
    for (int j = 0; j < 4; j++) codes[j] = encode_m_high(m[j], scale, __byte_perm(random[j], 0, 0x4104));
    return scale == 0.0f ? 0 : high_bytes(codes);
}
// encode_v by the high half of each random word; 0 where the scale is 0. Without the sign, which is 0, ptxas 13.0
// leaves the product out and keeps the noise alone.
__device__ inline uint32_t encode_v4(const float (&v)[4], float scale, const uint32_t (&random)[4]) {
    uint32_t codes[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const uint32_t bits = bf16::to_bits(v[j] * scale * (1.0f / kUnbiasV));
        codes[j] = ((bits << 4) + __byte_perm(random[j], 0, 0x4324)) | (bits & 0x80000000u);
        codes[j] = max(codes[j], min(__float_as_uint(v[j]), 1u << 24));
    }
    return scale == 0.0f ? 0 : high_bytes(codes);
}

}  // namespace cuda
