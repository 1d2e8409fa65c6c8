#include "llmc/model/model_context.h"

#include "llmc/model/rope_table.h"

ModelContext::ModelContext(const ModelConfig& shape, const ParamTable& params, const DecoderOptions& decoder_options,
                           Arena& memory, ParamStore& param_store, Fp8State& fp8_state)
    : config(shape), table(params), options(decoder_options), arena(memory), store(&param_store), fp8(fp8_state),
      stat(options.dtype == Dtype::kFp64 ? Dtype::kFp64 : Dtype::kFp32), cos_sin(options.cos_sin),
      offload(options.offload_activations ? head_layer() : 0) {
    if (!cos_sin && config.position == PositionEmbedding::kRope)
        cos_sin = arena.take(Purpose::kActivations, stat,
                             (config.local_rotary_base > 0 ? 2 : 1) * options.positions() * config.rotated());
}

Tensor ModelContext::rope_of(int layer) const {
    const int64_t elems = options.positions() * config.rotated();
    return !cos_sin ? Tensor{} : cos_sin.slice(config.local_rope(layer) ? elems : 0, elems);
}

void ModelContext::upload_constants(Ctx& ctx) {
    if (!cos_sin) return;
    std::vector<double> table = rope_table(config, options.positions());
    if (config.local_rotary_base > 0) {
        const std::vector<double> local = rope_table(config, options.positions(), true);
        table.insert(table.end(), local.begin(), local.end());
    }
    const std::vector<float> narrow(table.begin(), table.end());
    const void* host = stat == Dtype::kFp64 ? static_cast<const void*>(table.data()) : narrow.data();
    device::copy_to_device(ctx, cos_sin.data, host, cos_sin.bytes());
    device::synchronize(ctx);
}

Linear ModelContext::linear(int layer, LinearKind kind) const {
    int w = table.head, bias = -1;
    if (kind != LinearKind::kHead) {
        const LayerParams& p = params_of(layer);
        const int weights[] = {p.qkv_weight, p.proj_weight, p.up_weight, p.down_weight};
        const int biases[] = {p.qkv_bias, p.proj_bias, p.up_bias, p.down_bias};
        w = weights[static_cast<int>(kind)], bias = biases[static_cast<int>(kind)];
    }
    return linear_of(w, bias, fp8.linear(layer, kind));
}

Linear ModelContext::linear_of(int w, int bias, const Fp8Linear* fp8_linear) const {
    const Param& p = table.params[static_cast<size_t>(w)];
    return {.weight = weight(w), .bias = weight(bias), .dweight = grad(w), .dbias = grad(bias), .in = p.cols,
            .out = p.rows / p.experts, .fp8 = fp8_linear, .accumulate = store->accumulates(w)};
}

// ---- norms

void ModelContext::norm_forward(Ctx& ctx, const NormLayer& norm, const NormInput& x, int64_t N, Tensor out,
                                const QuantOut& quant) const {
    const NormForwardArgs args{.out = out, .residual_out = x.residual_out, .mean = norm.mean, .rstd = norm.rstd,
                               .in = x.in, .residual = x.residual, .weight = weight(norm.weight),
                               .bias = weight(norm.bias), .N = N, .C = config.hidden_size,
                               .eps = static_cast<float>(config.stream_eps()), .quant = quant, .stream = x.stream};
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

PendingOperand ModelContext::begin_x(const Linear& linear, const LinearOperand& saved, int64_t N, XUsage usage,
                                     bool keep_unquantized) const {
    PendingOperand x{.N = N, .recomputed = usage.recomputed, .out = saved.unquantized,
                     .operand = {.unquantized = saved.unquantized}};
    const Fp8Linear* const own = linear.fp8;
    if (!own || !(usage.rowwise || (usage.transposed && !own->bf16_wgrad))) return x;
    Fp8Layouts& layouts = x.operand.fp8;
    if (usage.transposed) layouts.transposed = saved.fp8.transposed;
    if (usage.rowwise) layouts.rowwise = saved.fp8.rowwise;
    if (usage.rowwise && !layouts.rowwise.data) {
        const Fp8Operand memory =
            fp8.alloc_operand(Fp8Role::kX, Fp8Layout::kRowwise, N, linear.in, take_scratch());
        layouts.rowwise = fp8.operand_of(*own, Fp8Role::kX, memory, N, linear.in);
    }
    quantize(x, *own, Fp8Role::kX, keep_unquantized);
    return x;
}

LinearOperand ModelContext::alloc_dy(int64_t N, int64_t C, Tensor unquantized, bool in_fp8) const {
    if (!in_fp8) return {.unquantized = unquantized};
    return {.unquantized = unquantized,
            .fp8 = {.rowwise = fp8.alloc_operand(Fp8Role::kDy, Fp8Layout::kRowwise, N, C, take_scratch()),
                    .transposed = fp8.plan().row().bf16_wgrad ? Fp8Operand{} : fp8.alloc_operand(
                        Fp8Role::kDy, Fp8Layout::kTransposed, C, N, take_scratch())}};
}

PendingOperand ModelContext::begin_dy(const Linear& linear, const LinearOperand& to, int64_t N,
                                      bool keep_unquantized) const {
    PendingOperand dy{.N = N, .out = to.unquantized, .operand = {.unquantized = to.unquantized}};
    Tensor sums;
    // QuantOut sums the bias gradient of bf16 only.
    if (linear.dbias && options.dtype == Dtype::kBf16) sums = scratch(stat, quant_partial_rows(N) * linear.out);
    else dy.separate_dbias = linear.dbias;
    if (const Fp8Linear* own = linear.fp8) {
        dy.operand.fp8.rowwise = fp8.operand_of(*own, Fp8Role::kDy, to.fp8.rowwise, N, linear.out);
        if (to.fp8.transposed.data && !own->of_experts)   // experts transpose the rows that they gather
            dy.operand.fp8.transposed = fp8.operand_of(*own, Fp8Role::kDy, to.fp8.transposed, linear.out, N);
        quantize(dy, *own, Fp8Role::kDy, keep_unquantized);
    }
    if (sums) {
        QuantOut& last = dy.second_pass ? dy.second_pass : dy.quant;
        last.dbias = linear.dbias;
        last.dbias_scratch = sums;
    }
    return dy;
}

void ModelContext::quantize(PendingOperand& operand, const Fp8Linear& linear, Fp8Role role,
                            bool keep_unquantized) const {
    const Fp8Passes passes = fp8.passes(linear, role, operand.operand.fp8, operand.recomputed);
    operand.linear = &linear;
    operand.role = role;
    operand.quant = passes.first;
    operand.second_pass = passes.second;
    const bool int8 = operand.operand.fp8.rowwise.granularity == Granularity::kRow;   // finish reads the result
    Tensor& unquantized = operand.operand.unquantized;
    const bool writes = passes.second || int8 || keep_unquantized || linear.bf16_wgrad;
    if (writes && !unquantized) unquantized = scratch(options.dtype, operand.N * linear.in);
    operand.out = writes ? unquantized : Tensor{};
}

LinearOperand ModelContext::finish(Ctx& ctx, const PendingOperand& pending) const {
    const auto& [unquantized, layouts] = pending.operand;
    const int64_t N = pending.N, C = unquantized.elems / N;
    if (pending.second_pass) ops::quantize(ctx, {.quant = pending.second_pass, .in = unquantized, .N = N, .C = C});
    if (layouts.rowwise.granularity == Granularity::kRow)
        ops::quantize_int8(ctx, {.out = layouts.rowwise.data, .scale_inv = layouts.rowwise.scale_inv,
                                 .in = unquantized, .N = N, .C = C});
    if (pending.linear)
        fp8.count_block_scales(ctx, *pending.linear, pending.role, layouts, N, pending.recomputed);
    if (pending.separate_dbias) {
        Arena::Scope scope(ctx, arena);
        ops::bias_backward(ctx, {.dbias = pending.separate_dbias, .scratch = scratch(stat, kPartialRows * C),
                                 .dout = unquantized, .N = N, .C = C});
    }
    return pending.operand;
}
