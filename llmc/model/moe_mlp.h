// A mixture of experts: branch = sum over the K chosen experts e of down_e(swiglu(up_e(x)) * weight_e) with x =
// norm(residual stream). Source: Shazeer et al., arXiv 1701.06538. Five stages: route (router, top-k), dispatch (sort
// by expert, gather rows), experts (grouped matmuls), combine, and the backward of each. No token is dropped: buffers
// have N K rows whatever the routing is, and the numbers of rows of experts stay on the device.
#pragma once
#include <vector>

#include "llmc/model/mlp.h"

class MoeMlp : public Mlp {
public:
    explicit MoeMlp(ModelContext& model);

    Tensor residual(int layer, int64_t N) const override { return norm_.residual(layer, N); }
    Linear output(int) const override { return {}; }
    void forward(Ctx& ctx, int layer, const NormInput& input, Tensor branch, const DeviceBatch& batch) override;
    void recompute(Ctx& ctx, int layer, const NormInput& input, const DeviceBatch& batch) override;
    LinearOperand backward(Ctx& ctx, int layer, const LinearOperand& dy, const LinearOperand& to, const Linear& below,
                           const DeviceBatch& batch, const StepState* state) override;

private:
    enum Row {
        kProbs = PreNorm::kRows, kLse, kExperts, kWeights, kUp, kAct, kRows, kDact, kDweights, kDlogits, kDnorm, kSlots
    };
    static std::vector<BufferRow> rows(const ModelConfig& config);

    // The order of rows, see SortExpertsArgs; scratch of the caller's scope.
    struct Order {
        Tensor offsets, row_slots, slot_rows;
    };
    int64_t E() const { return config_.num_experts; }
    int64_t K() const { return config_.experts_per_token; }
    Linear router(int layer) const;
    Tensor x(int layer, int64_t N) const { return norm_.x(layer, N).unquantized; }

    void route(Ctx& ctx, int layer, int64_t N, bool again);
    Order dispatch(Ctx& ctx, int layer, int64_t N);
    Order before_down(Ctx& ctx, int layer, const NormInput& input, int64_t N, bool again);
    Tensor gathered(Ctx& ctx, const Order& order, Tensor in, int64_t N);
    void up(Ctx& ctx, int layer, const Order& order, int64_t N);
    void activation(Ctx& ctx, int layer, const Order& order, int64_t N);
    void down_backward(Ctx& ctx, int layer, const Order& order, Tensor dy, Tensor dact, int64_t N);
    Tensor up_backward(Ctx& ctx, int layer, const Order& order, int64_t N);
    // D = or += the matmul of each expert with a weight (forward, dgrad) or its gradient (wgrad); see GroupedGemmArgs.
    void matmul(Ctx& ctx, GemmLayout layout, int layer, LinearKind kind, const Order& order, Tensor D, Tensor A,
                Tensor B, int64_t N);

    ModelContext& model_;
    const ModelConfig& config_;
    ActivationBuffers buffers_;
    PreNorm norm_;
};
