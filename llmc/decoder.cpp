#include "llmc/decoder.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace {

Dtype stat_dtype(Dtype working) { return working == Dtype::kFp64 ? Dtype::kFp64 : Dtype::kFp32; }

Tensor rows(const Tensor& tensor, int64_t elems) { return tensor ? tensor.slice(0, elems) : tensor; }

}  // namespace

std::vector<double> rope_table(const ModelConfig& config, int64_t T) {
    const int64_t half = config.kv_channels / 2;
    const RopeScaling& s = config.rope_scaling;
    std::vector<double> table(static_cast<size_t>(T * half * 2));
    for (int64_t i = 0; i < half; i++) {
        double freq = std::pow(config.rotary_base, -2.0 * static_cast<double>(i) / static_cast<double>(2 * half));
        if (s.factor > 0) {
            const double wavelength = 2.0 * std::numbers::pi / freq;
            const double original = static_cast<double>(s.original_max_positions);
            // 0: long waves, divided by the factor; 1: short waves, kept.
            double keep = (original / wavelength - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor);
            keep = std::fmin(1.0, std::fmax(0.0, keep));
            freq = (1.0 - keep) * freq / s.factor + keep * freq;
        }
        for (int64_t t = 0; t < T; t++) {
            table[static_cast<size_t>((t * half + i) * 2)] = std::cos(static_cast<double>(t) * freq);
            table[static_cast<size_t>((t * half + i) * 2 + 1)] = std::sin(static_cast<double>(t) * freq);
        }
    }
    return table;
}

Decoder::Decoder(const ModelConfig& config, const ParamTable& table, const DecoderOptions& options, Arena& arena,
                 Tensor weights, Tensor grads)
    : config_(config), table_(table), options_(options), arena_(arena), weights_(weights), grads_(grads),
      stat_(stat_dtype(options.dtype)) {
    take_activations(arena);
}

Tensor Decoder::view(const Tensor& flat, int param) const {
    if (param < 0) return {};
    const Param& p = table_.params[static_cast<size_t>(param)];
    return flat.slice(p.offset, p.elems());
}

Linear Decoder::linear(int weight, int bias) const {
    const Param& p = table_.params[static_cast<size_t>(weight)];
    return {.weight = view(weights_, weight), .bias = view(weights_, bias), .dweight = view(grads_, weight),
            .dbias = view(grads_, bias), .in = p.cols, .out = p.rows};
}

Linear Decoder::head() const { return linear(table_.head, -1); }

void Decoder::take_activations(Arena& arena) {
    const int64_t N = options_.max_batch * options_.max_seq, C = config_.hidden_size;
    const bool layer_norm = config_.norm == Norm::kLayerNorm;
    auto saved = [&](Dtype dtype, int64_t elems) { return arena.take(Purpose::kActivations, dtype, elems); };
    const Dtype T = options_.dtype;

    // What a block keeps for backward. With recomputation, blocks share one copy of what is made again.
    auto block_inner = [&](BlockActs& a) {
        if (config_.qk_norm) {
            a.qkv_raw = saved(T, N * config_.qkv_width());
            a.qk_rstd = saved(stat_, N * (config_.num_attention_heads + config_.num_query_groups));
        }
        a.qkv = saved(T, N * config_.qkv_width());
        a.att = saved(T, N * config_.q_width());
        a.lse = saved(stat_, N * config_.num_attention_heads);
        a.mid = saved(T, N * C);
        a.up = saved(T, N * config_.up_width());
        a.rstd1 = saved(stat_, N);
        a.rstd2 = saved(stat_, N);
        if (layer_norm) {
            a.mean1 = saved(stat_, N);
            a.mean2 = saved(stat_, N);
        }
    };
    auto norm_and_act = [&](BlockActs& a) {
        a.norm1 = saved(T, N * C);
        a.norm2 = saved(T, N * C);
        a.act = saved(T, N * config_.ffn_hidden_size);
    };
    BlockActs shared;
    if (options_.recompute != Recompute::kNone) norm_and_act(shared);
    if (options_.recompute == Recompute::kBlock) block_inner(shared);
    for (int64_t l = 0; l < config_.num_layers; l++) {
        BlockActs a = shared;
        a.x = saved(T, N * C);
        if (options_.recompute == Recompute::kNone) norm_and_act(a);
        if (options_.recompute != Recompute::kBlock) block_inner(a);
        blocks_.push_back(a);
    }
    branch_ = saved(T, N * C);
    final_x_ = saved(T, N * C);
    final_norm_ = saved(T, N * C);
    final_rstd_ = saved(stat_, N);
    if (layer_norm) final_mean_ = saved(stat_, N);
    if (config_.position == PositionEmbedding::kRope)
        cos_sin_ = saved(stat_, options_.max_seq * config_.kv_channels);
}

void Decoder::upload_constants(Ctx& ctx) {
    if (!cos_sin_) return;
    const std::vector<double> table = rope_table(config_, options_.max_seq);
    const std::vector<float> narrow(table.begin(), table.end());
    const void* host = stat_ == Dtype::kFp64 ? static_cast<const void*>(table.data()) : narrow.data();
    device::copy_to_device(ctx, cos_sin_.data, host, cos_sin_.bytes());
    device::synchronize(ctx);
}

Decoder::BlockActs Decoder::acts(int layer, int64_t N) const {
    const BlockActs& a = blocks_[static_cast<size_t>(layer)];
    const int64_t C = config_.hidden_size, heads = config_.num_attention_heads;
    return {.x = rows(a.x, N * C),
            .norm1 = rows(a.norm1, N * C), .mean1 = rows(a.mean1, N), .rstd1 = rows(a.rstd1, N),
            .qkv_raw = rows(a.qkv_raw, N * config_.qkv_width()),
            .qk_rstd = rows(a.qk_rstd, N * (heads + config_.num_query_groups)),
            .qkv = rows(a.qkv, N * config_.qkv_width()),
            .att = rows(a.att, N * config_.q_width()), .lse = rows(a.lse, N * heads),
            .mid = rows(a.mid, N * C),
            .norm2 = rows(a.norm2, N * C), .mean2 = rows(a.mean2, N), .rstd2 = rows(a.rstd2, N),
            .up = rows(a.up, N * config_.up_width()), .act = rows(a.act, N * config_.ffn_hidden_size)};
}

void Decoder::ready(int layer) {
    if (hooks.grads_ready) hooks.grads_ready(layer);
}

void Decoder::before(int layer) {
    if (hooks.before_layer) hooks.before_layer(layer);
}

float Decoder::softmax_mul() const { return 1.0f / std::sqrt(static_cast<float>(config_.kv_channels)); }

Tensor Decoder::bias_scratch_for(int64_t width) {
    return config_.linear_bias ? arena_.scratch(stat_, kPartialRows * width) : Tensor{};
}

RopeArgs Decoder::rope_args(Tensor qkv, int64_t N, int64_t T) const {
    return {.qkv = qkv, .cos_sin = cos_sin_, .N = N, .T = T, .NH = config_.num_attention_heads,
            .NKV = config_.num_query_groups, .HS = config_.kv_channels};
}

void Decoder::norm_forward(Ctx& ctx, NormForwardArgs args, int weight_index, int bias_index) {
    args.weight = weight(weight_index);
    args.bias = weight(bias_index);
    args.C = config_.hidden_size;
    args.eps = static_cast<float>(config_.norm_eps);
    if (config_.norm == Norm::kLayerNorm) ops::layernorm_forward(ctx, args);
    else ops::rmsnorm_forward(ctx, args);
}

void Decoder::norm_backward(Ctx& ctx, NormBackwardArgs args, int weight_index, int bias_index) {
    Arena::Scope scope(ctx, arena_);
    args.scratch = arena_.scratch(stat_, 2 * kPartialRows * config_.hidden_size);
    args.dweight = grad(weight_index);
    args.dbias = grad(bias_index);
    args.weight = weight(weight_index);
    args.C = config_.hidden_size;
    if (config_.norm == Norm::kLayerNorm) ops::layernorm_backward(ctx, args);
    else ops::rmsnorm_backward(ctx, args);
}

// ---- forward ----

void Decoder::norm1_forward(Ctx& ctx, int layer, const BlockActs& a, Tensor in, Tensor residual, Tensor residual_out,
                            int64_t N) {
    const BlockParams& p = table_.blocks[static_cast<size_t>(layer)];
    norm_forward(ctx, {.out = a.norm1, .residual_out = residual_out, .mean = a.mean1, .rstd = a.rstd1, .in = in,
                       .residual = residual, .weight = {}, .bias = {}, .N = N, .C = 0, .eps = 0},
                 p.norm1_weight, p.norm1_bias);
}

// norm1 -> branch = proj(attention(rope(qkv(norm1)))).
void Decoder::attention_half_forward(Ctx& ctx, int layer, const BlockActs& a, Tensor branch, int64_t B, int64_t T) {
    const BlockParams& p = table_.blocks[static_cast<size_t>(layer)];
    const int64_t N = B * T;
    linear_forward(ctx, linear(p.qkv_weight, p.qkv_bias), config_.qk_norm ? a.qkv_raw : a.qkv, a.norm1, N);
    if (config_.qk_norm) {
        ops::qk_norm_forward(ctx, {.out = a.qkv, .rstd = a.qk_rstd, .in = a.qkv_raw, .q_weight = weight(p.q_norm),
                                   .k_weight = weight(p.k_norm), .N = N, .NH = config_.num_attention_heads,
                                   .NKV = config_.num_query_groups, .HS = config_.kv_channels,
                                   .eps = static_cast<float>(config_.norm_eps)});
    }
    if (cos_sin_) ops::rope_forward(ctx, rope_args(a.qkv, N, T));
    ops::attention_forward(ctx, {.out = a.att, .lse = a.lse, .qkv = a.qkv, .B = B, .T = T,
                                 .NH = config_.num_attention_heads, .NKV = config_.num_query_groups,
                                 .HS = config_.kv_channels,
                                 .softmax_mul = softmax_mul()});
    linear_forward(ctx, linear(p.proj_weight, p.proj_bias), branch, a.att, N);
}

void Decoder::activation_forward(Ctx& ctx, const BlockActs& a, int64_t N) {
    const ActivationForwardArgs args{.out = a.act, .in = a.up, .N = N, .F = config_.ffn_hidden_size};
    if (config_.activation == Activation::kSwiglu) ops::swiglu_forward(ctx, args);
    else ops::gelu_forward(ctx, args);
}

// norm2 (already in a.norm2) -> up -> act.
void Decoder::mlp_up_forward(Ctx& ctx, int layer, const BlockActs& a, int64_t N) {
    const BlockParams& p = table_.blocks[static_cast<size_t>(layer)];
    const Linear up = linear(p.up_weight, p.up_bias);
    if (options_.fuse_gelu) {
        linear_gelu_forward(ctx, up, a.act, a.up, a.norm2, N);
    } else {
        linear_forward(ctx, up, a.up, a.norm2, N);
        activation_forward(ctx, a, N);
    }
}

// Attention half, norm2 and the up projection: all that backward reads, given norm1.
void Decoder::block_inner_forward(Ctx& ctx, int layer, const BlockActs& a, Tensor branch, int64_t B, int64_t T) {
    const BlockParams& p = table_.blocks[static_cast<size_t>(layer)];
    const int64_t N = B * T;
    attention_half_forward(ctx, layer, a, branch, B, T);
    norm_forward(ctx, {.out = a.norm2, .residual_out = a.mid, .mean = a.mean2, .rstd = a.rstd2, .in = branch,
                       .residual = a.x, .weight = {}, .bias = {}, .N = N, .C = 0, .eps = 0},
                 p.norm2_weight, p.norm2_bias);
    mlp_up_forward(ctx, layer, a, N);
}

void Decoder::forward(Ctx& ctx, const DeviceBatch& batch) {
    const int64_t B = batch.B, T = batch.T, N = B * T, C = config_.hidden_size;
    CHECK(B <= options_.max_batch && T <= options_.max_seq && N > 0, "batch %lld x %lld exceeds %lld x %lld",
          (long long)B, (long long)T, (long long)options_.max_batch, (long long)options_.max_seq);
    Tensor branch = rows(branch_, N * C), previous_mid;
    before(-1);
    ops::embedding_forward(ctx, {.out = rows(blocks_[0].x, N * C), .wte = weight(table_.wte),
                                 .wpe = weight(table_.wpe), .tokens = batch.tokens, .bad_tokens = batch.bad_tokens,
                                 .N = N, .T = T, .C = C, .V = config_.vocab_size});
    for (int l = 0; l < config_.num_layers; l++) {
        before(l);
        const BlockParams& p = table_.blocks[static_cast<size_t>(l)];
        const BlockActs a = acts(l, N);
        if (l == 0) norm1_forward(ctx, l, a, a.x, {}, {}, N);
        else norm1_forward(ctx, l, a, branch, previous_mid, a.x, N);
        block_inner_forward(ctx, l, a, branch, B, T);
        linear_forward(ctx, linear(p.down_weight, p.down_bias), branch, a.act, N);
        previous_mid = a.mid;
    }
    before(static_cast<int>(config_.num_layers));
    norm_forward(ctx, {.out = rows(final_norm_, N * C), .residual_out = rows(final_x_, N * C),
                       .mean = rows(final_mean_, N), .rstd = rows(final_rstd_, N), .in = branch,
                       .residual = previous_mid, .weight = {}, .bias = {}, .N = N, .C = 0, .eps = 0},
                 table_.final_norm_weight, table_.final_norm_bias);
}

void Decoder::logits_all(Ctx& ctx, Tensor logits, int64_t N) {
    linear_forward(ctx, head(), logits, rows(final_norm_, N * config_.hidden_size), N);
}

void Decoder::logits_row(Ctx& ctx, int64_t row, Tensor logits) {
    const int64_t C = config_.hidden_size;
    linear_forward(ctx, head(), logits, final_norm_.slice(row * C, C), 1);
}

// Losses of the micro-batch into state->loss_sum; with backward, logits become their gradient.
void Decoder::classify(Ctx& ctx, const DeviceBatch& batch, StepState* state, Tensor logits, bool backward) {
    Arena::Scope scope(ctx, arena_);
    const int64_t N = batch.B * batch.T;
    Tensor losses = arena_.scratch(stat_, N), sums = arena_.scratch(Dtype::kFp64, kPartialSums);
    ops::classifier(ctx, {.logits = logits, .losses = losses, .targets = batch.targets, .state = state, .N = N,
                          .V = config_.vocab_size, .Vp = config_.padded_vocab(), .write_dlogits = backward});
    ops::sum_losses(ctx, {.sum = &state->loss_sum, .losses = losses, .scratch = sums, .N = N});
}

void Decoder::loss(Ctx& ctx, const DeviceBatch& batch, StepState* state) {
    Arena::Scope scope(ctx, arena_);
    const int64_t N = batch.B * batch.T;
    Tensor logits = arena_.scratch(options_.dtype, N * config_.padded_vocab());
    logits_all(ctx, logits, N);
    classify(ctx, batch, state, logits, false);
}

// ---- backward ----

void Decoder::loss_and_backward(Ctx& ctx, const DeviceBatch& batch, StepState* state) {
    Arena::Scope scope(ctx, arena_);
    const int64_t N = batch.B * batch.T, C = config_.hidden_size;
    Tensor dresidual = arena_.scratch(options_.dtype, N * C);
    {
        Arena::Scope head_scope(ctx, arena_);
        Tensor logits = arena_.scratch(options_.dtype, N * config_.padded_vocab());
        Tensor dnorm = arena_.scratch(options_.dtype, N * C);
        logits_all(ctx, logits, N);
        classify(ctx, batch, state, logits, true);
        linear_backward(ctx, head(), dnorm, logits, rows(final_norm_, N * C), {}, N);
        norm_backward(ctx, {.dx = dresidual, .dresidual = {}, .dweight = {}, .dbias = {}, .scratch = {}, .dout = dnorm,
                            .x = rows(final_x_, N * C), .mean = rows(final_mean_, N), .rstd = rows(final_rstd_, N),
                            .weight = {}, .N = N, .C = 0},
                      table_.final_norm_weight, table_.final_norm_bias);
    }
    ready(static_cast<int>(config_.num_layers));
    for (int l = static_cast<int>(config_.num_layers) - 1; l >= 0; l--) {
        before(l);
        const BlockActs a = acts(l, N);
        if (options_.recompute == Recompute::kBlock) recompute_block(ctx, l, a, batch.B, batch.T);
        mlp_backward(ctx, l, a, dresidual, N);
        attention_half_backward(ctx, l, a, dresidual, batch.B, batch.T);
        ready(l);
    }
    ops::embedding_backward(ctx, {.dwte = grad(table_.wte), .dwpe = grad(table_.wpe), .dout = dresidual,
                                  .tokens = batch.tokens, .token_order = batch.token_order, .N = N, .T = batch.T,
                                  .C = C, .V = config_.vocab_size});
    ready(-1);
}

// The same operations on the same inputs as in forward, so the same bits; only the down projection is not needed.
void Decoder::recompute_block(Ctx& ctx, int layer, const BlockActs& a, int64_t B, int64_t T) {
    const int64_t N = B * T;
    norm1_forward(ctx, layer, a, a.x, {}, {}, N);
    block_inner_forward(ctx, layer, a, rows(branch_, N * config_.hidden_size), B, T);
}

// dresidual: in d(down output) and the gradient that passes by, out the gradient of mid.
void Decoder::mlp_backward(Ctx& ctx, int layer, const BlockActs& a, Tensor dresidual, int64_t N) {
    const BlockParams& p = table_.blocks[static_cast<size_t>(layer)];
    const int64_t C = config_.hidden_size, F = config_.ffn_hidden_size;
    Arena::Scope scope(ctx, arena_);
    Tensor bias_scratch = bias_scratch_for(config_.up_width());
    Tensor dact = arena_.scratch(options_.dtype, N * F);
    if (options_.recompute == Recompute::kNormAct) {
        activation_forward(ctx, a, N);
        norm_forward(ctx, {.out = a.norm2, .residual_out = {}, .mean = a.mean2, .rstd = a.rstd2, .in = a.mid,
                           .residual = {}, .weight = {}, .bias = {}, .N = N, .C = 0, .eps = 0},
                     p.norm2_weight, p.norm2_bias);
    }
    linear_backward(ctx, linear(p.down_weight, p.down_bias), dact, dresidual, a.act, bias_scratch, N);
    // The gradient of `up` takes the place of `up`, which nothing reads afterwards.
    const ActivationBackwardArgs act_args{.din = a.up, .dout = dact, .in = a.up, .N = N, .F = F};
    if (config_.activation == Activation::kSwiglu) ops::swiglu_backward(ctx, act_args);
    else ops::gelu_backward(ctx, act_args);
    Tensor dnorm = arena_.scratch(options_.dtype, N * C);
    linear_backward(ctx, linear(p.up_weight, p.up_bias), dnorm, a.up, a.norm2, bias_scratch, N);
    norm_backward(ctx, {.dx = dresidual, .dresidual = dresidual, .dweight = {}, .dbias = {}, .scratch = {},
                        .dout = dnorm, .x = a.mid, .mean = a.mean2, .rstd = a.rstd2, .weight = {}, .N = N, .C = 0},
                  p.norm2_weight, p.norm2_bias);
}

// dresidual: in the gradient of mid, out the gradient of x.
void Decoder::attention_half_backward(Ctx& ctx, int layer, const BlockActs& a, Tensor dresidual, int64_t B,
                                      int64_t T) {
    const BlockParams& p = table_.blocks[static_cast<size_t>(layer)];
    const int64_t N = B * T, C = config_.hidden_size, NH = config_.num_attention_heads;
    const int64_t NKV = config_.num_query_groups, HS = config_.kv_channels;
    Arena::Scope scope(ctx, arena_);
    Tensor bias_scratch = bias_scratch_for(std::max(C, config_.qkv_width()));
    Tensor datt = arena_.scratch(options_.dtype, N * config_.q_width());
    Tensor dqkv = arena_.scratch(options_.dtype, N * config_.qkv_width());
    Tensor delta = arena_.scratch(stat_, N * NH);
    linear_backward(ctx, linear(p.proj_weight, p.proj_bias), datt, dresidual, a.att, bias_scratch, N);
    ops::attention_backward(ctx, {.dqkv = dqkv, .delta = delta, .dout = datt, .out = a.att, .lse = a.lse,
                                  .qkv = a.qkv, .B = B, .T = T, .NH = NH, .NKV = NKV, .HS = HS,
                                  .softmax_mul = softmax_mul()});
    if (cos_sin_) ops::rope_backward(ctx, rope_args(dqkv, N, T));
    if (config_.qk_norm) {
        Tensor scratch = arena_.scratch(stat_, 2 * kPartialRows * HS);
        ops::qk_norm_backward(ctx, {.dqkv = dqkv, .dq_weight = grad(p.q_norm), .dk_weight = grad(p.k_norm),
                                    .scratch = scratch, .in = a.qkv_raw, .rstd = a.qk_rstd,
                                    .q_weight = weight(p.q_norm), .k_weight = weight(p.k_norm), .N = N, .NH = NH,
                                    .NKV = NKV, .HS = HS});
    }
    if (options_.recompute == Recompute::kNormAct) norm1_forward(ctx, layer, a, a.x, {}, {}, N);
    Tensor dnorm = arena_.scratch(options_.dtype, N * C);
    linear_backward(ctx, linear(p.qkv_weight, p.qkv_bias), dnorm, dqkv, a.norm1, bias_scratch, N);
    norm_backward(ctx, {.dx = dresidual, .dresidual = dresidual, .dweight = {}, .dbias = {}, .scratch = {},
                        .dout = dnorm, .x = a.x, .mean = a.mean1, .rstd = a.rstd1, .weight = {}, .N = N, .C = 0},
                  p.norm1_weight, p.norm1_bias);
}
