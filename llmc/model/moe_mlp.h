// A mixture of experts: branch = sum over the K chosen experts e of down_e(swiglu(up_e(x)) * weight_e) with x =
// norm(residual stream), plus shared(x), the shared experts as one MLP, where the model has some. Sources: Shazeer et
// al., arXiv 1701.06538; shared experts: DeepSeekMoE, arXiv 2401.06066.
// Five stages: route (router, top-k), dispatch (sort by expert, gather rows), experts (grouped matmuls), combine, and
// the backward of each. No token is dropped, and the numbers of rows of experts stay on the device. In FP8, x and dy
// are quantized once and gathered as codes, and saved are rowwise codes, of which weight gradients take transposed ones
// (FP8-Flow-MoE, arXiv 2511.02302).
// With expert parallelism (DecoderOptions::experts) P ranks have E / P experts each: they all-gather tokens with their
// experts and weights, so that sizes are fixed, and each rank returns the sum over its experts, a subtree of that of
// CombineRowsArgs, rounded to the working type, to the token's rank. Exchanges begin as early as possible, and what
// does not need them runs before their results are waited for: above all weight gradients while the gradients of tokens
// return.
#pragma once
#include <optional>
#include <vector>

#include "llmc/model/feed_forward.h"
#include "llmc/model/mlp.h"
#include "llmc/ops/ops_moe.h"

class MoeMlp : public Mlp {
public:
    explicit MoeMlp(ModelContext& model);

    Tensor residual(int layer, int64_t N) const override { return norm_.residual(layer, N); }
    Linear output(int layer) const override { return model_.linear(layer, LinearKind::kDown); }
    void forward(Ctx& ctx, int layer, const NormInput& input, Tensor branch, const DeviceBatch& batch) override;
    void recompute(Ctx& ctx, int layer, const NormInput& input, const DeviceBatch& batch) override;
    LinearOperand backward(Ctx& ctx, int layer, const LinearOperand& dy, const LinearOperand& to, const Linear& below,
                           const DeviceBatch& batch, const StepState* state) override;

private:
    enum Row {
        kProbs = PreNorm::kRows, kLse, kExperts, kWeights, kSpread, kUp, kAct, kActFp8, kRows, kDact, kDweights,
        kDlogits, kDnorm, kRowSlots, kSlotRows, kPartial, kDspread
    };
    static std::vector<BufferRow> rows(const ModelConfig& config, const DecoderOptions& options);

    // The order of rows, see SortExpertsArgs; scratch of the caller's scope.
    struct Order {
        Tensor offsets, row_slots, slot_rows;
    };
    // What an exchange brings, once it is waited for; scratch of the caller's scope. number: see ExpertExchange.
    struct Exchanged {
        Tensor data, scale_inv = {};
        int64_t number = 0;
    };
    int64_t E() const { return config_.num_experts; }
    int64_t K() const { return config_.experts_per_token; }
    int64_t P() const { return exchange_ ? exchange_->ranks : 1; }
    int64_t here() const { return E() / P(); }   // experts of this rank
    int64_t first() const { return exchange_ ? exchange_->rank * here() : 0; }
    // There is memory for R(N) rows of N tokens of each rank: those of row_tokens(N). A short pass takes as much as a
    // micro-batch has, up to all rows that it can get, so that none is left out which --moe-capacity has memory for. A
    // multiple of 4, which scales of rows in FP8 need.
    int64_t row_tokens(int64_t N) const {
        if (P() == 1) return N;
        const int64_t most = P() * N * std::min(K(), here());
        const int64_t tokens = ceil_div(most, model_.options.rows_of_token);
        return std::min(model_.options.max_rows(), round_up(tokens, int64_t{4}));
    }
    int64_t R(int64_t N) const { return P() > 1 ? model_.options.rows_of_token * row_tokens(N) : N * K(); }
    // This rank's shard of what all ranks have of their tokens.
    Tensor own(Tensor all) const {
        const int64_t elems = all.elems / P();
        return all.slice(exchange_ ? exchange_->rank * elems : 0, elems);
    }
    Linear router(int layer) const { return model_.linear_of(model_.params_of(layer).router_weight); }
    // The biases of down times weights of experts are a matmul of kSpread (N, E) and these (E, C), for this rank's
    // tokens and all experts: every rank has all of them.
    Linear down_biases(int layer) const;
    ExpertBias up_biases(int layer, int64_t N) const {
        return {.values = model_.weight(model_.params_of(layer).experts_up_bias),
                .experts = buffers_.at(kExperts, layer, N), .first = first()};
    }
    RouterForm form() const;
    Tensor x(int layer, int64_t N) const { return norm_.x(layer, N).unquantized; }
    Tensor up_rows(int layer, int64_t N) const { return buffers_.at(kUp, layer, row_tokens(N)); }
    LinearOperand saved_act(int layer, int64_t N) const { return buffers_.x(kAct, kActFp8, layer, row_tokens(N)); }

    void route(Ctx& ctx, int layer, int64_t N, bool again);
    Order order_memory(int64_t N) const;
    void sort(Ctx& ctx, int layer, const Order& order, int64_t N);
    std::pair<Order, LinearOperand> before_down(Ctx& ctx, int layer, const NormInput& input, int64_t N, bool again);
    Exchanged of_all(Ctx& ctx, const char* what, int layer, const LinearOperand& in);
    LinearOperand gathered(Ctx& ctx, const Order& order, Fp8Role role, const Exchanged& in, int64_t N);
    Exchanged sums(Ctx& ctx, GemmLayout layout, int layer, LinearKind kind, const Order& order, Tensor out,
                   const LinearOperand& in, int64_t N, bool accumulate);
    void combine(Ctx& ctx, Tensor out, const Exchanged& sums, int64_t width, bool accumulate);
    void clear_counted(Ctx& ctx, const QuantOut& quant) const;
    LinearOperand activation(Ctx& ctx, int layer, const Order& order, int64_t N, bool again);
    LinearOperand dup_backward(Ctx& ctx, int layer, const Order& order, const LinearOperand& dys, Tensor dweights,
                               int64_t N);
    void router_backward(Ctx& ctx, int layer, const LinearOperand& dy, Tensor dweights, Tensor dnorm, int64_t N,
                         const StepState* state);
    // D = the matmul of each expert with a weight (forward, dgrad), or the gradient of the weight = or += (wgrad: D is
    // empty, A is dy and B is x); see GroupedGemmArgs.
    void matmul(Ctx& ctx, GemmLayout layout, int layer, LinearKind kind, const Order& order, Tensor D,
                const LinearOperand& A, const LinearOperand& B, int64_t N);
    void wgrad(Ctx& ctx, int layer, LinearKind kind, const Order& order, const LinearOperand& dy,
               const LinearOperand& x, int64_t N);
    // The memory of `up` where its gradient is not in its place, for use once the gradient is there.
    Tensor idle_up(int layer, int64_t N) const {
        const Fp8Linear* up = model_.fp8.linear(layer, LinearKind::kUp);
        return up && !up->bf16_wgrad ? up_rows(layer, N) : Tensor{};
    }

    ModelContext& model_;
    const ModelConfig& config_;
    const ExpertExchange* const exchange_;
    const int first_layer_;   // with experts
    ActivationBuffers buffers_;
    PreNorm norm_;
    std::optional<FeedForward> shared_;
};
