// The codes of moments in 8 bits (--moment-dtype fp8), shared by both devices so that they agree bit for bit. A block
// of kScaleBlock consecutive elements of a parameter has one scale. It is a power of two, so that a moment whose block
// gets another scale keeps its value.
//   m: E4M3
//   v: UE5M3, E4M3 with the sign's bit as a fifth bit of the exponent (bias 15). For sqrt(v) it has the range of E4M3
//      and twice its precision.
// Stochastic rounding keeps the expected value: small steps of v, (1 - beta2) of it, would be lost in nearest numbers.
// Source: moments in blocks, COAT, arXiv 2410.19313; UE5M3, __nv_fp8_ue5m3 of CUDA 13.4. dev/LOG.md has what else was
// tried ("Second moments in 8 bits").
#pragma once
#include <cstdint>

#include "llmc/base/fp8.h"

// The largest numbers are 1.75 * 2^8 and 1.75 * 2^16. Codes as bits of floats are this much too small.
inline constexpr int kLog2LargestM = 8, kLog2LargestV = 16;
inline constexpr float kUnbiasM = 0x1p120f, kUnbiasV = 0x1p112f;

// Rounds of philox, whose word e % 4 at element / 4 has the random bits of an element: the low half is m's, the high
// half v's. The kernels are limited by their instructions.
inline constexpr int kMomentRounds = 7;

struct MomentScale {
    float scale, scale_inv;
};
// Returns the largest power of two, at most 2^100, that scales amax to at most 1.75 * 2^log2_largest. If that is below
// 2^-15 or amax is not finite, scale is 0 and scale_inv NaN, which makes the whole block NaN. With these bounds the
// products of a scale with 1 / kUnbiasM, and of its inverse with kUnbiasV or a beta of at least 2^-26, are exact, so
// that kernels may multiply them first.
HOST_DEVICE inline MomentScale moment_scale(uint32_t amax_bits, int log2_largest) {
    // A mantissa above 1.75 carries into the exponent.
    const int exponent = static_cast<int>((amax_bits + 0x1fffffu) >> 23) - 127;
    const int up = log2_largest - exponent < 100 ? log2_largest - exponent : 100;
    if (up < -15) return {0.0f, float_of_bits(0x7fc00000u)};
    return {float_of_bits(static_cast<uint32_t>(127 + up) << 23), float_of_bits(static_cast<uint32_t>(127 - up) << 23)};
}

HOST_DEVICE inline float decode_m(uint32_t code, float scale_inv) {
    return float_of_bits((code & 0x7fu) << 20 | (code & 0x80u) << 24) * kUnbiasM * scale_inv;
}
HOST_DEVICE inline float decode_v(uint32_t code, float scale_inv) {
    return float_of_bits((code & 0xffu) << 20) * kUnbiasV * scale_inv;
}

// Round up with the probability of the dropped fraction, by the low 16 bits of `random`. The subnormal numbers of a
// format are subnormal floats here.
// encode_m with the code in the highest byte; unbiased_scale: scale / kUnbiasM; noise: 16 random bits from bit 8 on.
HOST_DEVICE inline uint32_t encode_m_high(float value, float unbiased_scale, uint32_t noise) {
    const uint32_t bits = bf16::to_bits(value * unbiased_scale);
    return ((bits << 4) + noise) | (bits & 0x80000000u);
}
HOST_DEVICE inline uint32_t encode_m(float value, float scale, uint32_t random) {
    return encode_m_high(value, scale * (1.0f / kUnbiasM), (random & 0xffffu) << 8) >> 24;
}
// Rounds v >= 2^-125 at least to the smallest number, never to 0, with which the next update would be m / eps. That
// number is at least 2^-33.8 of the block's largest v, and m's smallest number at most 2^-16.8 of its largest m: if
// |m| <= r sqrt(v) in the whole block before the rounding, |m| <= 2.5 r sqrt(v) after it.
HOST_DEVICE inline uint32_t encode_v(float value, float scale, uint32_t random) {
    const uint32_t bits = bf16::to_bits(value * scale * (1.0f / kUnbiasV));
    const uint32_t code = (bits + ((random & 0xffffu) << 4)) >> 20;
    const uint32_t least = bf16::to_bits(value) >> 24;
    return code == 0 && least > 0 ? 1u : code;
}
