// The cast to FP8. It has no branches, so that loops over it are vectorised.
#pragma once
#include <bit>
#include <cstdint>

#include "llmc/base/fp8.h"

template <Dtype format> struct Fp8Traits {
    static_assert(is_fp8(format));
    static constexpr int kMantissaBits = format == Dtype::kE4m3 ? 3 : 2;
    static constexpr int kBias = format == Dtype::kE4m3 ? 7 : 15;
    static constexpr uint32_t kLargestBits = std::bit_cast<uint32_t>(fp8_largest(format));
    static constexpr uint32_t kSmallestNormalBits = static_cast<uint32_t>(127 + 1 - kBias) << 23;
    // Floats of this exponent are multiples of the smallest subnormal number, 2^(1 - kBias - kMantissaBits).
    static constexpr uint32_t kAlignerBits = static_cast<uint32_t>(127 + 1 - kBias - kMantissaBits + 23) << 23;
};
// Every NaN becomes this code, because the GPU loses a NaN's sign when it multiplies by the scale.
inline constexpr uint8_t kFp8Nan = 0x7f;

// Rounds to the nearest number of the format, ties to even. Larger values and infinities saturate to the largest
// number; NaN stays NaN. The same bytes as the GPU's cvt.rn.satfinite.
template <Dtype format> inline uint8_t fp8_cast(float value) {
    using F = Fp8Traits<format>;
    constexpr int kDropped = 23 - F::kMantissaBits;
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    const uint32_t magnitude = bits & 0x7fffffffu;
    const uint32_t clamped = magnitude < F::kLargestBits ? magnitude : F::kLargestBits;
    // Normal numbers: rounded to even as integers, so that a carry increments the exponent; then the bias changes.
    const uint32_t even = (clamped >> kDropped) & 1u;
    const uint32_t rounded = (clamped + ((1u << (kDropped - 1)) - 1u) + even) >> kDropped;
    const uint32_t normal = rounded - (static_cast<uint32_t>(127 - F::kBias) << F::kMantissaBits);
    // Subnormal numbers: the addition rounds, and its last bits are the number of multiples of the smallest number.
    const float aligned = std::bit_cast<float>(clamped) + std::bit_cast<float>(F::kAlignerBits);
    const uint32_t subnormal = std::bit_cast<uint32_t>(aligned) - F::kAlignerBits;
    // Masks select the result, because the compiler would turn ?: into a branch and not vectorise the loop.
    const uint32_t is_subnormal = -static_cast<uint32_t>(clamped < F::kSmallestNormalBits);
    const uint32_t is_nan = -static_cast<uint32_t>(magnitude > kInfinityBits);
    const uint32_t code = (subnormal & is_subnormal) | (normal & ~is_subnormal) | ((bits >> 24) & 0x80u);
    return static_cast<uint8_t>((kFp8Nan & is_nan) | (code & ~is_nan));
}
