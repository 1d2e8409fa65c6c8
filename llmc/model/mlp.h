// The MLP part of the blocks: branch = mlp(norm(x)), where x is the residual stream.
#pragma once
#include <memory>

#include "llmc/model/pre_norm.h"

class Mlp {
public:
    virtual ~Mlp() = default;

    virtual Tensor residual(int layer, int64_t N) const = 0;
    // The linear that writes the branch; without bias and FP8 it may be empty.
    virtual Linear output(int layer) const = 0;

    // branch (N, C) =. The residual stream x is the sum of the parts of `input`.
    virtual void forward(Ctx& ctx, int layer, const NormInput& input, Tensor branch, const DeviceBatch& batch) = 0;
    // Recomputes the buffers that the table marks so, without the branch. The operations and inputs are those of
    // forward, so the bits are the same.
    virtual void recompute(Ctx& ctx, int layer, const NormInput& input, const DeviceBatch& batch) = 0;
    // As Attention::backward. state: see RouterBackwardArgs.
    virtual LinearOperand backward(Ctx& ctx, int layer, const LinearOperand& dy, const LinearOperand& to,
                                   const Linear& below, const DeviceBatch& batch, const StepState* state) = 0;
};

// That of layers without experts, then that of layers with experts, if the model has such layers. Allocates their
// buffers from the arena.
std::vector<std::unique_ptr<Mlp>> make_mlps(ModelContext& model);
