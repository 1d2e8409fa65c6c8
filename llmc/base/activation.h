// Activation functions of the MLP, one per row. Each is implemented by a functor of the same name in cpu/activation.cpp
// and in cuda/activation.cu; those that experts have, too, in cpu/swiglu.h and cuda/swiglu.cuh.
#pragma once
#include <cstdint>

enum class Activation : uint8_t { kGelu, kSwiglu, kRelu2, kGeglu, kClampedSwiglu };

struct ActivationFunction {
    Activation kind;
    const char* name;   // --activation, and "activation" in the config.json that this trainer writes
    bool gated;         // the input row is [gate | up], twice as wide as the result
    const char* hf;     // name in transformers; a gated function has the name of its gate
    const char* help;
};

// In the order of Activation.
inline constexpr ActivationFunction kActivations[] = {
    {Activation::kGelu, "gelu", false, "gelu_new", "tanh form"},
    {Activation::kSwiglu, "swiglu", true, "silu", "SiLU(gate) * up"},
    {Activation::kRelu2, "relu2", false, "relu2", "max(x, 0)^2"},
    {Activation::kGeglu, "geglu", true, "gelu_pytorch_tanh", "gelu(gate) * up"},
    {Activation::kClampedSwiglu, "clamped_swiglu", true, "silu",
     "gate * sigmoid(1.702 gate) * (up + 1) with gate up to 7 and up within 7, as in gpt-oss"},
};

// Of clamped_swiglu.
inline constexpr double kSwigluLimit = 7, kSwigluSlope = 1.702;

constexpr const ActivationFunction& activation_function(Activation kind) {
    return kActivations[static_cast<int>(kind)];
}
// Number of input columns for a result of F columns.
constexpr int64_t activation_inputs(Activation kind, int64_t F) {
    return (activation_function(kind).gated ? 2 : 1) * F;
}
