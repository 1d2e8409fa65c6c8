// Inputs for the tests of communicated gradients and weights on both devices.
#pragma once
#include "tests/support/quant_test.h"

namespace op_test {

// (N, C) values, some of them 0, whose 32 x 32 blocks have very different magnitudes, so that a scale of the wrong
// block is detected.
inline HostTensor uneven_tensor(Dtype dtype, int64_t N, int64_t C, uint64_t key, int powers = 33) {
    HostTensor x = random_tensor(dtype, N * C, key);
    for (int64_t n = 0; n < N; n++)
        for (int64_t c = 0; c < C; c++) {
            const int64_t i = n * C + c;
            const uint32_t random = philox(key, static_cast<uint64_t>(n / 32 * 1000 + c / 32)).word[1];
            const int power = static_cast<int>(random % static_cast<uint32_t>(powers)) - powers / 2;
            x.set(i, i % 61 == 7 ? 0 : std::ldexp(x.get(i), power));
        }
    return x;
}

struct ShardRange {
    int64_t begin, elems;
};
// Divides [0, elems) at random multiples of `align` into `count` ranges; some may be empty.
inline std::vector<ShardRange> random_ranges(int64_t elems, int64_t count, int64_t align, uint64_t key) {
    std::vector<int64_t> cuts = {0, elems};
    for (int64_t i = 1; i < count; i++) {
        const int64_t random = philox(key, static_cast<uint64_t>(i)).word[0];
        cuts.push_back(random % (elems / align + 1) * align);
    }
    std::sort(cuts.begin(), cuts.end());
    std::vector<ShardRange> ranges;
    for (size_t i = 0; i + 1 < cuts.size(); i++) ranges.push_back({cuts[i], cuts[i + 1] - cuts[i]});
    return ranges;
}

// Copies a range to guarded memory, and back.
inline HostTensor part_of(const HostTensor& whole, ShardRange range) {
    HostTensor part(whole.dtype(), range.elems);
    const int64_t size = dtype_bytes(whole.dtype());
    std::memcpy(part.data(), static_cast<const char*>(whole.data()) + range.begin * size,
                static_cast<size_t>(part.bytes()));
    return part;
}
inline void put_part(HostTensor& whole, ShardRange range, const HostTensor& part) {
    const int64_t size = dtype_bytes(whole.dtype());
    std::memcpy(static_cast<char*>(whole.data()) + range.begin * size, part.data(), static_cast<size_t>(part.bytes()));
}

inline uint8_t byte_of(const HostTensor& t, int64_t i) { return static_cast<const uint8_t*>(t.data())[i]; }

// Quantizations of weights that several ranks may share: rowwise and transposed, with one scale or 128x128 blocks.
inline std::vector<QuantRequest> weight_requests() {
    std::vector<QuantRequest> requests;
    for (Dtype format : {Dtype::kE4m3, Dtype::kE5m2}) {
        requests.push_back({.name = "delayed", .format = format});
        requests.push_back({.name = "current", .scaling = Scaling::kCurrent, .format = format});
        requests.push_back({.name = "squares", .granularity = Granularity::kBlock128x128, .format = format});
    }
    return requests;
}

// Sets critical values: NaN, infinities, fp32 that rounds to infinity in bf16, denormals, ties.
inline void corrupt(HostTensor& x, uint64_t key) {
    const double values[] = {HUGE_VAL, -HUGE_VAL, std::nan(""), 0x1.fffffep127, 0x1p-149, -0x1p-133, 0x1p-126, -0.0,
                             0, 0x1.01p0, 1.0625, 0x1.8p-10};
    for (size_t i = 0; i < std::size(values); i++) x.set(philox(key, i).word[0] % x.elems(), values[i]);
}

// ---- code for both devices. A Device has Memory (a guarded copy of a HostTensor), ctx() and the operations.

// Memory of the CPU device.
class HostMemory {
public:
    explicit HostMemory(const HostTensor& start, int64_t = 0) : tensor_(start) {}
    Tensor view() { return tensor_.view(); }
    HostTensor download() const {
        CHECK(tensor_.guards_intact());
        return tensor_;
    }

private:
    HostTensor tensor_;
};
struct OnCpu {
    using Memory = HostMemory;
    static Ctx& ctx() {
        static Ctx one;
        return one;
    }
    static constexpr auto amax = cpu::amax;
    static constexpr auto quantize = cpu::quantize;
    static constexpr auto block_amax = cpu::block_amax;
    static constexpr auto fp8_scales = cpu::fp8_scales;
    static constexpr auto quantize_run = cpu::quantize_run;
    static constexpr auto block_scales = cpu::block_scales;
    static constexpr auto transpose_bytes = cpu::transpose_bytes;
};

// A QuantMemory on a device.
template <typename Device> struct WeightMemory {
    using Memory = typename Device::Memory;
    const QuantRequest& request;
    int64_t N, C;
    QuantMemory host;
    Memory rowwise, transposed, rowwise_scale_inv, transposed_scale_inv, entry, counts;

    WeightMemory(const QuantRequest& asked, int64_t N_, int64_t C_, int64_t matrices = 1)
        : request(asked),
          N(N_),
          C(C_),
          host(asked, N_, C_, 0, matrices),
          rowwise(host.rowwise),
          transposed(host.transposed),
          rowwise_scale_inv(host.rowwise_scale_inv),
          transposed_scale_inv(host.transposed_scale_inv),
          entry(tensor_of(host.entry)),
          counts(tensor_of(host.counts)) {}
    ScaleEntry* entry_here() { return object_in<ScaleEntry>(entry.view()); }
    Fp8Counts* counts_here() { return object_in<Fp8Counts>(counts.view()); }
    bool current() const { return request.scaling == Scaling::kCurrent; }
    QuantMemory download() {
        host.rowwise = rowwise.download(), host.transposed = transposed.download();
        host.rowwise_scale_inv = rowwise_scale_inv.download(),
        host.transposed_scale_inv = transposed_scale_inv.download();
        host.entry = object_of<ScaleEntry>(entry.download()), host.counts = object_of<Fp8Counts>(counts.download());
        return host;
    }
};

// Quantizes x (matrices, N, C) fp32 with one operation, or does nothing, since the step is skipped.
template <typename Device> QuantMemory quantize_whole(const QuantRequest& request, const HostTensor& x, int64_t N,
                                                      int64_t C, int64_t matrices = 1, bool skipped = false) {
    WeightMemory<Device> to(request, N, C, matrices);
    StepState state{};
    state.skip = skipped;
    typename Device::Memory in(x), device_state(tensor_of(state));
    if (to.current()) Device::amax(Device::ctx(), {.entry = to.entry_here(), .in = in.view()});
    QuantOut quant;
    quant.rowwise = to.rowwise.view(), quant.transposed = to.transposed.view();
    quant.granularity = request.granularity, quant.scaling = request.scaling;
    quant.entry = to.entry_here(), quant.counts = to.counts_here();
    quant.rowwise_scale_inv = to.rowwise_scale_inv.view(), quant.transposed_scale_inv = to.transposed_scale_inv.view();
    Device::quantize(Device::ctx(), {.quant = quant, .in = in.view(), .N = N, .C = C,
                                     .state = object_in<const StepState>(device_state.view()), .matrices = matrices});
    return to.download();
}

// Computes the block amaxes of each rank, then their maximum.
template <typename Device> HostTensor amaxes_of_ranges(const HostTensor& x, int64_t N, int64_t C,
                                                       const std::vector<ShardRange>& ranges, int64_t shift_bytes = 0,
                                                       int64_t matrices = 1) {
    HostTensor all(Dtype::kInt32, matrices * ((N + 127) / 128) * ((C + 127) / 128));
    all.fill(0);
    const HostTensor none = all;
    for (ShardRange range : ranges) {
        typename Device::Memory mine(none), in(part_of(x, range), shift_bytes);
        Device::block_amax(Device::ctx(), {.amaxes = object_in<uint32_t>(mine.view()), .in = in.view(),
                                           .begin = range.begin, .R = N, .C = C, .matrices = matrices});
        HostTensor host = mine.download();
        for (int64_t i = 0; i < all.elems(); i++) {
            uint32_t* most = object_in<uint32_t>(all.view()) + i;
            *most = std::max(*most, object_in<uint32_t>(host.view())[i]);
        }
    }
    return all;
}

// Does the same as quantize_whole in the steps of several ranks. shift_bytes: misalignment of the ranges. cast_from:
// the same values in another dtype, which quantize_run casts; empty: x.
template <typename Device>
QuantMemory quantize_shards(const QuantRequest& request, const HostTensor& x, int64_t N, int64_t C,
                            const std::vector<ShardRange>& ranges, int64_t shift_bytes = 0,
                            const HostTensor& cast_from = {}, int64_t matrices = 1) {
    using Memory = typename Device::Memory;
    Ctx& ctx = Device::ctx();
    WeightMemory<Device> to(request, N, C, matrices);
    const bool blocks = request.granularity != Granularity::kTensor;
    Memory amaxes(blocks ? amaxes_of_ranges<Device>(x, N, C, ranges, shift_bytes, matrices) : HostTensor{});
    const auto* block_amaxes = object_in<const uint32_t>(amaxes.view());
    if (blocks) {
        Device::block_scales(ctx, {.scale_inv = to.rowwise_scale_inv.view(),
                                   .transposed_scale_inv = to.transposed_scale_inv.view(), .amaxes = block_amaxes,
                                   .R = N, .C = C, .format = request.format, .matrices = matrices});
    } else {
        for (ShardRange range : ranges) {
            Memory in(part_of(x, range), shift_bytes);
            if (to.current()) Device::amax(ctx, {.entry = to.entry_here(), .in = in.view()});
        }
        Device::fp8_scales(ctx, {.entries = to.entry_here(), .count = 1, .scaling = request.scaling,
                                  .format = request.format});
    }
    HostTensor bytes(request.format, matrices * N * C);
    for (ShardRange range : ranges) {
        Memory in(part_of(cast_from.elems() ? cast_from : x, range), shift_bytes);
        Memory out(HostTensor(request.format, range.elems), shift_bytes);
        Device::quantize_run(ctx, {.out = out.view(), .in = in.view(), .begin = range.begin, .R = N, .C = C,
                                   .entry = blocks ? nullptr : to.entry_here(), .block_amaxes = block_amaxes,
                                   .counts = to.counts_here(), .matrices = matrices});
        put_part(bytes, range, out.download());
    }
    Memory gathered(bytes);
    Device::transpose_bytes(ctx, {.out = to.transposed.view(), .in = gathered.view(), .R = N, .C = C,
                                  .matrices = matrices});
    QuantMemory result = to.download();
    result.rowwise = gathered.download();
    return result;
}

// Quantizes each of several matrices alone, on the CPU.
inline QuantMemory quantize_each(const QuantRequest& request, const HostTensor& x, int64_t N, int64_t C,
                                 int64_t matrices) {
    QuantMemory all(request, N, C, 0, matrices);
    const Fp8Counts before = all.counts;
    for (int64_t m = 0; m < matrices; m++) {
        const QuantMemory one = quantize_whole<OnCpu>(request, part_of(x, {m * N * C, N * C}), N, C);
        for (HostTensor QuantMemory::* part : {&QuantMemory::rowwise, &QuantMemory::transposed,
                                               &QuantMemory::rowwise_scale_inv, &QuantMemory::transposed_scale_inv})
            put_part(all.*part, {m * (one.*part).elems(), (one.*part).elems()}, one.*part);
        all.counts.elems += one.counts.elems - before.elems;
        all.counts.saturated += one.counts.saturated - before.saturated;
        all.counts.flushed += one.counts.flushed - before.flushed;
        all.counts.nonfinite += one.counts.nonfinite - before.nonfinite;
    }
    return all;
}

// Several matrices in one call, whole and in ranges that begin and end in any of them.
template <typename Device> void check_matrices(int64_t matrices, int64_t N, int64_t C, int64_t align,
                                               int64_t shift_bytes = 0) {
    HostTensor x = uneven_tensor(Dtype::kFp32, matrices * N, C, 21, 99);
    corrupt(x, 22);
    const auto ranges = random_ranges(x.elems(), 4, align, static_cast<uint64_t>(matrices));
    for (const QuantRequest& request : weight_requests()) {
        if (request.granularity == Granularity::kTensor) continue;
        INFO(std::string(dtype_name(request.format)) << " " << matrices << " x " << N << " x " << C << ", ranges of "
                                                     << align << ", shift " << shift_bytes);
        const auto whole = [&](bool skipped) {
            return quantize_whole<Device>(request, x, N, C, matrices, skipped);
        };
        const auto shards = [&] {
            return quantize_shards<Device>(request, x, N, C, ranges, shift_bytes, {}, matrices);
        };
        const QuantMemory want = quantize_each(request, x, N, C, matrices);
        CHECK_EQ(whole(false).difference(want), "");
        CHECK_EQ(shards().difference(want), "");
        CHECK_EQ(whole(true).difference(QuantMemory(request, N, C, 0, matrices)), "");
        const int64_t last = x.elems() - 1 - C / 2;
        const double value = x.get(last);
        x.set(last, std::copysign(0x1p70, -value));   // one element, which is seen
        CHECK_NE(whole(false).difference(want), "");
        CHECK_NE(shards().difference(want), "");
        x.set(last, value);
    }
}

}  // namespace op_test
