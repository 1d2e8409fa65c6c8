// The decoder: one transformer for GPT-2 and Llama. Pre-norm blocks
//   x_l = mid_{l-1} + down_{l-1}
//   mid_l = x_l + proj(attention(qkv(norm1(x_l))))
//   down_l = down(act(up(norm2(mid_l))))
// where every residual addition happens inside the norm that follows it.
#pragma once
#include <functional>
#include <vector>

#include "llmc/arena.h"
#include "llmc/config.h"
#include "llmc/linear.h"
#include "llmc/ops.h"
#include "llmc/params.h"

// One micro-batch on the device.
struct DeviceBatch {
    const int32_t* tokens = nullptr;        // (B*T)
    const int32_t* targets = nullptr;       // (B*T), kIgnoreIndex is not counted
    const int32_t* token_order = nullptr;   // (B*T), see embedding_backward; backward only
    int32_t* bad_tokens = nullptr;          // (1), +=: ids outside the vocabulary
    int64_t B = 0, T = 0;
};

struct DecoderOptions {
    int64_t max_batch = 1, max_seq = 1;   // largest B and T
    Dtype dtype = Dtype::kBf16;           // working type
    Recompute recompute = Recompute::kNone;
    bool fuse_gelu = false;
};

// Called around the layers, so that sharding can overlap with compute. Layer numbers: -1 embeddings, 0..L-1 blocks,
// L final norm and head.
struct DecoderHooks {
    std::function<void(int layer)> before_layer;   // its parameters are about to be read
    std::function<void(int layer)> grads_ready;    // its gradients are complete for this micro-batch
};

class Decoder {
public:
    // weights and grads: flat buffers of table.flat_elems elements, not owned. Takes its saved activations from the
    // arena; scratch is taken and given back within each call.
    Decoder(const ModelConfig& config, const ParamTable& table, const DecoderOptions& options, Arena& arena,
            Tensor weights, Tensor grads);

    // Constants of the model that live on the device (rope table). Once, after construction.
    void upload_constants(Ctx& ctx);

    // Forward through all blocks, keeping what backward needs.
    void forward(Ctx& ctx, const DeviceBatch& batch);

    // After forward: adds the losses of the counted targets to state->loss_sum.
    void loss(Ctx& ctx, const DeviceBatch& batch, StepState* state);

    // After forward: loss as above, and gradients += of everything (divided by the counted tokens through
    // state->dloss_mul).
    void loss_and_backward(Ctx& ctx, const DeviceBatch& batch, StepState* state);

    // After forward: logits (padded_vocab) T of one row of the batch, into `logits`.
    void logits_row(Ctx& ctx, int64_t row, Tensor logits);
    // After forward: all logits (B*T, padded_vocab) T; for tests.
    void logits_all(Ctx& ctx, Tensor logits, int64_t N);

    Tensor weight(int param) const { return view(weights_, param); }
    Tensor grad(int param) const { return view(grads_, param); }
    DecoderHooks hooks;

private:
    // Saved or shared activations of one block; N rows.
    struct BlockActs {
        Tensor x;                     // (N, C) residual stream that enters the block
        Tensor norm1, mean1, rstd1;   // (N, C), (N), (N)
        Tensor qkv_raw, qk_rstd;      // with qk-norm: its input and statistics
        Tensor qkv;                   // (N, qkv) after rope
        Tensor att, lse;              // (N, q), (B, NH, T)
        Tensor mid;                   // (N, C) residual stream between the halves
        Tensor norm2, mean2, rstd2;
        Tensor up, act;               // (N, up_width), (N, F)
    };

    Tensor view(const Tensor& flat, int param) const;
    Linear linear(int weight, int bias) const;
    Linear head() const;
    void take_activations(Arena& arena);
    BlockActs acts(int layer, int64_t N) const;   // views cut to N rows

    void norm_forward(Ctx& ctx, NormForwardArgs args, int weight, int bias);
    void norm_backward(Ctx& ctx, NormBackwardArgs args, int weight, int bias);
    void norm1_forward(Ctx& ctx, int layer, const BlockActs& a, Tensor in, Tensor residual, Tensor residual_out,
                       int64_t N);
    void attention_half_forward(Ctx& ctx, int layer, const BlockActs& a, Tensor branch, int64_t B, int64_t T);
    void activation_forward(Ctx& ctx, const BlockActs& a, int64_t N);
    void mlp_up_forward(Ctx& ctx, int layer, const BlockActs& a, int64_t N);
    void block_inner_forward(Ctx& ctx, int layer, const BlockActs& a, Tensor branch, int64_t B, int64_t T);
    void recompute_block(Ctx& ctx, int layer, const BlockActs& a, int64_t B, int64_t T);
    void mlp_backward(Ctx& ctx, int layer, const BlockActs& a, Tensor dresidual, int64_t N);
    void attention_half_backward(Ctx& ctx, int layer, const BlockActs& a, Tensor dresidual, int64_t B, int64_t T);
    void classify(Ctx& ctx, const DeviceBatch& batch, StepState* state, Tensor logits, bool backward);
    void ready(int layer);
    void before(int layer);
    float softmax_mul() const;
    Tensor bias_scratch_for(int64_t width);   // empty without biases
    RopeArgs rope_args(Tensor qkv, int64_t N, int64_t T) const;

    ModelConfig config_;
    const ParamTable& table_;
    DecoderOptions options_;
    Arena& arena_;
    Tensor weights_, grads_;
    Dtype stat_;
    std::vector<BlockActs> blocks_;
    Tensor cos_sin_;                        // (max_seq, HS/2, 2) stat
    Tensor branch_;                         // (N, C) output of the half block that the next norm adds
    Tensor final_x_, final_norm_, final_mean_, final_rstd_;
};

// cos_sin[t][i] = {cos, sin}(t * f_i), f_i = base^(-2i/HS), scaled by the llama3 rule when it is on: frequencies whose
// wavelength exceeds original/low are divided by factor, those below original/high kept, between them blended.
std::vector<double> rope_table(const ModelConfig& config, int64_t T);
