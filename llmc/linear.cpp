#include "llmc/linear.h"

void linear_forward(Ctx& ctx, const Linear& linear, Tensor y, Tensor x, int64_t N) {
    ops::gemm(ctx, {.D = y, .A = x, .B = linear.weight, .bias = linear.bias, .pre = {}, .M = N, .N = linear.out,
                    .K = linear.in, .epilogue = linear.bias ? GemmEpilogue::kBias : GemmEpilogue::kNone});
}

void linear_gelu_forward(Ctx& ctx, const Linear& linear, Tensor y, Tensor pre, Tensor x, int64_t N) {
    ops::gemm(ctx, {.D = y, .A = x, .B = linear.weight, .bias = linear.bias, .pre = pre, .M = N, .N = linear.out,
                    .K = linear.in, .epilogue = GemmEpilogue::kBiasGelu});
}

void linear_backward(Ctx& ctx, const Linear& linear, Tensor dx, Tensor dy, Tensor x, Tensor scratch, int64_t N) {
    if (linear.bias) {
        ops::bias_backward(ctx, {.dbias = linear.dbias, .scratch = scratch.slice(0, kPartialRows * linear.out),
                                 .dout = dy, .N = N, .C = linear.out});
    }
    if (dx) {
        ops::gemm(ctx, {.D = dx, .A = dy, .B = linear.weight, .bias = {}, .pre = {}, .M = N, .N = linear.in,
                        .K = linear.out, .layout = GemmLayout::kDgrad});
    }
    ops::gemm(ctx, {.D = linear.dweight, .A = dy, .B = x, .bias = {}, .pre = {}, .M = linear.out, .N = linear.in,
                    .K = N, .layout = GemmLayout::kWgrad, .accumulate = true});
}
