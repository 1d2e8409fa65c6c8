// The decoder: one transformer for GPT-2 and Llama. Pre-norm blocks
//   x_l = mid_{l-1} + down_{l-1}
//   mid_l = x_l + proj(attention(qkv(norm1(x_l))))
//   down_l = down(act(up(norm2(mid_l))))
// where every residual addition happens inside the norm that follows it.
#pragma once
#include <vector>

#include "llmc/config/config.h"
#include "llmc/model/linear.h"
#include "llmc/model/param_store.h"
#include "llmc/model/params.h"
#include "llmc/ops/arena.h"
#include "llmc/ops/ops.h"

// One micro-batch on the device.
struct DeviceBatch {
    const int32_t* tokens = nullptr;        // (B*T)
    const int32_t* targets = nullptr;       // (B*T), kIgnoreIndex is not counted
    const int32_t* token_order = nullptr;   // (B*T), see embedding_backward; backward only
    int32_t* bad_tokens = nullptr;          // (1), +=: ids outside the vocabulary
    const int32_t* documents = nullptr;     // (2, B, T) optional, see AttentionForwardArgs
    int64_t B = 0, T = 0;
};

struct DecoderOptions {
    int64_t max_batch = 1, max_seq = 1;   // largest T, and B * T at most their product
    Dtype dtype = Dtype::kBf16;           // working type
    Recompute recompute = Recompute::kNone;
    bool fuse_gelu = false;
    bool fp8_attention = false;
    bool attention_fast = false;   // AttentionBackwardArgs::fast
};

class Decoder {
public:
    // Neither the store nor `fp8` is owned. Takes its saved activations from the arena; scratch is taken and given back
    // within each call.
    Decoder(const ModelConfig& config, const ParamTable& table, const DecoderOptions& options, Arena& arena,
            ParamStore& store, Fp8State& fp8);

    // Constants of the model that live on the device (rope table). Once, after construction.
    void upload_constants(Ctx& ctx);

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
    Tensor weight(int param) const { return param < 0 ? Tensor{} : store_->weight(param); }
    Tensor grad(int param) const { return param < 0 ? Tensor{} : store_->grad(param); }
    ParamStore& store() const { return *store_; }
    void set_store(ParamStore& store) { store_ = &store; }

private:
    // The input of a linear as backward finds it: bf16, or the transposed FP8 copy, or both where others read it too.
    struct SavedX {
        Tensor high;
        Fp8Operand transposed;
    };
    // What of an x is made now. Copies that recomputation makes again are left out of the first forward.
    struct XUse {
        bool rowwise, transposed, replay;
    };
    // Saved or shared activations of one block; N rows.
    struct BlockActs {
        Tensor x;                     // (N, C) residual stream that enters the block
        SavedX norm1;                 // (N, C)
        Tensor mean1, rstd1;          // (N), (N)
        Tensor qkv_raw, qk_rstd;      // with qk-norm: its input and statistics
        Tensor qkv;                   // (N, qkv) after rope
        SavedX att;                   // (N, q)
        Tensor lse;                   // (B, NH, T)
        Tensor mid;                   // (N, C) residual stream between the halves
        SavedX norm2;                 // (N, C)
        Tensor mean2, rstd2;
        Tensor up;                    // (N, up_width)
        SavedX act;                   // (N, F)
    };

    Linear linear(int layer, LinearKind kind) const;
    Linear head() const { return linear(static_cast<int>(config_.num_layers), LinearKind::kHead); }
    void take_activations(Arena& arena);
    SavedX take_x(Arena& arena, LinearKind kind, int first_layer, int layers, int64_t C, bool keep_high);
    BlockActs acts(int layer, int64_t N) const;   // views cut to N rows
    SavedX x_view(const SavedX& x, int layer, LinearKind kind, int64_t N) const;
    XUse first_use(bool made_again) const;
    LinearOperand make_x(Ctx& ctx, const Linear& linear, const SavedX& saved, int64_t N, XUse use, bool keep_high,
                         const Producer& run);
    LinearOperand take_grad(int64_t N, int64_t C, Tensor high, bool fp8);   // memory of a dy (N, C)
    LinearOperand make_dy(Ctx& ctx, const Linear& linear, const LinearOperand& to, int64_t N, bool keep_high,
                          const Producer& run);
    LinearOperand head_input(int64_t N) const;
    static LinearOperand saved_operand(const SavedX& x) { return {.high = x.high, .fp8 = {{}, x.transposed}}; }

    void norm_forward(Ctx& ctx, NormForwardArgs args, int weight, int bias);
    void norm_backward(Ctx& ctx, NormBackwardArgs args, int weight, int bias);
    LinearOperand block_norm_forward(Ctx& ctx, int layer, LinearKind kind, const SavedX& to, NormForwardArgs args,
                                     XUse use);
    LinearOperand norm1_forward(Ctx& ctx, int layer, const BlockActs& a, Tensor in, Tensor residual,
                                Tensor residual_out, int64_t N, XUse use);
    LinearOperand norm2_forward(Ctx& ctx, int layer, const BlockActs& a, Tensor in, Tensor residual,
                                Tensor residual_out, int64_t N, XUse use);
    LinearOperand activation_forward(Ctx& ctx, int layer, const BlockActs& a, int64_t N, XUse use);
    Fp8Heads place_heads(Ctx& ctx, Tensor qkv, int64_t B, int64_t T);
    void attention_half_forward(Ctx& ctx, int layer, const BlockActs& a, const LinearOperand& norm1, Tensor branch,
                                const DeviceBatch& batch, bool replay);
    void mlp_half_forward(Ctx& ctx, int layer, const BlockActs& a, Tensor branch, int64_t N, bool replay);
    void final_norm_forward(Ctx& ctx, Tensor branch, Tensor residual, int64_t N);
    LinearOperand head_backward(Ctx& ctx, const DeviceBatch& batch, StepState* state, const LinearOperand& dresidual);
    void recompute_block(Ctx& ctx, int layer, const BlockActs& a, const DeviceBatch& batch);
    void mlp_backward(Ctx& ctx, int layer, const BlockActs& a, const LinearOperand& dresidual, LinearOperand& dy,
                      int64_t N);
    void attention_half_backward(Ctx& ctx, int layer, const BlockActs& a, const LinearOperand& dresidual,
                                 LinearOperand& dy, const DeviceBatch& batch);
    LinearOperand dqkv_backward(Ctx& ctx, int layer, const BlockActs& a, const Linear& qkv, Tensor datt, Tensor dqkv,
                                const DeviceBatch& batch);
    void classify(Ctx& ctx, const DeviceBatch& batch, StepState* state, Tensor logits, bool backward,
                  void* host_losses = nullptr);
    int head_layer() const { return static_cast<int>(config_.num_layers); }
    float softmax_mul() const;
    RopeArgs rope_args(Tensor qkv, int64_t N, int64_t T) const;

    ModelConfig config_;
    const ParamTable& table_;
    DecoderOptions options_;
    Arena& arena_;
    ParamStore* store_;
    Fp8State& fp8_;
    Dtype stat_;
    bool training_ = true;                  // of the forward that runs
    std::vector<BlockActs> blocks_;
    Tensor cos_sin_;                        // (max_seq, HS/2, 2) stat
    Tensor branch_;                         // (N, C) output of the half block that the next norm adds
    Tensor final_x_, final_mean_, final_rstd_;
    SavedX final_norm_;
    Fp8Operand final_rowwise_;              // with an FP8 head
};

// cos_sin[t][i] = {cos, sin}(t * f_i), f_i = base^(-2i/HS), scaled by the llama3 rule when it is on: frequencies whose
// wavelength exceeds original/low are divided by factor, those below original/high kept, between them blended.
std::vector<double> rope_table(const ModelConfig& config, int64_t T);
