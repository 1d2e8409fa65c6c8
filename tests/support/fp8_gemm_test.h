// Products of FP8 operands for the tests of both devices: codes and strongly non-uniform scales.
#pragma once
#include "tests/support/op_test.h"

#include "tests/support/reference_gemm_fp8.h"

namespace op_test {

inline constexpr GemmLayout kGemmLayouts[] = {GemmLayout::kForward, GemmLayout::kDgrad, GemmLayout::kWgrad};

inline uint8_t* codes_of(HostTensor& t) { return static_cast<uint8_t*>(t.data()); }

// All supported combinations.
inline std::vector<Fp8Kind> fp8_kinds() {
    constexpr Granularity kT = Granularity::kTensor, kV = Granularity::kBlock1x128, kB = Granularity::kBlock128x128;
    std::vector<Fp8Kind> kinds;
    for (auto [a, b] : {std::pair{Dtype::kE4m3, Dtype::kE4m3}, {Dtype::kE5m2, Dtype::kE4m3},
                        {Dtype::kE4m3, Dtype::kE5m2}})
        for (auto [of_a, of_b] : {std::pair{kT, kT}, {kV, kB}, {kV, kV}}) kinds.push_back({a, b, of_a, of_b});
    return kinds;
}

// Scales of an (R, K) matrix between 2^-4 and 2^4, powers of two or not; those that no element uses stay NaN.
inline HostTensor random_scales(Granularity granularity, int64_t R, int64_t K, uint64_t key, bool powers) {
    HostTensor scales(Dtype::kFp32, scale_inv_elems(granularity, R, K));
    for (int64_t r = 0; r < R; r++)
        for (int64_t k = 0; k < K; k += 128) {
            const int64_t at = scale_inv_index(granularity, R, K, r, k);
            const Philox4 random = philox(key, static_cast<uint64_t>(at));
            const double mantissa = powers ? 1 : 1 + random.word[1] * 0x1p-32;
            scales.set(at, std::ldexp(mantissa, static_cast<int>(random.word[0] % 8) - 4));
        }
    return scales;
}

// Normally distributed numbers that use the range of the format, or integers up to `limit` if that is not 0.
inline HostTensor random_codes(Dtype format, int64_t elems, uint64_t key, int64_t limit = 0) {
    const HostTensor values = limit ? random_integers(Dtype::kFp32, elems, key, limit)
                                    : random_tensor(Dtype::kFp32, elems, key, fp8_largest(format) / 8);
    HostTensor t(format, elems);
    for (int64_t i = 0; i < elems; i++) codes_of(t)[i] = to_fp8(format, static_cast<float>(values.get(i)));
    return t;
}

// Fills operands, scales and the initial D. limit != 0: integers and scales that are powers of two, for exact sums.
// powers: scales are powers of two in any case.
inline Fp8Product& fill(Fp8Product& p, int64_t limit, bool with_bias = false, bool powers = false) {
    p.a = random_codes(p.kind.a, p.M * p.K, 1, limit), p.b = random_codes(p.kind.b, p.N * p.K, 2, limit);
    p.a_scale_inv = random_scales(p.kind.a_granularity, p.M, p.K, 3, powers || limit != 0);
    p.b_scale_inv = random_scales(p.kind.b_granularity, p.N, p.K, 4, powers || limit != 0);
    p.d = HostTensor(p.result, p.M * p.N);
    const double size = limit ? 0 : 100 * std::sqrt(static_cast<double>(p.K));
    if (p.accumulate) p.d = limit ? random_integers(p.result, p.M * p.N, 5, 50)
                                  : random_tensor(p.result, p.M * p.N, 5, size);
    if (with_bias) p.bias = limit ? random_integers(Dtype::kBf16, p.N, 6, 50)
                                  : random_tensor(Dtype::kBf16, p.N, 6, size);
    return p;
}

}  // namespace op_test
