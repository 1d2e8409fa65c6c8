// The activation functions that experts have, too; functors as in activation.cu.
#pragma once
#include "llmc/base/activation.h"
#include "llmc/cuda/sigmoid.cuh"

namespace cuda {

// Both parts, each as the functions above compute it.
template <typename T> __device__ inline SigmoidPair sigmoid_parts(float x) {
    const float s = sigmoid<T>(x);
    return {s, sigmoid_complement<T>(x, s)};
}

// argument: of the sigmoid. gradient with that sigmoid returns the value, too.

// Source: Shazeer, arXiv 2002.05202.
struct Swiglu {
    __device__ static float argument(float gate) { return gate; }
    template <typename T> __device__ static float value(float gate, float up) {
        return up * (gate * sigmoid<T>(gate));
    }
    // s = sigmoid(gate); dup = dout gate s; dgate = dout up s (1 + gate (1 - s)).
    __device__ static float gradient(SigmoidPair s, float dout, float& gate, float& up) {
        const float silu = gate * s.of_x, value = silu * up;
        gate = dout * up * s.of_x * (1.0f + gate * s.complement);
        up = dout * silu;
        return value;
    }
    template <typename T> __device__ static void gradient(float dout, float& gate, float& up) {
        gradient(sigmoid_parts<T>(gate), dout, gate, up);
    }
};

// Gradients are 0 where a value is clamped. A NaN stays one. Source: OpenAI's gpt-oss, torch/model.py.
struct ClampedSwiglu {
    static constexpr float kLimit = kSwigluLimit, kSlope = kSwigluSlope;
    __device__ static float clamped(float x) { return x > kLimit ? kLimit : x; }
    __device__ static float linear(float up) {
        const float most = clamped(up);
        return 1.0f + (most < -kLimit ? -kLimit : most);
    }
    __device__ static float argument(float gate) { return kSlope * clamped(gate); }
    template <typename T> __device__ static float value(float gate, float up) {
        return linear(up) * (clamped(gate) * sigmoid<T>(argument(gate)));
    }
    // As of swiglu with up + 1, and s = sigmoid(slope gate): dgate = dout (up + 1) s (1 + slope gate (1 - s)).
    __device__ static float gradient(SigmoidPair s, float dout, float& gate, float& up) {
        const float silu = clamped(gate) * s.of_x, other = linear(up),
                    dgate = dout * other * s.of_x * (1.0f + argument(gate) * s.complement);
        gate = gate > kLimit ? 0.0f : dgate;
        up = fabsf(up) > kLimit ? 0.0f : dout * silu;
        return silu * other;
    }
    template <typename T> __device__ static void gradient(float dout, float& gate, float& up) {
        gradient(sigmoid_parts<T>(argument(gate)), dout, gate, up);
    }
};

// Calls call(functor) for an activation function of experts.
template <typename Call> void with_expert_activation(Activation kind, Call&& call) {
    CHECK(kind == Activation::kSwiglu || kind == Activation::kClampedSwiglu, "experts with %s",
          activation_function(kind).name);
    if (kind == Activation::kSwiglu) call(Swiglu{});
    else call(ClampedSwiglu{});
}

}  // namespace cuda
