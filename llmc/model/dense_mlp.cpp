#include "llmc/model/dense_mlp.h"

std::vector<BufferRow> DenseMlp::rows(const ModelConfig& c) {
    const int64_t F = c.ffn_hidden_size;
    std::vector<BufferRow> rows = PreNorm::rows(c, LinearKind::kUp, kSavedUnlessBlock, kSavedUnlessNormAct);
    rows.insert(rows.end(), {
        {"up", c.up_width(), Form::kWorking, kSavedUnlessBlock},
        {"activation", F, Form::kWorking, kSavedUnlessNormAct, LinearKind::kDown},
        {"activation, FP8 transposed", F, Form::kFp8Transposed, kSavedUnlessNormAct, LinearKind::kDown},
        {"d activation", F, Form::kWorking, kScratch},
        {"d norm", c.hidden_size, Form::kWorking, kScratch},
    });
    return rows;
}

DenseMlp::DenseMlp(ModelContext& model)
    : model_(model), config_(model.config), buffers_(model, rows(config_), 0, static_cast<int>(config_.num_layers)),
      norm_(model, buffers_, LinearKind::kUp) {}

// ---- forward

LinearOperand DenseMlp::activation(Ctx& ctx, int layer, int64_t N, XUsage usage) {
    const PendingOperand act = model_.begin_x(down(layer), saved_act(layer, N), N, usage);
    ops::activation_forward(ctx, {.kind = config_.activation, .out = act.out, .in = buffers_.at(kUp, layer, N), .N = N,
                                  .F = config_.ffn_hidden_size, .quant = act.quant});
    return model_.finish(ctx, act);
}

void DenseMlp::forward(Ctx& ctx, int layer, const NormInput& input, Tensor branch, const DeviceBatch& batch) {
    Arena::Scope scope(ctx, model_.arena);
    const int64_t N = batch.rows();
    const LinearOperand x = norm_.forward(ctx, layer, input, N, buffers_.forward_usage(PreNorm::kNormFp8));
    linear_forward(ctx, up(layer), buffers_.at(kUp, layer, N), x, N);
    const LinearOperand act = activation(ctx, layer, N, buffers_.forward_usage(kActFp8));
    linear_forward(ctx, down(layer), branch, act, N);
}

void DenseMlp::recompute(Ctx& ctx, int layer, const NormInput& input, const DeviceBatch& batch) {
    if (!buffers_.recomputed(kUp)) return;
    Arena::Scope scope(ctx, model_.arena);
    const int64_t N = batch.rows();
    const LinearOperand x = norm_.forward(ctx, layer, input, N,
                                          {.rowwise = true, .transposed = true, .recomputed = true});
    linear_forward(ctx, up(layer), buffers_.at(kUp, layer, N), x, N);
    activation(ctx, layer, N, {.rowwise = false, .transposed = true, .recomputed = true});
}

// ---- backward

// Recomputes results at the --recompute levels that recompute no linear. Only weight gradients read these results.
void DenseMlp::recompute_norm_and_act(Ctx& ctx, int layer, int64_t N) {
    if (buffers_.recomputed(kUp)) return;
    Arena::Scope scope(ctx, model_.arena);
    const XUsage usage{.rowwise = false, .transposed = true, .recomputed = true};
    if (buffers_.recomputed(kAct)) activation(ctx, layer, N, usage);
    if (buffers_.recomputed(PreNorm::kNorm)) norm_.forward(ctx, layer, {.in = residual(layer, N)}, N, usage);
}

LinearOperand DenseMlp::dup_backward(Ctx& ctx, int layer, Tensor dact, int64_t N) {
    const Linear linear = up(layer);
    const Tensor in = buffers_.at(kUp, layer, N);
    // In bf16 the gradient of `up` overwrites `up`, which is not read again.
    const LinearOperand to = model_.alloc_dy(N, config_.up_width(), in, linear.fp8);
    Arena::Scope scope(ctx, model_.arena);
    const PendingOperand dup = model_.begin_dy(linear, to, N, false);
    ops::activation_backward(ctx, {.kind = config_.activation, .din = dup.out, .dout = dact, .in = in, .N = N,
                                   .F = config_.ffn_hidden_size, .quant = dup.quant});
    return model_.finish(ctx, dup);
}

LinearOperand DenseMlp::backward(Ctx& ctx, int layer, const LinearOperand& dy, const LinearOperand& to,
                                 const Linear& below, const DeviceBatch& batch,
                                 const StepState* /*state*/) {
    Arena::Scope scope(ctx, model_.arena);
    const int64_t N = batch.rows();
    const Tensor dact = buffers_.scratch(kDact, N);
    recompute_norm_and_act(ctx, layer, N);
    linear_backward(ctx, down(layer), dact, dy, saved_act(layer, N), N);
    const LinearOperand dup = dup_backward(ctx, layer, dact, N);
    const Tensor dnorm = buffers_.scratch(kDnorm, N);
    linear_backward(ctx, up(layer), dnorm, dup, norm_.x(layer, N), N);
    return norm_.backward(ctx, layer, {.dout = dnorm, .dresidual = dy.unquantized}, to, below, N);
}
