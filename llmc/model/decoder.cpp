#include "llmc/model/decoder.h"

#include <algorithm>
#include <cmath>

std::vector<BufferRow> Decoder::rows(const ModelConfig& c, const DecoderOptions& options) {
    std::vector<BufferRow> rows = PreNorm::rows(c, LinearKind::kHead, kSaved, kSaved);
    rows.insert(rows.end(), {
        // Written by one part of a block, added by the next norm.
        {"branch", c.post_norms() ? 0 : c.hidden_size, Form::kWorking, kSaved},
        {"logits", c.padded_vocab(), Form::kWorking, kScratch},
        {"losses", 1, Form::kStat, kScratch},
        {"squared log-sum-exp", options.z_loss > 0, Form::kStat, kScratch},
        {"d norm", c.hidden_size, Form::kWorking, kScratch},
    });
    if (options.loss_chunk > 0) rows[PreNorm::kNormFp8].width = 0;   // head_x quantizes the norm's result
    return rows;
}

Decoder::Decoder(const ModelConfig& config, const ParamTable& table, const DecoderOptions& options, Arena& arena,
                 ParamStore& store, Fp8State& fp8)
    : model_(config, table, options, arena, store, fp8), config_(model_.config),
      activations_begin_(arena.taken_bytes()), head_layer_(model_.head_layer()), attention_(model_),
      mlps_(make_mlps(model_)), after_attention_(model_, LinearKind::kProj), after_mlp_(model_, LinearKind::kDown),
      buffers_(model_, rows(config, options), head_layer_, 1),
      final_norm_(model_, buffers_, LinearKind::kHead) {
    model_.offload.allocate(arena);
}

// ---- forward

Tensor Decoder::positions_from(Tensor wpe, int64_t T) const {
    const int64_t first = model_.options.first_position(T) * config_.hidden_size;
    return wpe ? wpe.slice(first, wpe.elems - first) : wpe;
}

// transformers rounds Gemma's to the type of the weights, Granite's not. See also ModelConfig::stream_eps.
float Decoder::embedding_mul() const {
    if (!config_.gemma) return static_cast<float>(config_.embedding_multiplier / config_.residual_multiplier);
    const auto mul = static_cast<float>(std::sqrt(static_cast<double>(config_.hidden_size)));
    return model_.options.dtype == Dtype::kBf16 ? static_cast<float>(bf16(mul)) : mul;
}

void Decoder::embed(Ctx& ctx, const DeviceBatch& batch) {
    const ParamTable& table = model_.table;
    const int64_t N = batch.rows();
    const Tensor wpe = weight(table.wpe);
    ops::embedding_forward(ctx, {.out = attention_.residual(0, N), .wte = weight(table.wte),
                                 .wpe = batch.positions ? wpe : positions_from(wpe, batch.T), .tokens = batch.tokens,
                                 .bad_tokens = batch.bad_tokens, .N = N, .T = batch.T, .C = config_.hidden_size,
                                 .V = config_.vocab_size, .positions = batch.positions, .mul = embedding_mul()});
}

void Decoder::forward(Ctx& ctx, const DeviceBatch& batch, bool training) {
    const int64_t N = batch.rows();
    const DecoderOptions& options = model_.options;
    CHECK(N > 0 && N <= options.max_rows() && batch.T <= options.max_seq, "batch %lld x %lld exceeds %lld x %lld",
          (long long)batch.B, (long long)batch.T, (long long)options.max_batch, (long long)options.max_seq);
    model_.training = training;
    before(ctx, -1, Pass::kForward);
    embed(ctx, batch);
    after(ctx, -1, Pass::kForward);
    NormInput stream{.in = attention_.residual(0, N)};
    for (int l = 0; l < head_layer_; l++) {
        before(ctx, l, Pass::kForward);
        const Tensor x = attention_.residual(l, N), mid = mlp(l).residual(l, N);
        const Tensor attended = branch(after_attention_, l, N), mapped = branch(after_mlp_, l, N);
        attention_.forward(ctx, l, stream, attended, batch);
        mlp(l).forward(ctx, l, after_attention_.forward(ctx, l, attended, x, mid, N, false), mapped, batch);
        const bool last = l + 1 == head_layer_;
        if (!last) model_.offload.before_forward(ctx, l + 1);   // its stream is written now
        const Tensor next = last ? final_norm_.residual(head_layer_, N) : attention_.residual(l + 1, N);
        stream = after_mlp_.forward(ctx, l, mapped, mid, next, N, false);
        model_.offload.after_forward(ctx, l, training);
        after(ctx, l, Pass::kForward);
    }
    before(ctx, head_layer_, Pass::kForward);
    Arena::Scope scope(ctx, model_.arena);
    XUsage usage{};
    if (!chunks()) usage.transposed = training;
    final_norm_.forward(ctx, head_layer_, stream, N, usage);
    after(ctx, head_layer_, Pass::kForward);
}

// ---- head and loss, in chunks of --loss-chunk rows. Rows do not depend on each other, so that logits, losses and
// gradients of the norm's result have the same bits in any chunks; the weight gradient adds up the sums of the chunks.
// Current scaling of an FP8 head's gradients is the exception: a chunk's scale comes from the amax of all chunks so
// far. A chunk of an FP8 head is quantized from the norm's result, which is saved in the working type.

Decoder::Rows Decoder::chunk_of(int64_t row, int64_t N) const {
    const int64_t chunk = chunks() ? model_.options.loss_chunk : N, first = row / chunk * chunk;
    return {.first = first, .count = std::min(chunk, N - first)};
}

template <typename Body> void Decoder::for_each_chunk(int64_t N, Body&& body) const {
    for (int64_t row = 0; row < N;) {
        const Rows rows = chunk_of(row, N);
        body(rows);
        row += rows.count;
    }
}

// The x of the head for the backward pass of these rows of N, in scratch of the caller's scope where it is not saved.
LinearOperand Decoder::head_x(Ctx& ctx, Rows rows, int64_t N) {
    const LinearOperand all = final_norm_.x(head_layer_, N);
    if (!chunks()) return all;
    const int64_t C = config_.hidden_size;
    const Linear linear = head();
    LinearOperand x{.unquantized = all.unquantized.slice(rows.first * C, rows.count * C)};
    if (!linear.fp8 || linear.fp8->bf16_wgrad) return x;
    const Fp8Operand memory =
        model_.fp8.alloc_operand(Fp8Role::kX, Fp8Layout::kTransposed, C, rows.count, model_.take_scratch());
    x.fp8.transposed = model_.fp8.operand_of(*linear.fp8, Fp8Role::kX, memory, C, rows.count);
    const PendingOperand quantized = model_.begin_x(
        linear, x, rows.count, {.rowwise = false, .transposed = true, .recomputed = false}, true);
    ops::quantize(ctx, {.quant = quantized.quant, .in = quantized.out, .N = rows.count, .C = C});
    return model_.finish(ctx, quantized);
}

// logits (rows, Vp) = those of these rows of N.
void Decoder::head_logits(Ctx& ctx, Rows rows, int64_t N, Tensor logits) {
    const int64_t C = config_.hidden_size;
    const Tensor x = final_norm_.x(head_layer_, N).unquantized.slice(rows.first * C, rows.count * C);
    linear_forward(ctx, head(), logits, {.unquantized = x}, rows.count);
}

double Decoder::logit_of(double product) const {
    const double logit = product / config_.logits_scaling, cap = config_.logits_softcap;
    return cap > 0 ? cap * std::tanh(logit / cap) : logit;
}

void Decoder::logits_row(Ctx& ctx, const DeviceBatch& batch, int64_t row, Tensor logits) {
    before(ctx, head_layer_, Pass::kForward);
    head_logits(ctx, {.first = row, .count = 1}, batch.rows(), logits);
    after(ctx, head_layer_, Pass::kForward);
}

// Sets the losses (N) of these rows; with `backward`, overwrites logits with their gradient and sets squares (N), which
// are empty without a z-loss.
void Decoder::classify(Ctx& ctx, const DeviceBatch& batch, StepState* state, Rows rows, Tensor logits, Tensor losses,
                       bool backward, Tensor squares) {
    ops::classifier(ctx, {.logits = logits, .losses = losses.slice(rows.first, rows.count),
                          .targets = batch.targets + rows.first, .state = state, .N = rows.count,
                          .V = config_.vocab_size, .Vp = config_.padded_vocab(), .write_dlogits = backward,
                          .logit_mul = static_cast<float>(1 / config_.logits_scaling),
                          .z_loss = squares ? static_cast<float>(model_.options.z_loss) : 0.0f,
                          .squares = squares ? squares.slice(rows.first, rows.count) : squares,
                          .softcap = static_cast<float>(config_.logits_softcap)});
}

// *sum += the losses of all rows, or other values of them, in an order that does not depend on the chunks.
void Decoder::sum_losses(Ctx& ctx, Tensor losses, double* sum) {
    Arena::Scope scope(ctx, model_.arena);
    const Tensor sums = model_.scratch(Dtype::kFp64, kPartialSums);
    ops::sum_losses(ctx, {.sum = sum, .losses = losses, .scratch = sums, .N = losses.elems});
}

void Decoder::loss(Ctx& ctx, const DeviceBatch& batch, StepState* state, void* host_losses) {
    Arena::Scope scope(ctx, model_.arena);
    const int64_t N = batch.rows();
    const Tensor memory = buffers_.scratch(kLogits, chunk_of(0, N).count), losses = buffers_.scratch(kLosses, N);
    before(ctx, head_layer_, Pass::kForward);
    for_each_chunk(N, [&](Rows rows) {
        const Tensor logits = memory.slice(0, rows.count * config_.padded_vocab());
        head_logits(ctx, rows, N, logits);
        classify(ctx, batch, state, rows, logits, losses, false);
    });
    after(ctx, head_layer_, Pass::kForward);
    sum_losses(ctx, losses, &state->loss_sum);
    if (host_losses) device::copy_to_host(ctx, host_losses, losses.data, losses.bytes());
}

// ---- backward. The gradient of the residual stream is also the dy of proj and down, so if those run in FP8, the norm
// backward that writes it quantizes it as well.

void Decoder::recompute_block(Ctx& ctx, int layer, const DeviceBatch& batch) {
    const int64_t N = batch.rows();
    const Tensor attended = branch(after_attention_, layer, N);
    attention_.recompute(ctx, layer, attended, batch);
    mlp(layer).recompute(ctx, layer, after_attention_.forward(ctx, layer, attended, attention_.residual(layer, N),
                                                         mlp(layer).residual(layer, N), N, true), batch);
}

// Backward of the head for N rows, whose logits are overwritten with their gradient. dnorm (N, C) =. Chunks after the
// `first` one always add to the weight gradient, even if the first one has overwritten it.
void Decoder::dlogits_backward(Ctx& ctx, const LinearOperand& x, Tensor logits, Tensor dnorm, const int32_t* targets,
                               int64_t N, bool first) {
    Linear lm_head = head();
    lm_head.accumulate = lm_head.accumulate || !first;
    const int64_t Vp = config_.padded_vocab();
    LinearOperand dlogits{.unquantized = logits};
    if (lm_head.fp8) {
        const PendingOperand quantized = model_.begin_dy(lm_head, model_.alloc_dy(N, Vp, logits, true), N, true);
        if (quantized.quant) ops::quantize(ctx, {.quant = quantized.quant, .in = logits, .N = N, .C = Vp});
        dlogits = model_.finish(ctx, quantized);
    }
    linear_backward(ctx, lm_head, dnorm, dlogits, x, N);
    if (!lm_head.fp8) return;
    const Fp8Operand& quantized = dlogits.fp8.rowwise;
    ops::dlogits_residual(ctx, {.dx = dnorm, .dlogits = logits, .codes = quantized.data,
                                .scale_inv = quantized.scale_inv, .granularity = quantized.granularity,
                                .weight = lm_head.weight, .targets = targets, .N = N, .C = config_.hidden_size,
                                .V = config_.vocab_size, .Vp = Vp});
}

// Backward of loss, head and final norm; returns the dy of the last block's output, in `to`.
LinearOperand Decoder::head_backward(Ctx& ctx, const DeviceBatch& batch, StepState* state, const LinearOperand& to) {
    Arena::Scope scope(ctx, model_.arena);
    const int64_t N = batch.rows(), C = config_.hidden_size;
    const Tensor memory = buffers_.scratch(kLogits, chunk_of(0, N).count), dnorm = buffers_.scratch(kDnorm, N),
                 losses = buffers_.scratch(kLosses, N), squares = buffers_.scratch(kSquares, N);
    for_each_chunk(N, [&](Rows rows) {
        Arena::Scope chunk_scope(ctx, model_.arena);
        const Tensor logits = memory.slice(0, rows.count * config_.padded_vocab());
        head_logits(ctx, rows, N, logits);
        classify(ctx, batch, state, rows, logits, losses, true, squares);
        dlogits_backward(ctx, head_x(ctx, rows, N), logits, dnorm.slice(rows.first * C, rows.count * C),
                         batch.targets + rows.first, rows.count, rows.first == 0);
    });
    sum_losses(ctx, losses, &state->loss_sum);
    if (squares) sum_losses(ctx, squares, &state->z_sum);
    return final_norm_.backward(ctx, head_layer_, {.dout = dnorm}, to, below(head_layer_), N);
}

void Decoder::loss_and_backward(Ctx& ctx, const DeviceBatch& batch, StepState* state) {
    Arena::Scope scope(ctx, model_.arena);
    const ParamTable& table = model_.table;
    const int64_t N = batch.rows(), C = config_.hidden_size;
    const auto alloc = [&](bool in_fp8) {
        return model_.alloc_dy(N, C, model_.scratch(model_.options.dtype, N * C), in_fp8);
    };
    const bool post = config_.post_norms();
    const LinearOperand dbranch = alloc(model_.fp8.on()), dresidual = post ? alloc(false) : dbranch;
    // A layer needs the parameters of the layer below, too: its last norm backward writes the dy and the bias gradient
    // of that layer.
    before(ctx, head_layer_, Pass::kBackward);
    before(ctx, head_layer_ - 1, Pass::kBackward);
    LinearOperand dy = head_backward(ctx, batch, state, dresidual);
    after(ctx, head_layer_, Pass::kBackward);
    for (int l = head_layer_ - 1; l >= 0; l--) {
        before(ctx, l - 1, Pass::kBackward);
        model_.offload.before_backward(ctx, l);
        recompute_block(ctx, l, batch);
        if (post) dy = after_mlp_.backward(ctx, l, dresidual.unquantized, dbranch, mlp(l).output(l), N);
        dy = mlp(l).backward(ctx, l, dy, dresidual, post ? Linear{} : attention_.output(l), batch, state);
        if (post) dy = after_attention_.backward(ctx, l, dresidual.unquantized, dbranch, attention_.output(l), N);
        dy = attention_.backward(ctx, l, dy, dresidual, below(l), batch);
        model_.offload.after_backward(ctx, l);
        after(ctx, l, Pass::kBackward);
    }
    // Positions that restart index the whole table; others count from the first position of this rank's part.
    const bool restarts = table.wpe >= 0 && batch.positions;
    const Tensor dwpe = grad(table.wpe);
    ops::embedding_backward(ctx, {.dwte = grad(table.wte), .dwpe = restarts ? dwpe : positions_from(dwpe, batch.T),
                                  .dout = dresidual.unquantized, .tokens = batch.tokens,
                                  .token_order = batch.token_order, .N = N,
                                  .T = restarts ? batch.T * model_.options.ranks_of_sequence() : batch.T, .C = C,
                                  .V = config_.vocab_size, .positions = restarts ? batch.positions : nullptr,
                                  .position_order = restarts ? batch.position_order : nullptr, .mul = embedding_mul()});
    after(ctx, -1, Pass::kBackward);
}
