// Events, streams and memory of the device that their owner releases when it is destroyed, and copies of such memory
// that are waited for.
#pragma once
#include <memory>
#include <vector>

#include "llmc/ops/device.h"

// An event; null until it is created.
class OwnedEvent {
public:
    static OwnedEvent create() {
        OwnedEvent owned;
        owned.event_.reset(device::event_create());
        return owned;
    }
    operator Event*() const { return event_.get(); }

private:
    struct Destroy {
        void operator()(Event* event) const { device::event_destroy(event); }
    };
    std::unique_ptr<Event, Destroy> event_;
};

// A side stream (see side_open), which is closed at first.
class SideStream {
public:
    SideStream() = default;
    ~SideStream() {
        if (open_) device::side_close(ctx);
    }
    SideStream(const SideStream&) = delete;
    SideStream& operator=(const SideStream&) = delete;

    bool is_open() const { return open_; }
    void open(const Ctx& beside) {
        device::side_open(ctx, beside);
        open_ = true;
    }

    Ctx ctx;

private:
    bool open_ = false;
};

// Memory from device_alloc and pinned_alloc.
struct FreeDevice {
    void operator()(void* memory) const { device::device_free(memory); }
};
struct FreePinned {
    void operator()(void* memory) const { device::pinned_free(memory); }
};
template <typename T = void> using DevicePtr = std::unique_ptr<T, FreeDevice>;
template <typename T = void> using PinnedPtr = std::unique_ptr<T, FreePinned>;

// The values of device memory after all that is enqueued on ctx, and the way back; both wait until the copy is done.
template <typename T> std::vector<T> read_back(Ctx& ctx, const Tensor& memory) {
    std::vector<T> host(static_cast<size_t>(memory.bytes()) / sizeof(T));
    device::copy_to_host(ctx, host.data(), memory.data, memory.bytes());
    device::synchronize(ctx);
    return host;
}
template <typename T> void write_out(Ctx& ctx, const Tensor& memory, const std::vector<T>& host) {
    device::copy_to_device(ctx, memory.data, host.data(), static_cast<int64_t>(host.size() * sizeof(T)));
    device::synchronize(ctx);
}
