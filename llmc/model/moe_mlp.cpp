#include "llmc/model/moe_mlp.h"

static_assert(kMaxExperts <= kMaxRouterExperts);

// The exchanges, see ExpertExchange.
constexpr const char *kTokens = "tokens of layers.", *kSums = "sums of experts of layers.",
                     *kGradients = "gradients of tokens of layers.",
                     *kTokensAgain = "tokens for weight gradients of layers.",
                     *kWeightGradients = "gradients of router weights of layers.",
                     *kGradientSums = "sums of gradients of tokens of layers.";

std::vector<BufferRow> MoeMlp::rows(const ModelConfig& c, const DecoderOptions& options) {
    const int64_t E = c.num_experts, C = c.hidden_size, F = c.ffn_hidden_size;
    const int64_t P = options.experts ? options.experts->ranks : 1, K = c.experts_per_token * P;   // of all ranks
    const int64_t R = P > 1 ? options.rows_of_token : K, spread = c.gpt_oss() ? E : 0;
    std::vector<BufferRow> rows = PreNorm::rows(c, LinearKind::kUp, kSavedUnlessBlock, kSavedUnlessNormAct, true);
    rows.insert(rows.end(), {
        {"router probabilities", E, Form::kStat, kSavedUnlessBlock},
        {"router log-sum-exp", 1, Form::kStat, kSavedUnlessBlock},
        {"experts of tokens", K, Form::kIndex, kSaved},   // so that recomputation routes alike
        {"weights of experts", K, Form::kStat, kSavedUnlessBlock},
        {"weights of all experts", spread, Form::kWorking, kSavedUnlessBlock},
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
        {"sums of ranks", P * C, Form::kWorking, kScratch},
        {"d weights of all experts", spread, Form::kWorking, kScratch},
    });
    return rows;
}

MoeMlp::MoeMlp(ModelContext& model)
    : model_(model), config_(model.config), exchange_(model.options.experts),
      first_layer_(static_cast<int>(config_.dense_layers)),
      buffers_(model, rows(config_, model.options), first_layer_, static_cast<int>(config_.moe_layers())),
      norm_(model, buffers_, LinearKind::kUp, true) {
    if (config_.shared_experts > 0)
        shared_.emplace(model, config_.shared_experts * config_.ffn_hidden_size, true, first_layer_,
                        static_cast<int>(config_.moe_layers()));
}

Linear MoeMlp::down_biases(int layer) const {
    const int param = model_.params_of(layer).experts_down_bias;
    return {.weight = model_.weight(param), .bias = {}, .dweight = model_.grad(param), .dbias = {},
            .in = config_.hidden_size, .out = E()};
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
    const LayerParams& params = model_.params_of(layer);
    const Tensor probs = buffers_.at(kProbs, layer, N), lse = buffers_.at(kLse, layer, N),
                 all_experts = buffers_.at(kExperts, layer, N), all_weights = buffers_.at(kWeights, layer, N),
                 experts = own(all_experts);
    linear_forward(ctx, router(layer), probs, {.unquantized = x(layer, N)}, N);
    ops::router_forward(ctx, {.probs = probs, .lse = lse, .experts = experts,
                              .weights = own(all_weights),
                              .bias = model_.weight(params.router_bias), .N = N, .E = E(), .K = K(), .form = form(),
                              .chosen = again, .even = model_.options.even_experts,
                              .logit_bias = model_.weight(params.router_logit_bias),
                              .spread = buffers_.at(kSpread, layer, N)});
    if (exchange_ && !again) exchange_->all_gather(ctx, kTokens, layer, all_experts);
    const int64_t number = exchange_ ? exchange_->all_gather(ctx, kTokens, layer, all_weights) : 0;
    if (const Tensor& stats = model_.options.router_stats; stats && model_.training && !again) {
        const int64_t width = router_stats_elems(E());
        Arena::Scope scope(ctx, model_.arena);
        ops::router_stats(ctx, {.stats = stats.slice((layer - first_layer_) * width, width),
                                .scratch = model_.scratch(Dtype::kFp64, kRouterPartials * width), .probs = probs,
                                .lse = lse, .experts = experts, .N = N, .E = E(), .K = K(),
                                .sigmoid = form().sigmoid});
    }
    if (exchange_) exchange_->wait(ctx, number);
}

MoeMlp::Order MoeMlp::order_memory(int64_t N) const {
    return {.offsets = model_.scratch(Dtype::kInt32, here() + 1),
            .row_slots = buffers_.scratch(kRowSlots, row_tokens(N)), .slot_rows = buffers_.scratch(kSlotRows, N)};
}

void MoeMlp::sort(Ctx& ctx, int layer, const Order& order, int64_t N) {
    Arena::Scope scope(ctx, model_.arena);
    const Tensor& rows = model_.options.expert_rows;
    ops::sort_experts(ctx, {.offsets = order.offsets,
                            .scratch = model_.scratch(Dtype::kInt32, ceil_div(P() * N * K(), kSortChunk) * here()),
                            .row_slots = order.row_slots, .slot_rows = order.slot_rows,
                            .experts = buffers_.at(kExperts, layer, N), .N = P() * N, .E = here(), .K = K(),
                            .first = first(), .load = rows ? rows.slice(layer - first_layer_, 1) : Tensor{}});
}

// The codes or values of all ranks, in the order of ranks.
MoeMlp::Exchanged MoeMlp::of_all(Ctx& ctx, const char* what, int layer, const LinearOperand& in) {
    const Fp8Operand& codes = in.fp8.rowwise;
    Exchanged all{.data = codes.data ? codes.data : in.unquantized, .scale_inv = codes.scale_inv};
    for (Tensor* part : {&all.data, &all.scale_inv}) {
        if (!exchange_ || !*part) continue;
        const Tensor mine = *part;
        *part = model_.scratch(mine.dtype, P() * mine.elems);
        device::copy_on_device(ctx, own(*part).data, mine.data, mine.bytes());
        all.number = exchange_->all_gather(ctx, what, layer, *part);
    }
    return all;
}

// The rows of the tokens of all ranks in the order of experts, in FP8 if `in` is; scratch of the caller's scope.
LinearOperand MoeMlp::gathered(Ctx& ctx, const Order& order, Fp8Role role, const Exchanged& in, int64_t N) {
    const int64_t C = config_.hidden_size;
    LinearOperand out;
    if (in.scale_inv)
        out.fp8.rowwise = model_.fp8.alloc_operand(role, Fp8Layout::kRowwise, R(N), C, model_.take_scratch());
    else out.unquantized = buffers_.scratch(kRows, row_tokens(N));
    if (exchange_) exchange_->wait(ctx, in.number);
    ops::gather_rows(ctx, {.out = in.scale_inv ? out.fp8.rowwise.data : out.unquantized, .in = in.data,
                           .slot_rows = order.slot_rows, .N = P() * N, .K = K(), .C = C,
                           .out_scale_inv = out.fp8.rowwise.scale_inv, .in_scale_inv = in.scale_inv, .parts = P()});
    return out;
}

// Begins out (N, C) = or += the sums of the rows of each token of this rank: the results of a matmul of experts on all
// ranks. combine() completes it. Without other ranks it is complete.
MoeMlp::Exchanged MoeMlp::sums(Ctx& ctx, GemmLayout layout, int layer, LinearKind kind, const Order& order, Tensor out,
                               const LinearOperand& in, int64_t N, bool accumulate) {
    Exchanged arrived;
    if (exchange_) arrived.data = buffers_.scratch(kPartial, N), out = buffers_.scratch(kPartial, N);
    {
        Arena::Scope scope(ctx, model_.arena);
        const Tensor rows = buffers_.scratch(kRows, row_tokens(N));
        matmul(ctx, layout, layer, kind, order, rows, in, {}, N);
        ops::combine_rows(ctx, {.out = out, .in = rows, .slot_rows = order.slot_rows,
                                .experts = buffers_.at(kExperts, layer, N), .N = P() * N, .K = K(),
                                .C = config_.hidden_size, .E = E(), .accumulate = accumulate && !exchange_});
    }
    const char* const what = layout == GemmLayout::kForward ? kSums : kGradientSums;
    if (exchange_) arrived.number = exchange_->all_to_all(ctx, what, layer, arrived.data, out);
    return arrived;
}

// out (N, width) = or += the sums over the ranks of what has arrived; nothing without other ranks.
void MoeMlp::combine(Ctx& ctx, Tensor out, const Exchanged& arrived, int64_t width, bool accumulate) {
    if (!exchange_) return;
    exchange_->wait(ctx, arrived.number);
    ops::combine_rows(ctx, {.out = out, .in = arrived.data, .slot_rows = {}, .experts = {}, .N = out.elems / width,
                            .K = P(), .C = width, .E = P(), .accumulate = accumulate});
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

// Where codes are counted, all rows are that there is memory for: those that no token has become blocks of zeros.
void MoeMlp::clear_counted(Ctx& ctx, const QuantOut& quant) const {
    if (P() == 1 || !quant.counts || !quant.rowwise) return;
    device::fill_bytes(ctx, quant.rowwise.data, 0, quant.rowwise.bytes());
    ops::fill_constant(ctx, {.out = quant.rowwise_scale_inv, .value = 1.0f});
}

LinearOperand MoeMlp::activation(Ctx& ctx, int layer, const Order& order, int64_t N, bool again) {
    const PendingOperand act = model_.begin_x(model_.linear(layer, LinearKind::kDown), saved_act(layer, N), R(N),
                                              usage(again));
    clear_counted(ctx, act.quant);
    ops::expert_activation_forward(ctx, {.kind = config_.activation, .out = act.out, .in = up_rows(layer, N),
                                         .weights = buffers_.at(kWeights, layer, N), .row_slots = order.row_slots,
                                         .R = R(N), .F = config_.ffn_hidden_size, .quant = act.quant,
                                         .bias = up_biases(layer, N)});
    return model_.finish(ctx, act);
}

// ---- forward

// All before the matmul `down`, and its x. Memory of the results is scratch of the caller's scope. again: see route().
std::pair<MoeMlp::Order, LinearOperand> MoeMlp::before_down(Ctx& ctx, int layer, const NormInput& input, int64_t N,
                                                            bool again) {
    const Order order = order_memory(N);
    {
        Arena::Scope scope(ctx, model_.arena);
        const Exchanged x = of_all(ctx, kTokens, layer, norm_.forward(ctx, layer, input, N, usage(again)));
        route(ctx, layer, N, again);
        sort(ctx, layer, order, N);
        matmul(ctx, GemmLayout::kForward, layer, LinearKind::kUp, order, up_rows(layer, N),
               gathered(ctx, order, Fp8Role::kX, x, N), {}, N);
    }
    return {order, activation(ctx, layer, order, N, again)};
}

void MoeMlp::forward(Ctx& ctx, int layer, const NormInput& input, Tensor branch, const DeviceBatch& batch) {
    Arena::Scope scope(ctx, model_.arena);
    const int64_t N = batch.rows();
    const auto [order, act] = before_down(ctx, layer, input, N, false);
    const Linear biases = down_biases(layer);
    const bool add = shared_ || biases.weight;
    const auto of_own_tokens = [&] {   // while sums return
        if (shared_) shared_->forward(ctx, layer, {.unquantized = x(layer, N)}, branch, N);
        if (biases.weight)
            ops::gemm(ctx, {.D = branch, .A = buffers_.at(kSpread, layer, N), .B = biases.weight, .M = N,
                            .N = biases.in, .K = biases.out, .layout = GemmLayout::kDgrad});
    };
    if (!exchange_) of_own_tokens();
    const Exchanged returned = sums(ctx, GemmLayout::kForward, layer, LinearKind::kDown, order, branch, act, N, add);
    if (exchange_) of_own_tokens();
    combine(ctx, branch, returned, config_.hidden_size, add);
}

void MoeMlp::recompute(Ctx& ctx, int layer, const NormInput& input, const DeviceBatch& batch) {
    if (!buffers_.recomputed(kUp)) return;
    Arena::Scope scope(ctx, model_.arena);
    const int64_t N = batch.rows();
    before_down(ctx, layer, input, N, true);
    if (shared_) shared_->recompute(ctx, layer, {.unquantized = x(layer, N)}, N);
}

// ---- backward

// Backward of the data of down and of the activation. dys: the gathered dy. The gradient of `up` is in its place, or in
// FP8 scratch of the caller.
LinearOperand MoeMlp::dup_backward(Ctx& ctx, int layer, const Order& order, const LinearOperand& dys, Tensor dweights,
                                   int64_t N) {
    const Linear linear = model_.linear(layer, LinearKind::kUp);
    const Tensor in = up_rows(layer, N);
    LinearOperand to{.unquantized = in};
    if (linear.fp8)
        to.fp8.rowwise =
            model_.fp8.alloc_operand(Fp8Role::kDy, Fp8Layout::kRowwise, R(N), linear.out, model_.take_scratch());
    Arena::Scope scope(ctx, model_.arena);
    const Tensor dbias = model_.grad(model_.params_of(layer).experts_up_bias);
    const PendingOperand dup = model_.begin_dy(linear, to, R(N), static_cast<bool>(dbias));
    const Tensor dact = buffers_.scratch(kDact, row_tokens(N));
    matmul(ctx, GemmLayout::kDgrad, layer, LinearKind::kDown, order, dact, dys, {}, N);
    if (exchange_) device::fill_bytes(ctx, dweights.data, 0, dweights.bytes());
    clear_counted(ctx, dup.quant);
    ops::expert_activation_backward(ctx, {.kind = config_.activation, .din = dup.out, .dweights = dweights,
                                          .dout = dact, .in = in, .weights = buffers_.at(kWeights, layer, N),
                                          .row_slots = order.row_slots, .R = R(N), .F = config_.ffn_hidden_size,
                                          .quant = dup.quant, .bias = up_biases(layer, N)});
    if (dbias)
        ops::expert_bias_backward(ctx, {.dbias = dbias, .dout = dup.out, .offsets = order.offsets, .E = here(),
                                        .R = R(N), .C = linear.out});
    return model_.finish(ctx, dup);
}

// dnorm (N, C) = the gradient of x of the router and of the shared experts, whose weight gradients it computes, too.
// dweights: of this rank's tokens.
void MoeMlp::router_backward(Ctx& ctx, int layer, const LinearOperand& dy, Tensor dweights, Tensor dnorm, int64_t N,
                             const StepState* state) {
    Arena::Scope scope(ctx, model_.arena);
    const DecoderOptions& options = model_.options;
    const Linear biases = down_biases(layer);
    const Tensor dlogits = buffers_.scratch(kDlogits, N), dspread = buffers_.scratch(kDspread, N),
                 dlogit_bias = model_.grad(model_.params_of(layer).router_logit_bias);
    if (biases.weight) {
        linear_forward(ctx, biases, dspread, {.unquantized = dy.unquantized}, N);
        linear_backward(ctx, biases, {}, {.unquantized = buffers_.at(kSpread, layer, N)},
                        {.unquantized = dy.unquantized}, N);
    }
    ops::router_backward(ctx, {.dlogits = dlogits, .dweights = dweights, .probs = buffers_.at(kProbs, layer, N),
                               .lse = buffers_.at(kLse, layer, N), .experts = own(buffers_.at(kExperts, layer, N)),
                               .weights = own(buffers_.at(kWeights, layer, N)),
                               .load = options.expert_load.slice((layer - first_layer_) * E(), E()), .state = state,
                               .N = N, .E = E(), .K = K(), .form = form(),
                               .aux = static_cast<float>(options.aux_loss),
                               .z = static_cast<float>(options.router_z_loss), .dspread = dspread});
    if (dlogit_bias)
        ops::bias_backward(ctx, {.dbias = dlogit_bias, .scratch = model_.scratch(model_.stat, kPartialRows * E()),
                                 .dout = dlogits, .N = N, .C = E()});
    const LinearOperand x{.unquantized = this->x(layer, N)};
    if (shared_) shared_->backward(ctx, layer, dnorm, {.unquantized = dy.unquantized}, x, N);
    linear_backward(ctx, router(layer), dnorm, {.unquantized = dlogits}, x, N, shared_.has_value());
}

LinearOperand MoeMlp::backward(Ctx& ctx, int layer, const LinearOperand& dy, const LinearOperand& to,
                               const Linear& below, const DeviceBatch& batch, const StepState* state) {
    Arena::Scope scope(ctx, model_.arena);
    const int64_t N = batch.rows();
    const Tensor dweights = buffers_.scratch(kDweights, N), dnorm = buffers_.scratch(kDnorm, N);
    const Order order = order_memory(N);
    const Exchanged all_dy = of_all(ctx, kGradients, layer, dy);
    sort(ctx, layer, order, N);
    if (buffers_.recomputed(kAct) && !buffers_.recomputed(kUp)) {   // --recompute norm-act
        Arena::Scope codes(ctx, model_.arena);
        activation(ctx, layer, order, N, true);
        norm_.forward(ctx, layer, {.in = residual(layer, N)}, N, usage(true));
    }
    const Exchanged all_x = of_all(ctx, kTokensAgain, layer, norm_.x(layer, N));
    LinearOperand dys = gathered(ctx, order, Fp8Role::kDy, all_dy, N);
    const LinearOperand dup = dup_backward(ctx, layer, order, dys, dweights, N);
    Exchanged all_dweights{.data = dweights};
    if (exchange_) {   // one rank has computed each gradient; those of the others are 0
        all_dweights.data = buffers_.scratch(kDweights, N);
        all_dweights.number = exchange_->all_to_all(ctx, kWeightGradients, layer, all_dweights.data, dweights);
    }
    const Fp8Linear* down = model_.fp8.linear(layer, LinearKind::kDown);
    const bool bf16_wgrad = down && down->bf16_wgrad;
    Exchanged all_bf16_dy;
    if (bf16_wgrad) all_bf16_dy = of_all(ctx, kTokensAgain, layer, {.unquantized = dy.unquantized});
    const auto router = [&] {   // while sums return
        combine(ctx, own(dweights), all_dweights, K(), false);
        router_backward(ctx, layer, dy, own(dweights), dnorm, N, state);
    };
    if (!exchange_) router();
    const Exchanged returned = sums(ctx, GemmLayout::kDgrad, layer, LinearKind::kUp, order, dnorm, dup, N, true);
    {
        Arena::Scope rows(ctx, model_.arena);
        if (bf16_wgrad) dys = gathered(ctx, order, Fp8Role::kDy, all_bf16_dy, N);
        wgrad(ctx, layer, LinearKind::kDown, order, dys, saved_act(layer, N), N);
    }
    {
        Arena::Scope rows(ctx, model_.arena);
        wgrad(ctx, layer, LinearKind::kUp, order, dup, gathered(ctx, order, Fp8Role::kX, all_x, N), N);
    }
    if (exchange_) router();
    combine(ctx, dnorm, returned, config_.hidden_size, true);
    return norm_.backward(ctx, layer, {.dout = dnorm, .dresidual = dy.unquantized}, to, below, N);
}
