// Rotations of rotary position embedding.
#pragma once
#include "llmc/cuda/common.cuh"

namespace cuda {

// Rotates (x, y) by an angle, with explicit roundings: all kernels must agree on them.
__device__ inline void rotate(float& x, float& y, float cosine, float sine) {
    const float rotated = __fmaf_rn(x, cosine, -__fmul_rn(y, sine));
    y = __fmaf_rn(y, cosine, __fmul_rn(x, sine));
    x = rotated;
}

// Loads cosine and sine of kWidth pairs; direction 1 or -1.
template <int kWidth>
__device__ inline void load_angles(const float* table, float direction, float (&cosine)[kWidth],
                                   float (&sine)[kWidth]) {
    float pair[2 * kWidth];
    if constexpr (kWidth == 1) pair[0] = table[0], pair[1] = table[1];
    else load_floats<float, 2 * kWidth>(table, pair);
#pragma unroll
    for (int j = 0; j < kWidth; j++) cosine[j] = pair[2 * j], sine[j] = pair[2 * j + 1] * direction;
}

// Rotates 8 pairs of a row.
__device__ inline void rotate_vectors(uint4& x, uint4& y, const float (&cosine)[8], const float (&sine)[8]) {
    float a[8], b[8];
    unpack<bf16>(x, a);
    unpack<bf16>(y, b);
#pragma unroll
    for (int j = 0; j < 8; j++) rotate(a[j], b[j], cosine[j], sine[j]);
    x = pack<bf16>(a);
    y = pack<bf16>(b);
}

}  // namespace cuda
