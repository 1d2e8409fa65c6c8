// A linear layer y = x w^T + b and its backward: the one place that decides how a matmul runs.
#pragma once
#include "llmc/model/fp8_state.h"
#include "llmc/ops/ops.h"

// Views of one linear's parameters and their gradients.
struct Linear {
    Tensor weight;    // (out, in) T; absent where a quantized tensor replaces it
    Tensor bias;      // (out) T, optional
    Tensor dweight;   // (out, in) grad, +=
    Tensor dbias;     // (out) grad, +=, with bias
    int64_t in = 0, out = 0;
    const Fp8Linear* fp8 = nullptr;   // runs in FP8
};

// x or dy of a linear, as Fp8State::produce left it: `high` for BF16, the copies for FP8.
struct LinearOperand {
    Tensor high;     // (N, in or out) T
    Fp8Copies fp8;   // forward reads x.rowwise; backward dy.rowwise (for dx), dy.transposed and x.transposed (for dw)
};

// y(N, out) = x(N, in) w^T + b.
void linear_forward(Ctx& ctx, const Linear& linear, Tensor y, const LinearOperand& x, int64_t N);

// pre = x w^T + b and y = gelu(pre) in one matmul; both (N, out). BF16 and FP32 only.
void linear_gelu_forward(Ctx& ctx, const Linear& linear, Tensor y, Tensor pre, Tensor x, int64_t N);

// dx(N, in) = dy w (if dx is given); dweight += dy^T x. The gradient of the bias is the work of dy's producer.
void linear_backward(Ctx& ctx, const Linear& linear, Tensor dx, const LinearOperand& dy, const LinearOperand& x,
                     int64_t N);
