// The sigmoid of activation functions, in float for results of type T.
#pragma once
#include "llmc/cuda/common.cuh"
#include "llmc/cuda/ptx.cuh"

namespace cuda {

// 1 / (1 + e^-x). bf16 results tolerate the fast exponential and reciprocal (errors near 2^-21).
constexpr float kLog2E = 1.4426950408889634f;
template <typename T> __device__ inline float sigmoid(float x) {
    if constexpr (std::is_same_v<T, bf16>) return reciprocal_approx(1.0f + exp2_approx(-kLog2E * x));
    else return 1.0f / (1.0f + expf(-x));
}
// 1 - sigmoid(x); fp32 computes it without the cancellation.
template <typename T> __device__ inline float sigmoid_complement(float x, float sigmoid_of_x) {
    if constexpr (std::is_same_v<T, bf16>) return 1.0f - sigmoid_of_x;
    else return 1.0f / (1.0f + expf(x));
}

// Both, for results that also need FP32's precision where they are not rounded to bf16: of bf16 values from one fast
// exponential of -|x| (errors near 2^-22 of each), without branches.
struct SigmoidPair {
    float of_x, complement;
};
template <typename T> __device__ inline SigmoidPair sigmoid_pair(float x) {
    if constexpr (std::is_same_v<T, bf16>) {
        const float e = exp2_approx(-kLog2E * fabsf(x)), high = reciprocal_approx(1.0f + e), low = e * high;
        return x < 0.0f ? SigmoidPair{low, high} : SigmoidPair{high, low};
    } else {
        const float s = sigmoid<T>(x);
        return {s, sigmoid_complement<T>(x, s)};
    }
}

}  // namespace cuda
