#include "llmc/model/pre_norm.h"

// Whether the norm's result is read in the working type where its reader runs in FP8: by the forward matmul of the
// head, and by the router of experts.
static bool others_read(LinearKind reader, bool router) { return reader == LinearKind::kHead || router; }

std::vector<BufferRow> PreNorm::rows(const ModelConfig& config, LinearKind reader, Lifetime residual, Lifetime norm,
                                     bool router) {
    const int64_t C = config.hidden_size;
    const int64_t mean = config.norm == Norm::kLayerNorm ? 1 : 0;
    const bool head = reader == LinearKind::kHead, others = others_read(reader, router);
    const bool exists = head || config.pre_norms();
    const Lifetime statistics = head ? kSaved : kSavedUnlessBlock;
    return {{"residual", C, Form::kWorking, residual},
            {"norm", exists ? C : 0, Form::kWorking, norm, reader, others},
            {"norm, FP8", C, others && !head ? Form::kFp8Rowwise : Form::kFp8Transposed, norm, reader},
            {"mean", exists ? mean : 0, Form::kStat, statistics},
            {"rstd", exists, Form::kStat, statistics}};
}

NormLayer PreNorm::layer_of(int layer, int64_t N) const {
    const Tensor mean = buffers_.at(kMean, layer, N), rstd = buffers_.at(kRstd, layer, N);
    if (reader_ == LinearKind::kHead)
        return {model_.table.final_norm_weight, model_.table.final_norm_bias, mean, rstd};
    const LayerParams& p = model_.params_of(layer);
    if (reader_ == LinearKind::kQkv) return {p.norm1_weight, p.norm1_bias, mean, rstd};
    return {p.norm2_weight, p.norm2_bias, mean, rstd};
}

LinearOperand PreNorm::x(int layer, int64_t N) const {
    return buffers_.x(exists() ? kNorm : kResidual, kNormFp8, layer, N);
}

LinearOperand PreNorm::forward(Ctx& ctx, int layer, const NormInput& input, int64_t N, XUsage usage) const {
    const PendingOperand result = model_.begin_x(model_.linear(layer, reader_), x(layer, N), N, usage,
                                                 !exists() || others_read(reader_, router_));
    if (exists()) model_.norm_forward(ctx, layer_of(layer, N), input, N, result.out, result.quant);
    else if (result.quant)
        ops::quantize(ctx, {.quant = result.quant, .in = result.out, .N = N, .C = model_.config.hidden_size});
    return model_.finish(ctx, result);
}

LinearOperand PreNorm::backward(Ctx& ctx, int layer, const NormGrads& grads, const LinearOperand& to,
                                const Linear& below, int64_t N) const {
    Arena::Scope scope(ctx, model_.arena);
    const PendingOperand dx = model_.begin_dy(below, to, N, true);
    model_.norm_backward(ctx, layer_of(layer, N), grads, residual(layer, N), N, dx.out, dx.quant);
    return model_.finish(ctx, dx);
}
