#include "llmc/model/dense_mlp.h"

std::vector<BufferRow> DenseMlp::rows(const ModelConfig& c) {
    std::vector<BufferRow> rows = PreNorm::rows(c, LinearKind::kUp, kSavedUnlessBlock, kSavedUnlessNormAct);
    rows.push_back({"d norm", c.hidden_size, Form::kWorking, kScratch});
    return rows;
}

DenseMlp::DenseMlp(ModelContext& model)
    : model_(model), buffers_(model, rows(model.config), 0, layers(model.config)),
      norm_(model, buffers_, LinearKind::kUp),
      feed_forward_(model, model.config.ffn_size(0), false, 0, layers(model.config)) {}

void DenseMlp::forward(Ctx& ctx, int layer, const NormInput& input, Tensor branch, const DeviceBatch& batch) {
    Arena::Scope scope(ctx, model_.arena);
    const int64_t N = batch.rows();
    const LinearOperand x = norm_.forward(ctx, layer, input, N, buffers_.forward_usage(PreNorm::kNormFp8));
    feed_forward_.forward(ctx, layer, x, branch, N);
}

void DenseMlp::recompute(Ctx& ctx, int layer, const NormInput& input, const DeviceBatch& batch) {
    if (!feed_forward_.recomputes_up()) return;
    Arena::Scope scope(ctx, model_.arena);
    const int64_t N = batch.rows();
    const XUsage usage{.rowwise = true, .transposed = true, .recomputed = true};
    feed_forward_.recompute(ctx, layer, norm_.forward(ctx, layer, input, N, usage), N);
}

LinearOperand DenseMlp::backward(Ctx& ctx, int layer, const LinearOperand& dy, const LinearOperand& to,
                                 const Linear& below, const DeviceBatch& batch, const StepState* /*state*/) {
    Arena::Scope scope(ctx, model_.arena);
    const int64_t N = batch.rows();
    if (buffers_.recomputed(PreNorm::kNorm) && !feed_forward_.recomputes_up()) {   // --recompute norm-act
        Arena::Scope norm_scope(ctx, model_.arena);
        norm_.forward(ctx, layer, {.in = residual(layer, N)}, N,
                      {.rowwise = false, .transposed = true, .recomputed = true});
    }
    const bool add = !norm_.exists();
    const Tensor dx = add ? to.unquantized : buffers_.scratch(kDnorm, N);
    feed_forward_.backward(ctx, layer, dx, dy, norm_.x(layer, N), N, add);
    if (add) return to;
    return norm_.backward(ctx, layer, {.dout = dx, .dresidual = to.unquantized}, to, below, N);
}
