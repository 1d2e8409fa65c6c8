// The norm before attention, the MLP or the head, with the residual stream that it reads. Blocks with norms after their
// branches alone (OLMo-2) have none: their linears read the stream.
#pragma once
#include <vector>

#include "llmc/model/activation_buffers.h"

class PreNorm {
public:
    // The first rows of an ActivationBuffers table with a norm.
    enum Row { kResidual, kNorm, kNormFp8, kMean, kRstd, kRows };
    // reader: the linear whose x is the norm's result. `residual` and `norm`: lifetimes of the stream and the result.
    // router: one of experts reads the result, too.
    static std::vector<BufferRow> rows(const ModelConfig& config, LinearKind reader, Lifetime residual, Lifetime norm,
                                       bool router = false);

    PreNorm(ModelContext& model, const ActivationBuffers& buffers, LinearKind reader, bool router = false)
        : model_(model), buffers_(buffers), reader_(reader), router_(router) {}

    bool exists() const { return reader_ == LinearKind::kHead || model_.config.pre_norms(); }
    // The residual stream that the norm reads.
    Tensor residual(int layer, int64_t N) const { return buffers_.at(kResidual, layer, N); }
    // The saved x of the reader.
    LinearOperand x(int layer, int64_t N) const;
    LinearOperand forward(Ctx& ctx, int layer, const NormInput& input, int64_t N, XUsage usage) const;
    // Returns the gradient of the residual stream, quantized for `below`, the linear whose result was added last to the
    // stream, so that the stream's gradient is its dy. Its memory is `to`. Only if it exists(): else the reader adds
    // the gradient of its x to that of the stream.
    LinearOperand backward(Ctx& ctx, int layer, const NormGrads& grads, const LinearOperand& to, const Linear& below,
                           int64_t N) const;

private:
    NormLayer layer_of(int layer, int64_t N) const;

    ModelContext& model_;
    const ActivationBuffers& buffers_;
    const LinearKind reader_;
    const bool router_;
};
