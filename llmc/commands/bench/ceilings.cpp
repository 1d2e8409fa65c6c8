#include "llmc/commands/bench/bench_table.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <set>

#include "llmc/ops/owned.h"

namespace {

using Memory = std::vector<DevicePtr<>>;

Tensor take(Memory& memory, Dtype dtype, int64_t elems) {
    memory.emplace_back(device::device_alloc(elems * dtype_bytes(dtype)));
    return {memory.back().get(), dtype, elems};
}

// Milliseconds of one launch in the best of five series; the one before them is not counted.
double best_ms(Ctx& ctx, const std::function<void()>& launch) {
    constexpr int kLaunches = 20;
    const OwnedEvent begin = OwnedEvent::create(), end = OwnedEvent::create();
    double best = HUGE_VAL;
    for (int series = 0; series < 6; series++) {
        device::event_record(ctx, begin);
        for (int i = 0; i < kLaunches; i++) launch();
        device::event_record(ctx, end);
        device::event_wait(end);
        if (series > 0) best = std::min(best, static_cast<double>(device::event_elapsed_ms(begin, end)) / kLaunches);
    }
    return best;
}

BenchRow device_copy(Ctx& ctx) {
    const int64_t bytes = ctx.sm > 0 ? int64_t{1} << 30 : int64_t{1} << 24;
    Memory memory;
    const Tensor from = take(memory, Dtype::kFp32, bytes / 4), to = take(memory, Dtype::kFp32, bytes / 4);
    ops::fill_normal(ctx, {.out = from, .key = 1, .element_offset = 0, .mean = 0, .std = 1});
    const double ms = best_ms(ctx, [&] { device::copy_on_device(ctx, to.data, from.data, bytes); });
    return {.part = "ceiling", .name = "device copy", .ms = ms, .bytes = 2 * real(bytes)};
}

// A square matmul of normal numbers, because a GPU at its power limit is faster with zeros.
BenchRow square_matmul(Ctx& ctx, Dtype dtype) {
    const int64_t n = ctx.sm > 0 ? 8192 : 192;
    Memory memory;
    const bool fp8 = dtype_bytes(dtype) == 1;
    const Dtype high = fp8 ? Dtype::kBf16 : dtype;
    GemmArgs args{.D = take(memory, high, n * n), .A = take(memory, dtype, n * n), .B = take(memory, dtype, n * n),
                  .M = n, .N = n, .K = n};
    const Tensor entry = take(memory, Dtype::kFp32, sizeof(ScaleEntry) / 4);
    ops::fill_constant(ctx, {.out = entry, .value = 64});   // the scale
    for (const Tensor& operand : {args.A, args.B}) {
        const Tensor values = fp8 ? args.D : operand;
        ops::fill_normal(ctx, {.out = values, .key = 1, .element_offset = 0, .mean = 0, .std = 1});
        if (fp8) ops::quantize(ctx, {.quant = {.rowwise = operand, .entry = static_cast<ScaleEntry*>(entry.data)},
                                     .in = values, .N = n, .C = n});
    }
    if (fp8) args.A_scale_inv = args.B_scale_inv = entry.slice(0, 1), args.fast_accumulation = true;
    const double ms = best_ms(ctx, [&] { ops::gemm(ctx, args); });
    return {.part = "ceiling", .name = gemm_text(args), .ms = ms, .flop = 2 * real(n * n * n)};
}

}  // namespace

Ceilings measure_ceilings(Ctx& ctx, const StepRecorder& work) {
    std::set<Dtype> types;
    for (const PlannedGemm& g : work.gemms) types.insert(g.shape.A.dtype);
    for (const PlannedOp& op : work.ops)
        if (op.attention.HS > 0) types.insert(op.attention.fp8 ? Dtype::kE4m3 : op.dtype);
    if (types.erase(Dtype::kE5m2) + types.erase(Dtype::kInt8) > 0) types.insert(Dtype::kE4m3);
    const BenchRow copy = device_copy(ctx);
    Ceilings ceilings{.rows = {copy}, .copy_rate = 1e3 * copy.bytes / copy.ms, .flops = {}};
    for (Dtype dtype : types) {
        const BenchRow matmul = square_matmul(ctx, dtype);
        ceilings.flops[dtype] = 1e3 * matmul.flop / matmul.ms;
        ceilings.rows.push_back(matmul);
    }
    for (BenchRow& row : ceilings.rows) row.floor_ms = row.ms;
    device::synchronize(ctx);
    return ceilings;
}
