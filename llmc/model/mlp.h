// The MLP of a block: branch = down(activation(up(norm(x)))), where x is the residual stream.
#pragma once
#include <vector>

#include "llmc/model/pre_norm.h"

class Mlp {
public:
    // Allocates the buffers of all layers from the arena.
    explicit Mlp(ModelContext& model);

    Tensor residual(int layer, int64_t N) const { return norm_.residual(layer, N); }
    // The linear that writes the branch.
    Linear output(int layer) const { return down(layer); }

    // branch (N, C) =. The residual stream x is the sum of the parts of `input`.
    void forward(Ctx& ctx, int layer, const NormInput& input, Tensor branch, const DeviceBatch& batch);
    // Recomputes the buffers that the table marks so, without the branch. The operations and inputs are those of
    // forward, so the bits are the same.
    void recompute(Ctx& ctx, int layer, const NormInput& input, const DeviceBatch& batch);
    // As Attention::backward.
    LinearOperand backward(Ctx& ctx, int layer, const LinearOperand& dy, const LinearOperand& to, const Linear& below,
                           const DeviceBatch& batch);

private:
    enum Row { kUp = PreNorm::kRows, kAct, kActFp8, kDact, kDnorm };
    static std::vector<BufferRow> rows(const ModelConfig& config);

    Linear up(int layer) const { return model_.linear(layer, LinearKind::kUp); }
    Linear down(int layer) const { return model_.linear(layer, LinearKind::kDown); }
    LinearOperand saved_act(int layer, int64_t N) const { return buffers_.x(kAct, kActFp8, layer, N); }
    LinearOperand activation(Ctx& ctx, int layer, int64_t N, XUsage usage);
    void recompute_norm_and_act(Ctx& ctx, int layer, int64_t N);
    LinearOperand dup_backward(Ctx& ctx, int layer, Tensor dact, int64_t N);

    ModelContext& model_;
    const ModelConfig& config_;
    ActivationBuffers buffers_;
    PreNorm norm_;
};
