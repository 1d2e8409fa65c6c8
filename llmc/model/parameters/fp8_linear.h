// A linear in FP8 and its quantized weight, or those of all experts.
#pragma once
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
    bool of_experts = false;         // also where this rank has one of them
    Fp8Operand weight;               // (out, in); empty for the head, whose forward matmul reads the working type
    Fp8Operand weight_transposed;    // (in, out)
    bool fast_fprop = false, fast_backward = false, bf16_wgrad = false;   // see RecipeRow
};

// Scale blocks of the weight of one expert, or in INT8 its rows.
template <typename L> int64_t weight_blocks(Granularity granularity, const L& linear) {
    return granularity == Granularity::kRow ? linear.out : scale_blocks(linear.out) * scale_blocks(linear.in);
}
