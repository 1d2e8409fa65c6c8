// AVX2 vectors with one interface for float and double, so that every operation is written once. The width is fixed,
// because sums accumulate per lane: results do not depend on the machine.
#pragma once
#if !defined(__AVX2__) || !defined(__FMA__)
#error "the CPU device is compiled with -march=x86-64-v3"
#endif
#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "llmc/base/dtype.h"

namespace cpu {

template <typename Acc> struct Vec;

template <> struct Vec<float> {
    static constexpr int kWidth = 8;
    __m256 v;
    Vec() : v(_mm256_setzero_ps()) {}
    Vec(__m256 raw) : v(raw) {}
    explicit Vec(float value) : v(_mm256_set1_ps(value)) {}
};

template <> struct Vec<double> {
    static constexpr int kWidth = 4;
    __m256d v;
    Vec() : v(_mm256_setzero_pd()) {}
    Vec(__m256d raw) : v(raw) {}
    explicit Vec(double value) : v(_mm256_set1_pd(value)) {}
};

inline Vec<float> operator+(Vec<float> a, Vec<float> b) { return _mm256_add_ps(a.v, b.v); }
inline Vec<float> operator-(Vec<float> a, Vec<float> b) { return _mm256_sub_ps(a.v, b.v); }
inline Vec<float> operator*(Vec<float> a, Vec<float> b) { return _mm256_mul_ps(a.v, b.v); }
inline Vec<float> operator/(Vec<float> a, Vec<float> b) { return _mm256_div_ps(a.v, b.v); }
inline Vec<float> fma(Vec<float> a, Vec<float> b, Vec<float> c) { return _mm256_fmadd_ps(a.v, b.v, c.v); }
// Returns a where it is larger, else b: a NaN in b is kept, one in a is not.
inline Vec<float> max(Vec<float> a, Vec<float> b) { return _mm256_max_ps(a.v, b.v); }
inline Vec<float> min(Vec<float> a, Vec<float> b) { return _mm256_min_ps(a.v, b.v); }
inline Vec<float> round_nearest(Vec<float> a) {
    return _mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline Vec<float> abs(Vec<float> a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v); }
// Returns `negative` where the sign bit of `sign` is set, else `positive`.
inline Vec<float> select_by_sign(Vec<float> sign, Vec<float> negative, Vec<float> positive) {
    return _mm256_blendv_ps(positive.v, negative.v, sign.v);
}

inline Vec<double> operator+(Vec<double> a, Vec<double> b) { return _mm256_add_pd(a.v, b.v); }
inline Vec<double> operator-(Vec<double> a, Vec<double> b) { return _mm256_sub_pd(a.v, b.v); }
inline Vec<double> operator*(Vec<double> a, Vec<double> b) { return _mm256_mul_pd(a.v, b.v); }
inline Vec<double> operator/(Vec<double> a, Vec<double> b) { return _mm256_div_pd(a.v, b.v); }
inline Vec<double> fma(Vec<double> a, Vec<double> b, Vec<double> c) { return _mm256_fmadd_pd(a.v, b.v, c.v); }
inline Vec<double> max(Vec<double> a, Vec<double> b) { return _mm256_max_pd(a.v, b.v); }
inline Vec<double> min(Vec<double> a, Vec<double> b) { return _mm256_min_pd(a.v, b.v); }
inline Vec<double> round_nearest(Vec<double> a) {
    return _mm256_round_pd(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline Vec<double> abs(Vec<double> a) { return _mm256_andnot_pd(_mm256_set1_pd(-0.0), a.v); }
inline Vec<double> select_by_sign(Vec<double> sign, Vec<double> negative, Vec<double> positive) {
    return _mm256_blendv_pd(positive.v, negative.v, sign.v);
}

// Whole vectors, unaligned.
inline Vec<float> load(const float* p) { return _mm256_loadu_ps(p); }
inline Vec<double> load(const double* p) { return _mm256_loadu_pd(p); }
inline Vec<float> load(const bf16* p) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline void store(float* p, Vec<float> a) { _mm256_storeu_ps(p, a.v); }
inline void store(double* p, Vec<double> a) { _mm256_storeu_pd(p, a.v); }
// Rounds like struct bf16.
inline void store(bf16* p, Vec<float> a) {
    __m256i bits = _mm256_castps_si256(a.v);
    __m256i upper = _mm256_srli_epi32(bits, 16);
    __m256i odd = _mm256_and_si256(upper, _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    __m256i quiet_nan = _mm256_or_si256(upper, _mm256_set1_epi32(0x40));
    __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q));
    __m256i result = _mm256_blendv_epi8(_mm256_srli_epi32(rounded, 16), quiet_nan, is_nan);
    __m128i low = _mm256_castsi256_si128(result), high = _mm256_extracti128_si256(result, 1);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_packus_epi32(low, high));
}

// The width of a vector as a compile-time constant.
template <typename Acc> using Full = std::integral_constant<int, Vec<Acc>::kWidth>;

// The accumulation type of a storage type, also used for "stat" tensors (ops.h).
template <typename T> struct AccOf { using type = float; };
template <> struct AccOf<double> { using type = double; };
template <typename T> using Acc = typename AccOf<T>::type;

// Loads or stores `count` elements: Full, or fewer at the end of a row. The other lanes are loaded as 0.
template <typename T, typename Count> inline Vec<Acc<T>> load(const T* p, Count count) {
    if constexpr (std::is_same_v<Count, Full<Acc<T>>>) {
        return load(p);
    } else {
        T padded[Vec<Acc<T>>::kWidth] = {};
        std::memcpy(padded, p, static_cast<size_t>(count) * sizeof(T));
        return load(padded);
    }
}
template <typename T, typename Count> inline void store(T* p, Vec<Acc<T>> a, Count count) {
    if constexpr (std::is_same_v<Count, Full<Acc<T>>>) {
        store(p, a);
    } else {
        T padded[Vec<Acc<T>>::kWidth];
        store(padded, a);
        std::memcpy(p, padded, static_cast<size_t>(count) * sizeof(T));
    }
}

// Calls body(i, count) over [0, n) in steps of a vector; count is Full<A> except for a shorter last step.
template <typename A, typename Body> inline void for_lanes(int64_t n, Body&& body) {
    constexpr int64_t width = Vec<A>::kWidth;
    int64_t i = 0;
    for (; i + width <= n; i += width) body(i, Full<A>{});
    if (i < n) body(i, static_cast<int>(n - i));
}

// Adds the lanes in a fixed order: (0+4)+(2+6) and so on.
inline float sum_lanes(Vec<float> a) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
inline double sum_lanes(Vec<double> a) {
    __m128d s = _mm_add_pd(_mm256_castpd256_pd128(a.v), _mm256_extractf128_pd(a.v, 1));
    return _mm_cvtsd_f64(_mm_add_sd(s, _mm_unpackhi_pd(s, s)));
}
template <typename A> inline A max_lanes(Vec<A> a) {
    A lane[Vec<A>::kWidth];
    store(lane, a);
    A largest = lane[0];
    for (A value : lane) largest = value > largest ? value : largest;
    return largest;
}

// Converts a value to its accumulation type.
template <typename T> inline Acc<T> widen(T value) { return static_cast<Acc<T>>(value); }

}  // namespace cpu
