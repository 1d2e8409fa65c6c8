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

template <typename A> struct RawVec;
template <> struct RawVec<float> { using type = __m256; };
template <> struct RawVec<double> { using type = __m256d; };

template <typename A> struct Vec {
    using Raw = typename RawVec<A>::type;
    static constexpr int kWidth = sizeof(Raw) / sizeof(A);
    Raw v;
    Vec() : v{} {}
    Vec(Raw raw) : v(raw) {}
    explicit Vec(A value) : v(value - Raw{}) {}   // - 0 keeps the sign of a zero
    friend Vec operator+(Vec a, Vec b) { return a.v + b.v; }
    friend Vec operator-(Vec a, Vec b) { return a.v - b.v; }
    friend Vec operator*(Vec a, Vec b) { return a.v * b.v; }
    friend Vec operator/(Vec a, Vec b) { return a.v / b.v; }
    // Returns a where it is larger, else b: a NaN in b is kept, one in a is not.
    friend Vec max(Vec a, Vec b) { return a.v > b.v ? a.v : b.v; }
    friend Vec min(Vec a, Vec b) { return a.v < b.v ? a.v : b.v; }
    // Returns 0 where a is larger than b, else x.
    friend Vec unless_larger(Vec x, Vec a, Vec b) { return a.v > b.v ? Raw{} : x.v; }
};

inline Vec<float> fma(Vec<float> a, Vec<float> b, Vec<float> c) { return _mm256_fmadd_ps(a.v, b.v, c.v); }
inline Vec<double> fma(Vec<double> a, Vec<double> b, Vec<double> c) { return _mm256_fmadd_pd(a.v, b.v, c.v); }
inline constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
inline Vec<float> round_nearest(Vec<float> a) { return _mm256_round_ps(a.v, kNearest); }
inline Vec<double> round_nearest(Vec<double> a) { return _mm256_round_pd(a.v, kNearest); }
inline Vec<float> abs(Vec<float> a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v); }
inline Vec<double> abs(Vec<double> a) { return _mm256_andnot_pd(_mm256_set1_pd(-0.0), a.v); }
// Returns `negative` where the sign bit of `sign` is set, else `positive`.
inline Vec<float> select_by_sign(Vec<float> sign, Vec<float> negative, Vec<float> positive) {
    return _mm256_blendv_ps(positive.v, negative.v, sign.v);
}
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
inline Vec<float> load(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
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
template <typename A> inline A sum_lanes(Vec<A> a) {
    A lane[Vec<A>::kWidth];
    store(lane, a);
    for (int half = Vec<A>::kWidth / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) lane[i] += lane[i + half];
    return lane[0];
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
