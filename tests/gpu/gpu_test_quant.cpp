// FP8 on the GPU: quantize is bitwise equal to the CPU's on ordinary and extreme values; quantizing activations; the
// state of delayed scaling; the amax of new weights.
#include "tests/gpu/gpu_quant.h"

using namespace op_test;

namespace quant_test {

namespace {

constexpr Dtype kB = Dtype::kBf16, kF = Dtype::kFp32;

struct Shape {
    int64_t N, C;
};
// A small part of a tile, tiles that are cut in one or both directions, whole tiles, several groups of rows of tiles.
const Shape kShapes[] = {{16, 16},   {16, 128},   {128, 16},   {48, 80},    {112, 144}, {144, 112},
                         {128, 128}, {256, 384}, {272, 1600}, {2320, 144}, {1040, 528}};

// Rows and columns of very different magnitude, so that adjacent scales differ; zeros, a block of zeros, subnormals.
HostTensor uneven_values(Dtype dtype, int64_t N, int64_t C, uint64_t key, bool corrupted) {
    HostTensor t = random_tensor(dtype, N * C, key);
    for (int64_t n = 0; n < N; n++)
        for (int64_t c = 0; c < C; c++) {
            const int64_t i = n * C + c;
            t.set(i, t.get(i) * std::exp2(static_cast<double>(n * 7 % 23 - 11) + static_cast<double>(c * 5 % 19 - 9)));
            if (i % 31 == 0) t.set(i, 0);
            if (i % 101 == 0) t.set(i, 0x1p-130 * static_cast<double>(i % 7 + 1));
            if (n / 128 == 1 && c < 128) t.set(i, 0);
        }
    if (!corrupted) return t;
    t.set(N * C / 2, HUGE_VAL);
    t.set(N * C / 3, std::numeric_limits<double>::quiet_NaN());
    t.set(N * C - 1, -HUGE_VAL);
    t.set(1, dtype == kB ? -0x1.fep127 : 0x1.fffffep127);   // the largest; in fp32 it rounds to infinity
    return t;
}

Producer quantize_of(HostTensor in, int64_t N, int64_t C) {
    Producer p{.name = strf("quantize %lld x %lld %s", (long long)N, (long long)C, dtype_name(in.dtype())),
               .result = "in", .N = N, .C = C, .result_kept = true};
    p.tensors["in"] = std::move(in);
    p.run = [=](const View& view, const QuantOut& quant) {
        if (quant) cuda::quantize(gpu(), {.quant = quant, .in = view("in"), .N = N, .C = C});
    };
    return p;
}

// Runs one QuantOut on both devices: all tensors must be bitwise equal, except for payloads of NaN amaxes of an fp32
// source.
void check_quantize(const HostTensor& in, int64_t N, int64_t C, const QuantRequest& v,
                    const StepState* state = nullptr) {
    if (v.transposed && N % 16 != 0) return;
    INFO("quantize " << N << " x " << C << " " << dtype_name(in.dtype()) << ", " << v.name);
    HostTensor rounded = in.to(kB);
    const HostTensors request = quant_tensors(v, N, C, amax_bits_of_all(rounded));
    Producer p = quantize_of(in, N, C);
    if (state) {
        p.tensors["state"] = tensor_of(*state);
        p.run = [=](const View& view, const QuantOut& quant) {
            cuda::quantize(gpu(), {.quant = quant, .in = view("in"), .N = N, .C = C,
                                   .state = static_cast<const StepState*>(view("state").data)});
        };
    }
    HostTensors got = run_producer(p, &v, request);
    check_same_bits(got, state && state->skip ? request : quantize_on_cpu(v, request, in, N, C));
    CHECK(got.at("in").same_bits(in));
}

// quantize of one tensor with one scale for the whole of it.
void check_casts(const HostTensor& in, int64_t N, int64_t C, Dtype format, float scale) {
    INFO(dtype_name(format) << " with scale " << scale);
    QuantRequest v = quant_request("delayed");
    v.format = format;
    HostTensors request = quant_tensors(v, N, C, 0);
    entry_in(request["entry"]).scale = scale;
    check_same_bits(run_producer(quantize_of(in, N, C), &v, request), quantize_on_cpu(v, request, in, N, C));
}

Producer activation(Activation kind, const Shape& s, bool corrupted) {
    const int64_t inputs = s.N * activation_inputs(kind, s.C);
    Producer p{.name = strf("%s_forward %lld x %lld", activation_function(kind).name, (long long)s.N, (long long)s.C),
               .result = "out", .N = s.N, .C = s.C, .same = {"in"}, .result_optional = true};
    p.tensors["in"] = random_tensor(kB, inputs, rng_key(9, "in"), 2);
    if (corrupted) p.tensors["in"].set(inputs / 3, HUGE_VAL);
    p.tensors["out"] = HostTensor(kB, s.N * s.C);
    p.run = [=](const View& view, const QuantOut& quant) {
        cuda::activation_forward(gpu(), {.kind = kind, .out = view("out"), .in = view("in"), .N = s.N, .F = s.C,
                                         .quant = quant});
    };
    return p;
}

// s: of dout.
Producer activation_backward(Activation kind, const Shape& s, bool in_place, bool corrupted) {
    const int64_t C = activation_inputs(kind, s.C), inputs = s.N * C;
    Producer p{.name = strf("%s_backward %lld x %lld%s", activation_function(kind).name, (long long)s.N,
                            (long long)s.C, in_place ? " in place" : ""),
               .result = in_place ? "in" : "din", .N = s.N, .C = C, .same = {"dout"},
               .result_optional = !in_place, .result_kept = in_place};
    p.tensors["in"] = random_tensor(kB, inputs, rng_key(9, "in"), 2);
    p.tensors["dout"] = random_tensor(kB, s.N * s.C, rng_key(9, "dout"));
    if (corrupted) p.tensors["dout"].set(s.N * s.C / 3, std::numeric_limits<double>::quiet_NaN());
    if (!in_place) p.tensors["din"] = HostTensor(kB, inputs);
    p.run = [=](const View& view, const QuantOut& quant) {
        cuda::activation_backward(gpu(), {.kind = kind, .din = view(in_place ? "in" : "din"), .dout = view("dout"),
                                          .in = view("in"), .N = s.N, .F = s.C, .quant = quant});
    };
    return p;
}

// The state of `count` tensors in delayed scaling.
struct Delayed {
    int64_t count, length, interval;
    bool most_recent;
    HostTensor entries, history, updates, largest;

    Delayed(int64_t count_, int64_t length_, int64_t interval_, bool most_recent_)
        : count(count_), length(length_), interval(interval_), most_recent(most_recent_),
          entries(Dtype::kInt32, count_ * 4), history(kF, count_ * length_), updates(Dtype::kInt32, count_),
          largest(kF, count_) {
        entries.fill(0);
        history.fill(0);
        updates.fill(0);
        for (int64_t i = 0; i < count; i++) {
            entry(i) = {.scale_inv = 2, .scale = 1, .amax_bits = 0, .step_amax_bits = 0};
            largest.set(i, i % 2 ? 448 : 57344.0 / 4);
        }
    }
    ScaleEntry& entry(int64_t i) { return static_cast<ScaleEntry*>(entries.data())[i]; }
    // Sets the same amaxes on every call: none, ordinary, subnormal, infinite, NaN.
    void record(int64_t step) {
        for (int64_t i = 0; i < count; i++) {
            const Philox4 random = philox(23, static_cast<uint64_t>(step * count + i));
            const float values[] = {0, HUGE_VALF, std::nanf(""), 1e-39f, 3e38f};
            const uint32_t kind = random.word[0] % 24;
            const float amax = kind < 5 ? values[kind]
                                        : std::exp2(static_cast<float>(random.word[1] % 4000) / 100 - 30);
            entry(i).amax_bits = amax_bits_of(amax);
        }
    }
    Fp8UpdateArgs args(Tensor slots_at, Tensor history_at, Tensor updates_at, Tensor largest_at,
                       const StepState* state) const {
        return {.entries = static_cast<ScaleEntry*>(slots_at.data), .history = history_at.as<float>(),
                .updates = updates_at.as<int32_t>(), .largest = largest_at.as<float>(), .count = count,
                .length = length, .interval = interval, .most_recent = most_recent, .state = state};
    }
    void update_on_cpu(const StepState* state) {
        Ctx ctx;
        cpu::fp8_update(ctx, args(entries.view(), history.view(), updates.view(), largest.view(), state));
    }
    void update_on_gpu(const StepState* state) {
        DeviceTensor s(entries), h(history), u(updates), l(largest), g(tensor_of(state ? *state : StepState{}));
        cuda::fp8_update(gpu(), args(s.view(), h.view(), u.view(), l.view(),
                                     state ? static_cast<const StepState*>(g.view().data) : nullptr));
        entries = s.download(), history = h.download(), updates = u.download();
        CHECK(l.download().same_bits(largest));
    }
    bool same_bits(const Delayed& other) const {
        return entries.same_bits(other.entries) && history.same_bits(other.history) && updates.same_bits(other.updates);
    }
};

void check_updates(int64_t length, int64_t interval, bool most_recent, int64_t steps) {
    INFO("history of " << length << ", interval " << interval << (most_recent ? ", most recent" : ""));
    Delayed on_cpu(5, length, interval, most_recent), on_gpu = on_cpu;
    for (int64_t step = 0; step < steps; step++) {
        StepState state{};
        state.skip = step % 7 == 3;
        const StepState* given = step % 2 ? &state : nullptr;
        for (Delayed* d : {&on_cpu, &on_gpu}) d->record(step);
        on_cpu.update_on_cpu(given);
        on_gpu.update_on_gpu(given);
        REQUIRE(on_gpu.same_bits(on_cpu));
    }
}

}  // namespace

TEST_CASE("gpu quant: every bf16 value casts as on the CPU") {
    HostTensor all(kB, 65536);
    for (int64_t i = 0; i < 65536; i++) all.as<bf16>()[i] = bf16::from_bits(static_cast<uint16_t>(i * 40503));
    for (Dtype format : {Dtype::kE4m3, Dtype::kE5m2})
        for (float scale : {1.0f, 0x1.555556p0f, 0x1p-20f, 0x1.8p30f, 0x1.fffffep127f}) {
            check_casts(all, 256, 256, format, scale);
        }
}

TEST_CASE("gpu quant: block scales for every amax") {
    // One magnitude per row, and per column of 1x128 blocks along the rows.
    HostTensor rows(kB, 32768 * 16), columns(kB, 16 * 32768);
    rows.fill(0), columns.fill(0);
    for (int64_t i = 0; i < 32768; i++) {
        const bf16 value = bf16::from_bits(static_cast<uint16_t>(i | (i % 3 ? 0x8000 : 0)));
        rows.as<bf16>()[i * 16 + i % 16] = value;
        columns.as<bf16>()[i % 16 * 32768 + i] = value;
    }
    for (const QuantRequest& v : quant_requests()) {
        if (v.granularity != Granularity::kBlock1x128 || v.dbias) continue;
        check_quantize(rows, 32768, 16, v);
        check_quantize(columns, 16, 32768, v);
    }
}

TEST_CASE("gpu quant: quantize") {
    for (const Shape& s : kShapes) {
        if (left_out(s.N * s.C)) continue;
        for (Dtype dtype : {kB, kF})
            for (bool corrupted : {false, true}) {
                if (corrupted && dtype == kF) continue;   // NaN payloads, below
                const HostTensor in = uneven_values(dtype, s.N, s.C, 31, corrupted);
                for (const QuantRequest& v : quant_requests()) {
                    if (!v.dbias) check_quantize(in, s.N, s.C, v);
                }
            }
        check_producer(quantize_of(random_tensor(kB, s.N * s.C, 32), s.N, s.C));
    }
    // Numbers of rows that `transposed` does not support.
    check_quantize(uneven_values(kB, 7, 144, 33, true), 7, 144, quant_request("delayed, rowwise only"));
}

TEST_CASE("gpu quant: quantize of fp32 that is not finite, and of a skipped step") {
    const HostTensor in = uneven_values(kF, 48, 80, 34, true);
    QuantRequest v = quant_request("delayed");
    const HostTensors request = quant_tensors(v, 48, 80, 0);
    HostTensors got = run_producer(quantize_of(in, 48, 80), &v, request);
    HostTensors want = quantize_on_cpu(v, request, in, 48, 80);
    for (const char* name : {"rowwise", "transposed", "counts", "first"}) CHECK(got.at(name).same_bits(want.at(name)));
    CHECK_GT(entry_in(got.at("entry")).amax_bits, kInfinityBits);
    CHECK_GT(entry_in(want.at("entry")).amax_bits, kInfinityBits);
    StepState state{};
    for (int skip : {0, 1}) {
        state.skip = skip;
        for (const QuantRequest& w : quant_requests())
            if (w.granularity == Granularity::kBlock128x128) check_quantize(in.to(kB), 48, 80, w, &state);
        check_quantize(in.to(kB), 48, 80, v, &state);
    }
}

TEST_CASE("gpu quant: activation functions") {
    for (const Shape& s : kShapes) {
        if (left_out(s.N * s.C)) continue;
        for (const ActivationFunction& function : kActivations) {
            const Activation kind = function.kind;
            check_producer(activation(kind, s, false));
            check_producer(activation_backward(kind, s, false, false));
            check_producer(activation_backward(kind, s, true, false));
            if (s.N * s.C > 100000) continue;
            check_producer(activation(kind, s, true), false);
            check_producer(activation_backward(kind, s, false, true), false);
        }
    }
    // Half of swiglu's columns is not a multiple of 16.
    check_producer(activation_backward(Activation::kSwiglu, {32, 72}, false, false));
}

TEST_CASE("gpu quant: amax") {
    for (int64_t n : {1, 7, 8, 1000, 70001, 3000000}) {
        if (left_out(n)) continue;
        for (Dtype dtype : {kB, kF})
            for (int64_t shift_bytes : {0, 4}) {
                INFO(n << " of " << dtype_name(dtype));
                HostTensor in = random_tensor(dtype, n, 41, 1e-3), entry(Dtype::kInt32, 4);
                entry.fill(1);
                HostTensor want = entry;
                in.set(n / 2, -0x1.01fffep0);   // rounds up in bf16
                DeviceTensor device_in(in, shift_bytes), device_entry(entry);
                Ctx ctx;
                for (int repeat = 0; repeat < 2; repeat++) {   // the second changes nothing
                    cuda::amax(gpu(), {.entry = static_cast<ScaleEntry*>(device_entry.view().data),
                                       .in = device_in.view()});
                    cpu::amax(ctx, {.entry = &entry_in(want), .in = in.view()});
                    CHECK(device_entry.download().same_bits(want));
                }
                CHECK_EQ(entry_in(want).amax_bits, amax_bits_of(static_cast<float>(bf16(0x1.01fffep0f))));
            }
    }
}

// Counts the blocks of matrices on both devices, twice: the second time adds.
void check_count_scales(int64_t matrices, int64_t R, int64_t K, Granularity granularity) {
    INFO(matrices << " x " << R << " x " << K << ", granularity " << static_cast<int>(granularity));
    const int64_t scales = scale_inv_elems(granularity, R, K);
    HostTensor in = uneven_values(kB, matrices * R, K, 43, false), codes(Dtype::kE4m3, matrices * R * K);
    HostTensor scale_inv(kF, matrices * scales), bins(Dtype::kInt32, 2 * kScaleBins);
    for (int64_t k = 0; k < K; k++) in.set(R / 2 * K + k, 0);   // a row of zeros
    Ctx ctx;
    for (int64_t m = 0; m < matrices; m++) {
        QuantOut quant;
        quant.rowwise = codes.view().slice(m * R * K, R * K), quant.granularity = granularity;
        quant.rowwise_scale_inv = scale_inv.view().slice(m * scales, scales);
        cpu::quantize(ctx, {.quant = quant, .in = in.view().slice(m * R * K, R * K), .N = R, .C = K});
    }
    bins.fill(0);
    HostTensor want = bins;
    DeviceTensor device_codes(codes), device_bins(bins);
    auto bins_in = [](const Tensor& t) { return static_cast<unsigned long long*>(t.data); };
    DeviceTensor device_scales(scale_inv);
    for (int i = 0; i < 2; i++) {
        cuda::count_scales(gpu(), {.bins = bins_in(device_bins.view()), .codes = device_codes.view(),
                                   .scale_inv = device_scales.view(), .granularity = granularity, .R = R, .K = K,
                                   .matrices = matrices});
        cpu::count_scales(ctx, {.bins = bins_in(want.view()), .codes = codes.view(), .scale_inv = scale_inv.view(),
                                .granularity = granularity, .R = R, .K = K, .matrices = matrices});
        CHECK(device_bins.download().same_bits(want));
    }
    CHECK_FALSE(want.same_bits(bins));
}

TEST_CASE("gpu quant: count_scales") {
    for (const Shape& shape : kShapes)
        for (const Granularity granularity : {Granularity::kBlock1x128, Granularity::kBlock128x128})
            for (int64_t matrices : {1, 3})
                if (!left_out(matrices * shape.N * shape.C))
                    check_count_scales(matrices, shape.N, shape.C, granularity);
}

TEST_CASE("gpu quant: fp8_clear") {
    for (bool step : {false, true})
        for (int skip : {0, 1}) {
            HostTensor entries(Dtype::kInt32, 200 * 4);
            for (int64_t i = 0; i < entries.elems(); i++) entries.set(i, static_cast<double>(i * 7919 % 1000 + 1));
            StepState state{};
            state.skip = skip;
            HostTensor want = entries;
            DeviceTensor device(entries), device_state(tensor_of(state));
            cuda::fp8_clear(gpu(), {.entries = static_cast<ScaleEntry*>(device.view().data), .count = 199, .step = step,
                                    .state = static_cast<const StepState*>(device_state.view().data)});
            Ctx ctx;
            cpu::fp8_clear(ctx, {.entries = static_cast<ScaleEntry*>(want.data()), .count = 199, .step = step,
                                 .state = &state});
            CHECK(device.download().same_bits(want));
            CHECK_EQ(want.same_bits(entries), skip == 1);
        }
}

TEST_CASE("gpu quant: fp8_update") {
    for (int64_t length : {1, 2, 5, 1024})
        for (int64_t interval : {1, 3}) {
            for (bool most_recent : {false, true}) check_updates(length, interval, most_recent, 20);
        }
    if (!left_out(1 << 20)) check_updates(130, 1, false, 300);   // the history wraps around; several blocks
}

TEST_CASE("gpu quant: adamw records the amax of the new weights, with and without bf16 ones") {
    for (int64_t n : {1, 5, 4096, 70001}) {
        if (left_out(n)) continue;
        for (bool with_param : {false, true})
            for (int skip : {0, 1}) {
                OpCase c(strf("adamw of %lld with amax", (long long)n), kB, kF);
                if (with_param) c.poison("param", Kind::kWork, n);
                c.random("master", Kind::kStat, n);
                c.add("m", Kind::kFixed, random_tensor(kB, n, 3, 1e-2));
                c.add("v", Kind::kFixed, random_tensor(kB, n, 4, 0, 1e-4));
                c.random("grad", Kind::kGrad, n);
                StepState state{};
                state.lr = 1e-2f, state.grad_mul = 0.5f, state.adam_step = 3, state.skip = skip;
                c.add("state", Kind::kFixed, tensor_of(state));
                c.add("entry", Kind::kFixed, HostTensor(Dtype::kInt32, 4).fill(1));
                c.run_same_types(cuda::adamw, cpu::adamw, [&](auto view) {
                    return AdamWArgs{.param = view("param"), .master = view("master"), .m = view("m"), .v = view("v"),
                                     .grad = view("grad"), .state = static_cast<const StepState*>(view("state").data),
                                     .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .weight_decay = 0.1f, .rng_key = 5,
                                     .element_offset = 0, .entry = static_cast<ScaleEntry*>(view("entry").data)};
                });
                for (const char* name : {"master", "m", "v", "entry"}) c.check_bits(name);
                if (with_param) c.check_bits("param");
                if (skip) c.check_unchanged("entry");
            }
    }
}

}  // namespace quant_test
