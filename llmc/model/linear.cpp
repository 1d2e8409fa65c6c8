#include "llmc/model/linear.h"

namespace {

GemmEpilogue epilogue_of(const Tensor& bias) { return bias ? GemmEpilogue::kBias : GemmEpilogue::kNone; }

// D(M, N) = A(M, K) B(N, K)^T + bias in FP8, or += with `accumulate`. bias (N) is optional.
GemmArgs fp8_gemm(Tensor D, const Fp8Operand& A, const Fp8Operand& B, Tensor bias, int64_t M, int64_t N, int64_t K,
                  GemmLayout layout, bool fast, bool accumulate = false) {
    CHECK(A.data && B.data, "an FP8 operand of a linear is missing");
    return {.D = D, .A = A.data, .B = B.data, .bias = bias, .pre = {}, .M = M, .N = N, .K = K, .layout = layout,
            .epilogue = epilogue_of(bias), .accumulate = accumulate, .A_granularity = A.granularity,
            .B_granularity = B.granularity, .A_scale_inv = A.scale_inv, .B_scale_inv = B.scale_inv,
            .fast_accumulation = fast};
}

GemmArgs forward_gemm(const Linear& linear, Tensor y, const LinearOperand& x, int64_t N) {
    if (const Fp8Linear* fp8 = linear.fp8)
        return fp8_gemm(y, x.fp8.rowwise, fp8->weight, linear.bias, N, linear.out, linear.in, GemmLayout::kForward,
                        fp8->fast_fprop);
    return {.D = y, .A = x.high, .B = linear.weight, .bias = linear.bias, .pre = {}, .M = N, .N = linear.out,
            .K = linear.in, .epilogue = epilogue_of(linear.bias)};
}

}  // namespace

void linear_forward(Ctx& ctx, const Linear& linear, Tensor y, const LinearOperand& x, int64_t N) {
    ops::gemm(ctx, forward_gemm(linear, y, x, N));
}

void linear_gelu_forward(Ctx& ctx, const Linear& linear, Tensor y, Tensor pre, Tensor x, int64_t N) {
    ops::gemm(ctx, {.D = y, .A = x, .B = linear.weight, .bias = linear.bias, .pre = pre, .M = N, .N = linear.out,
                    .K = linear.in, .epilogue = GemmEpilogue::kBiasGelu});
}

void linear_backward(Ctx& ctx, const Linear& linear, Tensor dx, const LinearOperand& dy, const LinearOperand& x,
                     int64_t N) {
    if (const Fp8Linear* fp8 = linear.fp8) {
        if (dx)
            ops::gemm(ctx, fp8_gemm(dx, dy.fp8.rowwise, fp8->weight_transposed, {}, N, linear.in, linear.out,
                                    GemmLayout::kDgrad, fp8->fast_backward));
        return ops::gemm(ctx, fp8_gemm(linear.dweight, dy.fp8.transposed, x.fp8.transposed, {}, linear.out, linear.in,
                                       N, GemmLayout::kWgrad, fp8->fast_backward, linear.accumulate));
    }
    if (dx) {
        ops::gemm(ctx, {.D = dx, .A = dy.high, .B = linear.weight, .bias = {}, .pre = {}, .M = N, .N = linear.in,
                        .K = linear.out, .layout = GemmLayout::kDgrad});
    }
    ops::gemm(ctx, {.D = linear.dweight, .A = dy.high, .B = x.high, .bias = {}, .pre = {}, .M = linear.out,
                    .N = linear.in, .K = N, .layout = GemmLayout::kWgrad, .accumulate = linear.accumulate});
}
