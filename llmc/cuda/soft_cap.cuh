// Soft caps of attention scores and of logits: in place of mul x, cap tanh(mul x / cap) (Gemma-2, arXiv 2408.00118).
#pragma once
#include "llmc/cuda/common.cuh"
#include "llmc/cuda/ptx.cuh"

namespace cuda {

// of(x) times `mul` is what the softmax takes. Without a cap (kOn false), of(x) is x, so that the same kernel has the
// instructions of one that knows of no cap.
template <typename T, bool kOn> struct SoftCap {
    static constexpr bool kFast = std::is_same_v<T, bf16>;
    float mul, inner;

    __device__ SoftCap(float mul, float cap)
        : mul(kOn ? cap : mul), inner(kOn ? mul / cap * (kFast ? 2 * 1.44269504f : 1.0f) : 0.0f) {}
    // bf16 takes the fast exponential and reciprocal in tanh(y) = 1 - 2 / (1 + e^2y). The absolute error is at most
    // 2^-21: a half of the exponential's (2^-21 with that of its argument), and 2^-22 of the rest. tanh.approx has a
    // relative one of 2^-11: of a score of 20 that is 1 % of P.
    __device__ float of(float x) const {
        if constexpr (!kOn) return x;
        else if constexpr (kFast) return fmaf(-2.0f, reciprocal_approx(1.0f + exp2_approx(x * inner)), 1.0f);
        else return tanhf(x * inner);
    }
    // The derivative of the result by mul x, given t = of(x); 0 for a hidden x, whose t is -infinity.
    __device__ static float slope(float t) {
        if constexpr (!kOn) return 1.0f;
        const float shown = fmaxf(t, -1.0f);
        return fmaf(-shown, shown, 1.0f);
    }
};

}  // namespace cuda
