#include "llmc/model/activation_offload.h"

void ActivationOffload::add(int layer, const Tensor& saved) {
    if (!is_offloaded(layer) || !saved) return;
    offloaded_[static_cast<size_t>(layer)].push_back({saved, host_bytes_});
    host_bytes_ += round_up(saved.bytes(), Arena::kAlignBytes);
}

void ActivationOffload::allocate(Arena& arena) {
    if (host_bytes_ > 0) host_ = arena.take_host(host_bytes_);
}

void ActivationOffload::open(const Ctx& ctx) {
    if (in_.is_open()) return;
    in_.open(ctx);
    out_.open(ctx);
    in_.ctx.timer = out_.ctx.timer = nullptr;
    computed_ = OwnedEvent::create();
    for (int set = 0; set < kResidentLayers; set++) {
        saved_[set] = OwnedEvent::create();
        loaded_[set] = OwnedEvent::create();
    }
}

// The set holds the activations of layer - kResidentLayers until they are copied to the host.
void ActivationOffload::before_forward(Ctx& ctx, int layer) {
    if (on() && !ctx.rehearsal && in_.is_open() && layer >= kResidentLayers)
        device::event_order(ctx, saved_[set_of(layer)]);
}

void ActivationOffload::after_forward(Ctx& ctx, int layer, bool save) {
    if (!save || !is_offloaded(layer) || ctx.rehearsal) return;
    open(ctx);
    device::event_record(ctx, computed_);
    device::event_order(out_.ctx, computed_);
    for (const Part& part : offloaded_[static_cast<size_t>(layer)])
        device::copy_to_host(out_.ctx, host_ + part.offset, part.on_device.data, part.on_device.bytes());
    device::event_record(out_.ctx, saved_[set_of(layer)]);
}

void ActivationOffload::before_backward(Ctx& ctx, int layer) {
    if (is_offloaded(layer) && !ctx.rehearsal) device::event_order(ctx, loaded_[set_of(layer)]);
}

// Layer `next` has been copied to the host: in the forward pass, ctx waited for that copy before it ran the later layer
// that uses the same set.
void ActivationOffload::after_backward(Ctx& ctx, int layer) {
    const int next = layer - kResidentLayers;
    if (next < 0 || !is_offloaded(next) || ctx.rehearsal) return;
    device::event_record(ctx, computed_);
    device::event_order(in_.ctx, computed_);
    for (const Part& part : offloaded_[static_cast<size_t>(next)])
        device::copy_to_device(in_.ctx, part.on_device.data, host_ + part.offset, part.on_device.bytes());
    device::event_record(in_.ctx, loaded_[set_of(next)]);
}
