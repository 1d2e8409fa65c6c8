// Stochastic rounding of optimizer states to bf16, with the numbers of rng.h.
#pragma once
#include "llmc/base/rng.h"
#include "llmc/cuda/common.cuh"

namespace cuda {

// The key schedule of philox (rng.h), computed on the host: round keys are free as kernel parameters, while computing
// them per element makes the kernel compute-bound.
struct PhiloxKeys {
    uint32_t low[10], high[10];
};
inline PhiloxKeys philox_keys(uint64_t key) {
    PhiloxKeys keys;
    for (uint32_t round = 0; round < 10; round++) {
        keys.low[round] = static_cast<uint32_t>(key) + round * 0x9E3779B9u;
        keys.high[round] = static_cast<uint32_t>(key >> 32) + round * 0xBB67AE85u;
    }
    return keys;
}
// The words of philox(key, counter, counter_high, rounds); the compiler drops the work for words that are not used.
template <int rounds = 10>
__device__ inline uint4 philox_words(const PhiloxKeys& keys, uint64_t counter, uint64_t counter_high) {
    uint32_t c0 = static_cast<uint32_t>(counter), c1 = static_cast<uint32_t>(counter >> 32);
    uint32_t c2 = static_cast<uint32_t>(counter_high), c3 = static_cast<uint32_t>(counter_high >> 32);
#pragma unroll
    for (int round = 0; round < rounds; round++) {
        const uint64_t p0 = uint64_t{0xD2511F53u} * c0, p1 = uint64_t{0xCD9E8D57u} * c2;
        c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ keys.low[round];
        c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ keys.high[round];
        c1 = static_cast<uint32_t>(p1);
        c3 = static_cast<uint32_t>(p0);
    }
    return make_uint4(c0, c1, c2, c3);
}

// stochastic_round_bf16 of rng.h; returns a float that bf16 represents exactly. It has no branch: the
// compiler would compute the random numbers inside the branch, once for m and again for v.
__device__ inline float stochastic_round(float value, uint32_t random) {
    const uint32_t bits = __float_as_uint(value);
    const bool finite = (bits & 0x7f800000u) != 0x7f800000u;
    const float up = __uint_as_float((bits + (random & 0xffffu)) & 0xffff0000u);
    return finite ? up : value;
}

}  // namespace cuda
