#include "llmc/model/moe_mlp.h"

#include "llmc/ops/ops_moe.h"

static_assert(kMaxExperts <= kMaxRouterExperts);

std::vector<BufferRow> MoeMlp::rows(const ModelConfig& c, const DecoderOptions& options) {
    const int64_t E = c.num_experts, C = c.hidden_size, F = c.ffn_hidden_size;
    const int64_t P = options.experts ? options.experts->ranks : 1, K = c.experts_per_token * P;   // of all ranks
    const int64_t R = P > 1 ? options.rows_of_token : K;
    std::vector<BufferRow> rows = PreNorm::rows(c, LinearKind::kUp, kSavedUnlessBlock, kSavedUnlessNormAct);
    rows.insert(rows.end(), {
        {"router probabilities", E, Form::kStat, kSavedUnlessBlock},
        {"router log-sum-exp", 1, Form::kStat, kSavedUnlessBlock},
        {"experts of tokens", K, Form::kIndex, kSaved},   // so that recomputation routes alike
        {"weights of experts", K, Form::kStat, kSavedUnlessBlock},
        {"up", R * 2 * F, Form::kWorking, kSavedUnlessBlock},
        {"activation", R * F, Form::kWorking, kSavedUnlessNormAct, LinearKind::kDown},
        {"activation, FP8", R * F, Form::kFp8Rowwise, kSavedUnlessNormAct, LinearKind::kDown},
        {"rows of experts", R * C, Form::kWorking, kScratch},
        {"d activation", R * F, Form::kWorking, kScratch},
        {"d weights", K, Form::kStat, kScratch},
        {"d logits", E, Form::kWorking, kScratch},
        {"d norm", C, Form::kWorking, kScratch},
        {"slots of rows", R, Form::kIndex, kScratch},
        {"rows of slots", K, Form::kIndex, kScratch},
        {"sums of ranks", P * C, Form::kStat, kScratch},
    });
    return rows;
}

MoeMlp::MoeMlp(ModelContext& model)
    : model_(model), config_(model.config), exchange_(model.options.experts),
      buffers_(model, rows(config_, model.options), 0, static_cast<int>(config_.num_layers)),
      norm_(model, buffers_, LinearKind::kUp) {
    if (config_.shared_experts > 0) shared_.emplace(model, config_.shared_experts * config_.ffn_hidden_size, true);
}

RouterForm MoeMlp::form() const {
    return {.sigmoid = config_.sigmoid_router(), .normalize = config_.normalize_experts,
            .scale = static_cast<float>(config_.routed_scale)};
}

// ---- the stages

// again: the values were recorded in the forward pass. Weight gradients transpose what they read.
static XUsage usage(bool again) { return {.rowwise = true, .transposed = false, .recomputed = again}; }

// again: in the backward pass, with the experts of the forward pass and without statistics.
void MoeMlp::route(Ctx& ctx, int layer, int64_t N, bool again) {
    const Tensor probs = buffers_.at(kProbs, layer, N), lse = buffers_.at(kLse, layer, N),
                 all_experts = buffers_.at(kExperts, layer, N), all_weights = buffers_.at(kWeights, layer, N),
                 experts = own(all_experts);
    linear_forward(ctx, router(layer), probs, {.unquantized = x(layer, N)}, N);
    ops::router_forward(ctx, {.probs = probs, .lse = lse, .experts = experts,
                              .weights = own(all_weights),
                              .bias = model_.weight(model_.params_of(layer).router_bias), .N = N, .E = E(), .K = K(),
                              .form = form(), .chosen = again, .even = model_.options.even_experts});
    if (exchange_ && !again) exchange_->all_gather(ctx, layer, all_experts);
    if (exchange_) exchange_->all_gather(ctx, layer, all_weights);
    const Tensor& stats = model_.options.router_stats;
    if (again || !model_.training || !stats) return;
    const int64_t width = router_stats_elems(E());
    Arena::Scope scope(ctx, model_.arena);
    ops::router_stats(ctx, {.stats = stats.slice(layer * width, width),
                            .scratch = model_.scratch(Dtype::kFp64, kRouterPartials * width), .probs = probs,
                            .lse = lse, .experts = experts, .N = N, .E = E(), .K = K(), .sigmoid = form().sigmoid});
}

MoeMlp::Order MoeMlp::dispatch(Ctx& ctx, int layer, int64_t N) {
    const Order order{.offsets = model_.scratch(Dtype::kInt32, here() + 1),
                      .row_slots = buffers_.scratch(kRowSlots, N), .slot_rows = buffers_.scratch(kSlotRows, N)};
    Arena::Scope scope(ctx, model_.arena);
    const Tensor& rows = model_.options.expert_rows;
    ops::sort_experts(ctx, {.offsets = order.offsets,
                            .scratch = model_.scratch(Dtype::kInt32, ceil_div(P() * N * K(), kSortChunk) * here()),
                            .row_slots = order.row_slots, .slot_rows = order.slot_rows,
                            .experts = buffers_.at(kExperts, layer, N), .N = P() * N, .E = here(), .K = K(),
                            .first = first(), .load = rows ? rows.slice(layer, 1) : Tensor{}});
    return order;
}

// `in` of all ranks, in the order of ranks; scratch of the caller's scope.
Tensor MoeMlp::of_all(Ctx& ctx, int layer, Tensor in) {
    if (!exchange_ || !in) return in;
    const Tensor all = model_.scratch(in.dtype, P() * in.elems);
    device::copy_on_device(ctx, own(all).data, in.data, in.bytes());
    exchange_->all_gather(ctx, layer, all);
    return all;
}

// The rows of the tokens of all ranks in the order of experts, in FP8 if `in` is; scratch of the caller's scope.
LinearOperand MoeMlp::gathered(Ctx& ctx, int layer, const Order& order, Fp8Role role, const LinearOperand& in,
                               int64_t N) {
    const int64_t C = config_.hidden_size;
    const Fp8Operand& codes = in.fp8.rowwise;
    LinearOperand out;
    if (codes.data)
        out.fp8.rowwise = model_.fp8.alloc_operand(role, Fp8Layout::kRowwise, R(N), C, model_.take_scratch());
    else out.unquantized = buffers_.scratch(kRows, N);
    Arena::Scope scope(ctx, model_.arena);
    ops::gather_rows(ctx, {.out = codes.data ? out.fp8.rowwise.data : out.unquantized,
                           .in = of_all(ctx, layer, codes.data ? codes.data : in.unquantized),
                           .slot_rows = order.slot_rows, .N = P() * N, .K = K(), .C = C,
                           .out_scale_inv = out.fp8.rowwise.scale_inv,
                           .in_scale_inv = of_all(ctx, layer, codes.scale_inv), .parts = P()});
    return out;
}

// out (N, C) = or += the sums of the rows of each token of this rank, from the rows of all ranks.
void MoeMlp::combine(Ctx& ctx, int layer, const Order& order, Tensor out, Tensor rows, int64_t N, bool accumulate) {
    Arena::Scope scope(ctx, model_.arena);
    const int64_t C = config_.hidden_size;
    const Tensor sums = exchange_ ? buffers_.scratch(kPartial, N) : out;
    ops::combine_rows(ctx, {.out = sums, .in = rows, .slot_rows = order.slot_rows,
                            .experts = buffers_.at(kExperts, layer, N), .N = P() * N, .K = K(), .C = C, .E = E(),
                            .accumulate = accumulate && !exchange_});
    if (!exchange_) return;
    const Tensor arrived = buffers_.scratch(kPartial, N);
    exchange_->all_to_all(ctx, layer, arrived, sums);
    ops::combine_rows(ctx, {.out = out, .in = arrived, .slot_rows = {}, .experts = {}, .N = N, .K = P(), .C = C,
                            .E = P(), .accumulate = accumulate});
}

// The gradients of the weights of this rank's tokens, each of which one rank has computed; those of the others are 0.
Tensor MoeMlp::returned(Ctx& ctx, int layer, Tensor dweights, int64_t N) {
    if (!exchange_) return dweights;
    const Tensor arrived = buffers_.scratch(kDweights, N);
    exchange_->all_to_all(ctx, layer, arrived, dweights);
    ops::combine_rows(ctx, {.out = own(dweights), .in = arrived, .slot_rows = {}, .experts = {}, .N = N, .K = P(),
                            .C = K(), .E = P()});
    return own(dweights);
}

void MoeMlp::matmul(Ctx& ctx, GemmLayout layout, int layer, LinearKind kind, const Order& order, Tensor D,
                    const LinearOperand& A, const LinearOperand& B, int64_t N) {
    const Linear linear = model_.linear(layer, kind);
    const bool forward = layout == GemmLayout::kForward, wgrad = layout == GemmLayout::kWgrad;
    GroupedGemmArgs args{.D = wgrad ? linear.dweight : D, .A = A.unquantized,
                         .B = wgrad ? B.unquantized : linear.weight, .offsets = order.offsets, .E = here(),
                         .M = wgrad ? linear.out : R(N), .N = forward ? linear.out : linear.in,
                         .K = wgrad ? R(N) : forward ? linear.in : linear.out, .layout = layout,
                         .accumulate = wgrad && linear.accumulate};
    if (linear.fp8 && !(wgrad && linear.fp8->bf16_wgrad)) {
        const Fp8Operand &a = wgrad ? A.fp8.transposed : A.fp8.rowwise,
                         &b = wgrad ? B.fp8.transposed : forward ? linear.fp8->weight : linear.fp8->weight_transposed;
        args.A = a.data, args.A_scale_inv = a.scale_inv, args.B = b.data, args.B_scale_inv = b.scale_inv;
    }
    ops::grouped_gemm(ctx, args);
}

// Call it once the gradient of `up` is known. FP8 operands are transposed to the memory of `up` as far as it suffices,
// and to scratch.
void MoeMlp::wgrad(Ctx& ctx, int layer, LinearKind kind, const Order& order, const LinearOperand& dy,
                   const LinearOperand& x, int64_t N) {
    Arena::Scope scope(ctx, model_.arena);
    const Fp8Linear* fp8 = model_.fp8.linear(layer, kind);
    const Tensor idle = idle_up(layer, N);
    int64_t used = 0;
    const auto take = [&](Dtype dtype, int64_t elems) {
        const int64_t begin = used, end = begin + round_up(elems * dtype_bytes(dtype), 256);
        if (end > idle.bytes()) return model_.scratch(dtype, elems);
        used = end;
        return Tensor{static_cast<char*>(idle.data) + begin, dtype, elems};
    };
    const auto transposed = [&](Fp8Role role, const LinearOperand& rows) -> LinearOperand {
        if (!fp8 || fp8->bf16_wgrad) return rows;
        const Fp8Operand& in = rows.fp8.rowwise;
        const int64_t width = in.data.elems / R(N);
        const Fp8Operand out =
            model_.fp8.alloc_operand(role, Fp8Layout::kTransposed, width, padded_rows(R(N), here()), take);
        ops::transpose_scaled(ctx, {.out = out.data, .out_scale_inv = out.scale_inv, .in = in.data,
                                    .in_scale_inv = in.scale_inv, .offsets = order.offsets,
                                    .counts = model_.fp8.counts(*fp8, role), .R = R(N), .C = width, .E = here()});
        return {.unquantized = {}, .fp8 = {.rowwise = {}, .transposed = out}};
    };
    const LinearOperand A = transposed(Fp8Role::kDy, dy), B = transposed(Fp8Role::kX, x);
    matmul(ctx, GemmLayout::kWgrad, layer, kind, order, {}, A, B, N);
}

void MoeMlp::up(Ctx& ctx, int layer, const Order& order, const LinearOperand& x, int64_t N) {
    Arena::Scope scope(ctx, model_.arena);
    matmul(ctx, GemmLayout::kForward, layer, LinearKind::kUp, order, buffers_.at(kUp, layer, N),
           gathered(ctx, layer, order, Fp8Role::kX, x, N), {}, N);
}

LinearOperand MoeMlp::activation(Ctx& ctx, int layer, const Order& order, int64_t N, bool again) {
    const PendingOperand act = model_.begin_x(model_.linear(layer, LinearKind::kDown), saved_act(layer, N), R(N),
                                              usage(again));
    ops::expert_activation_forward(ctx, {.out = act.out, .in = buffers_.at(kUp, layer, N),
                                         .weights = buffers_.at(kWeights, layer, N), .row_slots = order.row_slots,
                                         .R = R(N), .F = config_.ffn_hidden_size, .quant = act.quant});
    return model_.finish(ctx, act);
}

// ---- forward

// All before the matmul `down`, and its x. Memory of the results is scratch of the caller's scope. again: see route().
std::pair<MoeMlp::Order, LinearOperand> MoeMlp::before_down(Ctx& ctx, int layer, const NormInput& input, int64_t N,
                                                            bool again) {
    const LinearOperand x = norm_.forward(ctx, layer, input, N, usage(again));
    route(ctx, layer, N, again);
    const Order order = dispatch(ctx, layer, N);
    up(ctx, layer, order, x, N);
    return {order, activation(ctx, layer, order, N, again)};
}

void MoeMlp::forward(Ctx& ctx, int layer, const NormInput& input, Tensor branch, const DeviceBatch& batch) {
    Arena::Scope scope(ctx, model_.arena);
    const int64_t N = batch.rows();
    const auto [order, act] = before_down(ctx, layer, input, N, false);
    const Tensor y = buffers_.scratch(kRows, N);
    matmul(ctx, GemmLayout::kForward, layer, LinearKind::kDown, order, y, act, {}, N);
    if (shared_) shared_->forward(ctx, layer, {.unquantized = x(layer, N)}, branch, N);
    combine(ctx, layer, order, branch, y, N, shared_.has_value());
}

void MoeMlp::recompute(Ctx& ctx, int layer, const NormInput& input, const DeviceBatch& batch) {
    if (!buffers_.recomputed(kUp)) return;
    Arena::Scope scope(ctx, model_.arena);
    const int64_t N = batch.rows();
    before_down(ctx, layer, input, N, true);
    if (shared_) shared_->recompute(ctx, layer, {.unquantized = x(layer, N)}, N);
}

// ---- backward

// Backward of down and of the activation. The gradient of `up` is in its place, or in FP8 scratch of the caller.
LinearOperand MoeMlp::dup_backward(Ctx& ctx, int layer, const Order& order, const LinearOperand& dy, Tensor dweights,
                                   int64_t N) {
    const Linear linear = model_.linear(layer, LinearKind::kUp);
    const Tensor in = buffers_.at(kUp, layer, N);
    LinearOperand to{.unquantized = in};
    if (linear.fp8)
        to.fp8.rowwise =
            model_.fp8.alloc_operand(Fp8Role::kDy, Fp8Layout::kRowwise, R(N), linear.out, model_.take_scratch());
    Arena::Scope scope(ctx, model_.arena);
    const PendingOperand dup = model_.begin_dy(linear, to, R(N), false);
    LinearOperand dys = gathered(ctx, layer, order, Fp8Role::kDy, dy, N);
    {
        Arena::Scope act_scope(ctx, model_.arena);
        const Tensor dact = buffers_.scratch(kDact, N);
        matmul(ctx, GemmLayout::kDgrad, layer, LinearKind::kDown, order, dact, dys, {}, N);
        if (exchange_) device::fill_bytes(ctx, dweights.data, 0, dweights.bytes());
        ops::expert_activation_backward(ctx, {.din = dup.out, .dweights = dweights, .dout = dact, .in = in,
                                              .weights = buffers_.at(kWeights, layer, N),
                                              .row_slots = order.row_slots, .R = R(N), .F = config_.ffn_hidden_size,
                                              .quant = dup.quant});
    }
    const Fp8Linear* down = model_.fp8.linear(layer, LinearKind::kDown);
    if (down && down->bf16_wgrad)
        dys = gathered(ctx, layer, order, Fp8Role::kDy, {.unquantized = dy.unquantized}, N);
    wgrad(ctx, layer, LinearKind::kDown, order, dys, saved_act(layer, N), N);
    return model_.finish(ctx, dup);
}

// Returns the gradients of the gathered rows (R, C), scratch of the caller's scope.
Tensor MoeMlp::up_backward(Ctx& ctx, int layer, const Order& order, const LinearOperand& dup, int64_t N) {
    {
        Arena::Scope scope(ctx, model_.arena);
        wgrad(ctx, layer, LinearKind::kUp, order, dup,
              gathered(ctx, layer, order, Fp8Role::kX, norm_.x(layer, N), N), N);
    }
    const Tensor dxs = buffers_.scratch(kRows, N);
    matmul(ctx, GemmLayout::kDgrad, layer, LinearKind::kUp, order, dxs, dup, {}, N);
    return dxs;
}

LinearOperand MoeMlp::backward(Ctx& ctx, int layer, const LinearOperand& dy, const LinearOperand& to,
                               const Linear& below, const DeviceBatch& batch, const StepState* state) {
    Arena::Scope scope(ctx, model_.arena);
    const int64_t N = batch.rows();
    const DecoderOptions& options = model_.options;
    const Tensor dweights = buffers_.scratch(kDweights, N), dlogits = buffers_.scratch(kDlogits, N),
                 dnorm = buffers_.scratch(kDnorm, N);
    const Order order = dispatch(ctx, layer, N);
    if (buffers_.recomputed(kAct) && !buffers_.recomputed(kUp)) {   // --recompute norm-act
        Arena::Scope codes(ctx, model_.arena);
        activation(ctx, layer, order, N, true);
        norm_.forward(ctx, layer, {.in = residual(layer, N)}, N, usage(true));
    }
    const LinearOperand dup = dup_backward(ctx, layer, order, dy, dweights, N);
    ops::router_backward(ctx, {.dlogits = dlogits, .dweights = returned(ctx, layer, dweights, N),
                               .probs = buffers_.at(kProbs, layer, N), .lse = buffers_.at(kLse, layer, N),
                               .experts = own(buffers_.at(kExperts, layer, N)),
                               .weights = own(buffers_.at(kWeights, layer, N)),
                               .load = options.expert_load.slice(layer * E(), E()), .state = state, .N = N,
                               .E = E(), .K = K(), .form = form(),
                               .aux = static_cast<float>(options.aux_loss),
                               .z = static_cast<float>(options.router_z_loss)});
    const LinearOperand x{.unquantized = this->x(layer, N)};
    if (shared_) shared_->backward(ctx, layer, dnorm, {.unquantized = dy.unquantized}, x, N);
    linear_backward(ctx, router(layer), dnorm, {.unquantized = dlogits}, x, N, shared_.has_value());
    const Tensor dxs = up_backward(ctx, layer, order, dup, N);
    combine(ctx, layer, order, dnorm, dxs, N, true);
    return norm_.backward(ctx, layer, {.dout = dnorm, .dresidual = dy.unquantized}, to, below, N);
}
