// The MLP of a block: branch = down(activation(up(norm(x)))), where x is the residual stream. A mixture of experts is
// another class with these functions and a table of its own.
#pragma once
#include <vector>

#include "llmc/model/pre_norm.h"

class Mlp {
public:
    // Takes its buffers, for all layers, from the arena.
    explicit Mlp(ModelContext& model);

    Tensor residual(int layer, int64_t N) const { return norm_.residual(layer, N); }
    // The linear that writes the branch.
    Linear output(int layer) const { return down(layer); }

    // input: what the residual stream is the sum of.
    void forward(Ctx& ctx, int layer, const NormInput& input, Tensor branch, const DeviceBatch& batch);
    // The same operations on the same inputs as in forward, so the same bits, as far as the rows say: the branch is not
    // needed. input: as in forward.
    void recompute(Ctx& ctx, int layer, const NormInput& input, const DeviceBatch& batch);
    // dy: the gradient of the branch as the dy of its output, which is also the gradient that passes by. Returns that
    // of the residual stream, in `to`, as the dy of `below`.
    LinearOperand backward(Ctx& ctx, int layer, const LinearOperand& dy, const LinearOperand& to, const Linear& below,
                           const DeviceBatch& batch);

private:
    enum Row { kUp = PreNorm::kRows, kAct, kActFp8, kDact, kDnorm };
    static std::vector<BufferRow> rows(const ModelConfig& config);

    Linear up(int layer) const { return model_.linear(layer, LinearKind::kUp); }
    Linear down(int layer) const { return model_.linear(layer, LinearKind::kDown); }
    LinearOperand saved_act(int layer, int64_t N) const { return buffers_.x(kAct, kActFp8, layer, N); }
    LinearOperand up_and_activation(Ctx& ctx, int layer, const LinearOperand& x, int64_t N, XCopies copies);
    LinearOperand activation(Ctx& ctx, int layer, int64_t N, XCopies copies);
    void recompute_norm_and_act(Ctx& ctx, int layer, int64_t N);
    LinearOperand dup_backward(Ctx& ctx, int layer, Tensor dact, int64_t N);

    ModelContext& model_;
    const ModelConfig& config_;
    ActivationBuffers buffers_;
    PreNorm norm_;
};
