// The norm after attention or the MLP (OLMo-2, Gemma-3): stream = residual + norm(branch).
#pragma once
#include <vector>

#include "llmc/model/activation_buffers.h"

class PostNorm {
public:
    // output: the linear that writes the branch, kProj or kDown. Allocates the buffers of all layers from the arena.
    PostNorm(ModelContext& model, LinearKind output);

    // What the part of a block writes; empty if the model has no such norms.
    Tensor branch(int layer, int64_t N) const { return buffers_.at(kBranch, layer, N); }
    // What the next norm reads: the new stream, in `out`, or without norms after branches the two parts of the sum.
    // again: in the backward pass; computes only what was not saved.
    NormInput forward(Ctx& ctx, int layer, Tensor branch, Tensor residual, Tensor out, int64_t N, bool again) const;
    // Returns the gradient of the branch, quantized for `output`, from that of the stream. Its memory is `to`.
    LinearOperand backward(Ctx& ctx, int layer, Tensor dstream, const LinearOperand& to, const Linear& output,
                           int64_t N) const;

private:
    enum Row { kBranch, kRstd };
    static std::vector<BufferRow> rows(const ModelConfig& config, LinearKind output);
    NormLayer layer_of(int layer, int64_t N) const;

    ModelContext& model_;
    const LinearKind output_;
    ActivationBuffers buffers_;
};
