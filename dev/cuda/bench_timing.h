// How the benches of memory-bound operations measure: launches back to back, and the ceiling of a copy on the device.
#pragma once
#include <algorithm>
#include <functional>
#include <vector>

#include "llmc/ops.h"

// Median of five, in microseconds a launch.
inline double time_us(Ctx& ctx, const std::function<void(int64_t)>& launch) {
    Event *begin = cuda::event_create(), *end = cuda::event_create();
    auto batch_ms = [&](int64_t launches) {
        cuda::event_record(ctx, begin);
        for (int64_t i = 0; i < launches; i++) launch(i);
        cuda::event_record(ctx, end);
        cuda::event_wait(end);
        return static_cast<double>(cuda::event_elapsed_ms(begin, end));
    };
    batch_ms(3);
    const double one_ms = batch_ms(5) / 5;
    const int64_t launches = std::max<int64_t>(5, static_cast<int64_t>(50 / one_ms));
    std::vector<double> batches;
    for (int i = 0; i < 5; i++) batches.push_back(batch_ms(launches) / static_cast<double>(launches) * 1e3);
    cuda::event_destroy(begin);
    cuda::event_destroy(end);
    std::sort(batches.begin(), batches.end());
    return batches[2];
}

inline double copy_gbps(Ctx& ctx) {
    const int64_t bytes = int64_t{1} << 31;
    void *from = cuda::device_alloc(bytes), *to = cuda::device_alloc(bytes);
    cuda::fill_normal(ctx, {Tensor{from, Dtype::kFp32, bytes / 4}, 1, 0, 0.0f, 1.0f});
    const double us = time_us(ctx, [&](int64_t) { cuda::copy_on_device(ctx, to, from, bytes); });
    cuda::device_free(from);
    cuda::device_free(to);
    return 2.0 * static_cast<double>(bytes) / us * 1e-3;
}
