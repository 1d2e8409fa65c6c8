// Where the decoder finds weights and gradients. It keeps no views of its own, so that a store may gather the weights
// of a layer when that layer is about to run, and give its memory to the next one afterwards (ZeRO-3; Rajbhandari et
// al., arXiv 1910.02054).
#pragma once
#include <cstdint>

#include "llmc/ops/device.h"

enum class Pass : uint8_t { kForward, kBackward };

class ParamStore {
public:
    virtual ~ParamStore() = default;

    // The views of a layer's parameters are valid for work that ctx is given between these two calls, which the decoder
    // makes around each layer in each pass; two layers may be open at a time. Layers: -1 embeddings, 0..L-1 blocks, L
    // final norm and head, which may read the weight of the embeddings (a tied head). After the backward of a layer its
    // gradients are complete for this micro-batch.
    virtual void before_layer(Ctx& ctx, int layer, Pass pass) = 0;
    virtual void after_layer(Ctx& ctx, int layer, Pass pass) = 0;

    // Working type; empty for a parameter that only FP8 weights hold.
    virtual Tensor weight(int param) const = 0;
    // Backward adds to it.
    virtual Tensor grad(int param) const = 0;
};
