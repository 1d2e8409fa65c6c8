#include "llmc/model/post_norm.h"

// Recomputation ends at the x of down, so that the branch of the MLP is always saved.
std::vector<BufferRow> PostNorm::rows(const ModelConfig& c, LinearKind output) {
    const Lifetime lifetime = output == LinearKind::kProj ? kSavedUnlessBlock : kSaved;
    return {{"branch before its norm", c.post_norms() ? c.hidden_size : 0, Form::kWorking, lifetime},
            {"rstd of the branch", c.post_norms() ? 1 : 0, Form::kStat, lifetime}};
}

PostNorm::PostNorm(ModelContext& model, LinearKind output)
    : model_(model), output_(output),
      buffers_(model, rows(model.config, output), 0, static_cast<int>(model.config.num_layers)) {}

NormLayer PostNorm::layer_of(int layer, int64_t N) const {
    const LayerParams& p = model_.params_of(layer);
    return {.weight = output_ == LinearKind::kProj ? p.post_norm1_weight : p.post_norm2_weight, .bias = -1, .mean = {},
            .rstd = buffers_.at(kRstd, layer, N)};
}

NormInput PostNorm::forward(Ctx& ctx, int layer, Tensor branch, Tensor residual, Tensor out, int64_t N,
                            bool again) const {
    if (!model_.config.post_norms()) return {.in = branch, .residual = residual, .residual_out = out};
    if (!again || buffers_.recomputed(kBranch))
        model_.norm_forward(ctx, layer_of(layer, N), {.in = branch, .stream = residual}, N, out, {});
    return {.in = out};
}

LinearOperand PostNorm::backward(Ctx& ctx, int layer, Tensor dstream, const LinearOperand& to, const Linear& output,
                                 int64_t N) const {
    Arena::Scope scope(ctx, model_.arena);
    const PendingOperand dy = model_.begin_dy(output, to, N, true);
    model_.norm_backward(ctx, layer_of(layer, N), {.dout = dstream}, branch(layer, N), N, dy.out, dy.quant);
    return model_.finish(ctx, dy);
}
