#include "llmc/model/parameters/layer_buffers.h"

LayerBuffers::LayerBuffers(const FlatLayout& layout, int num_layers, Dtype working, Dtype rowwise, Dtype transposed,
                           Arena& arena)
    : layout_(layout), num_layers_(num_layers), ring_(std::min(kRing, num_layers)), working_(working),
      rowwise_(rowwise), transposed_type_(transposed) {
    struct Bytes {
        int64_t all = 0, fp8 = 0;
    };
    std::vector<Bytes> layers(static_cast<size_t>(num_layers + 2));   // from the embedding to the head
    for (const ParamGroup& group : layout.groups()) {
        Bytes& layer = layers[static_cast<size_t>(group.first_layer + 1)];
        // FP8 groups come first, so that their transposed weights have the same offsets.
        offsets_.push_back(layer.all);
        if (!gathers(group)) continue;
        CHECK(group.first_layer == group.last_layer, "the weights of several layers are gathered together");
        layer.all += group.elems * dtype_bytes(dtype_of(group));
        if (group.form == ParamForm::kFp8Linear) layer.fp8 += group.elems;
    }
    Bytes largest;
    for (size_t l = 1; l + 1 < layers.size(); l++) {
        largest.all = std::max(largest.all, layers[l].all);
        largest.fp8 = std::max(largest.fp8, layers[l].fp8);
    }
    const auto take = [&](int64_t bytes) { return arena.take(Purpose::kComm, Dtype::kE4m3, bytes); };
    layers_ = take(ring_ * largest.all);
    transposed_ = take(ring() * largest.fp8);
    ends_ = take(std::max(layers.front().all, layers.back().all));
}

Tensor LayerBuffers::whole(const ParamGroup& group) const {
    CHECK(gathers(group), "a group that is not gathered has no buffer");
    const int layer = group.first_layer;
    return {static_cast<char*>(memory(layer).data) + offset_of(group), dtype_of(group), group.elems};
}

Tensor LayerBuffers::transposed(const ParamGroup& group) const {
    CHECK(group.form == ParamForm::kFp8Linear, "only FP8 weights are transposed");
    return {static_cast<char*>(transposed_memory(group.first_layer).data) + offset_of(group), transposed_type_,
            group.elems};
}

Tensor LayerBuffers::memory(int layer) const {
    if (!in_ring(layer)) return ends_;
    const int64_t bytes = layers_.elems / ring_;
    return layers_.slice(buffer_of(layer) * bytes, bytes);
}

Tensor LayerBuffers::transposed_memory(int layer) const {
    const int64_t bytes = transposed_.elems / ring();
    return transposed_.slice(layer % ring() * bytes, bytes);
}
