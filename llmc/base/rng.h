// Counter-based random numbers for initial weights, stochastic rounding and shuffling: every value is a pure function
// of (key, counter), with equal bits on every device.
// Source: Philox4x32, Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011. 7 rounds pass all of
// BigCrush, 10 leave a margin.
#pragma once
#include <cmath>
#include <cstdint>
#include <string_view>

#include "llmc/base/dtype.h"

struct Philox4 {
    uint32_t word[4];
};

HOST_DEVICE inline Philox4 philox(uint64_t key, uint64_t counter, uint64_t counter_high = 0, int rounds = 10) {
    uint32_t c0 = static_cast<uint32_t>(counter), c1 = static_cast<uint32_t>(counter >> 32);
    uint32_t c2 = static_cast<uint32_t>(counter_high), c3 = static_cast<uint32_t>(counter_high >> 32);
    uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
    for (int round = 0; round < rounds; round++) {
        uint64_t p0 = 0xD2511F53ull * c0;
        uint64_t p1 = 0xCD9E8D57ull * c2;
        uint32_t n0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
        uint32_t n2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
        c1 = static_cast<uint32_t>(p1);
        c3 = static_cast<uint32_t>(p0);
        c0 = n0;
        c2 = n2;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return {{c0, c1, c2, c3}};
}

// Hashes a seed and a name (FNV-1a, then one Philox call to mix the bits).
inline uint64_t rng_key(uint64_t seed, std::string_view name) {
    uint64_t hash = 0xcbf29ce484222325ull;
    for (char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ull;
    Philox4 p = philox(seed, hash);
    return (static_cast<uint64_t>(p.word[1]) << 32) | p.word[0];
}

// Returns standard normal number `element` of the stream `key` (Box-Muller, cosine branch). Logarithm and cosine are
// series of fmaf, division and square root, which are correctly rounded everywhere, so that the CPU and the GPU agree
// bit for bit. Contraction cannot change that: the CPU uses -ffp-contract=off, and no plain product feeds a sum.
HOST_DEVICE inline float rng_normal(uint64_t key, uint64_t element) {
    Philox4 p = philox(key, element);
    // u in (0, 1], 24 bits; split into m * 2^e with m in [sqrt(1/2), sqrt(2)).
    float u = static_cast<float>((p.word[0] >> 8) + 1u) * 0x1p-24f;
    uint32_t bits = bf16::to_bits(u);
    int exponent = static_cast<int>(bits >> 23) - 127;
    uint32_t mantissa_bits = (bits & 0x7fffffu) | 0x3f800000u;
    float m;
    memcpy(&m, &mantissa_bits, 4);
    if (m > 1.41421356f) {
        m = m * 0.5f;
        exponent += 1;
    }
    // ln m = 2 artanh(s), s = (m - 1) / (m + 1), |s| < 0.172: the series to s^11 is exact to a float.
    float s = (m - 1.0f) / (m + 1.0f);
    float s2 = s * s;
    float series = fmaf(s2, 1.0f / 11.0f, 1.0f / 9.0f);
    series = fmaf(s2, series, 1.0f / 7.0f);
    series = fmaf(s2, series, 1.0f / 5.0f);
    series = fmaf(s2, series, 1.0f / 3.0f);
    series = fmaf(s2, series, 1.0f);
    float two_s = 2.0f * s;
    float log_u = fmaf(static_cast<float>(exponent), 0.693147181f, two_s * series);
    float minus_2_log = -2.0f * log_u;
    float radius = sqrtf(minus_2_log > 0.0f ? minus_2_log : 0.0f);
    // |cos| of a uniform angle in [0, pi/2), Taylor to x^14, and a random sign.
    float angle = static_cast<float>(p.word[1] >> 8) * (1.57079633f * 0x1p-24f);
    float a2 = angle * angle;
    float cosine = fmaf(a2, -1.0f / 87178291200.0f, 1.0f / 479001600.0f);
    cosine = fmaf(a2, cosine, -1.0f / 3628800.0f);
    cosine = fmaf(a2, cosine, 1.0f / 40320.0f);
    cosine = fmaf(a2, cosine, -1.0f / 720.0f);
    cosine = fmaf(a2, cosine, 1.0f / 24.0f);
    cosine = fmaf(a2, cosine, -0.5f);
    cosine = fmaf(a2, cosine, 1.0f);
    float value = radius * cosine;
    return (p.word[1] & 1u) ? -value : value;
}

// Rounds a float stochastically with 16 random bits: up with the probability of the dropped fraction, so that the
// expected value is the float. Infinities and NaN are kept.
HOST_DEVICE inline bf16 stochastic_round_bf16(float value, uint32_t random16) {
    uint32_t u = bf16::to_bits(value);
    if ((u & 0x7f800000u) == 0x7f800000u) return bf16(value);
    return bf16::from_bits(static_cast<uint16_t>((u + (random16 & 0xffffu)) >> 16));
}
