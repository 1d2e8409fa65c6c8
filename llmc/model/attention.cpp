#include "llmc/model/attention.h"

#include <cmath>

std::vector<BufferRow> Attention::rows(const ModelConfig& c, int64_t ranks) {
    const int64_t NH = c.num_attention_heads, NKV = c.num_query_groups;
    // Elements of Q, K and V per token of this rank. `part`: exists only if the sequences are split.
    const int64_t qkv_width = (NH + 2 * ranks * heads_of_rank(NKV, ranks)) * c.kv_channels;
    const auto part = [&](int64_t width) { return ranks > 1 ? width : 0; };
    const LinearKind proj = LinearKind::kProj;
    // With split sequences another exchange would have to precede quantizing the output again.
    const Lifetime quantized_output = ranks > 1 ? kSavedUnlessBlock : kSavedUnlessNormAct;
    std::vector<BufferRow> rows = PreNorm::rows(c, LinearKind::kQkv, kSaved, kSavedUnlessNormAct);
    rows.insert(rows.end(), {
        {"qkv before qk-norm", c.qk_norm ? c.qkv_width() : 0, Form::kWorking, kSavedUnlessBlock},
        {"qk-norm rstd", c.qk_norm ? c.qk_norm_heads(NH) + c.qk_norm_heads(NKV) : 0, Form::kStat, kSavedUnlessBlock},
        {"qkv", qkv_width, Form::kWorking, kSavedUnlessBlock},   // after rope
        {"attention output", c.q_width(), Form::kWorking, kSavedUnlessAttention, proj, true},
        {"attention output, FP8 transposed", c.q_width(), Form::kFp8Transposed, quantized_output, proj},
        {"log-sum-exp", NH, Form::kStat, kSavedUnlessAttention},
        {"d attention output", c.q_width(), Form::kWorking, kScratch},
        {"d qkv", qkv_width, Form::kWorking, kScratch},
        {"delta", NH, Form::kStat, kScratch},
        {"d norm", c.hidden_size, Form::kWorking, kScratch},
        {"qkv of a part", part(c.qkv_width()), Form::kWorking, kScratch},
        // Recomputed even if attention's output is kept: an exchange costs less than the memory.
        {"attention output of a part", part(c.q_width()), Form::kWorking, kSavedUnlessBlock, proj},
        {"d qkv of a part", part(c.qkv_width()), Form::kWorking, kScratch},
    });
    return rows;
}

Attention::Attention(ModelContext& model)
    : model_(model), config_(model.config), options_(model.options), exchange_(options_.exchange),
      buffers_(model, rows(config_, options_.ranks_of_sequence()), 0, static_cast<int>(config_.num_layers)),
      norm_(model, buffers_, LinearKind::kQkv) {}

float Attention::softmax_mul() const {
    if (config_.attention_multiplier > 0) return static_cast<float>(config_.attention_multiplier);
    return 1.0f / std::sqrt(static_cast<float>(config_.kv_channels));
}

RopeArgs Attention::rope_args(int layer, Tensor qkv, const DeviceBatch& batch, const QuantOut& quant) const {
    const int64_t R = config_.rotated(), first = batch.positions ? 0 : options_.first_position(batch.T) * R;
    const Tensor table = model_.rope_of(layer);
    return {.qkv = qkv, .cos_sin = table.slice(first, table.elems - first), .N = batch.rows(), .T = batch.T,
            .NH = config_.num_attention_heads, .NKV = config_.num_query_groups, .HS = config_.kv_channels,
            .quant = quant, .positions = batch.positions, .rotated = R};
}

// ---- forward

// Computes Q, K and V from x, with qk-norm.
void Attention::project(Ctx& ctx, int layer, const LinearOperand& x, Tensor out, int64_t N) {
    if (!config_.qk_norm) return linear_forward(ctx, qkv(layer), out, x, N);
    const LayerParams& p = model_.params_of(layer);
    const Tensor raw = buffers_.at(kQkvRaw, layer, N);
    linear_forward(ctx, qkv(layer), raw, x, N);
    ops::qk_norm_forward(ctx, {.out = out, .rstd = buffers_.at(kQkRstd, layer, N), .in = raw,
                               .q_weight = model_.weight(p.q_norm), .k_weight = model_.weight(p.k_norm), .N = N,
                               .NH = config_.qk_norm_heads(config_.num_attention_heads),
                               .NKV = config_.qk_norm_heads(config_.num_query_groups), .HS = config_.qk_norm_width(),
                               .KS = config_.qk_norm_key_width(), .eps = static_cast<float>(config_.norm_eps)});
}

// Writes Q, K and V as attention reads them. With FP8 attention, returns the quantized heads, scratch of the caller's
// scope, and leaves their dequantized values in qkv.
Fp8Heads Attention::qkv_forward(Ctx& ctx, int layer, const LinearOperand& x, const DeviceBatch& batch) {
    const Tensor qkv = buffers_.at(kQkv, layer, batch.rows());
    {
        Arena::Scope scope(ctx, model_.arena);
        const Tensor part = exchange_ ? buffers_.scratch(kPartQkv, batch.rows()) : qkv;
        project(ctx, layer, x, part, batch.rows());
        if (model_.cos_sin && !options_.fp8_attention) ops::rope_forward(ctx, rope_args(layer, part, batch, {}));
        if (exchange_) to_heads(ctx, layer, qkv, part, config_.num_query_groups, batch);
    }
    return options_.fp8_attention ? quantize_heads(ctx, layer, qkv, batch) : Fp8Heads{};
}

// Applies rope to qkv and quantizes it.
Fp8Heads Attention::quantize_heads(Ctx& ctx, int layer, Tensor qkv, const DeviceBatch& batch) {
    const int64_t NH = heads(), NKV = kv_heads(), HS = config_.kv_channels, T = whole_T(batch);
    const int64_t blocks = batch.B * (NH + 2 * NKV) * head_blocks(T);
    const Fp8Heads quantized{.bytes = model_.scratch(Dtype::kE4m3, blocks * kHeadBlock * HS),
                             .scales = model_.scratch(Dtype::kFp32, blocks)};
    ops::quantize_heads(ctx, {.heads = quantized, .qkv = qkv, .cos_sin = model_.rope_of(layer), .B = batch.B, .T = T,
                              .NH = NH, .NKV = NKV, .HS = HS,
                              .positions = exchange_ ? batch.whole_positions : batch.positions});
    return quantized;
}

// ---- context parallelism. part: (B, T, (NH + 2 kv_heads) HS), heads: (B, whole T, the heads of this rank).

void Attention::to_heads(Ctx& ctx, int layer, Tensor heads, Tensor part, int64_t kv_heads, const DeviceBatch& batch) {
    Arena::Scope scope(ctx, model_.arena);
    const Tensor sent = model_.scratch(heads.dtype, heads.elems);
    ops::split_heads(ctx, {.out = sent, .in = part, .B = batch.B, .T = batch.T, .ranks = exchange_->ranks,
                           .NH = config_.num_attention_heads, .NKV = kv_heads, .HS = config_.kv_channels});
    exchange_->all_to_all(ctx, layer, batch.B, heads, sent);
}

void Attention::to_parts(Ctx& ctx, int layer, Tensor part, Tensor heads, int64_t kv_heads, const DeviceBatch& batch) {
    Arena::Scope scope(ctx, model_.arena);
    const Tensor received = model_.scratch(heads.dtype, heads.elems);
    exchange_->all_to_all(ctx, layer, batch.B, received, heads);
    ops::join_heads(ctx, {.out = part, .in = received, .B = batch.B, .T = batch.T, .ranks = exchange_->ranks,
                          .NH = config_.num_attention_heads, .NKV = kv_heads, .HS = config_.kv_channels});
}

// ---- attention itself

void Attention::attention_forward(Ctx& ctx, int layer, Tensor out, const Fp8Heads& quantized, const DeviceBatch& batch,
                                  const QuantOut& quant) {
    const int64_t N = batch.rows();
    const Tensor& logits = options_.max_logits;
    ops::attention_forward(ctx, {.out = out, .lse = buffers_.at(kLse, layer, N), .qkv = buffers_.at(kQkv, layer, N),
                                 .B = batch.B, .T = whole_T(batch), .NH = heads(), .NKV = kv_heads(),
                                 .HS = config_.kv_channels, .softmax_mul = softmax_mul(),
                                 .documents = batch.documents, .window = config_.window(layer), .quant = quant,
                                 .heads = quantized,
                                 .max_logits = logits ? logits.as<float>() + layer * config_.num_attention_heads
                                                            + first_head()
                                                      : nullptr,
                                 .sinks = own_heads(model_.weight(model_.params_of(layer).sinks)),
                                 .softcap = static_cast<float>(config_.attention_softcap)});
}

// Computes attention's output, as the x of proj. If it is saved, recomputation only quantizes it again: the same bf16
// values with the same scale, so the same bits.
LinearOperand Attention::attend(Ctx& ctx, int layer, const Fp8Heads& heads, const DeviceBatch& batch,
                                XUsage usage) {
    const int64_t N = batch.rows();
    const bool saved = usage.recomputed && !buffers_.recomputed(kOut);
    const PendingOperand x = model_.begin_x(proj(layer), saved_out(layer, N), N, usage, true);
    if (!exchange_ && !saved) {
        attention_forward(ctx, layer, x.out, heads, batch, x.quant);
    } else {
        if (exchange_) {
            const Tensor own = buffers_.at(kOut, layer, N);
            if (!saved) attention_forward(ctx, layer, own, heads, batch, {});
            to_parts(ctx, layer, x.out, own, 0, batch);
        }
        if (x.quant) ops::quantize(ctx, {.quant = x.quant, .in = x.out, .N = N, .C = config_.q_width()});
    }
    return model_.finish(ctx, x);
}

void Attention::forward(Ctx& ctx, int layer, const NormInput& input, Tensor branch, const DeviceBatch& batch) {
    Arena::Scope scope(ctx, model_.arena);
    const int64_t N = batch.rows();
    const LinearOperand x = norm_.forward(ctx, layer, input, N, buffers_.forward_usage(PreNorm::kNormFp8));
    const Fp8Heads heads = qkv_forward(ctx, layer, x, batch);
    linear_forward(ctx, proj(layer), branch, attend(ctx, layer, heads, batch, buffers_.forward_usage(kOutFp8)), N);
}

void Attention::recompute(Ctx& ctx, int layer, Tensor branch, const DeviceBatch& batch) {
    if (!buffers_.recomputed(kQkv)) return;
    Arena::Scope scope(ctx, model_.arena);
    const int64_t N = batch.rows();
    const XUsage usage{.rowwise = true, .transposed = true, .recomputed = true};
    const LinearOperand x = norm_.forward(ctx, layer, {.in = residual(layer, N)}, N, usage);
    const Fp8Heads heads = qkv_forward(ctx, layer, x, batch);
    linear_forward(ctx, proj(layer), branch, attend(ctx, layer, heads, batch, usage), N);
}

// ---- backward

void Attention::attention_backward(Ctx& ctx, int layer, Tensor dout, Tensor dqkv, const DeviceBatch& batch,
                                   const QuantOut& quant) {
    Arena::Scope scope(ctx, model_.arena);
    const int64_t N = batch.rows(), NH = heads(), HS = config_.kv_channels, T = whole_T(batch);
    const Tensor delta = buffers_.scratch(kDelta, N);
    const int sinks = model_.params_of(layer).sinks;   // -1: none
    const int64_t sums = device::attention_sums_elems(options_.dtype, batch.B, T, NH, HS);
    ops::attention_backward(ctx, {.dqkv = dqkv, .delta = delta, .dout = dout, .out = buffers_.at(kOut, layer, N),
                                  .lse = buffers_.at(kLse, layer, N), .qkv = buffers_.at(kQkv, layer, N),
                                  .B = batch.B, .T = T, .NH = NH, .NKV = kv_heads(), .HS = HS,
                                  .softmax_mul = softmax_mul(), .documents = batch.documents,
                                  .window = config_.window(layer), .quant = quant,
                                  .sums = sums > 0 ? model_.scratch(Dtype::kFp32, sums) : Tensor{},
                                  .sinks = own_heads(model_.weight(sinks)),
                                  .dsinks = own_heads(model_.grad(sinks)),
                                  .softcap = static_cast<float>(config_.attention_softcap)});
}

// attention_backward for this rank's part of the sequences: from the dout of all heads to their dqkv.
void Attention::part_backward(Ctx& ctx, int layer, Tensor dout, Tensor dqkv, const DeviceBatch& batch,
                              const QuantOut& quant) {
    if (!exchange_) return attention_backward(ctx, layer, dout, dqkv, batch, quant);
    Arena::Scope scope(ctx, model_.arena);
    const int64_t N = batch.rows();
    const Tensor own_dqkv = buffers_.scratch(kDqkv, N);
    {
        Arena::Scope dout_scope(ctx, model_.arena);
        const Tensor own_dout = buffers_.scratch(kDout, N);
        to_heads(ctx, layer, own_dout, dout, 0, batch);
        attention_backward(ctx, layer, own_dout, own_dqkv, batch, {});
    }
    to_parts(ctx, layer, dqkv, own_dqkv, config_.num_query_groups, batch);
    if (quant) ops::quantize(ctx, {.quant = quant, .in = dqkv, .N = N, .C = config_.qkv_width()});
}

void Attention::qk_norm_backward(Ctx& ctx, int layer, Tensor dqkv, const DeviceBatch& batch, const QuantOut& quant) {
    Arena::Scope scope(ctx, model_.arena);
    const LayerParams& p = model_.params_of(layer);
    const int64_t N = batch.rows(), HS = config_.qk_norm_width();
    ops::qk_norm_backward(ctx, {.dqkv = dqkv, .dq_weight = model_.grad(p.q_norm), .dk_weight = model_.grad(p.k_norm),
                                .scratch = model_.scratch(model_.stat, 2 * kPartialRows * HS),
                                .in = buffers_.at(kQkvRaw, layer, N), .rstd = buffers_.at(kQkRstd, layer, N),
                                .q_weight = model_.weight(p.q_norm), .k_weight = model_.weight(p.k_norm), .N = N,
                                .NH = config_.qk_norm_heads(config_.num_attention_heads),
                                .NKV = config_.qk_norm_heads(config_.num_query_groups), .HS = HS,
                                .KS = config_.qk_norm_key_width(), .quant = quant});
}

// The last of attention, rope and qk-norm backward writes the gradient of qkv's output as the dy of qkv.
LinearOperand Attention::dqkv_backward(Ctx& ctx, int layer, Tensor dout, Tensor dqkv, const DeviceBatch& batch) {
    const int64_t N = batch.rows();
    const bool rope = static_cast<bool>(model_.cos_sin);
    if (rope || config_.qk_norm) part_backward(ctx, layer, dout, dqkv, batch, {});
    if (rope && config_.qk_norm) ops::rope_backward(ctx, rope_args(layer, dqkv, batch, {}));
    const Linear linear = qkv(layer);
    const LinearOperand to = model_.alloc_dy(N, config_.qkv_width(), dqkv, linear.fp8);
    Arena::Scope scope(ctx, model_.arena);
    const PendingOperand dy = model_.begin_dy(linear, to, N, true);
    if (config_.qk_norm) qk_norm_backward(ctx, layer, dqkv, batch, dy.quant);
    else if (rope) ops::rope_backward(ctx, rope_args(layer, dqkv, batch, dy.quant));
    else part_backward(ctx, layer, dout, dqkv, batch, dy.quant);
    return model_.finish(ctx, dy);
}

LinearOperand Attention::backward(Ctx& ctx, int layer, const LinearOperand& dy, const LinearOperand& to,
                                  const Linear& below, const DeviceBatch& batch) {
    Arena::Scope scope(ctx, model_.arena);
    const int64_t N = batch.rows();
    const Tensor dout = buffers_.scratch(kDout, N), dqkv = buffers_.scratch(exchange_ ? kPartDqkv : kDqkv, N);
    if (buffers_.recomputed(kOutFp8) && !buffers_.recomputed(kQkv)) {   // --recompute norm-act
        Arena::Scope out_scope(ctx, model_.arena);
        attend(ctx, layer, {}, batch, {.rowwise = false, .transposed = true, .recomputed = true});
    }
    linear_backward(ctx, proj(layer), dout, dy, saved_out(layer, N), N);
    const LinearOperand dqkv_operand = dqkv_backward(ctx, layer, dout, dqkv, batch);
    // If qkv itself is not recomputed, only its weight gradient reads the norm's result.
    if (buffers_.recomputed(PreNorm::kNorm) && !buffers_.recomputed(kQkv)) {
        Arena::Scope norm_scope(ctx, model_.arena);
        norm_.forward(ctx, layer, {.in = residual(layer, N)}, N,
                      {.rowwise = false, .transposed = true, .recomputed = true});
    }
    const bool add = !norm_.exists();
    const Tensor dx = add ? to.unquantized : buffers_.scratch(kDnorm, N);
    linear_backward(ctx, qkv(layer), dx, dqkv_operand, norm_.x(layer, N), N, add);
    if (add) return to;
    return norm_.backward(ctx, layer, {.dout = dx, .dresidual = to.unquantized}, to, below, N);
}
