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

// The numbers of four codes of m, before the scale.
__device__ inline void numbers_of_m4(uint32_t codes, float* m) {
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
        const float2 pair = from_fp8x2<Dtype::kE4m3>(codes >> (8 * j));
        m[j] = pair.x, m[j + 1] = pair.y;
    }
}
// The numbers of four codes of v, before the scale, times 1 / kUnbiasV.
__device__ inline void numbers_of_v4(uint32_t codes, float* v) {
#pragma unroll
    for (int j = 0; j < 4; j++) v[j] = __uint_as_float((j < 3 ? codes << (20 - 8 * j) : codes >> 4) & 0xff00000u);
}
// encode_m by the low half of each random word; unbiased_scale: scale / kUnbiasM.
__device__ inline uint32_t encode_m4(const float* m, float unbiased_scale, const uint4& random) {
    const uint32_t noise[4] = {random.x, random.y, random.z, random.w};
    uint32_t codes[4];
#pragma unroll
    for (int j = 0; j < 4; j++) codes[j] = encode_m_high(m[j], unbiased_scale, __byte_perm(noise[j], 0, 0x4104));
    return high_bytes(codes);
}
// encode_v by the high half of each random word; unbiased_scale: scale / kUnbiasV. The highest four bits of a product
// are 0, so that it is rotated instead of shifted: ptxas 13.0 would combine its multiplication with one by 16.
__device__ inline uint32_t encode_v4(const float* v, float unbiased_scale, const uint4& random) {
    const uint32_t noise[4] = {random.x, random.y, random.z, random.w};
    uint32_t codes[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const uint32_t bits = bf16::to_bits(v[j] * unbiased_scale);
        codes[j] = max(__funnelshift_l(bits, bits, 4) + __byte_perm(noise[j], 0, 0x4324),
                       min(__float_as_uint(v[j]), 1u << 24));
    }
    return high_bytes(codes);
}

}  // namespace cuda
