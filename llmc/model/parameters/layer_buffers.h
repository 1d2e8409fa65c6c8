// The memory of whole weights under ZeRO-3, where ranks hold only their shards and all-gather a layer's weights before
// it runs. The layers of the model share a ring of buffers: layer l is always in buffer l % ring(), so its views never
// change. The embedding and the head, which never run at the same time, share one more buffer. Transposed FP8 weights,
// which only backward reads, have separate buffers.
#pragma once
#include <vector>

#include "llmc/model/parameters/flat_layout.h"
#include "llmc/ops/arena.h"

class LayerBuffers {
public:
    // Buffers of a ring: for a layer that runs and the next one.
    static constexpr int kRing = 2;

    // Takes the buffers from the arena. The layout is not owned, and must have groups by layer. working, rowwise and
    // transposed (one byte each): the types of weights.
    LayerBuffers(const FlatLayout& layout, int num_layers, Dtype working, Dtype rowwise, Dtype transposed,
                 Arena& arena);

    // Whether a group is gathered layer by layer. Norms and biases of all layers are few: every rank holds them whole.
    static bool gathers(const ParamGroup& group) { return group.form != ParamForm::kOther || group.last_layer < 0; }

    int ring() const { return ring_; }
    // The buffer of a layer, numbered as in ParamStore; ring() is that of embedding and head.
    int buffer_of(int layer) const { return in_ring(layer) ? layer % ring_ : ring_; }
    // Whether it is neither the embedding nor the head.
    bool in_ring(int layer) const { return layer >= 0 && layer < num_layers_; }

    // Returns the whole weights of a gathered group, in the working type or rowwise in FP8 or INT8.
    Tensor whole(const ParamGroup& group) const;
    // Returns the transposed weights of the parameters of a kFp8Linear group, at the same offsets.
    Tensor transposed(const ParamGroup& group) const;
    // All bytes of a layer's buffer, and of its buffer for transposed weights.
    Tensor memory(int layer) const;
    Tensor transposed_memory(int layer) const;
    // The memory that weights are gathered into.
    std::vector<Tensor> gathered() const { return {layers_, ends_}; }

private:
    Dtype dtype_of(const ParamGroup& group) const { return group.form == ParamForm::kFp8Linear ? rowwise_ : working_; }
    int64_t offset_of(const ParamGroup& group) const {
        return offsets_[static_cast<size_t>(&group - layout_.groups().data())];
    }

    const FlatLayout& layout_;
    const int num_layers_, ring_;
    const Dtype working_, rowwise_, transposed_type_;
    std::vector<int64_t> offsets_;        // by group: of its first byte in the buffer of its layer
    Tensor layers_, transposed_, ends_;   // bytes of the ring, of transposed weights, of embedding or head
};
