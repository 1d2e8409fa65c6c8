// The CUDA device: memory, copies, events, profiler. Needs only the statically linked runtime, so the program starts on
// a machine without a driver: device_count() is 0 there and nothing else is called.
#include <cublasLt.h>
#include <cuda_profiler_api.h>
#include <nvtx3/nvToolsExt.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>

#include "llmc/base/system/threads.h"
#include "llmc/cuda/common.h"
#include "llmc/cuda/gemm.h"
#include "llmc/ops/op_timer.h"

namespace cuda {
namespace {

constexpr int kMinimumSm = 80;  // bf16 arithmetic and cp.async

// Prints the first error of calls made by destructors: after a device error all of them fail, and an exception would
// end the process without the first error's message.
void warn_once(cudaError_t status, const char* what) {
    static std::atomic<bool> warned{false};
    if (status == cudaSuccess || warned.exchange(true)) return;
    std::fprintf(stderr, "warning: %s: %s\n", what, cudaGetErrorString(status));
}

// Device and pinned allocations of the process since its start.
std::atomic<int64_t>& allocations() {
    static std::atomic<int64_t> count{0};
    return count;
}

void* allocate(int64_t bytes, const char* where, cudaError_t (*take)(void** memory, size_t size)) {
    CHECK(bytes >= 0, "allocation of %lld bytes %s", (long long)bytes, where);
    allocations()++;
    void* memory = nullptr;
    const cudaError_t status = take(&memory, static_cast<size_t>(std::max<int64_t>(bytes, 1)));
    if (status == cudaSuccess) return memory;
    cudaGetLastError();
    FAIL(kExitBadInput, "cannot allocate %lld bytes (%.2f GiB) %s: %s; %.2f GiB are free on the GPU", (long long)bytes,
         gib(bytes), where, cudaGetErrorString(status), gib(device_free_bytes()));
}

// Writes to each page, so that all are there.
void touch_pages(char* memory, int64_t bytes) {
    constexpr int64_t kPage = 4096, kPart = 64 << 20;
    std::atomic<int64_t> next{0};
    const SignalsBlocked blocked;
    on_threads(16, [&] {
        for (int64_t begin; (begin = next.fetch_add(kPart)) < bytes;)
            for (int64_t at = begin; at < std::min(bytes, begin + kPart); at += kPage) memory[at] = 0;
    });
}

// Like cudaMallocHost, which makes its pages in one thread while other processes wait in the driver: on four GPUs of a
// host it took five times as long (dev/results/2026-11-27-h200-start).
cudaError_t allocate_pinned(void** memory, size_t size) {
    constexpr size_t kPage = 4096, kHugePage = 2 << 20;
    const size_t page = size < kHugePage ? kPage : kHugePage;
    size = (size + page - 1) / page * page;
    *memory = std::aligned_alloc(page, size);
    if (!*memory) return cudaErrorMemoryAllocation;
    if (page == kHugePage) madvise(*memory, size, MADV_HUGEPAGE);   // without huge pages it only takes longer
    touch_pages(static_cast<char*>(*memory), static_cast<int64_t>(size));
    const cudaError_t status = cudaHostRegister(*memory, size, cudaHostRegisterDefault);
    if (status != cudaSuccess) std::free(*memory);
    return status;
}

cudaEvent_t handle_of(Event* event) { return reinterpret_cast<cudaEvent_t>(event); }

std::string version_text(int version) { return strf("%d.%d", version / 1000, version % 1000 / 10); }

std::string matmul_library_text() {
    int major = 0, minor = 0, patch = 0;
    if (cublasLtGetProperty(MAJOR_VERSION, &major) != CUBLAS_STATUS_SUCCESS ||
        cublasLtGetProperty(MINOR_VERSION, &minor) != CUBLAS_STATUS_SUCCESS ||
        cublasLtGetProperty(PATCH_LEVEL, &patch) != CUBLAS_STATUS_SUCCESS) {
        return "cuBLASLt";
    }
    return strf("cuBLASLt %d.%d.%d", major, minor, patch);
}

std::string id_text(const cudaUUID_t& uuid) {
    std::string text = "GPU-";
    for (const char byte : uuid.bytes) text += strf("%02x", static_cast<unsigned char>(byte));
    return text;
}

std::string driver_text() {
    int version = 0;
    if (cudaDriverGetVersion(&version) != cudaSuccess) cudaGetLastError();
    return version > 0 ? version_text(version) : "";
}

}  // namespace

int device_count() {
    int count = 0;
    if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
    cudaGetLastError();  // no driver or no GPU: not an error, and not one that a later check should see
    return 0;
}

DeviceInfo device_info(int index) {
    DeviceInfo info;
    info.index = index, info.name = "no CUDA device", info.driver = driver_text();
    info.toolkit = version_text(CUDART_VERSION), info.matmul_library = matmul_library_text();
    info.sm90a_code = kSm90aCode;
    // The build uses no feature that is newer than its headers.
    info.cublaslt_version = std::min(static_cast<int64_t>(cublasLtGetVersion()), int64_t{CUBLAS_VERSION});
    if (index < 0) return info;
    const int count = device_count();
    REQUIRE(index < count, "CUDA device %d requested, but %d can be used", index, count);
    cudaDeviceProp properties;
    CUDA_CHECK(cudaGetDeviceProperties(&properties, index));
    info.name = properties.name, info.sm = properties.major * 10 + properties.minor, info.id = id_text(properties.uuid);
    info.bus = strf("%04x:%02x:%02x.0", properties.pciDomainID, properties.pciBusID, properties.pciDeviceID);
    info.sm_count = properties.multiProcessorCount, info.memory_bytes = static_cast<int64_t>(properties.totalGlobalMem);
    return info;
}

void device_open(Ctx& ctx, int index) {
    const int count = device_count();
    const std::string driver = driver_text();
    REQUIRE(count > 0, "no usable CUDA device (driver: %s; built with CUDA %s): run on a machine with a GPU "
            "and its driver, or build with DEVICE=cpu", driver.empty() ? "none" : driver.c_str(),
            version_text(CUDART_VERSION).c_str());
    REQUIRE(index >= 0 && index < count, "CUDA device %d requested, but there are only %d (0 to %d)", index,
            count, count - 1);
    const DeviceInfo info = device_info(index);
    REQUIRE(info.sm >= kMinimumSm, "CUDA device %d (%s) has compute capability %d.%d, but %d.%d is needed",
            index, info.name.c_str(), info.sm / 10, info.sm % 10, kMinimumSm / 10, kMinimumSm % 10);
    cudaError_t status = cudaSetDevice(index);
    if (status == cudaSuccess) status = cudaFree(nullptr);  // creates the context, which is what can fail
    REQUIRE(status == cudaSuccess, "CUDA device %d (%s) cannot be used: %s", index, info.name.c_str(),
            cudaGetErrorString(status));
    cudaStream_t stream = nullptr;
    CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    ctx.stream = stream, ctx.index = index, ctx.sm = info.sm, ctx.sm_count = info.sm_count, ctx.fp8_matmuls = 0;
    gemm_state_create(ctx, info);
}

void device_close(Ctx& ctx) {
    if (ctx.stream == nullptr) return;
    warn_once(cudaStreamSynchronize(stream_of(ctx)), "closing the device");
    gemm_state_destroy(ctx);
    warn_once(cudaStreamDestroy(stream_of(ctx)), "cudaStreamDestroy");
    ctx.stream = nullptr;
}

void device_use(const Ctx& ctx) { CUDA_CHECK(cudaSetDevice(ctx.index)); }

// The stream has the highest priority: a late message delays every rank, while a message takes only a few
// multiprocessors from the matmuls.
void side_open(Ctx& side, const Ctx& ctx) {
    side = ctx;
    side.gemm = nullptr, side.recorder = nullptr, side.stream = nullptr;
    if (ctx.rehearsal) return;
    int lowest = 0, highest = 0;
    CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
    cudaStream_t stream = nullptr;
    CUDA_CHECK(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, highest));
    side.stream = stream;
}

void side_close(Ctx& side) {
    if (side.stream == nullptr) return;
    warn_once(cudaStreamSynchronize(stream_of(side)), "closing the side stream");
    warn_once(cudaStreamDestroy(stream_of(side)), "cudaStreamDestroy");
    side.stream = nullptr;
}

void* device_alloc(int64_t bytes) {
    return allocate(bytes, "on the GPU", [](void** memory, size_t size) { return cudaMalloc(memory, size); });
}

void device_free(void* memory) { warn_once(cudaFree(memory), "cudaFree"); }

void* pinned_alloc(int64_t bytes) { return allocate(bytes, "of pinned host memory", allocate_pinned); }

void pinned_free(void* memory) {
    if (memory) warn_once(cudaHostUnregister(memory), "cudaHostUnregister");
    std::free(memory);
}

int64_t allocation_count() { return allocations(); }

int64_t device_free_bytes() {
    size_t free_bytes = 0, total_bytes = 0;
    CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
    return static_cast<int64_t>(free_bytes);
}

namespace {

void copy(Ctx& ctx, void* to, const void* from, int64_t bytes, cudaMemcpyKind kind) {
    if (ctx.rehearsal || bytes == 0) return;
    const OpSpan span(ctx, "copy", 2 * bytes);
    CUDA_CHECK(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), kind, stream_of(ctx)));
}

}  // namespace

void copy_to_device(Ctx& ctx, void* device, const void* host, int64_t bytes) {
    copy(ctx, device, host, bytes, cudaMemcpyHostToDevice);
}
void copy_to_host(Ctx& ctx, void* host, const void* device, int64_t bytes) {
    copy(ctx, host, device, bytes, cudaMemcpyDeviceToHost);
}
void copy_on_device(Ctx& ctx, void* to, const void* from, int64_t bytes) {
    copy(ctx, to, from, bytes, cudaMemcpyDeviceToDevice);
}

void fill_bytes(Ctx& ctx, void* device, int value, int64_t bytes) {
    if (ctx.rehearsal || bytes == 0) return;
    const OpSpan span(ctx, "fill", bytes);
    CUDA_CHECK(cudaMemsetAsync(device, value, static_cast<size_t>(bytes), stream_of(ctx)));
}

void synchronize(Ctx& ctx) {
    if (ctx.rehearsal) return;
    CUDA_CHECK(cudaStreamSynchronize(stream_of(ctx)));
}

Event* event_create() {
    cudaEvent_t event = nullptr;
    CUDA_CHECK(cudaEventCreate(&event));
    return reinterpret_cast<Event*>(event);
}

void event_destroy(Event* event) { warn_once(cudaEventDestroy(handle_of(event)), "cudaEventDestroy"); }

void event_record(Ctx& ctx, Event* event) {
    if (ctx.rehearsal) return;
    CUDA_CHECK(cudaEventRecord(handle_of(event), stream_of(ctx)));
}

void event_order(Ctx& ctx, Event* event) {
    if (ctx.rehearsal) return;
    CUDA_CHECK(cudaStreamWaitEvent(stream_of(ctx), handle_of(event), 0));
}

void event_wait(Event* event) { CUDA_CHECK(cudaEventSynchronize(handle_of(event))); }

bool event_reached(Event* event) {
    const cudaError_t status = cudaEventQuery(handle_of(event));
    if (status == cudaErrorNotReady) {
        cudaGetLastError();
        return false;
    }
    CUDA_CHECK(status);
    return true;
}

float event_elapsed_ms(Event* begin, Event* end) {
    float milliseconds = 0.0f;
    CUDA_CHECK(cudaEventElapsedTime(&milliseconds, handle_of(begin), handle_of(end)));
    return milliseconds;
}

void range_push(const char* name) { nvtxRangePushA(name); }
void range_pop() { nvtxRangePop(); }

// cudaProfilerStart and Stop fail when no profiler is attached; that error is ignored.
void profiler_start() {
    if (cudaProfilerStart() != cudaSuccess) cudaGetLastError();
}
void profiler_stop() {
    if (cudaProfilerStop() != cudaSuccess) cudaGetLastError();
}

}  // namespace cuda
