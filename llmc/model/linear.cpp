#include "llmc/model/linear.h"

namespace {

// D(M, N) = or += A(M, K) B(N, K)^T + bias in FP8. bias (N) is optional.
void fp8_gemm(Ctx& ctx, GemmLayout layout, Tensor D, const Fp8Operand& A, const Fp8Operand& B, int64_t M, int64_t N,
              int64_t K, bool fast_accumulation, Tensor bias = {}, bool accumulate = false) {
    CHECK(A.data && B.data, "an FP8 operand of a linear is missing");
    ops::gemm(ctx, {.D = D, .A = A.data, .B = B.data, .bias = bias, .M = M, .N = N, .K = K, .layout = layout,
                    .accumulate = accumulate, .A_granularity = A.granularity, .B_granularity = B.granularity,
                    .A_scale_inv = A.scale_inv, .B_scale_inv = B.scale_inv, .fast_accumulation = fast_accumulation});
}

}  // namespace

void linear_forward(Ctx& ctx, const Linear& linear, Tensor y, const LinearOperand& x, int64_t N) {
    if (const Fp8Linear* fp8 = linear.fp8; fp8 && !linear.weight)
        return fp8_gemm(ctx, GemmLayout::kForward, y, x.fp8.rowwise, fp8->weight, N, linear.out, linear.in,
                        fp8->fast_fprop, linear.bias);
    ops::gemm(ctx, {.D = y, .A = x.unquantized, .B = linear.weight, .bias = linear.bias, .M = N, .N = linear.out,
                    .K = linear.in});
}

void linear_backward(Ctx& ctx, const Linear& linear, Tensor dx, const LinearOperand& dy, const LinearOperand& x,
                     int64_t N, bool add) {
    const Fp8Linear* fp8 = linear.fp8;
    if (dx && fp8)
        fp8_gemm(ctx, GemmLayout::kDgrad, dx, dy.fp8.rowwise, fp8->weight_transposed, N, linear.in, linear.out,
                 fp8->fast_backward, {}, add);
    else if (dx)
        ops::gemm(ctx, {.D = dx, .A = dy.unquantized, .B = linear.weight, .M = N, .N = linear.in, .K = linear.out,
                        .layout = GemmLayout::kDgrad, .accumulate = add});
    if (fp8 && !fp8->bf16_wgrad)
        return fp8_gemm(ctx, GemmLayout::kWgrad, linear.dweight, dy.fp8.transposed, x.fp8.transposed, linear.out,
                        linear.in, N, fp8->fast_backward, {}, linear.accumulate);
    ops::gemm(ctx, {.D = linear.dweight, .A = dy.unquantized, .B = x.unquantized, .M = linear.out, .N = linear.in,
                    .K = N, .layout = GemmLayout::kWgrad, .accumulate = linear.accumulate});
}
