// The linears and the activation of a dense MLP, also of the shared experts of a mixture: down(activation(up(x))).
#pragma once
#include <vector>

#include "llmc/model/activation_buffers.h"

class FeedForward {
public:
    // Of layers [first_layer, first_layer + layers). shared: the parameters of shared experts, in the working type.
    FeedForward(ModelContext& model, int64_t width, bool shared, int first_layer, int layers);

    Linear up(int layer) const;
    Linear down(int layer) const;
    bool recomputes_up() const { return buffers_.recomputed(kUp); }
    // y (N, C) =.
    void forward(Ctx& ctx, int layer, const LinearOperand& x, Tensor y, int64_t N);
    // Only if recomputes_up().
    void recompute(Ctx& ctx, int layer, const LinearOperand& x, int64_t N);
    // dx (N, C) =, or += if add, and the gradients of the weights.
    void backward(Ctx& ctx, int layer, Tensor dx, const LinearOperand& dy, const LinearOperand& x, int64_t N,
                  bool add = false);

private:
    enum Row { kUp, kAct, kActFp8, kDact };
    static std::vector<BufferRow> rows(const ModelConfig& config, int64_t width, bool shared);

    LinearOperand saved_act(int layer, int64_t N) const { return buffers_.x(kAct, kActFp8, layer, N); }
    LinearOperand activation(Ctx& ctx, int layer, int64_t N, XUsage usage);
    LinearOperand dup_backward(Ctx& ctx, int layer, Tensor dact, int64_t N);

    ModelContext& model_;
    const int64_t width_;
    const bool shared_;
    ActivationBuffers buffers_;
};
