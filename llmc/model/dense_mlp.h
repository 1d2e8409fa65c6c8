// The MLP of a model without experts: branch = down(activation(up(norm(x)))).
#pragma once
#include <vector>

#include "llmc/model/mlp.h"

class DenseMlp : public Mlp {
public:
    explicit DenseMlp(ModelContext& model);

    Tensor residual(int layer, int64_t N) const override { return norm_.residual(layer, N); }
    Linear output(int layer) const override { return down(layer); }
    void forward(Ctx& ctx, int layer, const NormInput& input, Tensor branch, const DeviceBatch& batch) override;
    void recompute(Ctx& ctx, int layer, const NormInput& input, const DeviceBatch& batch) override;
    LinearOperand backward(Ctx& ctx, int layer, const LinearOperand& dy, const LinearOperand& to, const Linear& below,
                           const DeviceBatch& batch, const StepState* state) override;

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
