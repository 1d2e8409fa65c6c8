// The MLP of layers without experts: branch = feed_forward(norm(x)).
#pragma once
#include <vector>

#include "llmc/model/feed_forward.h"
#include "llmc/model/mlp.h"

class DenseMlp : public Mlp {
public:
    explicit DenseMlp(ModelContext& model);

    Tensor residual(int layer, int64_t N) const override { return norm_.residual(layer, N); }
    Linear output(int layer) const override { return feed_forward_.down(layer); }
    void forward(Ctx& ctx, int layer, const NormInput& input, Tensor branch, const DeviceBatch& batch) override;
    void recompute(Ctx& ctx, int layer, const NormInput& input, const DeviceBatch& batch) override;
    LinearOperand backward(Ctx& ctx, int layer, const LinearOperand& dy, const LinearOperand& to, const Linear& below,
                           const DeviceBatch& batch, const StepState* state) override;

private:
    enum Row { kDnorm = PreNorm::kRows };
    static std::vector<BufferRow> rows(const ModelConfig& config);
    static int layers(const ModelConfig& c) { return static_cast<int>(c.num_layers - c.moe_layers()); }

    ModelContext& model_;
    ActivationBuffers buffers_;
    PreNorm norm_;
    FeedForward feed_forward_;
};
