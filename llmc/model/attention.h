// Attention of a block: branch = proj(attention(rope(qk_norm(qkv(norm(x)))))), where x is the residual stream.
// With context parallelism a rank has a part of each sequence, with all heads. For attention itself the ranks exchange
// heads, so that each rank has whole sequences with 1 / ranks of the heads. Q, K, V, attention's output and its
// statistics are saved in that form.
#pragma once
#include <vector>

#include "llmc/model/pre_norm.h"

class Attention {
public:
    // Allocates the buffers of all layers from the arena.
    explicit Attention(ModelContext& model);

    Tensor residual(int layer, int64_t N) const { return norm_.residual(layer, N); }
    // The linear that writes the branch.
    Linear output(int layer) const { return proj(layer); }

    // branch (N, C) =. The residual stream x is the sum of the parts of `input`.
    void forward(Ctx& ctx, int layer, const NormInput& input, Tensor branch, const DeviceBatch& batch);
    // Recomputes the buffers that the table marks so, and the branch, which the MLP reads. The operations and inputs
    // are those of forward, so the bits are the same. Does nothing if no linear is recomputed, and skips attention
    // itself if its output is saved.
    void recompute(Ctx& ctx, int layer, Tensor branch, const DeviceBatch& batch);
    // dy: the gradient of the branch, quantized for output(). to.unquantized: that of the residual stream after this
    // part, to which the branch was added, so that without a norm after it the two are the same. Returns the gradient
    // of the stream before this part, in `to`, quantized for `below`, the linear whose result was added there (or
    // none).
    LinearOperand backward(Ctx& ctx, int layer, const LinearOperand& dy, const LinearOperand& to, const Linear& below,
                           const DeviceBatch& batch);

private:
    enum Row {
        kQkvRaw = PreNorm::kRows, kQkRstd, kQkv, kOut, kOutFp8, kLse, kDout, kDqkv, kDelta, kDnorm,
        // of this rank's part of the sequences, with context parallelism
        kPartQkv, kPartOut, kPartDqkv
    };
    static std::vector<BufferRow> rows(const ModelConfig& config, int64_t ranks);

    Linear qkv(int layer) const { return model_.linear(layer, LinearKind::kQkv); }
    Linear proj(int layer) const { return model_.linear(layer, LinearKind::kProj); }
    LinearOperand saved_out(int layer, int64_t N) const {
        return buffers_.x(exchange_ ? kPartOut : kOut, kOutFp8, layer, N);
    }
    // The heads and the length of the sequences in attention itself on this rank.
    int64_t heads() const { return config_.num_attention_heads / options_.ranks_of_sequence(); }
    int64_t first_head() const { return exchange_ ? exchange_->rank * heads() : 0; }
    // Of one element a query head, that of this rank's heads.
    Tensor own_heads(Tensor t) const { return t ? t.slice(first_head(), heads()) : t; }
    int64_t kv_heads() const { return heads_of_rank(config_.num_query_groups, options_.ranks_of_sequence()); }
    int64_t whole_T(const DeviceBatch& batch) const { return batch.T * options_.ranks_of_sequence(); }

    void project(Ctx& ctx, int layer, const LinearOperand& x, Tensor out, int64_t N);
    Fp8Heads qkv_forward(Ctx& ctx, int layer, const LinearOperand& x, const DeviceBatch& batch);
    void to_heads(Ctx& ctx, int layer, Tensor heads, Tensor part, int64_t kv_heads, const DeviceBatch& batch);
    void to_parts(Ctx& ctx, int layer, Tensor part, Tensor heads, int64_t kv_heads, const DeviceBatch& batch);
    Fp8Heads quantize_heads(Ctx& ctx, int layer, Tensor qkv, const DeviceBatch& batch);
    void attention_forward(Ctx& ctx, int layer, Tensor out, const Fp8Heads& heads, const DeviceBatch& batch,
                           const QuantOut& quant);
    LinearOperand attend(Ctx& ctx, int layer, const Fp8Heads& heads, const DeviceBatch& batch, XUsage usage);
    void attention_backward(Ctx& ctx, int layer, Tensor dout, Tensor dqkv, const DeviceBatch& batch,
                            const QuantOut& quant);
    void part_backward(Ctx& ctx, int layer, Tensor dout, Tensor dqkv, const DeviceBatch& batch, const QuantOut& quant);
    void qk_norm_backward(Ctx& ctx, int layer, Tensor dqkv, const DeviceBatch& batch, const QuantOut& quant);
    LinearOperand dqkv_backward(Ctx& ctx, int layer, Tensor dout, Tensor dqkv, const DeviceBatch& batch);
    float softmax_mul() const;
    RopeArgs rope_args(int layer, Tensor qkv, const DeviceBatch& batch, const QuantOut& quant) const;

    ModelContext& model_;
    const ModelConfig& config_;
    const DecoderOptions& options_;
    const HeadExchange* const exchange_;   // null: this rank has whole sequences
    ActivationBuffers buffers_;
    PreNorm norm_;
};
