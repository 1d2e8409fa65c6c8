// Casts of lines of elements to FP8 and back, their amaxes, and statistics of the casts. CPU.
#pragma once
#include <atomic>

#include "llmc/base/fp8_cast.h"
#include "llmc/cpu/common.h"

namespace cpu {

// ---- amaxes, as bits

inline uint32_t magnitude(bf16 value) { return value.bits & 0x7fffu; }
inline uint32_t wide_bits(uint32_t bf16_magnitude) { return bf16_magnitude << 16; }

inline uint32_t amax_of_line(const bf16* x, int64_t count) {
    uint16_t amax = 0;   // 16 bits, so that a vector has 16 elements
    for (int64_t i = 0; i < count; i++) amax = std::max<uint16_t>(amax, x[i].bits & 0x7fff);
    return wide_bits(amax);
}
inline uint32_t amax_of_line(const float* x, int64_t count) {
    uint32_t amax = 0;
    for (int64_t i = 0; i < count; i++) amax = std::max(amax, amax_bits_of(x[i]));
    return amax;
}

// amax of the elements rounded to bf16; rounding is monotonic.
inline uint32_t rounded_amax_of_line(const float* x, int64_t count) {
    return wide_bits(magnitude(bf16(std::bit_cast<float>(amax_of_line(x, count)))));
}

// *amax = max(*amax, bits). Thread-safe.
inline void raise_amax(uint32_t* amax, uint32_t bits) {
    std::atomic_ref<uint32_t> shared(*amax);
    uint32_t before = shared.load(std::memory_order_relaxed);
    while (before < bits && !shared.compare_exchange_weak(before, bits, std::memory_order_relaxed)) {}
}

inline void round_line(bf16* to, const float* from, int64_t count) {
    for_lanes<float>(count, [&](int64_t i, auto n) { store(to + i, load(from + i, n), n); });
}

// ---- scales of 128x128 blocks

// Row stride of scale_inv for K columns (kBlock128x128).
inline int64_t block_row_stride(int64_t K) { return (scale_blocks(K) + 3) / 4 * 4; }
inline float block_scale(uint32_t amax_bits, Dtype format) {
    return block_scale_of(amax_bits, fp8_largest(format));
}

// ---- casts

template <Dtype format, typename T>
void cast_line(uint8_t* codes, const T* x, const float* scale, int64_t count) {
    for (int64_t i = 0; i < count; i++) codes[i] = fp8_cast<format>(widen(x[i]) * scale[i]);
}

struct Tally {
    uint64_t saturated = 0, flushed = 0, nonfinite = 0;
};

template <Dtype format, typename T>
void count_line(Tally& tally, const uint8_t* codes, const T* x, const float* scale, int64_t count) {
    uint32_t saturated = 0, flushed = 0, nonfinite = 0;
    for (int64_t i = 0; i < count; i++) {
        const uint32_t size = amax_bits_of(widen(x[i])), product = amax_bits_of(widen(x[i]) * scale[i]);
        const uint32_t finite = size < kInfinityBits;
        saturated += finite & static_cast<uint32_t>(product > Fp8Traits<format>::kLargestBits)
                     & static_cast<uint32_t>(product <= kInfinityBits);   // the products of a NaN chunk do not saturate
        flushed += static_cast<uint32_t>(size != 0) & static_cast<uint32_t>((codes[i] & 0x7f) == 0);
        nonfinite += finite ^ 1u;
    }
    tally.saturated += saturated, tally.flushed += flushed, tally.nonfinite += nonfinite;
}

inline void add_counts(Fp8Counts* counts, int64_t elems, const Tally& tally) {
    auto add = [](unsigned long long& to, uint64_t value) {
        std::atomic_ref(to).fetch_add(value, std::memory_order_relaxed);
    };
    add(counts->elems, static_cast<uint64_t>(elems));
    add(counts->saturated, tally.saturated);
    add(counts->flushed, tally.flushed);
    add(counts->nonfinite, tally.nonfinite);
}

}  // namespace cpu
