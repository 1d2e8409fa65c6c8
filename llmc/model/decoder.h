// The decoder: one transformer for all families. A block has two parts, each of which normalizes the residual
// stream and adds a branch to it:
//   mid_l   = x_l   + attention_l(x_l)
//   x_{l+1} = mid_l + mlp_l(mid_l)
// The norm that follows performs the addition; or a norm of the branch does (see NormPlace), which may be the only one.
#pragma once
#include <vector>

#include "llmc/model/attention.h"
#include "llmc/model/mlp.h"
#include "llmc/model/post_norm.h"

class Decoder {
public:
    // Owns none of its arguments. Allocates the saved activations from the arena; each call frees its own scratch.
    Decoder(const ModelConfig& config, const ParamTable& table, const DecoderOptions& options, Arena& arena,
            ParamStore& store, Fp8State& fp8);

    // Uploads the constants of the model. Call once, after construction.
    void upload_constants(Ctx& ctx) { model_.upload_constants(ctx); }

    // Runs embedding, all blocks and the final norm; saves what backward needs if `training`.
    void forward(Ctx& ctx, const DeviceBatch& batch, bool training);

    // The functions below run after a forward of `batch`.
    // state->loss_sum += the losses of the counted targets. host_losses (B*T) stat, optional: = the loss of each token,
    // 0 where the target is ignored.
    void loss(Ctx& ctx, const DeviceBatch& batch, StepState* state, void* host_losses = nullptr);

    // loss(), and all gradients += those of loss * state->dloss_mul (1 / counted tokens). With DecoderOptions::z_loss,
    // the gradients include those of the z-loss, and state->z_sum += the squared log-sum-exps of the counted targets.
    void loss_and_backward(Ctx& ctx, const DeviceBatch& batch, StepState* state);

    // logits (padded_vocab) T = those of one row, each before logit_of().
    double logit_of(double product) const;
    void logits_row(Ctx& ctx, const DeviceBatch& batch, int64_t row, Tensor logits);

    // Empty for a parameter that the model does not have (-1).
    Tensor weight(int param) const { return model_.weight(param); }
    Tensor grad(int param) const { return model_.grad(param); }
    const ActivationOffload& offload() const { return model_.offload; }
    Tensor cos_sin() const { return model_.cos_sin; }
    int64_t activations_begin() const { return activations_begin_; }   // in the arena, see Arena::Instead
    ParamStore& store() const { return *model_.store; }
    void set_store(ParamStore& store) { model_.store = &store; }

private:
    enum Row { kBranch = PreNorm::kRows, kLogits, kLosses, kSquares, kDnorm };
    static std::vector<BufferRow> rows(const ModelConfig& config, const DecoderOptions& options);

    Mlp& mlp(int layer) const { return *mlps_[mlps_.size() > 1 && config_.has_experts(layer)]; }
    Linear head() const { return model_.linear(head_layer_, LinearKind::kHead); }
    // What the part of a block with this output writes.
    Tensor branch(const PostNorm& norm, int layer, int64_t N) const {
        return config_.post_norms() ? norm.branch(layer, N) : buffers_.at(kBranch, head_layer_, N);
    }
    // The linear whose result was added last to the stream that the layer reads, if no norm came between.
    Linear below(int layer) const {
        return layer > 0 && !config_.post_norms() ? mlp(layer - 1).output(layer - 1) : Linear{};
    }
    float embedding_mul() const;
    void embed(Ctx& ctx, const DeviceBatch& batch);
    void recompute_block(Ctx& ctx, int layer, const DeviceBatch& batch);
    // Rows [first, first + count) of a micro-batch, which head and loss compute at once.
    struct Rows {
        int64_t first, count;
    };
    bool chunks() const { return model_.options.loss_chunk > 0; }
    Rows chunk_of(int64_t row, int64_t N) const;
    template <typename Body> void for_each_chunk(int64_t N, Body&& body) const;
    LinearOperand head_x(Ctx& ctx, Rows rows, int64_t N);
    void head_logits(Ctx& ctx, Rows rows, int64_t N, Tensor logits);
    void classify(Ctx& ctx, const DeviceBatch& batch, StepState* state, Rows rows, Tensor logits, Tensor losses,
                  bool backward, Tensor squares = {});
    void sum_losses(Ctx& ctx, Tensor losses, double* sum);
    void dlogits_backward(Ctx& ctx, const LinearOperand& x, Tensor logits, Tensor dnorm, const int32_t* targets,
                          int64_t N, bool first);
    LinearOperand head_backward(Ctx& ctx, const DeviceBatch& batch, StepState* state, const LinearOperand& to);
    void before(Ctx& ctx, int layer, Pass pass) { model_.store->before_layer(ctx, layer, pass); }
    void after(Ctx& ctx, int layer, Pass pass) { model_.store->after_layer(ctx, layer, pass); }

    ModelContext model_;
    // The rows of the position embedding, or of its gradient, from this rank's first position on.
    Tensor positions_from(Tensor wpe, int64_t T) const;

    const ModelConfig& config_;
    const int64_t activations_begin_;
    const int head_layer_;   // the last block's number + 1
    Attention attention_;
    const std::vector<std::unique_ptr<Mlp>> mlps_;   // see make_mlps
    PostNorm after_attention_, after_mlp_;
    ActivationBuffers buffers_;
    PreNorm final_norm_;
};
