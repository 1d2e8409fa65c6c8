// The CUDA device: memory, copies, events, properties, and errors.
#include "tests/gpu/gpu_op.h"

using namespace op_test;

namespace ops_device_test {

TEST_CASE("gpu device: properties with and without an index") {
    const DeviceInfo none = cuda::device_info(-1);
    CHECK_EQ(none.sm, 0);
    CHECK_FALSE(none.toolkit.empty());
    CHECK_NE(none.matmul_library.find("cuBLASLt"), std::string::npos);
    REQUIRE(cuda::device_count() > 0);
    const DeviceInfo info = cuda::device_info(0);
    CHECK_GE(info.sm, 80);
    CHECK_GT(info.sm_count, 0);
    CHECK_GT(info.memory_bytes, int64_t{1} << 30);
    CHECK_FALSE(info.name.empty());
    CHECK_FALSE(info.driver.empty());
    Ctx ctx;
    const int count = cuda::device_count();
    CHECK_NE(error_of([&] { cuda::device_open(ctx, count); }).find(strf("exit 2: CUDA device %d", count)),
             std::string::npos);
    CHECK_NE(error_of([&] { cuda::device_open(ctx, -1); }).find("exit 2"), std::string::npos);
}

TEST_CASE("gpu device: allocations are counted, aligned, and fail with the numbers") {
    const int64_t before = cuda::allocation_count(), free_before = cuda::device_free_bytes();
    void* memory = cuda::device_alloc((1 << 26) + 1);
    CHECK_EQ(reinterpret_cast<uintptr_t>(memory) % 256, 0);
    CHECK_LE(cuda::device_free_bytes(), free_before - (1 << 26));
    void* pinned = cuda::pinned_alloc(100);
    CHECK_EQ(cuda::allocation_count(), before + 2);
    cuda::device_free(memory);
    cuda::pinned_free(pinned);
    const std::string error = error_of([] { cuda::device_alloc(int64_t{1} << 50); });
    CHECK_NE(error.find("exit 2: cannot allocate 1125899906842624 bytes"), std::string::npos);
    CHECK_NE(error.find("GiB are free"), std::string::npos);
    // The error is cleared, so that the next check does not report it.
    HostTensor one(Dtype::kFp32, 1);
    DeviceTensor out(one);
    cuda::fill_constant(gpu(), {.out = out.view(), .value = 1});
    CHECK_EQ(out.download().get(0), 1);
}

TEST_CASE("gpu device: copies, fills, events, ranges") {
    constexpr int64_t kBytes = 100003;
    auto* host = static_cast<uint8_t*>(cuda::pinned_alloc(2 * kBytes));
    auto* device = static_cast<uint8_t*>(cuda::device_alloc(2 * kBytes));
    for (int64_t i = 0; i < kBytes; i++) host[i] = static_cast<uint8_t>(i * 31), host[kBytes + i] = 0;
    Event *begin = cuda::event_create(), *end = cuda::event_create();
    cuda::range_push("test");
    cuda::event_record(gpu(), begin);
    cuda::copy_to_device(gpu(), device, host, kBytes);
    cuda::copy_on_device(gpu(), device + kBytes, device, kBytes);
    cuda::fill_bytes(gpu(), device + kBytes + 5, 0xab, 7);
    cuda::copy_to_host(gpu(), host + kBytes, device + kBytes, kBytes);
    cuda::event_record(gpu(), end);
    cuda::event_wait(end);
    cuda::range_pop();
    CHECK(cuda::event_reached(begin));
    CHECK(cuda::event_reached(end));
    CHECK_GE(cuda::event_elapsed_ms(begin, end), 0);
    int64_t wrong = 0;
    for (int64_t i = 0; i < kBytes; i++)
        wrong += host[kBytes + i] != (i >= 5 && i < 12 ? 0xab : static_cast<uint8_t>(i * 31));
    CHECK_EQ(wrong, 0);

    // A rehearsal moves nothing.
    Ctx rehearsal = gpu();
    rehearsal.rehearsal = true;
    host[0] = 77;
    cuda::copy_to_device(rehearsal, device, host, 1);
    cuda::fill_bytes(rehearsal, device, 1, 1);
    cuda::copy_to_host(gpu(), host, device, 1);
    cuda::synchronize(gpu());
    CHECK_EQ(host[0], 0);
    cuda::event_destroy(begin);
    cuda::event_destroy(end);
    cuda::device_free(device);
    cuda::pinned_free(host);
}

TEST_CASE("gpu device: types and shapes that do not fit are named") {
    HostTensor in(Dtype::kFp64, 8), out(Dtype::kFp32, 8);
    DeviceTensor device_in(in), device_out(out);
    const std::string type = error_of([&] {
        cuda::cast(gpu(), {.out = device_out.view(), .in = device_in.view()});
    });
    CHECK_NE(type.find("exit 1"), std::string::npos);
    CHECK_NE(type.find("cast: in in fp64"), std::string::npos);
    const std::string shape = error_of([&] {
        cuda::activation_forward(gpu(), {.kind = Activation::kGelu, .out = device_out.view(), .in = device_out.view(),
                                         .N = 3, .F = 3});
    });
    CHECK_NE(shape.find("activation_forward has 8 elements, not 9"), std::string::npos);
}

}  // namespace ops_device_test
