#include "llmc/model/moe_mlp.h"

#include "llmc/ops/ops_moe.h"

static_assert(kMaxExperts <= kMaxRouterExperts);

std::vector<BufferRow> MoeMlp::rows(const ModelConfig& c) {
    const int64_t E = c.num_experts, K = c.experts_per_token, C = c.hidden_size, F = c.ffn_hidden_size;
    std::vector<BufferRow> rows = PreNorm::rows(c, LinearKind::kUp, kSavedUnlessBlock, kSavedUnlessNormAct);
    rows.insert(rows.end(), {
        {"router probabilities", E, Form::kStat, kSavedUnlessBlock},
        {"router log-sum-exp", 1, Form::kStat, kSavedUnlessBlock},
        {"experts of tokens", K, Form::kIndex, kSaved},   // so that recomputation routes alike
        {"weights of experts", K, Form::kStat, kSavedUnlessBlock},
        {"up", K * 2 * F, Form::kWorking, kSavedUnlessBlock},
        {"activation", K * F, Form::kWorking, kSavedUnlessNormAct},
        {"rows of experts", K * C, Form::kWorking, kScratch},
        {"d activation", K * F, Form::kWorking, kScratch},
        {"d weights", K, Form::kStat, kScratch},
        {"d logits", E, Form::kWorking, kScratch},
        {"d norm", C, Form::kWorking, kScratch},
        {"slots", K, Form::kIndex, kScratch},
    });
    return rows;
}

MoeMlp::MoeMlp(ModelContext& model)
    : model_(model), config_(model.config), buffers_(model, rows(config_), 0, static_cast<int>(config_.num_layers)),
      norm_(model, buffers_, LinearKind::kUp) {}

Linear MoeMlp::router(int layer) const {
    const int w = model_.params_of(layer).router_weight;
    return {.weight = model_.weight(w), .bias = {}, .dweight = model_.grad(w), .dbias = {}, .in = config_.hidden_size,
            .out = E(), .accumulate = model_.store->accumulates(w)};
}

// ---- the stages

// again: in the backward pass, with the experts of the forward pass and without statistics.
void MoeMlp::route(Ctx& ctx, int layer, int64_t N, bool again) {
    const Tensor probs = buffers_.at(kProbs, layer, N), lse = buffers_.at(kLse, layer, N),
                 experts = buffers_.at(kExperts, layer, N);
    linear_forward(ctx, router(layer), probs, {.unquantized = x(layer, N)}, N);
    ops::router_forward(ctx, {.probs = probs, .lse = lse, .experts = experts,
                              .weights = buffers_.at(kWeights, layer, N), .N = N, .E = E(), .K = K(),
                              .normalize = config_.normalize_experts, .chosen = again});
    const Tensor& stats = model_.options.router_stats;
    if (again || !model_.training || !stats) return;
    const int64_t width = router_stats_elems(E());
    Arena::Scope scope(ctx, model_.arena);
    ops::router_stats(ctx, {.stats = stats.slice(layer * width, width),
                            .scratch = model_.scratch(Dtype::kFp64, kRouterPartials * width), .probs = probs,
                            .lse = lse, .experts = experts, .N = N, .E = E(), .K = K()});
}

MoeMlp::Order MoeMlp::dispatch(Ctx& ctx, int layer, int64_t N) {
    const Order order{.offsets = model_.scratch(Dtype::kInt32, E() + 1), .row_slots = buffers_.scratch(kSlots, N),
                      .slot_rows = buffers_.scratch(kSlots, N)};
    Arena::Scope scope(ctx, model_.arena);
    ops::sort_experts(ctx, {.offsets = order.offsets,
                            .scratch = model_.scratch(Dtype::kInt32, ceil_div(N * K(), kSortChunk) * E()),
                            .row_slots = order.row_slots, .slot_rows = order.slot_rows,
                            .experts = buffers_.at(kExperts, layer, N), .N = N, .E = E(), .K = K()});
    return order;
}

// The rows of tokens in the order of experts, scratch of the caller's scope.
Tensor MoeMlp::gathered(Ctx& ctx, const Order& order, Tensor in, int64_t N) {
    const Tensor out = buffers_.scratch(kRows, N);
    ops::gather_rows(ctx, {.out = out, .in = in, .slot_rows = order.slot_rows, .N = N, .K = K(),
                           .C = config_.hidden_size});
    return out;
}

void MoeMlp::matmul(Ctx& ctx, GemmLayout layout, int layer, LinearKind kind, const Order& order, Tensor D, Tensor A,
                    Tensor B, int64_t N) {
    const LayerParams& params = model_.params_of(layer);
    const bool is_up = kind == LinearKind::kUp, wgrad = layout == GemmLayout::kWgrad;
    const int weight = is_up ? params.up_weight : params.down_weight;
    const int64_t C = config_.hidden_size, F = config_.ffn_hidden_size, in = is_up ? C : F, out = is_up ? 2 * F : C;
    const bool forward = layout == GemmLayout::kForward;
    ops::grouped_gemm(ctx, {.D = wgrad ? model_.grad(weight) : D, .A = A, .B = wgrad ? B : model_.weight(weight),
                            .offsets = order.offsets, .E = E(), .M = wgrad ? out : N * K(), .N = forward ? out : in,
                            .K = wgrad ? N * K() : forward ? in : out, .layout = layout,
                            .accumulate = wgrad && model_.store->accumulates(weight)});
}

void MoeMlp::up(Ctx& ctx, int layer, const Order& order, int64_t N) {
    Arena::Scope scope(ctx, model_.arena);
    matmul(ctx, GemmLayout::kForward, layer, LinearKind::kUp, order, buffers_.at(kUp, layer, N),
           gathered(ctx, order, x(layer, N), N), {}, N);
}

void MoeMlp::activation(Ctx& ctx, int layer, const Order& order, int64_t N) {
    ops::expert_activation_forward(ctx, {.out = buffers_.at(kAct, layer, N), .in = buffers_.at(kUp, layer, N),
                                         .weights = buffers_.at(kWeights, layer, N), .row_slots = order.row_slots,
                                         .R = N * K(), .F = config_.ffn_hidden_size});
}

// ---- forward

// All before the matmul `down`. Memory of the result is scratch of the caller's scope. again: see route().
MoeMlp::Order MoeMlp::before_down(Ctx& ctx, int layer, const NormInput& input, int64_t N, bool again) {
    norm_.forward(ctx, layer, input, N, {});
    route(ctx, layer, N, again);
    const Order order = dispatch(ctx, layer, N);
    up(ctx, layer, order, N);
    activation(ctx, layer, order, N);
    return order;
}

void MoeMlp::forward(Ctx& ctx, int layer, const NormInput& input, Tensor branch, const DeviceBatch& batch) {
    Arena::Scope scope(ctx, model_.arena);
    const int64_t N = batch.rows();
    const Order order = before_down(ctx, layer, input, N, false);
    const Tensor y = buffers_.scratch(kRows, N);
    matmul(ctx, GemmLayout::kForward, layer, LinearKind::kDown, order, y, buffers_.at(kAct, layer, N), {}, N);
    ops::combine_rows(ctx, {.out = branch, .in = y, .slot_rows = order.slot_rows, .N = N, .K = K(),
                            .C = config_.hidden_size});
}

void MoeMlp::recompute(Ctx& ctx, int layer, const NormInput& input, const DeviceBatch& batch) {
    if (!buffers_.recomputed(kUp)) return;
    Arena::Scope scope(ctx, model_.arena);
    before_down(ctx, layer, input, batch.rows(), true);
}

// ---- backward

// dact (R, F) =, and the gradient of the weight.
void MoeMlp::down_backward(Ctx& ctx, int layer, const Order& order, Tensor dy, Tensor dact, int64_t N) {
    Arena::Scope scope(ctx, model_.arena);
    const Tensor dys = gathered(ctx, order, dy, N);
    matmul(ctx, GemmLayout::kDgrad, layer, LinearKind::kDown, order, dact, dys, {}, N);
    matmul(ctx, GemmLayout::kWgrad, layer, LinearKind::kDown, order, {}, dys, buffers_.at(kAct, layer, N), N);
}

// From the gradient of `up`, in its place. Returns the gradients of the gathered rows (R, C), scratch of the caller's
// scope.
Tensor MoeMlp::up_backward(Ctx& ctx, int layer, const Order& order, int64_t N) {
    const Tensor dxs = buffers_.scratch(kRows, N), dup = buffers_.at(kUp, layer, N);
    matmul(ctx, GemmLayout::kDgrad, layer, LinearKind::kUp, order, dxs, dup, {}, N);
    Arena::Scope scope(ctx, model_.arena);
    matmul(ctx, GemmLayout::kWgrad, layer, LinearKind::kUp, order, {}, dup, gathered(ctx, order, x(layer, N), N), N);
    return dxs;
}

LinearOperand MoeMlp::backward(Ctx& ctx, int layer, const LinearOperand& dy, const LinearOperand& to,
                               const Linear& below, const DeviceBatch& batch, const StepState* state) {
    Arena::Scope scope(ctx, model_.arena);
    const int64_t N = batch.rows();
    const DecoderOptions& options = model_.options;
    const Tensor dweights = buffers_.scratch(kDweights, N), dlogits = buffers_.scratch(kDlogits, N),
                 dnorm = buffers_.scratch(kDnorm, N), weights = buffers_.at(kWeights, layer, N);
    const Order order = dispatch(ctx, layer, N);
    if (buffers_.recomputed(kAct) && !buffers_.recomputed(kUp)) {   // --recompute norm-act
        activation(ctx, layer, order, N);
        norm_.forward(ctx, layer, {.in = residual(layer, N)}, N, {});
    }
    {
        Arena::Scope act_scope(ctx, model_.arena);
        const Tensor dact = buffers_.scratch(kDact, N), in = buffers_.at(kUp, layer, N);
        down_backward(ctx, layer, order, dy.unquantized, dact, N);
        ops::expert_activation_backward(ctx, {.din = in, .dweights = dweights, .dout = dact, .in = in,
                                              .weights = weights, .row_slots = order.row_slots, .R = N * K(),
                                              .F = config_.ffn_hidden_size});
    }
    ops::router_backward(ctx, {.dlogits = dlogits, .dweights = dweights, .probs = buffers_.at(kProbs, layer, N),
                               .lse = buffers_.at(kLse, layer, N), .experts = buffers_.at(kExperts, layer, N),
                               .weights = weights, .load = options.expert_load.slice(layer * E(), E()), .state = state,
                               .N = N, .E = E(), .K = K(), .normalize = config_.normalize_experts,
                               .aux = static_cast<float>(options.aux_loss),
                               .z = static_cast<float>(options.router_z_loss)});
    const Tensor dxs = up_backward(ctx, layer, order, N);
    linear_backward(ctx, router(layer), dnorm, {.unquantized = dlogits}, {.unquantized = x(layer, N)}, N);
    ops::combine_rows(ctx, {.out = dnorm, .in = dxs, .slot_rows = order.slot_rows, .N = N, .K = K(),
                            .C = config_.hidden_size, .accumulate = true});
    return norm_.backward(ctx, layer, {.dout = dnorm, .dresidual = dy.unquantized}, to, below, N);
}
