#include "llmc/model/decoder.h"

std::vector<BufferRow> Decoder::rows(const ModelConfig& c) {
    std::vector<BufferRow> rows = PreNorm::rows(c, LinearKind::kHead, kSaved, kSaved);
    rows.insert(rows.end(), {
        {"branch", c.hidden_size, Form::kWorking, kSaved},   // written by one part of a block, added by the next norm
        {"logits", c.padded_vocab(), Form::kWorking, kScratch},
        {"losses", 1, Form::kStat, kScratch},
        {"d norm", c.hidden_size, Form::kWorking, kScratch},
    });
    return rows;
}

Decoder::Decoder(const ModelConfig& config, const ParamTable& table, const DecoderOptions& options, Arena& arena,
                 ParamStore& store, Fp8State& fp8)
    : model_(config, table, options, arena, store, fp8), config_(model_.config),
      head_layer_(model_.head_layer()), attention_(model_), mlp_(model_),
      buffers_(model_, rows(config), head_layer_, 1), final_norm_(model_, buffers_, LinearKind::kHead) {
    model_.offload.allocate(arena);
}

// ---- forward

Tensor Decoder::positions_from(Tensor wpe, int64_t T) const {
    const int64_t first = model_.options.first_position(T) * config_.hidden_size;
    return wpe ? wpe.slice(first, wpe.elems - first) : wpe;
}

void Decoder::embed(Ctx& ctx, const DeviceBatch& batch) {
    const ParamTable& table = model_.table;
    const int64_t N = batch.rows();
    ops::embedding_forward(ctx, {.out = attention_.residual(0, N), .wte = weight(table.wte),
                                 .wpe = positions_from(weight(table.wpe), batch.T), .tokens = batch.tokens,
                                 .bad_tokens = batch.bad_tokens, .N = N, .T = batch.T, .C = config_.hidden_size,
                                 .V = config_.vocab_size, .positions = batch.positions()});
}

void Decoder::forward(Ctx& ctx, const DeviceBatch& batch, bool training) {
    const int64_t N = batch.rows();
    const DecoderOptions& options = model_.options;
    CHECK(N > 0 && N <= options.max_rows() && batch.T <= options.max_seq, "batch %lld x %lld exceeds %lld x %lld",
          (long long)batch.B, (long long)batch.T, (long long)options.max_batch, (long long)options.max_seq);
    model_.training = training;
    const Tensor branch = this->branch(N);
    before(ctx, -1, Pass::kForward);
    embed(ctx, batch);
    after(ctx, -1, Pass::kForward);
    NormInput stream{.in = attention_.residual(0, N)};
    for (int l = 0; l < head_layer_; l++) {
        before(ctx, l, Pass::kForward);
        model_.offload.before_forward(ctx, l);
        const Tensor x = attention_.residual(l, N), mid = mlp_.residual(l, N);
        attention_.forward(ctx, l, stream, branch, batch);
        mlp_.forward(ctx, l, {.in = branch, .residual = x, .residual_out = mid}, branch, batch);
        const Tensor next = l + 1 < head_layer_ ? attention_.residual(l + 1, N) : final_norm_.residual(head_layer_, N);
        stream = {.in = branch, .residual = mid, .residual_out = next};
        model_.offload.after_forward(ctx, l, training);
        after(ctx, l, Pass::kForward);
    }
    before(ctx, head_layer_, Pass::kForward);
    Arena::Scope scope(ctx, model_.arena);
    final_norm_.forward(ctx, head_layer_, stream, N, buffers_.forward_usage(PreNorm::kNormFp8));
    after(ctx, head_layer_, Pass::kForward);
}

void Decoder::logits_all(Ctx& ctx, Tensor logits, int64_t N) {
    before(ctx, head_layer_, Pass::kForward);
    linear_forward(ctx, head(), logits, final_norm_.x(head_layer_, N), N);
    after(ctx, head_layer_, Pass::kForward);
}

void Decoder::logits_row(Ctx& ctx, const DeviceBatch& batch, int64_t row, Tensor logits) {
    const int64_t N = batch.rows(), C = config_.hidden_size, Vp = config_.padded_vocab();
    if (!model_.fp8.linear(head_layer_, LinearKind::kHead)) {
        const Tensor x = final_norm_.x(head_layer_, N).high.slice(row * C, C);
        before(ctx, head_layer_, Pass::kForward);
        linear_forward(ctx, head(), logits, {.high = x, .fp8 = {}}, 1);
        after(ctx, head_layer_, Pass::kForward);
        return;
    }
    // The FP8 x has the scales of all rows, so the head runs on all of them.
    Arena::Scope scope(ctx, model_.arena);
    const Tensor all = buffers_.scratch(kLogits, N);
    logits_all(ctx, all, N);
    device::copy_on_device(ctx, logits.data, all.slice(row * Vp, Vp).data, logits.bytes());
}

// state->loss_sum += the losses of the micro-batch; with `backward`, overwrites logits with their gradient.
void Decoder::classify(Ctx& ctx, const DeviceBatch& batch, StepState* state, Tensor logits, bool backward,
                       void* host_losses) {
    Arena::Scope scope(ctx, model_.arena);
    const int64_t N = batch.rows();
    const Tensor losses = buffers_.scratch(kLosses, N), sums = model_.scratch(Dtype::kFp64, kPartialSums);
    ops::classifier(ctx, {.logits = logits, .losses = losses, .targets = batch.targets, .state = state, .N = N,
                          .V = config_.vocab_size, .Vp = config_.padded_vocab(), .write_dlogits = backward});
    ops::sum_losses(ctx, {.sum = &state->loss_sum, .losses = losses, .scratch = sums, .N = N});
    if (host_losses) device::copy_to_host(ctx, host_losses, losses.data, losses.bytes());
}

void Decoder::loss(Ctx& ctx, const DeviceBatch& batch, StepState* state, void* host_losses) {
    Arena::Scope scope(ctx, model_.arena);
    const Tensor logits = buffers_.scratch(kLogits, batch.rows());
    logits_all(ctx, logits, batch.rows());
    classify(ctx, batch, state, logits, false, host_losses);
}

// ---- backward. The gradient of the residual stream is also the dy of proj and down, so if those run in FP8, the norm
// backward that writes it quantizes it as well.

void Decoder::recompute_block(Ctx& ctx, int layer, const DeviceBatch& batch) {
    const int64_t N = batch.rows();
    attention_.recompute(ctx, layer, branch(N), batch);
    mlp_.recompute(ctx, layer, {.in = branch(N), .residual = attention_.residual(layer, N),
                                .residual_out = mlp_.residual(layer, N)}, batch);
}

// Backward of loss, head and final norm; returns the dy of the last block's output, in `to`.
LinearOperand Decoder::head_backward(Ctx& ctx, const DeviceBatch& batch, StepState* state, const LinearOperand& to) {
    Arena::Scope scope(ctx, model_.arena);
    const int64_t N = batch.rows(), Vp = config_.padded_vocab();
    const Linear lm_head = head();
    const Tensor logits = buffers_.scratch(kLogits, N), dnorm = buffers_.scratch(kDnorm, N);
    linear_forward(ctx, lm_head, logits, final_norm_.x(head_layer_, N), N);
    classify(ctx, batch, state, logits, true);
    LinearOperand dlogits{.high = logits, .fp8 = {}};
    if (lm_head.fp8) {
        const LinearOperand memory = model_.alloc_dy(N, Vp, logits, true);
        dlogits = model_.make_dy(ctx, lm_head, memory, N, true, [&](Tensor, const QuantOut& quant) {
            ops::quantize(ctx, {.quant = quant, .in = logits, .N = N, .C = Vp});
        });
    }
    linear_backward(ctx, lm_head, dnorm, dlogits, final_norm_.x(head_layer_, N), N);
    return final_norm_.backward(ctx, head_layer_, {.dout = dnorm}, to, mlp_.output(head_layer_ - 1), N);
}

void Decoder::loss_and_backward(Ctx& ctx, const DeviceBatch& batch, StepState* state) {
    Arena::Scope scope(ctx, model_.arena);
    const ParamTable& table = model_.table;
    const int64_t N = batch.rows(), C = config_.hidden_size;
    const LinearOperand dresidual = model_.alloc_dy(N, C, model_.scratch(model_.options.dtype, N * C), model_.fp8.on());
    // A layer needs the parameters of the one below, too: its last norm writes that one's dy and bias gradient.
    before(ctx, head_layer_, Pass::kBackward);
    before(ctx, head_layer_ - 1, Pass::kBackward);
    LinearOperand dy = head_backward(ctx, batch, state, dresidual);
    after(ctx, head_layer_, Pass::kBackward);
    for (int l = head_layer_ - 1; l >= 0; l--) {
        before(ctx, l - 1, Pass::kBackward);
        model_.offload.before_backward(ctx, l);
        recompute_block(ctx, l, batch);
        dy = mlp_.backward(ctx, l, dy, dresidual, attention_.output(l), batch);
        dy = attention_.backward(ctx, l, dy, dresidual, l > 0 ? mlp_.output(l - 1) : Linear{}, batch);
        model_.offload.after_backward(ctx, l);
        after(ctx, l, Pass::kBackward);
    }
    ops::embedding_backward(ctx, {.dwte = grad(table.wte), .dwpe = positions_from(grad(table.wpe), batch.T),
                                  .dout = dresidual.high, .tokens = batch.tokens,
                                  .token_order = batch.token_order, .N = N, .T = batch.T, .C = C,
                                  .V = config_.vocab_size});
    after(ctx, -1, Pass::kBackward);
}
