// A linear in FP8 and its quantized weight, or those of all experts.
#pragma once
#include <algorithm>

#include "llmc/ops/quantized_output.h"

// A quantized (R, K) matrix as a matmul reads it.
struct Fp8Operand {
    Tensor data;        // (R, K) fp8, or int8 (kRow)
    Tensor scale_inv;   // (scale_inv_elems) fp32
    Granularity granularity = Granularity::kTensor;
};

// A linear in FP8 and its quantized weight, whose data are in a layer buffer if there are LayerBuffers.
struct Fp8Linear {
    int number = 0;                  // among the FP8 linears
    int param = -1;                  // of the weight
    int64_t in = 0, out = 0;
    int64_t experts = 1;             // the weights of experts follow each other, and so do their scales
    Fp8Operand weight;               // (out, in); empty for the head, whose forward matmul reads the working type
    Fp8Operand weight_transposed;    // (in, out)
    bool fast_fprop = false, fast_backward = false, bf16_wgrad = false;   // see RecipeRow

    // The linear of one expert.
    Fp8Linear expert(int64_t e) const {
        const auto part_of = [&](const Tensor& all) { return all.slice(all.elems / experts * e, all.elems / experts); };
        Fp8Linear one = *this;
        one.experts = 1;
        for (Fp8Operand* operand : {&one.weight, &one.weight_transposed}) {
            operand->data = part_of(operand->data);
            if (operand->granularity != Granularity::kTensor) operand->scale_inv = part_of(operand->scale_inv);
        }
        return one;
    }
};

// Scale blocks of the weight of one expert, or in INT8 its rows.
template <typename L> int64_t weight_blocks(Granularity granularity, const L& linear) {
    return granularity == Granularity::kRow ? linear.out : scale_blocks(linear.out) * scale_blocks(linear.in);
}

// Calls f(expert, begin, at, n) for each expert in elements [first, first + elems) of the weights: its n elements from
// `begin` on are those from `at` on of the range.
template <typename F> void each_expert(const Fp8Linear& linear, int64_t first, int64_t elems, F&& f) {
    const int64_t one = linear.in * linear.out;
    for (int64_t at = 0; at < elems;) {
        const int64_t begin = (first + at) % one, n = std::min(elems - at, one - begin);
        f((first + at) / one, begin, at, n);
        at += n;
    }
}
