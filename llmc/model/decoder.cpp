#include "llmc/model/decoder.h"

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
                 ParamStore& store, Fp8State& fp8)
    : config_(config), table_(table), options_(options), arena_(arena), store_(&store), fp8_(fp8),
      stat_(stat_dtype(options.dtype)) {
    take_activations(arena);
}

Linear Decoder::linear(int layer, LinearKind kind) const {
    int w = table_.head, bias = -1;
    if (kind != LinearKind::kHead) {
        const BlockParams& p = table_.blocks[static_cast<size_t>(layer)];
        const int weights[] = {p.qkv_weight, p.proj_weight, p.up_weight, p.down_weight};
        const int biases[] = {p.qkv_bias, p.proj_bias, p.up_bias, p.down_bias};
        w = weights[static_cast<int>(kind)], bias = biases[static_cast<int>(kind)];
    }
    const Param& p = table_.params[static_cast<size_t>(w)];
    return {.weight = weight(w), .bias = weight(bias), .dweight = grad(w), .dbias = grad(bias), .in = p.cols,
            .out = p.rows, .fp8 = fp8_.linear(layer, kind)};
}

// ---- memory

// The x of one linear kind: of one layer, or one copy shared by several, which may differ in what they need.
Decoder::SavedX Decoder::take_x(Arena& arena, LinearKind kind, int first_layer, int layers, int64_t C,
                                bool keep_high) {
    const int64_t N = options_.max_batch * options_.max_seq;
    auto take = [&](Dtype dtype, int64_t elems) { return arena.take(Purpose::kActivations, dtype, elems); };
    SavedX x;
    bool any_high = keep_high;
    for (int l = first_layer; l < first_layer + layers; l++) {
        const Fp8Linear* fp8 = fp8_.linear(l, kind);
        any_high |= !fp8;
        if (!fp8 || x.transposed.data) continue;
        x.transposed = fp8_.take_operand(Fp8Role::kX, C, N, take);
    }
    if (any_high) x.high = take(options_.dtype, N * C);
    return x;
}

// What one layer uses of it, cut to N rows.
Decoder::SavedX Decoder::x_view(const SavedX& x, int layer, LinearKind kind, int64_t N) const {
    const Fp8Linear* fp8 = fp8_.linear(layer, kind);
    const int64_t C = linear(layer, kind).in;
    SavedX view{.high = rows(x.high, N * C), .transposed = {}};
    if (fp8) view.transposed = fp8_.operand_of(*fp8, Fp8Role::kX, x.transposed, C, N);
    return view;
}

void Decoder::take_activations(Arena& arena) {
    const int64_t N = options_.max_batch * options_.max_seq, C = config_.hidden_size;
    const bool layer_norm = config_.norm == Norm::kLayerNorm;
    auto saved = [&](Dtype dtype, int64_t elems) { return arena.take(Purpose::kActivations, dtype, elems); };
    const Dtype T = options_.dtype;

    // What a block keeps for backward. With recomputation, blocks share one copy of what is made again.
    const int L = static_cast<int>(config_.num_layers);
    auto block_inner = [&](BlockActs& a, int first, int layers) {
        if (config_.qk_norm) {
            a.qkv_raw = saved(T, N * config_.qkv_width());
            a.qk_rstd = saved(stat_, N * (config_.num_attention_heads + config_.num_query_groups));
        }
        a.qkv = saved(T, N * config_.qkv_width());
        a.att = take_x(arena, LinearKind::kProj, first, layers, config_.q_width(), true);
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
    auto norm_and_act = [&](BlockActs& a, int first, int layers) {
        a.norm1 = take_x(arena, LinearKind::kQkv, first, layers, C, false);
        a.norm2 = take_x(arena, LinearKind::kUp, first, layers, C, false);
        a.act = take_x(arena, LinearKind::kDown, first, layers, config_.ffn_hidden_size, false);
    };
    BlockActs shared;
    if (options_.recompute != Recompute::kNone) norm_and_act(shared, 0, L);
    if (options_.recompute == Recompute::kBlock) block_inner(shared, 0, L);
    for (int l = 0; l < L; l++) {
        BlockActs a = shared;
        a.x = saved(T, N * C);
        if (options_.recompute == Recompute::kNone) norm_and_act(a, l, 1);
        if (options_.recompute != Recompute::kBlock) block_inner(a, l, 1);
        blocks_.push_back(a);
    }
    branch_ = saved(T, N * C);
    final_x_ = saved(T, N * C);
    final_norm_ = take_x(arena, LinearKind::kHead, L, 1, C, false);
    if (fp8_.linear(L, LinearKind::kHead)) final_rowwise_ = fp8_.take_operand(Fp8Role::kX, N, C, saved);
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
    return {.x = rows(a.x, N * C), .norm1 = x_view(a.norm1, layer, LinearKind::kQkv, N),
            .mean1 = rows(a.mean1, N), .rstd1 = rows(a.rstd1, N),
            .qkv_raw = rows(a.qkv_raw, N * config_.qkv_width()),
            .qk_rstd = rows(a.qk_rstd, N * (heads + config_.num_query_groups)),
            .qkv = rows(a.qkv, N * config_.qkv_width()),
            .att = x_view(a.att, layer, LinearKind::kProj, N), .lse = rows(a.lse, N * heads),
            .mid = rows(a.mid, N * C), .norm2 = x_view(a.norm2, layer, LinearKind::kUp, N),
            .mean2 = rows(a.mean2, N), .rstd2 = rows(a.rstd2, N),
            .up = rows(a.up, N * config_.up_width()), .act = x_view(a.act, layer, LinearKind::kDown, N)};
}

float Decoder::softmax_mul() const { return 1.0f / std::sqrt(static_cast<float>(config_.kv_channels)); }

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

Decoder::XUse Decoder::first_use(bool made_again) const {
    return {.rowwise = true, .transposed = training_ && !made_again, .replay = false};
}

// Runs the producer of x. The rowwise copy and, where nobody keeps the bf16 result, its working memory are scratch of
// the caller's scope: they live until the matmul that follows.
LinearOperand Decoder::make_x(Ctx& ctx, const Linear& linear, const SavedX& saved, int64_t N, XUse use,
                              bool keep_high, const Producer& run) {
    const Fp8Linear* fp8 = linear.fp8;
    LinearOperand x{.high = saved.high, .fp8 = {}};
    if (fp8) {
        if (use.transposed) x.fp8.transposed = saved.transposed;
        if (use.rowwise) {
            auto scratch = [&](Dtype dtype, int64_t elems) { return arena_.scratch(dtype, elems); };
            const Fp8Operand memory = fp8_.take_operand(Fp8Role::kX, N, linear.in, scratch);
            x.fp8.rowwise = fp8_.operand_of(*fp8, Fp8Role::kX, memory, N, linear.in);
        }
        if (!x.high) x.high = arena_.scratch(options_.dtype, N * linear.in);
    }
    fp8_.produce(ctx, {.linear = fp8, .role = Fp8Role::kX, .to = x.fp8, .high = x.high, .keep_high = keep_high,
                       .replay = use.replay, .N = N, .dbias = {}, .dbias_scratch = {}}, run);
    return x;
}

// The norm that makes x of qkv or up; args says the rest.
LinearOperand Decoder::block_norm_forward(Ctx& ctx, int layer, LinearKind kind, const SavedX& to, NormForwardArgs args,
                                          XUse use) {
    const BlockParams& p = table_.blocks[static_cast<size_t>(layer)];
    const bool first = kind == LinearKind::kQkv;
    return make_x(ctx, linear(layer, kind), to, args.N, use, false, [&](Tensor out, const QuantOut& quant) {
        args.out = out;
        args.quant = quant;
        norm_forward(ctx, args, first ? p.norm1_weight : p.norm2_weight, first ? p.norm1_bias : p.norm2_bias);
    });
}

LinearOperand Decoder::norm1_forward(Ctx& ctx, int layer, const BlockActs& a, Tensor in, Tensor residual,
                                     Tensor residual_out, int64_t N, XUse use) {
    return block_norm_forward(ctx, layer, LinearKind::kQkv, a.norm1,
                              {.out = {}, .residual_out = residual_out, .mean = a.mean1, .rstd = a.rstd1, .in = in,
                               .residual = residual, .weight = {}, .bias = {}, .N = N, .C = 0, .eps = 0}, use);
}

LinearOperand Decoder::norm2_forward(Ctx& ctx, int layer, const BlockActs& a, Tensor in, Tensor residual,
                                     Tensor residual_out, int64_t N, XUse use) {
    return block_norm_forward(ctx, layer, LinearKind::kUp, a.norm2,
                              {.out = {}, .residual_out = residual_out, .mean = a.mean2, .rstd = a.rstd2, .in = in,
                               .residual = residual, .weight = {}, .bias = {}, .N = N, .C = 0, .eps = 0}, use);
}

LinearOperand Decoder::activation_forward(Ctx& ctx, int layer, const BlockActs& a, int64_t N, XUse use) {
    return make_x(ctx, linear(layer, LinearKind::kDown), a.act, N, use, false, [&](Tensor out, const QuantOut& quant) {
        const ActivationForwardArgs args{.out = out, .in = a.up, .N = N, .F = config_.ffn_hidden_size, .quant = quant};
        if (config_.activation == Activation::kSwiglu) ops::swiglu_forward(ctx, args);
        else ops::gelu_forward(ctx, args);
    });
}

// Rope, and with FP8 attention the copies of what it makes, which then is what they stand for: scratch of the caller's
// scope, one layer's at a time.
Fp8Heads Decoder::place_heads(Ctx& ctx, Tensor qkv, int64_t B, int64_t T) {
    if (!options_.fp8_attention) {
        if (cos_sin_) ops::rope_forward(ctx, rope_args(qkv, B * T, T));
        return {};
    }
    const int64_t NH = config_.num_attention_heads, NKV = config_.num_query_groups, HS = config_.kv_channels;
    const int64_t blocks = B * (NH + 2 * NKV) * head_blocks(T);
    const Fp8Heads heads{.bytes = arena_.scratch(Dtype::kE4m3, blocks * kHeadBlock * HS),
                         .scales = arena_.scratch(Dtype::kFp32, blocks)};
    ops::quantize_heads(ctx, {.heads = heads, .qkv = qkv, .cos_sin = cos_sin_, .B = B, .T = T, .NH = NH, .NKV = NKV,
                              .HS = HS});
    return heads;
}

// branch = proj(attention(rope(qkv(norm1)))).
void Decoder::attention_half_forward(Ctx& ctx, int layer, const BlockActs& a, const LinearOperand& norm1,
                                     Tensor branch, const DeviceBatch& batch, bool replay) {
    const BlockParams& p = table_.blocks[static_cast<size_t>(layer)];
    const int64_t B = batch.B, T = batch.T, N = B * T;
    linear_forward(ctx, linear(layer, LinearKind::kQkv), config_.qk_norm ? a.qkv_raw : a.qkv, norm1, N);
    if (config_.qk_norm) {
        ops::qk_norm_forward(ctx, {.out = a.qkv, .rstd = a.qk_rstd, .in = a.qkv_raw, .q_weight = weight(p.q_norm),
                                   .k_weight = weight(p.k_norm), .N = N, .NH = config_.num_attention_heads,
                                   .NKV = config_.num_query_groups, .HS = config_.kv_channels,
                                   .eps = static_cast<float>(config_.norm_eps)});
    }
    const Fp8Heads heads = place_heads(ctx, a.qkv, B, T);
    XUse use = first_use(options_.recompute == Recompute::kBlock);
    if (replay) use = {.rowwise = true, .transposed = true, .replay = true};
    const Linear proj = linear(layer, LinearKind::kProj);
    const LinearOperand att = make_x(ctx, proj, a.att, N, use, true, [&](Tensor out, const QuantOut& quant) {
        ops::attention_forward(ctx, {.out = out, .lse = a.lse, .qkv = a.qkv, .B = B, .T = T,
                                     .NH = config_.num_attention_heads, .NKV = config_.num_query_groups,
                                     .HS = config_.kv_channels, .softmax_mul = softmax_mul(),
                                     .documents = batch.documents, .quant = quant, .heads = heads});
    });
    linear_forward(ctx, proj, branch, att, N);
}

// norm2 of the residual stream, up, act and, the first time, branch = down(act).
void Decoder::mlp_half_forward(Ctx& ctx, int layer, const BlockActs& a, Tensor branch, int64_t N, bool replay) {
    Arena::Scope scope(ctx, arena_);
    const bool made_again = options_.recompute != Recompute::kNone;
    const XUse norm_use = replay ? XUse{.rowwise = true, .transposed = true, .replay = true} : first_use(made_again);
    const LinearOperand norm2 = norm2_forward(ctx, layer, a, branch, a.x, a.mid, N, norm_use);
    const Linear up = linear(layer, LinearKind::kUp), down = linear(layer, LinearKind::kDown);
    LinearOperand act{.high = a.act.high, .fp8 = {}};
    if (options_.fuse_gelu) {
        linear_gelu_forward(ctx, up, a.act.high, a.up, norm2.high, N);
    } else {
        linear_forward(ctx, up, a.up, norm2, N);
        const XUse act_use = replay ? XUse{.rowwise = false, .transposed = true, .replay = true} : norm_use;
        act = activation_forward(ctx, layer, a, N, act_use);
    }
    if (!replay) linear_forward(ctx, down, branch, act, N);
}

void Decoder::forward(Ctx& ctx, const DeviceBatch& batch, bool training) {
    const int64_t B = batch.B, T = batch.T, N = B * T, C = config_.hidden_size;
    CHECK(N > 0 && N <= options_.max_batch * options_.max_seq && T <= options_.max_seq,
          "batch %lld x %lld exceeds %lld x %lld",
          (long long)B, (long long)T, (long long)options_.max_batch, (long long)options_.max_seq);
    training_ = training;
    Tensor branch = rows(branch_, N * C), previous_mid;
    store_->before_layer(ctx, -1, Pass::kForward);
    ops::embedding_forward(ctx, {.out = rows(blocks_[0].x, N * C), .wte = weight(table_.wte),
                                 .wpe = weight(table_.wpe), .tokens = batch.tokens, .bad_tokens = batch.bad_tokens,
                                 .N = N, .T = T, .C = C, .V = config_.vocab_size});
    store_->after_layer(ctx, -1, Pass::kForward);
    for (int l = 0; l < config_.num_layers; l++) {
        store_->before_layer(ctx, l, Pass::kForward);
        const BlockActs a = acts(l, N);
        {
            Arena::Scope scope(ctx, arena_);
            const XUse use = first_use(options_.recompute != Recompute::kNone);
            const LinearOperand norm1 = l == 0 ? norm1_forward(ctx, l, a, a.x, {}, {}, N, use)
                                               : norm1_forward(ctx, l, a, branch, previous_mid, a.x, N, use);
            attention_half_forward(ctx, l, a, norm1, branch, batch, false);
        }
        mlp_half_forward(ctx, l, a, branch, N, false);
        previous_mid = a.mid;
        store_->after_layer(ctx, l, Pass::kForward);
    }
    store_->before_layer(ctx, head_layer(), Pass::kForward);
    final_norm_forward(ctx, branch, previous_mid, N);
    store_->after_layer(ctx, head_layer(), Pass::kForward);
}

void Decoder::final_norm_forward(Ctx& ctx, Tensor branch, Tensor residual, int64_t N) {
    Arena::Scope scope(ctx, arena_);
    LinearOperand x = head_input(N);
    if (!x.high) x.high = arena_.scratch(options_.dtype, N * config_.hidden_size);
    if (!training_) x.fp8.transposed = {};
    fp8_.produce(ctx, {.linear = head().fp8, .role = Fp8Role::kX, .to = x.fp8, .high = x.high, .keep_high = false,
                       .replay = false, .N = N, .dbias = {}, .dbias_scratch = {}},
                 [&](Tensor out, const QuantOut& quant) {
        norm_forward(ctx, {.out = out, .residual_out = rows(final_x_, N * config_.hidden_size),
                           .mean = rows(final_mean_, N), .rstd = rows(final_rstd_, N), .in = branch,
                           .residual = residual, .weight = {}, .bias = {}, .N = N, .C = 0, .eps = 0, .quant = quant},
                     table_.final_norm_weight, table_.final_norm_bias);
    });
}

// The final norm as the head reads it, forward and backward.
LinearOperand Decoder::head_input(int64_t N) const {
    const SavedX saved = x_view(final_norm_, static_cast<int>(config_.num_layers), LinearKind::kHead, N);
    LinearOperand x{.high = saved.high, .fp8 = {.rowwise = {}, .transposed = saved.transposed}};
    if (const Fp8Linear* fp8 = head().fp8)
        x.fp8.rowwise = fp8_.operand_of(*fp8, Fp8Role::kX, final_rowwise_, N, config_.hidden_size);
    return x;
}

void Decoder::logits_all(Ctx& ctx, Tensor logits, int64_t N) {
    store_->before_layer(ctx, head_layer(), Pass::kForward);
    linear_forward(ctx, head(), logits, head_input(N), N);
    store_->after_layer(ctx, head_layer(), Pass::kForward);
}

void Decoder::logits_row(Ctx& ctx, const DeviceBatch& batch, int64_t row, Tensor logits) {
    const int64_t C = config_.hidden_size, Vp = config_.padded_vocab();
    if (!head().fp8) {
        store_->before_layer(ctx, head_layer(), Pass::kForward);
        linear_forward(ctx, head(), logits, {.high = final_norm_.high.slice(row * C, C), .fp8 = {}}, 1);
        store_->after_layer(ctx, head_layer(), Pass::kForward);
        return;
    }
    // FP8 grids are laid out for all rows: run them all, once per sampled token.
    Arena::Scope scope(ctx, arena_);
    const int64_t N = batch.B * batch.T;
    Tensor all = arena_.scratch(options_.dtype, N * Vp);
    logits_all(ctx, all, N);
    device::copy_on_device(ctx, logits.data, all.slice(row * Vp, Vp).data, logits.bytes());
}

// Losses of the micro-batch into state->loss_sum; with backward, logits become their gradient.
void Decoder::classify(Ctx& ctx, const DeviceBatch& batch, StepState* state, Tensor logits, bool backward,
                       void* host_losses) {
    Arena::Scope scope(ctx, arena_);
    const int64_t N = batch.B * batch.T;
    Tensor losses = arena_.scratch(stat_, N), sums = arena_.scratch(Dtype::kFp64, kPartialSums);
    ops::classifier(ctx, {.logits = logits, .losses = losses, .targets = batch.targets, .state = state, .N = N,
                          .V = config_.vocab_size, .Vp = config_.padded_vocab(), .write_dlogits = backward});
    ops::sum_losses(ctx, {.sum = &state->loss_sum, .losses = losses, .scratch = sums, .N = N});
    if (host_losses) device::copy_to_host(ctx, host_losses, losses.data, losses.bytes());
}

void Decoder::loss(Ctx& ctx, const DeviceBatch& batch, StepState* state, void* host_losses) {
    Arena::Scope scope(ctx, arena_);
    const int64_t N = batch.B * batch.T;
    Tensor logits = arena_.scratch(options_.dtype, N * config_.padded_vocab());
    logits_all(ctx, logits, N);
    classify(ctx, batch, state, logits, false, host_losses);
}
