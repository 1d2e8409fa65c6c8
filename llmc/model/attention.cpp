#include "llmc/model/attention.h"

#include <cmath>

#include "llmc/model/rope_table.h"

std::vector<BufferRow> Attention::rows(const ModelConfig& c) {
    const int64_t NH = c.num_attention_heads, NKV = c.num_query_groups;
    const LinearKind proj = LinearKind::kProj;
    std::vector<BufferRow> rows = PreNorm::rows(c, LinearKind::kQkv, kSaved, kSavedUnlessNormAct);
    rows.insert(rows.end(), {
        {"qkv before qk-norm", c.qk_norm ? c.qkv_width() : 0, Form::kWorking, kSavedUnlessBlock},
        {"qk-norm rstd", c.qk_norm ? NH + NKV : 0, Form::kStat, kSavedUnlessBlock},
        {"qkv", c.qkv_width(), Form::kWorking, kSavedUnlessBlock},   // after rope
        {"attention output", c.q_width(), Form::kWorking, kSavedUnlessAttention, proj, true},
        {"attention output, FP8 transposed", c.q_width(), Form::kFp8Transposed, kSavedUnlessBlock, proj},
        {"log-sum-exp", NH, Form::kStat, kSavedUnlessAttention},
        {"d attention output", c.q_width(), Form::kWorking, kScratch},
        {"d qkv", c.qkv_width(), Form::kWorking, kScratch},
        {"delta", NH, Form::kStat, kScratch},
        {"d norm", c.hidden_size, Form::kWorking, kScratch},
    });
    return rows;
}

Attention::Attention(ModelContext& model)
    : model_(model), config_(model.config), buffers_(model, rows(config_), 0, static_cast<int>(config_.num_layers)),
      norm_(model, buffers_, LinearKind::kQkv) {
    if (config_.position == PositionEmbedding::kRope)
        cos_sin_ = model.arena.take(Purpose::kActivations, model.stat, model.options.positions() * config_.kv_channels);
}

void Attention::upload_constants(Ctx& ctx) {
    if (!cos_sin_) return;
    const std::vector<double> table = rope_table(config_, model_.options.positions());
    const std::vector<float> narrow(table.begin(), table.end());
    const void* host = model_.stat == Dtype::kFp64 ? static_cast<const void*>(table.data()) : narrow.data();
    device::copy_to_device(ctx, cos_sin_.data, host, cos_sin_.bytes());
    device::synchronize(ctx);
}

float Attention::softmax_mul() const { return 1.0f / std::sqrt(static_cast<float>(config_.kv_channels)); }

RopeArgs Attention::rope_args(Tensor qkv, const DeviceBatch& batch, const QuantOut& quant) const {
    return {.qkv = qkv, .cos_sin = cos_sin_, .N = batch.rows(), .T = batch.T, .NH = config_.num_attention_heads,
            .NKV = config_.num_query_groups, .HS = config_.kv_channels, .quant = quant,
            .positions = batch.positions()};
}

// ---- forward

// Computes Q, K and V from x, with qk-norm.
void Attention::qkv_forward(Ctx& ctx, int layer, const LinearOperand& x, const DeviceBatch& batch) {
    const int64_t N = batch.rows();
    const Tensor out = buffers_.at(kQkv, layer, N);
    if (!config_.qk_norm) return linear_forward(ctx, qkv(layer), out, x, N);
    const BlockParams& p = model_.block(layer);
    const Tensor raw = buffers_.at(kQkvRaw, layer, N);
    linear_forward(ctx, qkv(layer), raw, x, N);
    ops::qk_norm_forward(ctx, {.out = out, .rstd = buffers_.at(kQkRstd, layer, N), .in = raw,
                               .q_weight = model_.weight(p.q_norm), .k_weight = model_.weight(p.k_norm), .N = N,
                               .NH = config_.num_attention_heads, .NKV = config_.num_query_groups,
                               .HS = config_.kv_channels, .eps = static_cast<float>(config_.norm_eps)});
}

// Applies rope to qkv. With FP8 attention, returns the quantized heads, scratch of the caller's scope, and leaves their
// dequantized values in qkv.
Fp8Heads Attention::position_heads(Ctx& ctx, Tensor qkv, const DeviceBatch& batch) {
    if (!model_.options.fp8_attention) {
        if (cos_sin_) ops::rope_forward(ctx, rope_args(qkv, batch, {}));
        return {};
    }
    const int64_t NH = config_.num_attention_heads, NKV = config_.num_query_groups, HS = config_.kv_channels;
    const int64_t blocks = batch.B * (NH + 2 * NKV) * head_blocks(batch.T);
    const Fp8Heads heads{.bytes = model_.scratch(Dtype::kE4m3, blocks * kHeadBlock * HS),
                         .scales = model_.scratch(Dtype::kFp32, blocks)};
    ops::quantize_heads(ctx, {.heads = heads, .qkv = qkv, .cos_sin = cos_sin_, .B = batch.B, .T = batch.T, .NH = NH,
                              .NKV = NKV, .HS = HS, .positions = batch.positions()});
    return heads;
}

// Computes attention's output, as the x of proj. If it is saved, recomputation only quantizes it again: the same bf16
// values with the same scale, so the same bits.
LinearOperand Attention::attend(Ctx& ctx, int layer, const Fp8Heads& heads, const DeviceBatch& batch,
                                XUsage usage) {
    const int64_t N = batch.rows();
    return model_.make_x(ctx, proj(layer), saved_out(layer, N), N, usage, true,
                         [&](Tensor out, const QuantOut& quant) {
        if (usage.recomputed && !buffers_.recomputed(kOut)) {
            if (quant) ops::quantize(ctx, {.quant = quant, .in = buffers_.at(kOut, layer, N), .N = N,
                                           .C = config_.q_width()});
            return;
        }
        if (batch.cached && batch.cached->decode) return decode(ctx, layer, out, *batch.cached, N, quant);
        ops::attention_forward(ctx, {.out = out, .lse = buffers_.at(kLse, layer, N),
                                     .qkv = buffers_.at(kQkv, layer, N), .B = batch.B, .T = batch.T,
                                     .NH = config_.num_attention_heads, .NKV = config_.num_query_groups,
                                     .HS = config_.kv_channels, .softmax_mul = softmax_mul(),
                                     .documents = batch.documents, .window = config_.sliding_window,
                                     .quant = quant, .heads = heads});
    });
}

void Attention::append(Ctx& ctx, int layer, const CachedRows& cached, int64_t N) {
    ops::cache_append(ctx, {.cache = cached.layer(layer), .qkv = buffers_.at(kQkv, layer, N), .N = N,
                            .NH = config_.num_attention_heads, .NKV = config_.num_query_groups,
                            .HS = config_.kv_channels});
}

void Attention::decode(Ctx& ctx, int layer, Tensor out, const CachedRows& cached, int64_t N, const QuantOut& quant) {
    Arena::Scope scope(ctx, model_.arena);
    const int64_t NH = config_.num_attention_heads, HS = config_.kv_channels;
    const Tensor splits = model_.scratch(Dtype::kFp32, decode_split_elems(N, NH, HS, cached.longest));
    ops::attention_decode(ctx, {.out = out, .qkv = buffers_.at(kQkv, layer, N), .cache = cached.layer(layer),
                                .splits = splits, .N = N, .NH = NH, .NKV = config_.num_query_groups, .HS = HS,
                                .longest = cached.longest, .softmax_mul = softmax_mul(),
                                .window = config_.sliding_window, .quant = quant});
}

void Attention::forward(Ctx& ctx, int layer, const NormInput& input, Tensor branch, const DeviceBatch& batch) {
    Arena::Scope scope(ctx, model_.arena);
    const int64_t N = batch.rows();
    const LinearOperand x = norm_.forward(ctx, layer, input, N, buffers_.forward_usage(PreNorm::kNormFp8));
    qkv_forward(ctx, layer, x, batch);
    const Fp8Heads heads = position_heads(ctx, buffers_.at(kQkv, layer, N), batch);
    if (batch.cached) append(ctx, layer, *batch.cached, N);
    linear_forward(ctx, proj(layer), branch, attend(ctx, layer, heads, batch, buffers_.forward_usage(kOutFp8)), N);
}

void Attention::recompute(Ctx& ctx, int layer, Tensor branch, const DeviceBatch& batch) {
    if (!buffers_.recomputed(kQkv)) return;
    Arena::Scope scope(ctx, model_.arena);
    const int64_t N = batch.rows();
    const XUsage usage{.rowwise = true, .transposed = true, .recomputed = true};
    qkv_forward(ctx, layer, norm_.forward(ctx, layer, {.in = residual(layer, N)}, N, usage), batch);
    const Fp8Heads heads = position_heads(ctx, buffers_.at(kQkv, layer, N), batch);
    linear_forward(ctx, proj(layer), branch, attend(ctx, layer, heads, batch, usage), N);
}

// ---- backward

void Attention::attention_backward(Ctx& ctx, int layer, Tensor dout, Tensor dqkv, const DeviceBatch& batch,
                                   const QuantOut& quant) {
    Arena::Scope scope(ctx, model_.arena);
    const int64_t N = batch.rows(), NH = config_.num_attention_heads, HS = config_.kv_channels;
    const Tensor delta = buffers_.scratch(kDelta, N);
    const int64_t sums = device::attention_sums_elems(model_.options.dtype, batch.B, batch.T, NH, HS);
    ops::attention_backward(ctx, {.dqkv = dqkv, .delta = delta, .dout = dout, .out = buffers_.at(kOut, layer, N),
                                  .lse = buffers_.at(kLse, layer, N), .qkv = buffers_.at(kQkv, layer, N),
                                  .B = batch.B, .T = batch.T, .NH = NH, .NKV = config_.num_query_groups, .HS = HS,
                                  .softmax_mul = softmax_mul(), .documents = batch.documents,
                                  .window = config_.sliding_window, .quant = quant,
                                  .sums = sums > 0 ? model_.scratch(Dtype::kFp32, sums) : Tensor{},
                                  .fast = model_.options.attention_fast});
}

void Attention::qk_norm_backward(Ctx& ctx, int layer, Tensor dqkv, const DeviceBatch& batch, const QuantOut& quant) {
    Arena::Scope scope(ctx, model_.arena);
    const BlockParams& p = model_.block(layer);
    const int64_t N = batch.rows(), HS = config_.kv_channels;
    ops::qk_norm_backward(ctx, {.dqkv = dqkv, .dq_weight = model_.grad(p.q_norm), .dk_weight = model_.grad(p.k_norm),
                                .scratch = model_.scratch(model_.stat, 2 * kPartialRows * HS),
                                .in = buffers_.at(kQkvRaw, layer, N), .rstd = buffers_.at(kQkRstd, layer, N),
                                .q_weight = model_.weight(p.q_norm), .k_weight = model_.weight(p.k_norm), .N = N,
                                .NH = config_.num_attention_heads, .NKV = config_.num_query_groups, .HS = HS,
                                .quant = quant});
}

// The last of attention, rope and qk-norm backward writes the gradient of qkv's output as the dy of qkv.
LinearOperand Attention::dqkv_backward(Ctx& ctx, int layer, Tensor dout, Tensor dqkv, const DeviceBatch& batch) {
    const int64_t N = batch.rows();
    const bool rope = static_cast<bool>(cos_sin_);
    if (rope || config_.qk_norm) attention_backward(ctx, layer, dout, dqkv, batch, {});
    if (rope && config_.qk_norm) ops::rope_backward(ctx, rope_args(dqkv, batch, {}));
    const Linear linear = qkv(layer);
    const LinearOperand to = model_.alloc_dy(N, config_.qkv_width(), dqkv, linear.fp8);
    return model_.make_dy(ctx, linear, to, N, true, [&](Tensor, const QuantOut& quant) {
        if (config_.qk_norm) qk_norm_backward(ctx, layer, dqkv, batch, quant);
        else if (rope) ops::rope_backward(ctx, rope_args(dqkv, batch, quant));
        else attention_backward(ctx, layer, dout, dqkv, batch, quant);
    });
}

LinearOperand Attention::backward(Ctx& ctx, int layer, const LinearOperand& dy, const LinearOperand& to,
                                  const Linear& below, const DeviceBatch& batch) {
    Arena::Scope scope(ctx, model_.arena);
    const int64_t N = batch.rows();
    const Tensor dout = buffers_.scratch(kDout, N), dqkv = buffers_.scratch(kDqkv, N);
    linear_backward(ctx, proj(layer), dout, dy, saved_out(layer, N), N);
    const LinearOperand dqkv_operand = dqkv_backward(ctx, layer, dout, dqkv, batch);
    // If qkv itself is not recomputed, only its weight gradient reads the norm's result.
    if (buffers_.recomputed(PreNorm::kNorm) && !buffers_.recomputed(kQkv)) {
        Arena::Scope norm_scope(ctx, model_.arena);
        norm_.forward(ctx, layer, {.in = residual(layer, N)}, N,
                      {.rowwise = false, .transposed = true, .recomputed = true});
    }
    const Tensor dnorm = buffers_.scratch(kDnorm, N);
    linear_backward(ctx, qkv(layer), dnorm, dqkv_operand, norm_.x(layer, N), N);
    return norm_.backward(ctx, layer, {.dout = dnorm, .dresidual = dy.high}, to, below, N);
}
