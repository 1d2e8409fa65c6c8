// Shared by all kernels that quantize: casts, amaxes, block scales, counts. A magnitude is the 15 bits of a bf16 |x|;
// as integers magnitudes order like the numbers, with infinity and NaN on top.
#pragma once
#include <cuda_fp8.h>

#include "llmc/base/fp8.h"
#include "llmc/cuda/common.cuh"

namespace cuda {

// Calls f(format) with the FP8 format as a compile-time constant.
template <typename F> void with_format(Dtype format, const char* op, F&& f) {
    CHECK(is_fp8(format), "%s: quantized to %s", op, dtype_name(format));
    if (format == Dtype::kE4m3) f(std::integral_constant<Dtype, Dtype::kE4m3>{});
    else f(std::integral_constant<Dtype, Dtype::kE5m2>{});
}

// ---- casts: to_fp8 of fp8.h with the hardware's conversion, which saturates and keeps NaN

// Casts to two bytes, `low` in the low one.
template <Dtype kFormat> __device__ inline uint32_t to_fp8x2(float low, float high) {
    constexpr __nv_fp8_interpretation_t kKind = kFormat == Dtype::kE4m3 ? __NV_E4M3 : __NV_E5M2;
    return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, kKind);
}
template <Dtype kFormat> __device__ inline uint32_t to_fp8x4(float a, float b, float c, float d) {
    return to_fp8x2<kFormat>(a, b) | to_fp8x2<kFormat>(c, d) << 16;
}
// Casts eight bf16 values times scale.
template <Dtype kFormat> __device__ inline uint2 to_fp8x8(const uint4& x, float scale) {
    float v[8];
    unpack<bf16>(x, v);
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] *= scale;
    return make_uint2(to_fp8x4<kFormat>(v[0], v[1], v[2], v[3]), to_fp8x4<kFormat>(v[4], v[5], v[6], v[7]));
}
// The numbers of two codes, `low` in the low byte of a pair.
template <Dtype kFormat> __device__ inline float2 from_fp8x2(uint32_t pair) {
    constexpr __nv_fp8_interpretation_t kKind = kFormat == Dtype::kE4m3 ? __NV_E4M3 : __NV_E5M2;
    return __half22float2(__nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(pair), kKind));
}
// Dequantizes eight E4M3 bytes to bf16; exact where bf16 can represent the product.
__device__ inline uint4 from_e4m3x8(const uint2& bytes, float scale_inv) {
    const uint32_t word[2] = {bytes.x, bytes.y};
    float v[8];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 values = from_fp8x2<Dtype::kE4m3>(word[i / 2] >> (i % 2 * 16) & 0xffffu);
        v[2 * i] = values.x * scale_inv, v[2 * i + 1] = values.y * scale_inv;
    }
    return pack<bf16>(v);
}
// Transposes 4 x 4 bytes: words of rows to words of columns.
__device__ inline void transpose_bytes(const uint32_t (&row)[4], uint32_t (&column)[4]) {
    const uint32_t low01 = __byte_perm(row[0], row[1], 0x5140), high01 = __byte_perm(row[0], row[1], 0x7362);
    const uint32_t low23 = __byte_perm(row[2], row[3], 0x5140), high23 = __byte_perm(row[2], row[3], 0x7362);
    column[0] = __byte_perm(low01, low23, 0x5410), column[1] = __byte_perm(low01, low23, 0x7632);
    column[2] = __byte_perm(high01, high23, 0x5410), column[3] = __byte_perm(high01, high23, 0x7632);
}

// ---- amaxes, two magnitudes per word

__device__ inline uint32_t max_pair(uint32_t a, uint32_t b) { return __vmaxu2(a, b); }
__device__ inline uint32_t magnitudes(uint32_t pair) { return pair & 0x7fff7fffu; }
// The amax of the four values with even indices, and of the four with odd ones.
__device__ inline uint32_t amax_pair(const uint4& x) {
    return max_pair(max_pair(magnitudes(x.x), magnitudes(x.y)), max_pair(magnitudes(x.z), magnitudes(x.w)));
}
__device__ inline uint32_t larger_of_pair(uint32_t pair) { return max(pair & 0xffffu, pair >> 16); }
inline constexpr uint32_t kInfinityMagnitude = kInfinityBits >> 16;

// Raises *amax_bits to the fp32 bits of an amax. `seen`: an earlier value of *amax_bits; few blocks exceed it, and the
// others skip the atomic.
__device__ inline void record_amax(uint32_t* amax_bits, uint32_t amax, uint32_t seen) {
    if (amax > seen) atomicMax(amax_bits, amax);
}
// Does the same with a block's largest magnitude, rounded to bf16. All its threads call this. shared: one word per
// warp. `seen` should be read before the values, so that its latency is hidden.
template <int kThreads>
__device__ inline void record_block_amax(uint32_t* amax_bits, float magnitude, uint32_t* shared, uint32_t seen) {
    const uint32_t amax = __reduce_max_sync(0xffffffffu, amax_bits_of(magnitude));
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = amax;
    __syncthreads();
    if (threadIdx.x != 0) return;
    uint32_t largest = 0;
#pragma unroll
    for (int w = 0; w < kThreads / 32; w++) largest = max(largest, shared[w]);
    record_amax(amax_bits, amax_bits_of(rounded<bf16>(__uint_as_float(largest))), seen);
}
template <int kThreads>
__device__ inline void record_block_amax(uint32_t* amax_bits, float magnitude, uint32_t* shared) {
    record_block_amax<kThreads>(amax_bits, magnitude, shared, *amax_bits);
}

// ---- scales of blocks: block_scale_of(magnitude, fp8_largest(format)), without the division. The largest number of
// both formats is 1.75 * 2^k, so largest / amax rounded down to a power of two is 2^(k - exponent of amax), or half of
// it if the significand of amax is above 1.75.

struct BlockScale {
    float scale, scale_inv;
};
template <Dtype kFormat> HOST_DEVICE inline BlockScale block_scale(uint32_t magnitude) {
    constexpr uint32_t kTop = kFormat == Dtype::kE4m3 ? 8 : 15;
    uint32_t exponent = 254 + kTop - (magnitude >> 7) - ((magnitude & 0x7fu) > 0x60u ? 1 : 0);
    exponent = exponent < 254 ? exponent : 254;   // the largest power of two of a float
    if (magnitude == 0 || magnitude >= kInfinityMagnitude) exponent = 127;
    const uint32_t scale_bits = exponent << 23;
    const uint32_t inverse_bits = exponent == 254 ? 0x00400000u : (254 - exponent) << 23;   // 2^-127 is subnormal
    BlockScale block;
    memcpy(&block.scale, &scale_bits, 4);
    memcpy(&block.scale_inv, &inverse_bits, 4);
    return block;
}

// ---- counts of one thread's casts

struct CastTally {
    uint32_t saturated = 0, flushed = 0, nonfinite = 0;

    // Half of the smallest subnormal, and anything below, rounds to 0.
    template <Dtype kFormat> __device__ void add(float x, float scale) {
        constexpr float kFlush = kFormat == Dtype::kE4m3 ? 0x1p-10f : 0x1p-17f;
        const float cast = fabsf(x * scale);
        const bool finite = amax_bits_of(x) < kInfinityBits;
        nonfinite += !finite;
        saturated += finite && cast > fp8_largest(kFormat);
        flushed += x != 0.0f && cast <= kFlush;
    }
    template <Dtype kFormat> __device__ void add(const uint4& x, float scale) {
        float v[8];
        unpack<bf16>(x, v);
#pragma unroll
        for (int i = 0; i < 8; i++) add<kFormat>(v[i], scale);
    }
    // The same, but examines single values only if there is something to count; amax: amax_pair(x), bytes: the cast.
    template <Dtype kFormat>
    __device__ void add_cast(const uint4& x, uint32_t amax, float scale, const uint2& bytes) {
        const float largest = __uint_as_float(larger_of_pair(amax) << 16) * scale;
        const bool zeros = has_zero(bytes.x & 0x7f7f7f7fu) || has_zero(bytes.y & 0x7f7f7f7fu);
        if (zeros || !(largest <= fp8_largest(kFormat))) add<kFormat>(x, scale);
    }
    template <Dtype kFormat> __device__ void add_columns(const uint4& x, const float* scale) {
        float v[8];
        unpack<bf16>(x, v);
#pragma unroll
        for (int i = 0; i < 8; i++) add<kFormat>(v[i], scale[i]);
    }
    // Called by all lanes of a warp.
    __device__ void flush_to(Fp8Counts* counts) const {
        auto total = [](unsigned long long* count, uint32_t mine) {
            const uint32_t sum = __reduce_add_sync(0xffffffffu, mine);
            if (threadIdx.x % 32 == 0 && sum != 0) atomicAdd(count, sum);
        };
        total(&counts->saturated, saturated);
        total(&counts->flushed, flushed);
        total(&counts->nonfinite, nonfinite);
    }

private:
    // Whether one of four bytes, all below 128, is 0.
    __device__ static bool has_zero(uint32_t bytes) { return ((bytes - 0x01010101u) & 0x80808080u) != 0; }
};

}  // namespace cuda
