#include "llmc/model/feed_forward.h"

std::vector<BufferRow> FeedForward::rows(const ModelConfig& c, int64_t F, bool shared) {
    const auto reader = shared ? std::nullopt : std::optional(LinearKind::kDown);
    return {{"up", activation_inputs(c.activation, F), Form::kWorking, kSavedUnlessBlock},
            {"activation", F, Form::kWorking, kSavedUnlessNormAct, reader},
            {"activation, FP8 transposed", F, Form::kFp8Transposed, kSavedUnlessNormAct, reader},
            {"d activation", F, Form::kWorking, kScratch}};
}

FeedForward::FeedForward(ModelContext& model, int64_t width, bool shared, int first_layer, int layers)
    : model_(model), width_(width), shared_(shared),
      buffers_(model, rows(model.config, width, shared), first_layer, layers) {}

Linear FeedForward::up(int layer) const {
    return shared_ ? model_.linear_of(model_.params_of(layer).shared_up_weight)
                   : model_.linear(layer, LinearKind::kUp);
}

Linear FeedForward::down(int layer) const {
    return shared_ ? model_.linear_of(model_.params_of(layer).shared_down_weight)
                   : model_.linear(layer, LinearKind::kDown);
}

LinearOperand FeedForward::activation(Ctx& ctx, int layer, int64_t N, XUsage usage) {
    const PendingOperand act = model_.begin_x(down(layer), saved_act(layer, N), N, usage);
    ops::activation_forward(ctx, {.kind = model_.config.activation, .out = act.out, .in = buffers_.at(kUp, layer, N),
                                  .N = N, .F = width_, .quant = act.quant});
    return model_.finish(ctx, act);
}

void FeedForward::forward(Ctx& ctx, int layer, const LinearOperand& x, Tensor y, int64_t N) {
    Arena::Scope scope(ctx, model_.arena);
    linear_forward(ctx, up(layer), buffers_.at(kUp, layer, N), x, N);
    linear_forward(ctx, down(layer), y, activation(ctx, layer, N, buffers_.forward_usage(kActFp8)), N);
}

void FeedForward::recompute(Ctx& ctx, int layer, const LinearOperand& x, int64_t N) {
    Arena::Scope scope(ctx, model_.arena);
    linear_forward(ctx, up(layer), buffers_.at(kUp, layer, N), x, N);
    activation(ctx, layer, N, {.rowwise = false, .transposed = true, .recomputed = true});
}

LinearOperand FeedForward::dup_backward(Ctx& ctx, int layer, Tensor dact, int64_t N) {
    const Linear linear = up(layer);
    const Tensor in = buffers_.at(kUp, layer, N);
    // In bf16 the gradient of `up` overwrites `up`, which is not read again.
    const LinearOperand to = model_.alloc_dy(N, linear.out, in, linear.fp8);
    Arena::Scope scope(ctx, model_.arena);
    const PendingOperand dup = model_.begin_dy(linear, to, N, false);
    ops::activation_backward(ctx, {.kind = model_.config.activation, .din = dup.out, .dout = dact, .in = in, .N = N,
                                   .F = width_, .quant = dup.quant});
    return model_.finish(ctx, dup);
}

void FeedForward::backward(Ctx& ctx, int layer, Tensor dx, const LinearOperand& dy, const LinearOperand& x, int64_t N,
                           bool add) {
    Arena::Scope scope(ctx, model_.arena);
    const Tensor dact = buffers_.scratch(kDact, N);
    if (buffers_.recomputed(kAct) && !recomputes_up()) {   // --recompute norm-act
        Arena::Scope act_scope(ctx, model_.arena);
        activation(ctx, layer, N, {.rowwise = false, .transposed = true, .recomputed = true});
    }
    linear_backward(ctx, down(layer), dact, dy, saved_act(layer, N), N);
    linear_backward(ctx, up(layer), dx, dup_backward(ctx, layer, dact, N), x, N, add);
}
