// The decoder: one transformer for GPT-2 and Llama. Pre-norm blocks of two parts, each of which adds a branch to the
// residual stream:
//   mid_l   = x_l   + attention_l(x_l)
//   x_{l+1} = mid_l + mlp_l(mid_l)
// where every addition happens inside the norm that follows it.
#pragma once
#include <vector>

#include "llmc/model/attention.h"
#include "llmc/model/mlp.h"

class Decoder {
public:
    // Neither the store nor `fp8` is owned. Takes its saved activations from the arena; scratch is taken and given back
    // within each call.
    Decoder(const ModelConfig& config, const ParamTable& table, const DecoderOptions& options, Arena& arena,
            ParamStore& store, Fp8State& fp8);

    // Constants of the model that live on the device. Once, after construction.
    void upload_constants(Ctx& ctx) { attention_.upload_constants(ctx); }

    // Forward through all blocks, keeping what backward needs if `training`.
    void forward(Ctx& ctx, const DeviceBatch& batch, bool training);

    // After forward: adds the losses of the counted targets to state->loss_sum. host_losses: a copy of each token's,
    // (B*T) stat, 0 where the target is not counted.
    void loss(Ctx& ctx, const DeviceBatch& batch, StepState* state, void* host_losses = nullptr);

    // After forward: loss as above, and gradients += of everything (divided by the counted tokens through
    // state->dloss_mul).
    void loss_and_backward(Ctx& ctx, const DeviceBatch& batch, StepState* state);

    // After forward of `batch`: logits (padded_vocab) T of one of its rows, into `logits`.
    void logits_row(Ctx& ctx, const DeviceBatch& batch, int64_t row, Tensor logits);
    // After forward: all logits (B*T, padded_vocab) T; for tests.
    void logits_all(Ctx& ctx, Tensor logits, int64_t N);

    // Empty for a parameter that the model does not have (-1).
    Tensor weight(int param) const { return model_.weight(param); }
    Tensor grad(int param) const { return model_.grad(param); }
    ParamStore& store() const { return *model_.store; }
    void set_store(ParamStore& store) { model_.store = &store; }

private:
    enum Row { kBranch = PreNorm::kRows, kLogits, kLosses, kDnorm };
    static std::vector<BufferRow> rows(const ModelConfig& config);

    Linear head() const { return model_.linear(head_layer_, LinearKind::kHead); }
    Tensor branch(int64_t N) const { return buffers_.at(kBranch, head_layer_, N); }
    void embed(Ctx& ctx, const DeviceBatch& batch);
    void recompute_block(Ctx& ctx, int layer, const DeviceBatch& batch);
    LinearOperand head_backward(Ctx& ctx, const DeviceBatch& batch, StepState* state, const LinearOperand& to);
    void classify(Ctx& ctx, const DeviceBatch& batch, StepState* state, Tensor logits, bool backward,
                  void* host_losses = nullptr);
    void before(Ctx& ctx, int layer, Pass pass) { model_.store->before_layer(ctx, layer, pass); }
    void after(Ctx& ctx, int layer, Pass pass) { model_.store->after_layer(ctx, layer, pass); }

    ModelContext model_;
    const ModelConfig& config_;
    const int head_layer_;   // its number: that of the last block + 1
    Attention attention_;    // of all blocks
    Mlp mlp_;
    ActivationBuffers buffers_;
    PreNorm final_norm_;
};
