// The CPU device: memory and properties. Streams are in stream.cpp.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <thread>

#include "llmc/base/check.h"
#include "llmc/base/system/host.h"
#include "llmc/cpu/threads.h"
#include "llmc/ops/device.h"

namespace cpu {

namespace {
std::atomic<int64_t>& allocations() {
    static std::atomic<int64_t> count{0};
    return count;
}

void* allocate(int64_t bytes, const char* what) {
    constexpr size_t kAlignment = 256;
    CHECK(bytes >= 0, "%s of %lld bytes", what, (long long)bytes);
    int64_t available = device_free_bytes();
    // Linux overcommits and kills the process later, so memory that is not available is refused here.
    void* memory = nullptr;
    if (available < 0 || bytes <= available) {
        size_t padded = (static_cast<size_t>(bytes) + kAlignment) / kAlignment * kAlignment;
        memory = std::aligned_alloc(kAlignment, padded);
    }
    REQUIRE(memory, "out of memory: %lld bytes asked for, %lld free%s; lower --micro-batch-size or the model's "
            "size", (long long)bytes, (long long)available,
            bytes <= available ? ", but not for this process (ulimit -v)" : "");
    allocations()++;
    return memory;
}
}  // namespace

int device_count() { return 1; }

DeviceInfo device_info(int index) {
    CHECK(index == 0 || index == -1, "CPU device %d", index);
    DeviceInfo info;
    info.index = 0;
    info.name = "CPU";
    info.sm_count = static_cast<int>(std::thread::hardware_concurrency());
    info.memory_bytes = std::max<int64_t>(0, meminfo_bytes("MemTotal"));
    info.matmul_library = "cpu";
    return info;
}

void device_open(Ctx& ctx, int index) {
    REQUIRE(index == 0, "CPU device %d does not exist: the CPU is device 0", index);
    ctx = Ctx{};
    ctx.sm_count = static_cast<int>(std::thread::hardware_concurrency());
    start_threads();
}
void device_use(const Ctx&) {}

void* device_alloc(int64_t bytes) { return allocate(bytes, "device_alloc"); }
void device_free(void* memory) { std::free(memory); }
void* pinned_alloc(int64_t bytes) { return allocate(bytes, "pinned_alloc"); }
void pinned_free(void* memory) { std::free(memory); }
int64_t allocation_count() { return allocations(); }
int64_t device_free_bytes() { return meminfo_bytes("MemAvailable"); }

void copy_to_device(Ctx& ctx, void* device, const void* host, int64_t bytes) {
    copy_on_device(ctx, device, host, bytes);
}
void copy_to_host(Ctx& ctx, void* host, const void* device, int64_t bytes) {
    copy_on_device(ctx, host, device, bytes);
}
void range_push(const char*) {}
void range_pop() {}
void profiler_start() {}
void profiler_stop() {}
}  // namespace cpu
