// The activation functions that experts have, too; functors as in activation.cpp.
#pragma once
#include "llmc/base/activation.h"
#include "llmc/base/check.h"
#include "llmc/cpu/math.h"

namespace cpu {

struct Swiglu {
    template <typename A> static Vec<A> value(Vec<A> gate, Vec<A> up) { return gate * sigmoid_pair(gate).of_x * up; }
    // d(silu)/dg = s (1 + g (1 - s)), s = sigmoid(g).
    template <typename A> static void gradient(Vec<A> dout, Vec<A>& gate, Vec<A>& up) {
        const SigmoidPair<A> s = sigmoid_pair(gate);
        const Vec<A> dgate = dout * up * (s.of_x * fma(gate, s.of_minus_x, Vec<A>(A(1))));
        up = dout * (gate * s.of_x);
        gate = dgate;
    }
};

// Gradients are 0 where a value is clamped. A NaN stays one.
struct ClampedSwiglu {
    template <typename A> struct Clamped {
        Vec<A> gate, up;
    };
    template <typename A> static Clamped<A> clamped(Vec<A> gate, Vec<A> up) {
        const Vec<A> limit{A(kSwigluLimit)};
        return {min(limit, gate), max(Vec<A>(A(-kSwigluLimit)), min(limit, up)) + Vec<A>(A(1))};
    }
    template <typename A> static SigmoidPair<A> sigmoids(Vec<A> gate) {
        return sigmoid_pair(Vec<A>(A(kSwigluSlope)) * gate);
    }
    template <typename A> static Vec<A> value(Vec<A> gate, Vec<A> up) {
        const Clamped<A> x = clamped(gate, up);
        return x.gate * sigmoids(x.gate).of_x * x.up;
    }
    template <typename A> static void gradient(Vec<A> dout, Vec<A>& gate, Vec<A>& up) {
        const Clamped<A> x = clamped(gate, up);
        const SigmoidPair<A> s = sigmoids(x.gate);
        const Vec<A> limit{A(kSwigluLimit)}, slope = Vec<A>(A(kSwigluSlope)) * x.gate,
                     dgate = dout * x.up * (s.of_x * fma(slope, s.of_minus_x, Vec<A>(A(1))));
        gate = unless_larger(dgate, gate, limit);
        up = unless_larger(dout * (x.gate * s.of_x), abs(up), limit);
    }
};

// Calls call(functor) for an activation function of experts.
template <typename Call> void with_expert_activation(Activation kind, Call&& call) {
    CHECK(kind == Activation::kSwiglu || kind == Activation::kClampedSwiglu, "experts with %s",
          activation_function(kind).name);
    if (kind == Activation::kSwiglu) call(Swiglu{});
    else call(ClampedSwiglu{});
}

}  // namespace cpu
