// Backward of the decoder. The gradient of the residual stream goes through every block; besides its bf16 form it is
// the dy of proj and down, so where those run in FP8 the norm that writes it makes their copies, too.
#include "llmc/model/decoder.h"

// Memory of a dy: scratch of the caller's scope for its FP8 copies.
LinearOperand Decoder::take_grad(int64_t N, int64_t C, Tensor high, bool fp8) {
    auto scratch = [&](Dtype dtype, int64_t elems) { return arena_.scratch(dtype, elems); };
    LinearOperand to{.high = high, .fp8 = {}};
    if (!fp8) return to;
    to.fp8.rowwise = fp8_.take_operand(Fp8Role::kDy, N, C, scratch);
    to.fp8.transposed = fp8_.take_operand(Fp8Role::kDy, C, N, scratch);
    return to;
}

// Runs the producer of dy of `linear`, which adds the gradient of the bias as well; of FP32 and FP64, which QuantOut is
// not made for, it is added in a pass of its own.
LinearOperand Decoder::make_dy(Ctx& ctx, const Linear& linear, const LinearOperand& to, int64_t N, bool keep_high,
                               const Producer& run) {
    Arena::Scope scope(ctx, arena_);
    LinearOperand dy{.high = to.high, .fp8 = {}};
    const bool producer_sums = options_.dtype == Dtype::kBf16;
    Tensor dbias, scratch;
    if (linear.dbias && producer_sums) {
        dbias = linear.dbias;
        scratch = arena_.scratch(stat_, quant_partial_rows(N) * linear.out);
    }
    if (const Fp8Linear* fp8 = linear.fp8) {
        dy.fp8.rowwise = fp8_.operand_of(*fp8, Fp8Role::kDy, to.fp8.rowwise, N, linear.out);
        dy.fp8.transposed = fp8_.operand_of(*fp8, Fp8Role::kDy, to.fp8.transposed, linear.out, N);
    }
    fp8_.produce(ctx, {.linear = linear.fp8, .role = Fp8Role::kDy, .to = dy.fp8, .high = to.high,
                       .keep_high = keep_high, .replay = false, .N = N, .dbias = dbias, .dbias_scratch = scratch},
                 run);
    if (linear.dbias && !producer_sums) {
        ops::bias_backward(ctx, {.dbias = linear.dbias, .scratch = arena_.scratch(stat_, kPartialRows * linear.out),
                                 .dout = dy.high, .N = N, .C = linear.out});
    }
    return dy;
}

void Decoder::loss_and_backward(Ctx& ctx, const DeviceBatch& batch, StepState* state) {
    Arena::Scope scope(ctx, arena_);
    const int64_t N = batch.B * batch.T, C = config_.hidden_size;
    const int last = static_cast<int>(config_.num_layers) - 1;
    const LinearOperand dresidual = take_grad(N, C, arena_.scratch(options_.dtype, N * C), fp8_.on());
    // A layer opens the one below it, too: its last norm makes the dy of that layer and adds the gradient of its bias.
    store_->before_layer(ctx, last + 1, Pass::kBackward);
    store_->before_layer(ctx, last, Pass::kBackward);
    LinearOperand dy = head_backward(ctx, batch, state, dresidual);
    store_->after_layer(ctx, last + 1, Pass::kBackward);
    for (int l = last; l >= 0; l--) {
        store_->before_layer(ctx, l - 1, Pass::kBackward);
        const BlockActs a = acts(l, N);
        if (options_.recompute == Recompute::kBlock) recompute_block(ctx, l, a, batch);
        mlp_backward(ctx, l, a, dresidual, dy, N);
        attention_half_backward(ctx, l, a, dresidual, dy, batch);
        store_->after_layer(ctx, l, Pass::kBackward);
    }
    ops::embedding_backward(ctx, {.dwte = grad(table_.wte), .dwpe = grad(table_.wpe), .dout = dresidual.high,
                                  .tokens = batch.tokens, .token_order = batch.token_order, .N = N, .T = batch.T,
                                  .C = C, .V = config_.vocab_size});
    store_->after_layer(ctx, -1, Pass::kBackward);
}

// Loss, head and final norm; returns the dy of the last block's down projection, in `dresidual`.
LinearOperand Decoder::head_backward(Ctx& ctx, const DeviceBatch& batch, StepState* state,
                                     const LinearOperand& dresidual) {
    Arena::Scope scope(ctx, arena_);
    const int64_t N = batch.B * batch.T, C = config_.hidden_size, Vp = config_.padded_vocab();
    const Linear lm_head = head(), down = linear(static_cast<int>(config_.num_layers) - 1, LinearKind::kDown);
    Tensor logits = arena_.scratch(options_.dtype, N * Vp);
    Tensor dnorm = arena_.scratch(options_.dtype, N * C);
    linear_forward(ctx, lm_head, logits, head_input(N), N);
    classify(ctx, batch, state, logits, true);
    LinearOperand dlogits{.high = logits, .fp8 = {}};
    if (lm_head.fp8) {
        dlogits = make_dy(ctx, lm_head, take_grad(N, Vp, logits, true), N, true, [&](Tensor, const QuantOut& quant) {
            ops::quantize(ctx, {.quant = quant, .in = logits, .N = N, .C = Vp});
        });
    }
    linear_backward(ctx, lm_head, dnorm, dlogits, head_input(N), N);
    const Tensor mean = final_mean_ ? final_mean_.slice(0, N) : Tensor{};
    return make_dy(ctx, down, dresidual, N, true, [&](Tensor dx, const QuantOut& quant) {
        norm_backward(ctx, {.dx = dx, .dresidual = {}, .dweight = {}, .dbias = {}, .scratch = {}, .dout = dnorm,
                            .x = final_x_.slice(0, N * C), .mean = mean, .rstd = final_rstd_.slice(0, N),
                            .weight = {}, .N = N, .C = 0, .quant = quant},
                      table_.final_norm_weight, table_.final_norm_bias);
    });
}

// The same operations on the same inputs as in forward, so the same bits; only the down projection is not needed.
void Decoder::recompute_block(Ctx& ctx, int layer, const BlockActs& a, const DeviceBatch& batch) {
    const int64_t N = batch.B * batch.T;
    Tensor branch = branch_.slice(0, N * config_.hidden_size);
    {
        Arena::Scope scope(ctx, arena_);
        const XUse use{.rowwise = true, .transposed = true, .replay = true};
        const LinearOperand norm1 = norm1_forward(ctx, layer, a, a.x, {}, {}, N, use);
        attention_half_forward(ctx, layer, a, norm1, branch, batch, true);
    }
    mlp_half_forward(ctx, layer, a, branch, N, true);
}

// dresidual and dy: in d(down output), which is also the gradient that passes by; out the gradient of mid, as the dy
// of proj.
void Decoder::mlp_backward(Ctx& ctx, int layer, const BlockActs& a, const LinearOperand& dresidual, LinearOperand& dy,
                           int64_t N) {
    const BlockParams& p = table_.blocks[static_cast<size_t>(layer)];
    const int64_t C = config_.hidden_size, F = config_.ffn_hidden_size;
    const Linear up = linear(layer, LinearKind::kUp), down = linear(layer, LinearKind::kDown);
    const Linear proj = linear(layer, LinearKind::kProj);
    const XUse replay{.rowwise = false, .transposed = true, .replay = true};
    Arena::Scope scope(ctx, arena_);
    Tensor dact = arena_.scratch(options_.dtype, N * F);
    if (options_.recompute == Recompute::kNormAct) {
        Arena::Scope replay_scope(ctx, arena_);
        activation_forward(ctx, layer, a, N, replay);
        norm2_forward(ctx, layer, a, a.mid, {}, {}, N, replay);
    }
    linear_backward(ctx, down, dact, dy, saved_operand(a.act), N);
    // In bf16 the gradient of `up` takes the place of `up`, which nothing reads afterwards.
    const LinearOperand dup_to = take_grad(N, config_.up_width(), a.up, up.fp8);
    const LinearOperand dup = make_dy(ctx, up, dup_to, N, false, [&](Tensor din, const QuantOut& quant) {
        const ActivationBackwardArgs args{.din = din, .dout = dact, .in = a.up, .N = N, .F = F, .quant = quant};
        if (config_.activation == Activation::kSwiglu) ops::swiglu_backward(ctx, args);
        else ops::gelu_backward(ctx, args);
    });
    Tensor dnorm = arena_.scratch(options_.dtype, N * C);
    linear_backward(ctx, up, dnorm, dup, saved_operand(a.norm2), N);
    dy = make_dy(ctx, proj, dresidual, N, true, [&](Tensor dx, const QuantOut& quant) {
        norm_backward(ctx, {.dx = dx, .dresidual = dresidual.high, .dweight = {}, .dbias = {}, .scratch = {},
                            .dout = dnorm, .x = a.mid, .mean = a.mean2, .rstd = a.rstd2, .weight = {}, .N = N, .C = 0,
                            .quant = quant},
                      p.norm2_weight, p.norm2_bias);
    });
}

// The gradient of qkv's output, made by whichever operation comes last: attention, rope or qk-norm.
LinearOperand Decoder::dqkv_backward(Ctx& ctx, int layer, const BlockActs& a, const Linear& qkv, Tensor datt,
                                     Tensor dqkv, const DeviceBatch& batch) {
    const BlockParams& p = table_.blocks[static_cast<size_t>(layer)];
    const int64_t B = batch.B, T = batch.T, N = B * T, NH = config_.num_attention_heads, NKV = config_.num_query_groups;
    const int64_t HS = config_.kv_channels;
    auto attention = [&](const QuantOut& quant) {
        Arena::Scope scope(ctx, arena_);
        Tensor delta = arena_.scratch(stat_, N * NH);
        const int64_t sums_elems = device::attention_sums_elems(options_.dtype, B, T, NH, HS);
        Tensor sums = sums_elems > 0 ? arena_.scratch(Dtype::kFp32, sums_elems) : Tensor{};
        ops::attention_backward(ctx, {.dqkv = dqkv, .delta = delta, .dout = datt, .out = a.att.high, .lse = a.lse,
                                      .qkv = a.qkv, .B = B, .T = T, .NH = NH, .NKV = NKV, .HS = HS,
                                      .softmax_mul = softmax_mul(), .documents = batch.documents,
                                      .quant = quant, .sums = sums, .fast = options_.attention_fast});
    };
    auto rope = [&](const QuantOut& quant) {
        RopeArgs args = rope_args(dqkv, N, T);
        args.quant = quant;
        ops::rope_backward(ctx, args);
    };
    auto qk_norm = [&](const QuantOut& quant) {
        Arena::Scope scope(ctx, arena_);
        Tensor scratch = arena_.scratch(stat_, 2 * kPartialRows * HS);
        ops::qk_norm_backward(ctx, {.dqkv = dqkv, .dq_weight = grad(p.q_norm), .dk_weight = grad(p.k_norm),
                                    .scratch = scratch, .in = a.qkv_raw, .rstd = a.qk_rstd,
                                    .q_weight = weight(p.q_norm), .k_weight = weight(p.k_norm), .N = N, .NH = NH,
                                    .NKV = NKV, .HS = HS, .quant = quant});
    };
    if (cos_sin_ || config_.qk_norm) attention({});
    if (cos_sin_ && config_.qk_norm) rope({});
    const LinearOperand to = take_grad(N, config_.qkv_width(), dqkv, qkv.fp8);
    return make_dy(ctx, qkv, to, N, true, [&](Tensor, const QuantOut& quant) {
        if (config_.qk_norm) qk_norm(quant);
        else if (cos_sin_) rope(quant);
        else attention(quant);
    });
}

// dresidual and dy: in the gradient of mid, as the dy of proj; out the gradient of x, as the dy of the block before's
// down projection.
void Decoder::attention_half_backward(Ctx& ctx, int layer, const BlockActs& a, const LinearOperand& dresidual,
                                      LinearOperand& dy, const DeviceBatch& batch) {
    const BlockParams& p = table_.blocks[static_cast<size_t>(layer)];
    const int64_t N = batch.B * batch.T, C = config_.hidden_size;
    const Linear qkv = linear(layer, LinearKind::kQkv), proj = linear(layer, LinearKind::kProj);
    Arena::Scope scope(ctx, arena_);
    Tensor datt = arena_.scratch(options_.dtype, N * config_.q_width());
    Tensor dqkv = arena_.scratch(options_.dtype, N * config_.qkv_width());
    linear_backward(ctx, proj, datt, dy, saved_operand(a.att), N);
    const LinearOperand d = dqkv_backward(ctx, layer, a, qkv, datt, dqkv, batch);
    if (options_.recompute == Recompute::kNormAct) {
        Arena::Scope replay_scope(ctx, arena_);
        norm1_forward(ctx, layer, a, a.x, {}, {}, N, {.rowwise = false, .transposed = true, .replay = true});
    }
    Tensor dnorm = arena_.scratch(options_.dtype, N * C);
    linear_backward(ctx, qkv, dnorm, d, saved_operand(a.norm1), N);
    const Linear below = layer > 0 ? linear(layer - 1, LinearKind::kDown) : Linear{};
    dy = make_dy(ctx, below, dresidual, N, true, [&](Tensor dx, const QuantOut& quant) {
        norm_backward(ctx, {.dx = dx, .dresidual = dresidual.high, .dweight = {}, .dbias = {}, .scratch = {},
                            .dout = dnorm, .x = a.x, .mean = a.mean1, .rstd = a.rstd1, .weight = {}, .N = N, .C = 0,
                            .quant = quant},
                      p.norm1_weight, p.norm1_bias);
    });
}
