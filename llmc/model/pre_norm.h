// The norm before a linear, with the residual stream that it reads: before attention, before the MLP and before the
// head.
#pragma once
#include <vector>

#include "llmc/model/activation_buffers.h"

class PreNorm {
public:
    // The first rows of a table of buffers that has a norm.
    enum Row { kResidual, kNorm, kNormFp8, kNormFp8Rowwise, kMean, kRstd, kRows };
    // reader: the linear whose x the norm makes. `residual` and `norm`: how long the stream and the norm's result live.
    static std::vector<BufferRow> rows(const ModelConfig& config, LinearKind reader, Lifetime residual, Lifetime norm);

    PreNorm(ModelContext& model, const ActivationBuffers& buffers, LinearKind reader)
        : model_(model), buffers_(buffers), reader_(reader) {}

    // The residual stream that the norm reads.
    Tensor residual(int layer, int64_t N) const { return buffers_.at(kResidual, layer, N); }
    // The x of the reader: what is saved of it, as forward and backward find it.
    LinearOperand x(int layer, int64_t N) const;
    LinearOperand forward(Ctx& ctx, int layer, const NormInput& input, int64_t N, XCopies copies) const;
    // The gradient of the residual stream, in `to`, as the dy of `below`, the linear that wrote the stream last.
    LinearOperand backward(Ctx& ctx, int layer, const NormGrads& grads, const LinearOperand& to, const Linear& below,
                           int64_t N) const;

private:
    NormLayer layer_of(int layer, int64_t N) const;

    ModelContext& model_;
    const ActivationBuffers& buffers_;
    const LinearKind reader_;
};
