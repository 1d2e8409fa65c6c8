// A linear layer y = x w^T + b and its backward, in FP8 or the working type.
#pragma once
#include "llmc/model/parameters/fp8_state.h"
#include "llmc/ops/ops.h"

// Views of one linear's parameters and their gradients.
struct Linear {
    Tensor weight;    // (out, in) T; empty if the linear has only its FP8 weight
    Tensor bias;      // (out) T, optional
    Tensor dweight;   // (out, in) grad, see accumulate
    Tensor dbias;     // (out) grad, +=, with bias
    int64_t in = 0, out = 0;
    const Fp8Linear* fp8 = nullptr;   // null: the linear runs in the working type; the head's forward always does
    bool accumulate = true;           // dweight is +=, otherwise =
};

// The x or dy of a linear. A linear in FP8 reads `fp8`: forward x.rowwise, backward dy.rowwise (for dx), dy.transposed
// and x.transposed (for dw). Other linears, weight gradients in BF16, and other operations, read `unquantized`.
struct LinearOperand {
    Tensor unquantized;   // (N, in or out) T
    Fp8Layouts fp8 = {};
};

// y(N, out) = x(N, in) w^T + b.
void linear_forward(Ctx& ctx, const Linear& linear, Tensor y, const LinearOperand& x, int64_t N);

// dx(N, in) = dy w (if dx is given), or += if add; dweight += or = dy^T x. The producer of dy adds the bias
// gradient.
void linear_backward(Ctx& ctx, const Linear& linear, Tensor dx, const LinearOperand& dy, const LinearOperand& x,
                     int64_t N, bool add = false);
