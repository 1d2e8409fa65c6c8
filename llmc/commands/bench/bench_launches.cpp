#include "llmc/commands/bench/bench_launches.h"

#include <algorithm>

Tensor DeviceMemory::take(Dtype dtype, int64_t elems) {
    taken_.emplace_back(device::device_alloc(elems * dtype_bytes(dtype)));
    return {taken_.back().get(), dtype, elems};
}

Tensor DeviceMemory::random(Ctx& ctx, Dtype dtype, int64_t N, int64_t C, Fp8Slot* slot, uint64_t key) {
    const Tensor out = take(dtype, N * C);
    const bool fp8 = dtype_bytes(dtype) == 1;
    DeviceMemory rounded;   // BF16 values that are cast to FP8
    const Tensor values = fp8 ? rounded.take(Dtype::kBf16, N * C) : out;
    if (dtype == Dtype::kFp64) device::fill_bytes(ctx, out.data, 0, out.bytes());
    else ops::fill_normal(ctx, {.out = values, .key = key, .element_offset = 0, .mean = 0, .std = 1});
    if (fp8) {
        ops::quantize(ctx, {.quant = {.rowwise = out, .slot = slot}, .in = values, .N = N, .C = C});
        device::synchronize(ctx);
    }
    return out;
}

CastSlot::CastSlot(Ctx& ctx, DeviceMemory& memory) {
    const Fp8Slot start{.scale_inv = 1, .scale = 64, .amax_bits = 0, .step_amax_bits = 0};
    slot_ = static_cast<Fp8Slot*>(memory.take(Dtype::kInt32, sizeof start / 4).data);
    device::copy_to_device(ctx, slot_, &start, sizeof start);
    device::synchronize(ctx);
}

double launches_ms(Ctx& ctx, const Span& span, int64_t launches, const Launch& launch) {
    device::event_record(ctx, span.begin);
    for (int64_t i = 0; i < launches; i++) launch();
    device::event_record(ctx, span.end);
    device::event_wait(span.end);
    return static_cast<double>(device::event_elapsed_ms(span.begin, span.end));
}

std::vector<std::vector<double>> series_in_turn(Ctx& ctx, double series_ms, const std::vector<Launch>& launches) {
    const Span span;
    std::vector<int64_t> counts;
    for (const Launch& launch : launches) {
        launches_ms(ctx, span, 3, launch);
        const double one_ms = std::max(1e-4, launches_ms(ctx, span, 3, launch) / 3);
        counts.push_back(std::max<int64_t>(3, static_cast<int64_t>(series_ms / one_ms)));
    }
    std::vector<std::vector<double>> ms(launches.size());
    for (int series = 0; series < 5; series++)
        for (size_t i = 0; i < launches.size(); i++)
            ms[i].push_back(launches_ms(ctx, span, counts[i], launches[i]) / static_cast<double>(counts[i]));
    return ms;
}

double best_ms(Ctx& ctx, const Launch& launch) {
    const std::vector<double> ms = series_in_turn(ctx, ctx.sm > 0 ? 50 : 5, {launch})[0];
    return *std::min_element(ms.begin(), ms.end());
}
