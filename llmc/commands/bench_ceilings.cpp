#include "llmc/commands/bench_ceilings.h"

#include <algorithm>
#include <functional>
#include <set>

#include "llmc/base/median.h"
#include "llmc/ops/op_timer.h"

namespace {

double d(int64_t x) { return static_cast<double>(x); }

Dtype ceiling_type(Dtype dtype) { return dtype == Dtype::kE5m2 ? Dtype::kE4m3 : dtype; }

class DeviceMemory {
public:
    Tensor take(Dtype dtype, int64_t elems) {
        taken_.push_back(device::device_alloc(elems * dtype_bytes(dtype)));
        return {taken_.back(), dtype, elems};
    }
    DeviceMemory() = default;
    DeviceMemory(const DeviceMemory&) = delete;
    ~DeviceMemory() {
        for (void* memory : taken_) device::device_free(memory);
    }

private:
    std::vector<void*> taken_;
};

struct Span {
    Event *begin = device::event_create(), *end = device::event_create();
    Span() = default;
    Span(const Span&) = delete;
    ~Span() {
        device::event_destroy(begin);
        device::event_destroy(end);
    }
};

using Launch = std::function<void()>;

double launches_ms(Ctx& ctx, const Span& span, int64_t launches, const Launch& launch) {
    device::event_record(ctx, span.begin);
    for (int64_t i = 0; i < launches; i++) launch();
    device::event_record(ctx, span.end);
    device::event_wait(span.end);
    return static_cast<double>(device::event_elapsed_ms(span.begin, span.end));
}

// Time of one launch: the best of five series that take 50 ms each (on a CPU 5 ms).
double best_ms(Ctx& ctx, const Launch& launch) {
    const Span span;
    launches_ms(ctx, span, 3, launch);
    const double wanted_ms = ctx.sm > 0 ? 50 : 5, one_ms = std::max(1e-4, launches_ms(ctx, span, 3, launch) / 3);
    const int64_t launches = std::max<int64_t>(3, static_cast<int64_t>(wanted_ms / one_ms));
    double best = launches_ms(ctx, span, launches, launch);
    for (int i = 0; i < 4; i++) best = std::min(best, launches_ms(ctx, span, launches, launch));
    return best / d(launches);
}

double copy_rate(Ctx& ctx) {
    const int64_t bytes = ctx.sm > 0 ? int64_t{1} << 30 : int64_t{1} << 24;
    DeviceMemory memory;
    const Tensor from = memory.take(Dtype::kFp32, bytes / 4), to = memory.take(Dtype::kFp32, bytes / 4);
    ops::fill_normal(ctx, {.out = from, .key = 1, .element_offset = 0, .mean = 0, .std = 1});
    return 2e3 * d(bytes) / best_ms(ctx, [&] { device::copy_on_device(ctx, to.data, from.data, bytes); });
}

// Random numbers, because a GPU at its power limit is faster with zeros.
Tensor random_operand(Ctx& ctx, DeviceMemory& memory, Dtype dtype, int64_t n, const Fp8Slot* slot, uint64_t key) {
    const Tensor out = memory.take(dtype, n * n);
    const bool fp8 = dtype_bytes(dtype) == 1;
    const Tensor values = fp8 ? memory.take(Dtype::kBf16, n * n) : out;
    if (dtype == Dtype::kFp64) device::fill_bytes(ctx, out.data, 0, out.bytes());
    else ops::fill_normal(ctx, {.out = values, .key = key, .element_offset = 0, .mean = 0, .std = 1});
    if (fp8) {
        QuantOut quant;
        quant.rowwise = out;
        quant.slot = const_cast<Fp8Slot*>(slot);
        ops::quantize(ctx, {.quant = quant, .in = values, .N = n, .C = n});
    }
    return out;
}

double matmul_flops(Ctx& ctx, Dtype dtype, int64_t n) {
    DeviceMemory memory;
    const bool fp8 = dtype_bytes(dtype) == 1;
    const Fp8Slot start{.scale_inv = 1, .scale = 64, .amax_bits = 0, .step_amax_bits = 0};
    const Tensor slot_bytes = memory.take(Dtype::kInt32, sizeof start / 4);
    device::copy_to_device(ctx, slot_bytes.data, &start, sizeof start);
    device::synchronize(ctx);
    auto* slot = static_cast<Fp8Slot*>(slot_bytes.data);
    GemmArgs args{.D = memory.take(fp8 ? Dtype::kBf16 : dtype, n * n),
                  .A = random_operand(ctx, memory, dtype, n, slot, 1),
                  .B = random_operand(ctx, memory, dtype, n, slot, 2), .bias = {}, .pre = {}, .M = n, .N = n, .K = n};
    if (fp8) {
        args.A_scale_inv = args.B_scale_inv = {&slot->scale_inv, Dtype::kFp32, 1};
        args.fast_accumulation = true;
    }
    return 2e3 * d(n) * d(n) * d(n) / best_ms(ctx, [&] { ops::gemm(ctx, args); });
}

// The time that two events add to a small operation: the median of five comparisons with the same launches without
// events.
double event_cost_ms(Ctx& ctx, const Launch& launch) {
    constexpr int64_t kLaunches = 200;
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

void measure_events(Ctx& ctx, Ceilings& ceilings) {
    const int64_t n = ctx.sm > 0 ? 4096 : 64;
    DeviceMemory memory;
    const Tensor matrix = memory.take(Dtype::kFp32, n * n);
    auto* amaxes = static_cast<uint32_t*>(memory.take(Dtype::kInt32, (n / 128 + 1) * (n / 128 + 1)).data);
    ceilings.event_ms = event_cost_ms(ctx, [&] { ops::fill_constant(ctx, {.out = matrix, .value = 1}); });
    ceilings.early_event_ms = event_cost_ms(ctx, [&] {
        ops::block_amax(ctx, {.amaxes = amaxes, .in = matrix, .begin = 0, .R = n, .C = n});
    });
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
    const int64_t results = g.M * g.N * dtype_bytes(g.D.dtype) * (g.accumulate || g.pre ? 2 : 1);
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
    for (Dtype dtype : types) ceilings.flops[dtype] = matmul_flops(ctx, dtype, ceilings.matmul_size);
    measure_events(ctx, ceilings);
    device::synchronize(ctx);
    return ceilings;
}
