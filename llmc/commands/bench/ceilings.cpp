#include "llmc/commands/bench/ceilings.h"

#include <algorithm>
#include <functional>
#include <set>

#include "llmc/base/median.h"
#include "llmc/ops/op_timer.h"

namespace {

double d(int64_t x) { return static_cast<double>(x); }

Dtype ceiling_type(Dtype dtype) { return dtype == Dtype::kE5m2 ? Dtype::kE4m3 : dtype; }

// Device memory that is freed at the end of the scope.
class DeviceMemory {
public:
    Tensor take(Dtype dtype, int64_t elems) {
        taken_.emplace_back(device::device_alloc(elems * dtype_bytes(dtype)));
        return {taken_.back().get(), dtype, elems};
    }

private:
    std::vector<DevicePtr<>> taken_;
};

struct Span {
    OwnedEvent begin = OwnedEvent::create(), end = OwnedEvent::create();
};
using Launch = std::function<void()>;

double launches_ms(Ctx& ctx, const Span& span, int64_t launches, const Launch& launch) {
    device::event_record(ctx, span.begin);
    for (int64_t i = 0; i < launches; i++) launch();
    device::event_record(ctx, span.end);
    device::event_wait(span.end);
    return static_cast<double>(device::event_elapsed_ms(span.begin, span.end));
}

// Milliseconds of one launch in the best of five series, which take about 50 ms each (on a CPU 5). The first launches
// are not counted.
double best_ms(Ctx& ctx, const Launch& launch) {
    const Span span;
    launches_ms(ctx, span, 3, launch);
    const double one_ms = std::max(1e-4, launches_ms(ctx, span, 3, launch) / 3);
    const auto count = std::max<int64_t>(3, static_cast<int64_t>((ctx.sm > 0 ? 50 : 5) / one_ms));
    double best = 1e300;
    for (int series = 0; series < 5; series++) best = std::min(best, launches_ms(ctx, span, count, launch) / d(count));
    return best;
}

double copy_rate(Ctx& ctx) {
    const int64_t bytes = ctx.sm > 0 ? int64_t{1} << 30 : int64_t{1} << 24;
    DeviceMemory memory;
    const Tensor from = memory.take(Dtype::kFp32, bytes / 4), to = memory.take(Dtype::kFp32, bytes / 4);
    ops::fill_normal(ctx, {.out = from, .key = 1, .element_offset = 0, .mean = 0, .std = 1});
    return 2e3 * d(bytes) / best_ms(ctx, [&] { device::copy_on_device(ctx, to.data, from.data, bytes); });
}

double host_link_rate(Ctx& ctx) {
    const int64_t bytes = ctx.sm > 0 ? int64_t{1} << 28 : int64_t{1} << 22;
    DeviceMemory memory;
    const Tensor to = memory.take(Dtype::kFp32, bytes / 4), from = memory.take(Dtype::kFp32, bytes / 4);
    const PinnedPtr<> host[2] = {PinnedPtr<>(device::pinned_alloc(bytes)), PinnedPtr<>(device::pinned_alloc(bytes))};
    SideStream streams[2];
    for (SideStream& stream : streams) stream.open(ctx);
    const OwnedEvent event = OwnedEvent::create();
    const double ms = best_ms(ctx, [&] {
        device::event_record(ctx, event);
        for (SideStream& stream : streams) device::event_order(stream.ctx, event);
        device::copy_to_device(streams[0].ctx, to.data, host[0].get(), bytes);
        device::copy_to_host(streams[1].ctx, host[1].get(), from.data, bytes);
        for (SideStream& stream : streams) {
            device::event_record(stream.ctx, event);
            device::event_order(ctx, event);
        }
    });
    device::synchronize(ctx);
    return 1e3 * d(bytes) / ms;
}

// A square matmul of normal numbers, because a GPU at its power limit is faster with zeros.
double matmul_flops(Ctx& ctx, Dtype dtype, int64_t n) {
    DeviceMemory memory;
    const bool fp8 = dtype_bytes(dtype) == 1;
    const Dtype high = fp8 ? Dtype::kBf16 : dtype;
    GemmArgs args{.D = memory.take(high, n * n), .A = memory.take(dtype, n * n), .B = memory.take(dtype, n * n),
                  .M = n, .N = n, .K = n};
    const Tensor entry = memory.take(Dtype::kFp32, sizeof(ScaleEntry) / 4);
    ops::fill_constant(ctx, {.out = entry, .value = 64});   // the scale
    for (const Tensor& operand : {args.A, args.B}) {
        const Tensor values = fp8 ? args.D : operand;
        if (dtype == Dtype::kFp64) device::fill_bytes(ctx, operand.data, 0, operand.bytes());
        else ops::fill_normal(ctx, {.out = values, .key = 1, .element_offset = 0, .mean = 0, .std = 1});
        if (fp8) ops::quantize(ctx, {.quant = {.rowwise = operand, .entry = static_cast<ScaleEntry*>(entry.data)},
                                     .in = values, .N = n, .C = n});
    }
    if (fp8) args.A_scale_inv = args.B_scale_inv = entry.slice(0, 1), args.fast_accumulation = true;
    return 2e3 * d(n) * d(n) * d(n) / best_ms(ctx, [&] { ops::gemm(ctx, args); });
}

// The time that two events add to a small operation: the median of five comparisons with the same launches without
// events.
double event_cost_ms(Ctx& ctx) {
    constexpr int64_t kLaunches = 200;
    DeviceMemory memory;
    const int64_t elems = ctx.sm > 0 ? 1 << 24 : 1 << 12;
    const Tensor values = memory.take(Dtype::kFp32, elems);
    const Launch launch = [&] { ops::fill_constant(ctx, {.out = values, .value = 1}); };
    const Span span;
    OpTimer timer(ctx);
    std::vector<double> costs;
    for (int i = 0; i < 6; i++) {
        const double alone = launches_ms(ctx, span, kLaunches, launch) / kLaunches;
        timer.restart();
        ctx.timer = &timer;
        for (int64_t l = 0; l < kLaunches; l++) launch();
        ctx.timer = nullptr;
        double within = 0;
        const auto& calls = timer.read();
        for (size_t c = 0; c < timer.calls(); c++) within += calls[c].ms;
        if (i > 0) costs.push_back(within / kLaunches - alone);   // the first comparison creates the events
    }
    return std::max(0.0, median_of(costs));
}

}  // namespace

double attention_flop(const PlannedAttention& s) {
    return (s.backward ? 5 : 2) * d(s.B) * d(s.NH) * d(s.T) * d(s.T) * d(s.HS);
}

double Ceilings::floor_ms(const PlannedOp& op) const {
    const double moving = copy_ms(op.bytes);
    const auto rate = flops.find(op.attention.fp8 ? Dtype::kE4m3 : op.dtype);
    if (op.attention.HS == 0 || rate == flops.end()) return moving;
    return std::max(moving, 1e3 * attention_flop(op.attention) / rate->second);
}

double Ceilings::floor_ms(const GemmArgs& g) const {
    const int64_t operands = (g.M + g.N) * g.K * dtype_bytes(g.A.dtype);
    const int64_t results = g.M * g.N * dtype_bytes(g.D.dtype) * (g.accumulate ? 2 : 1);
    const double moving = copy_ms(operands + results);
    const auto rate = flops.find(ceiling_type(g.A.dtype));
    return rate == flops.end() ? moving : std::max(moving, 2e3 * d(g.M) * d(g.N) * d(g.K) / rate->second);
}

Ceilings measure_ceilings(Ctx& ctx, const StepRecorder& work) {
    Ceilings ceilings;
    ceilings.matmul_size = ctx.sm > 0 ? 8192 : 192;
    std::set<Dtype> types;
    for (const PlannedGemm& g : work.gemms) types.insert(ceiling_type(g.shape.A.dtype));
    for (const PlannedOp& op : work.ops)
        if (op.attention.HS > 0) types.insert(op.attention.fp8 ? Dtype::kE4m3 : op.dtype);
    ceilings.copy_rate = copy_rate(ctx);
    ceilings.host_link = host_link_rate(ctx);
    for (Dtype dtype : types) ceilings.flops[dtype] = matmul_flops(ctx, dtype, ceilings.matmul_size);
    ceilings.event_ms = event_cost_ms(ctx);
    device::synchronize(ctx);
    return ceilings;
}
