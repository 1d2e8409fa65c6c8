// Tensors of the GPU tests: copies of host tensors in device memory, between guard zones as on the host.
#pragma once
#include "tests/support/op_test.h"

#include "llmc/ops/device.h"

namespace op_test {

// One device for the whole process.
inline Ctx& gpu() {
    static Ctx ctx = [] {
        Ctx opened;
        cuda::device_open(opened, 0);
        return opened;
    }();
    return ctx;
}

// A new context: no plans, search off, nothing counted.
struct FreshContext {
    Ctx ctx;
    FreshContext() { cuda::device_open(ctx, 0); }
    ~FreshContext() { cuda::device_close(ctx); }
};

// The bytes of a host tensor on the device, including initial NaNs. `shift_bytes` misaligns it.
class DeviceTensor {
public:
    explicit DeviceTensor(const HostTensor& host, int64_t shift_bytes = 0) : host_(host), front_(kGuard + shift_bytes) {
        if (host_.elems() == 0) return;
        std::vector<uint8_t> bytes(static_cast<size_t>(front_ + host_.bytes() + kGuard), kGuardByte);
        std::memcpy(bytes.data() + front_, host_.data(), static_cast<size_t>(host_.bytes()));
        memory_ = static_cast<uint8_t*>(cuda::device_alloc(static_cast<int64_t>(bytes.size())));
        cuda::copy_to_device(gpu(), memory_, bytes.data(), static_cast<int64_t>(bytes.size()));
        cuda::synchronize(gpu());
    }
    ~DeviceTensor() {
        if (memory_) cuda::device_free(memory_);
    }
    DeviceTensor(const DeviceTensor&) = delete;
    DeviceTensor& operator=(const DeviceTensor&) = delete;

    Tensor view() const {
        return memory_ ? Tensor{memory_ + front_, host_.dtype(), host_.elems()} : Tensor{};
    }
    // Returns the present values; the test fails if a guard has changed.
    HostTensor download() {
        HostTensor result = host_;
        if (!memory_) return result;
        std::vector<uint8_t> bytes(static_cast<size_t>(front_ + host_.bytes() + kGuard));
        cuda::copy_to_host(gpu(), bytes.data(), memory_, static_cast<int64_t>(bytes.size()));
        cuda::synchronize(gpu());
        int64_t damaged = 0;
        for (int64_t i = 0; i < front_; i++) damaged += bytes[static_cast<size_t>(i)] != kGuardByte;
        for (size_t i = static_cast<size_t>(front_ + host_.bytes()); i < bytes.size(); i++)
            damaged += bytes[i] != kGuardByte;
        CHECK_EQ(damaged, 0);
        std::memcpy(result.data(), bytes.data() + front_, static_cast<size_t>(host_.bytes()));
        return result;
    }

private:
    static constexpr int64_t kGuard = 256;
    static constexpr uint8_t kGuardByte = 0x5a;
    HostTensor host_;
    int64_t front_;
    uint8_t* memory_ = nullptr;
};

// Root of the mean square of got - want.
inline double rms_error(const HostTensor& got, const HostTensor& want) {
    double sum = 0;
    for (int64_t i = 0; i < got.elems(); i++) sum += std::pow(got.get(i) - want.get(i), 2);
    return std::sqrt(sum / static_cast<double>(got.elems()));
}

}  // namespace op_test
