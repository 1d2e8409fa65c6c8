// Gives the decoder its weights and gradients. The decoder keeps no views, so that a store may all-gather the weights
// of a layer just before it runs and reuse their memory afterwards (ZeRO-3; Rajbhandari et al., arXiv 1910.02054).
#pragma once
#include <cstdint>

#include "llmc/ops/device.h"

enum class Pass : uint8_t { kForward, kBackward };

class ParamStore {
public:
    virtual ~ParamStore() = default;

    // The decoder calls these two around each layer in each pass. The views of the layer's parameters are valid for
    // work enqueued on ctx between the two calls. In backward the decoder also calls before_layer for the layer below;
    // only the gradients of that layer are valid until after_layer of the present one. Layers: -1 embeddings, 0..L-1
    // attention and MLP, L final norm and head, which may read the embedding's weight (a tied head). After the backward
    // of a layer its gradients are complete for this micro-batch.
    virtual void before_layer(Ctx& ctx, int layer, Pass pass) = 0;
    virtual void after_layer(Ctx& ctx, int layer, Pass pass) = 0;

    virtual Tensor weight(int param) const = 0;   // T; empty if the parameter is stored in FP8 only
    // Gradients of embeddings and of weights of linears are valid only after the backward of the layer above.
    virtual Tensor grad(int param) const = 0;
    // Whether backward adds to grad(param), which is 0 before or has the sum of earlier micro-batches. Otherwise
    // backward overwrites all of it.
    virtual bool accumulates(int /*param*/) const { return true; }
};
