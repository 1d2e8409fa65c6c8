#include "llmc/model/model_context.h"

Linear ModelContext::linear(int layer, LinearKind kind) const {
    int w = table.head, bias = -1;
    if (kind != LinearKind::kHead) {
        const LayerParams& p = params_of(layer);
        const int weights[] = {p.qkv_weight, p.proj_weight, p.up_weight, p.down_weight};
        const int biases[] = {p.qkv_bias, p.proj_bias, p.up_bias, p.down_bias};
        w = weights[static_cast<int>(kind)], bias = biases[static_cast<int>(kind)];
    }
    const Param& p = table.params[static_cast<size_t>(w)];
    return {.weight = weight(w), .bias = weight(bias), .dweight = grad(w), .dbias = grad(bias), .in = p.cols,
            .out = p.rows, .fp8 = fp8.linear(layer, kind), .accumulate = store->accumulates(w)};
}

// ---- norms

void ModelContext::norm_forward(Ctx& ctx, const NormLayer& norm, const NormInput& x, int64_t N, Tensor out,
                                const QuantOut& quant) const {
    const NormForwardArgs args{.out = out, .residual_out = x.residual_out, .mean = norm.mean, .rstd = norm.rstd,
                               .in = x.in, .residual = x.residual, .weight = weight(norm.weight),
                               .bias = weight(norm.bias), .N = N, .C = config.hidden_size,
                               .eps = static_cast<float>(config.norm_eps), .quant = quant};
    if (config.norm == Norm::kLayerNorm) ops::layernorm_forward(ctx, args);
    else ops::rmsnorm_forward(ctx, args);
}

void ModelContext::norm_backward(Ctx& ctx, const NormLayer& norm, const NormGrads& grads, Tensor x, int64_t N,
                                 Tensor dx, const QuantOut& quant) const {
    Arena::Scope scope(ctx, arena);
    const int64_t C = config.hidden_size;
    const NormBackwardArgs args{.dx = dx, .dresidual = grads.dresidual, .dweight = grad(norm.weight),
                                .dbias = grad(norm.bias), .scratch = scratch(stat, 2 * kPartialRows * C),
                                .dout = grads.dout, .x = x, .mean = norm.mean, .rstd = norm.rstd,
                                .weight = weight(norm.weight), .N = N, .C = C, .quant = quant};
    if (config.norm == Norm::kLayerNorm) ops::layernorm_backward(ctx, args);
    else ops::rmsnorm_backward(ctx, args);
}

// ---- operands of linears

LinearOperand ModelContext::make_x(Ctx& ctx, const Linear& linear, const LinearOperand& saved, int64_t N,
                                   XUsage usage, bool keep_high, const Producer& run) const {
    LinearOperand x{.high = saved.high, .fp8 = {}};
    const Fp8Linear* own = usage.rowwise || usage.transposed ? linear.fp8 : nullptr;
    if (own) {
        if (usage.transposed) x.fp8.transposed = saved.fp8.transposed;
        if (usage.rowwise) {
            auto take = [&](Dtype dtype, int64_t elems) { return scratch(dtype, elems); };
            x.fp8.rowwise = saved.fp8.rowwise;
            if (!x.fp8.rowwise.data) {
                const Fp8Operand memory = fp8.alloc_operand(Fp8Role::kX, N, linear.in, take);
                x.fp8.rowwise = fp8.operand_of(*own, Fp8Role::kX, memory, N, linear.in);
            }
        }
        if (!x.high) x.high = scratch(options.dtype, N * linear.in);
    }
    fp8.produce(ctx, {.linear = own, .role = Fp8Role::kX, .to = x.fp8, .high = x.high, .keep_high = keep_high,
                      .recompute = usage.recomputed, .N = N, .dbias = {},
                      .dbias_scratch = {}}, run);
    return x;
}

LinearOperand ModelContext::alloc_dy(int64_t N, int64_t C, Tensor high, bool in_fp8) const {
    if (!in_fp8) return {.high = high, .fp8 = {}};
    auto take = [&](Dtype dtype, int64_t elems) { return scratch(dtype, elems); };
    return {.high = high, .fp8 = {.rowwise = fp8.alloc_operand(Fp8Role::kDy, N, C, take),
                                  .transposed = fp8.alloc_operand(Fp8Role::kDy, C, N, take)}};
}

// QuantOut sums the bias gradient of bf16 only; FP32 and FP64 take a separate pass.
LinearOperand ModelContext::make_dy(Ctx& ctx, const Linear& linear, const LinearOperand& to, int64_t N,
                                    bool keep_high, const Producer& run) const {
    Arena::Scope scope(ctx, arena);
    LinearOperand dy{.high = to.high, .fp8 = {}};
    const bool producer_sums = options.dtype == Dtype::kBf16;
    Tensor dbias, partial_sums;
    if (linear.dbias && producer_sums) {
        dbias = linear.dbias;
        partial_sums = scratch(stat, quant_partial_rows(N) * linear.out);
    }
    if (const Fp8Linear* own = linear.fp8) {
        dy.fp8.rowwise = fp8.operand_of(*own, Fp8Role::kDy, to.fp8.rowwise, N, linear.out);
        dy.fp8.transposed = fp8.operand_of(*own, Fp8Role::kDy, to.fp8.transposed, linear.out, N);
    }
    fp8.produce(ctx, {.linear = linear.fp8, .role = Fp8Role::kDy, .to = dy.fp8, .high = to.high,
                      .keep_high = keep_high, .recompute = false, .N = N, .dbias = dbias,
                      .dbias_scratch = partial_sums}, run);
    if (linear.dbias && !producer_sums) {
        ops::bias_backward(ctx, {.dbias = linear.dbias, .scratch = scratch(stat, kPartialRows * linear.out),
                                 .dout = dy.high, .N = N, .C = linear.out});
    }
    return dy;
}
