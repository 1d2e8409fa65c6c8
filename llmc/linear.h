// A linear layer y = x w^T + b and its backward: the one place that decides how a matmul runs.
#pragma once
#include "llmc/ops.h"

// Views of one linear's parameters and their gradients.
struct Linear {
    Tensor weight;    // (out, in) T
    Tensor bias;      // (out) T, optional
    Tensor dweight;   // (out, in) grad, +=
    Tensor dbias;     // (out) grad, +=, with bias
    int64_t in = 0, out = 0;
};

// y(N, out) = x(N, in) w^T + b.
void linear_forward(Ctx& ctx, const Linear& linear, Tensor y, Tensor x, int64_t N);

// pre = x w^T + b and y = gelu(pre) in one matmul; both (N, out).
void linear_gelu_forward(Ctx& ctx, const Linear& linear, Tensor y, Tensor pre, Tensor x, int64_t N);

// dx(N, in) = dy w (if dx is given); dweight += dy^T x; dbias += column sums of dy.
// scratch: (kPartialRows * out) stat, needed with bias.
void linear_backward(Ctx& ctx, const Linear& linear, Tensor dx, Tensor dy, Tensor x, Tensor scratch, int64_t N);
