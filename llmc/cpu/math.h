// Elementary functions of the CPU device for vectors of float or double: an argument reduction and a polynomial of fma,
// so that results do not depend on the C library. The error is below 2 ulp (tests/ops/test_ops_cpu_math.cpp).
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "llmc/cpu/simd.h"

namespace cpu {

// Returns 2^n for integers n within the normal range.
inline Vec<float> power_of_two(Vec<float> n) {
    __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
}
inline Vec<double> power_of_two(Vec<double> n) {
    __m256i exponent = _mm256_cvtepi32_epi64(_mm_add_epi32(_mm256_cvtpd_epi32(n.v), _mm_set1_epi32(1023)));
    return _mm256_castsi256_pd(_mm256_slli_epi64(exponent, 52));
}

// 1/k!, the Taylor coefficients of e^r.
struct InverseFactorials {
    double at[14];
    constexpr InverseFactorials() : at{} {
        double factorial = 1;
        for (int k = 0; k < 14; k++) {
            if (k > 0) factorial *= k;
            at[k] = 1 / factorial;
        }
    }
};
inline constexpr InverseFactorials kInverseFactorials;

template <typename A> struct ExpConstants;
template <> struct ExpConstants<float> {
    static constexpr float kLowest = -104.0f, kHighest = 89.0f;   // 0 below, infinite above
    static constexpr float kLn2High = 0x1.62e430p-1f, kLn2Low = -0x1.05c610p-29f;
    static constexpr int kDegree = 7;    // r^8/8! < 2^-27 for |r| <= ln(2)/2
};
template <> struct ExpConstants<double> {
    static constexpr double kLowest = -746.0, kHighest = 710.0;
    static constexpr double kLn2High = 0x1.62e42fefa39efp-1, kLn2Low = 0x1.abc9e3b39803fp-56;
    static constexpr int kDegree = 13;   // r^14/14! < 2^-57
};

// e^x = (1 + more) 2^n, for x within the limits of ExpConstants.
template <typename A> struct ExpParts {
    Vec<A> more, n;
};
template <typename A> inline ExpParts<A> exp_parts(Vec<A> x) {
    using C = ExpConstants<A>;
    constexpr double kLog2E = 1.4426950408889634;
    Vec<A> n = round_nearest(x * Vec<A>(A(kLog2E)));
    Vec<A> r = fma(n, Vec<A>(-C::kLn2High), x);
    r = fma(n, Vec<A>(-C::kLn2Low), r);
    // Taylor: e^r - 1 - r = r^2 (1/2 + r/6 + ...), in Horner's form.
    Vec<A> series(A(kInverseFactorials.at[C::kDegree]));
#pragma GCC unroll 16
    for (int k = C::kDegree - 1; k >= 2; k--) series = fma(series, r, Vec<A>(A(kInverseFactorials.at[k])));
    return {fma(r * r, series, r), n};
}

// e^x. NaN stays NaN; results below the normal range are rounded once.
template <typename A> inline Vec<A> exp(Vec<A> x) {
    using C = ExpConstants<A>;
    const ExpParts<A> e = exp_parts(min(Vec<A>(C::kHighest), max(Vec<A>(C::kLowest), x)));
    // 2^n as two factors, because 2^n may be outside the normal range.
    Vec<A> half = round_nearest(e.n * Vec<A>(A(0.5)));
    return (e.more + Vec<A>(A(1))) * power_of_two(half) * power_of_two(e.n - half);
}

inline double exp(double x) { return _mm256_cvtsd_f64(exp(Vec<double>(x)).v); }

// Natural logarithm of x > 0; -infinity for 0, NaN for negative numbers and NaN.
inline double log(double x) {
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    if (!(x > 0)) return x == 0 ? -kInfinity : std::numeric_limits<double>::quiet_NaN();
    if (x == kInfinity) return x;
    int exponent = 0;
    if (x < 0x1p-1022) {
        x *= 0x1p54;
        exponent = -54;
    }
    uint64_t bits;
    std::memcpy(&bits, &x, 8);
    exponent += static_cast<int>(bits >> 52) - 1023;
    bits = (bits & 0xfffffffffffffull) | 0x3ff0000000000000ull;
    double m;
    std::memcpy(&m, &bits, 8);
    if (m > 1.4142135623730951) {
        m *= 0.5;
        exponent += 1;
    }
    // ln m = 2 artanh(s), s = (m - 1) / (m + 1), |s| <= 0.1716: terms to s^25.
    double s = (m - 1) / (m + 1);
    double s2 = s * s;
    double series = 1.0 / 25;
    for (int k = 23; k >= 3; k -= 2) series = std::fma(s2, series, 1.0 / k);
    double log_m = 2 * s + 2 * (s * s2) * series;
    return std::fma(exponent, ExpConstants<double>::kLn2High, std::fma(exponent, ExpConstants<double>::kLn2Low, log_m));
}

// sigmoid(x) and sigmoid(-x), both with full relative precision: neither is 1 minus the other.
template <typename A> struct SigmoidPair {
    Vec<A> of_x, of_minus_x;
};
template <typename A> inline SigmoidPair<A> sigmoid_pair(Vec<A> x) {
    Vec<A> one(A(1));
    Vec<A> e = exp(Vec<A>() - abs(x));
    Vec<A> large = one / (one + e), small = e * large;
    return {select_by_sign(x, small, large), select_by_sign(x, large, small)};
}

// tanh |x| = -m / (m + 2) with m = e^(-2|x|) - 1, which is computed without the cancellation near 0. NaN stays NaN.
template <typename A> inline Vec<A> tanh(Vec<A> x) {
    constexpr double kLeast = -80;   // e^-80 is within the normal range, and 1 + e^-80 is 1
    const ExpParts<A> e = exp_parts(max(Vec<A>(A(kLeast)), Vec<A>(A(-2)) * abs(x)));
    const Vec<A> power = power_of_two(e.n), m = fma(e.more, power, power - Vec<A>(A(1)));
    const Vec<A> negative = m / (m + Vec<A>(A(2)));
    return select_by_sign(x, negative, Vec<A>() - negative);
}

// Scores or logits: mul x, or with a soft cap (cap > 0) cap tanh(mul x / cap), as in Gemma-2 (arXiv 2408.00118).
template <typename A> struct SoftCap {
    A mul, cap;
    Vec<A> of(Vec<A> x) const { return cap > 0 ? tanh(x * Vec<A>(mul / cap)) * Vec<A>(cap) : x * Vec<A>(mul); }
    // The derivative of y = of(x) by mul x.
    Vec<A> slope(Vec<A> y) const {
        const Vec<A> t = y * Vec<A>(cap > 0 ? 1 / cap : A(0));
        return fma(Vec<A>() - t, t, Vec<A>(A(1)));
    }
};

// gelu, tanh form. 0.5 (1 + tanh(u)) is computed as sigmoid(2u), which is accurate where tanh is near -1.
inline constexpr double kTwoSqrt2OverPi = 1.5957691216057308;   // 2 sqrt(2 / pi)
template <typename A> inline Vec<A> gelu_argument(Vec<A> x) {
    Vec<A> cubic = fma(x * x, Vec<A>(A(0.044715 * kTwoSqrt2OverPi)), Vec<A>(A(kTwoSqrt2OverPi)));
    return x * cubic;
}
template <typename A> inline Vec<A> gelu(Vec<A> x) { return x * sigmoid_pair(gelu_argument(x)).of_x; }
template <typename A> inline Vec<A> gelu_derivative(Vec<A> x) {
    SigmoidPair<A> s = sigmoid_pair(gelu_argument(x));
    Vec<A> slope = fma(x * x, Vec<A>(A(3 * 0.044715 * kTwoSqrt2OverPi)), Vec<A>(A(kTwoSqrt2OverPi)));
    return s.of_x * fma(x * slope, s.of_minus_x, Vec<A>(A(1)));
}

}  // namespace cpu
