// Saved activations in pinned host memory (--offload activations). The layers share kResidentLayers sets of device
// buffers. After the forward of a layer its set is copied to host memory. It is copied back once backward has finished
// the layer above that uses the same set. The last kResidentLayers layers stay on the device. Each direction of copies
// has its own stream.
#pragma once
#include <algorithm>
#include <vector>

#include "llmc/config/config.h"
#include "llmc/ops/arena.h"
#include "llmc/ops/owned.h"

class ActivationOffload {
public:
    // layers: of the model; 0: nothing is offloaded.
    explicit ActivationOffload(int layers) : layers_(layers), offloaded_(static_cast<size_t>(offloaded_layers())) {}

    bool on() const { return layers_ > 0; }
    static int set_of(int layer) { return layer % kResidentLayers; }
    // At construction: call add() for every buffer of a layer's set that the layer saves, then allocate() once. It
    // allocates the host memory of all these buffers, unless the arena only measures.
    void add(int layer, const Tensor& saved);
    void allocate(Arena& arena);
    int64_t host_bytes() const { return host_bytes_; }   // copied in each direction per micro-batch

    // Called around a layer in either pass. No host synchronisation. save: a backward follows.
    void before_forward(Ctx& ctx, int layer);
    void after_forward(Ctx& ctx, int layer, bool save);
    void before_backward(Ctx& ctx, int layer);
    void after_backward(Ctx& ctx, int layer);

private:
    struct Part {
        Tensor on_device;
        int64_t offset;   // in host memory
    };
    int offloaded_layers() const { return std::max(0, layers_ - kResidentLayers); }   // the first ones
    bool is_offloaded(int layer) const { return layer < offloaded_layers(); }
    void open(const Ctx& ctx);

    const int layers_;
    std::vector<std::vector<Part>> offloaded_;   // by layer
    int64_t host_bytes_ = 0;
    char* host_ = nullptr;   // null in a rehearsal
    OwnedEvent computed_;   // the layer is done
    OwnedEvent saved_[kResidentLayers], loaded_[kResidentLayers];   // by set: its latest copy is done
    SideStream in_, out_;   // of the copies, closed until the first training step
};
