// Activations, rope and embedding at given positions, conversions, initial values and the optimizer of the GPU against
// the CPU.
#include "tests/gpu/gpu_op.h"

using namespace op_test;

namespace ops_pointwise_test {

namespace {

struct Shape {
    int64_t N, F;
};
// One element, odd ends, rows that are not whole vectors, more than one block, odd numbers of rows.
const Shape kShapes[] = {{1, 1}, {1, 7}, {3, 8}, {5, 24}, {1, 4099}, {7, 1001}, {33, 2056}, {3, 14336}};

std::string name_of(const char* op, const Shape& s) {
    return strf("%s %lld x %lld", op, (long long)s.N, (long long)s.F);
}

// Values from -30 to 30 as well as small ones: the tails of sigmoid and tanh.
HostTensor wide_values(Dtype dtype, int64_t elems, uint64_t key) {
    HostTensor t = random_tensor(dtype, elems, key, 2);
    for (int64_t i = 0; i < elems; i += 5) t.set(i, t.get(i) * 6);
    return t;
}

void check_activation(Activation kind, const Shape& s, Dtype work, int64_t shift_bytes) {
    const int64_t inputs = s.N * activation_inputs(kind, s.F), outputs = s.N * s.F;
    const std::string name = activation_function(kind).name;
    OpCase forward(name_of((name + "_forward").c_str(), s), work, Dtype::kFp32, shift_bytes);
    forward.add("in", Kind::kWork, wide_values(work, inputs, 1));
    forward.poison("out", Kind::kWork, outputs);
    forward.run(cuda::activation_forward, cpu::activation_forward, [&](auto view) {
        return ActivationForwardArgs{.kind = kind, .out = view("out"), .in = view("in"), .N = s.N, .F = s.F};
    });
    forward.check("out");
    for (bool in_place : {false, true}) {
        OpCase backward(name_of((name + "_backward").c_str(), s), work, Dtype::kFp32, shift_bytes);
        backward.add("in", Kind::kWork, wide_values(work, inputs, 1));
        backward.random("dout", Kind::kWork, outputs);
        if (!in_place) backward.poison("din", Kind::kWork, inputs);
        backward.run(cuda::activation_backward, cpu::activation_backward, [&](auto view) {
            return ActivationBackwardArgs{.kind = kind, .din = view(in_place ? "in" : "din"), .dout = view("dout"),
                                          .in = view("in"), .N = s.N, .F = s.F};
        });
        backward.check(in_place ? "in" : "din");
    }
}

const Dtype kFloats[] = {Dtype::kFp32, Dtype::kBf16};
const int64_t kLengths[] = {1, 3, 8, 31, 1000, 4096, 70001};

struct Types {
    Dtype param, moment, grad;
};

StepState step_state(int64_t adam_step, int32_t skip) {
    StepState state{};
    state.lr = 3e-4f, state.grad_mul = 0.37f, state.adam_step = adam_step, state.skip = skip;
    return state;
}

void check_adamw(int64_t n, const Types& types, int64_t shift_bytes, const StepState& state) {
    OpCase c(strf("adamw of %lld, moments %s, step %lld", (long long)n, dtype_name(types.moment),
                  (long long)state.adam_step),
             types.param, types.grad, shift_bytes);
    c.random("param", Kind::kWork, n);
    c.random("master", Kind::kStat, n);
    c.add("m", Kind::kFixed, random_tensor(types.moment, n, 3, 1e-2));
    HostTensor v = random_tensor(types.moment, n, 4, 1e-2);
    for (int64_t i = 0; i < n; i++) v.set(i, i % 7 == 0 ? 0.0 : v.get(i) * v.get(i));
    c.add("v", Kind::kFixed, v);
    HostTensor grad = random_tensor(types.grad, n, 5, 1e-2);
    for (int64_t i = 0; i < n; i += 14) grad.set(i, 0);
    c.add("grad", Kind::kGrad, grad);
    c.add("state", Kind::kFixed, tensor_of(state));
    // Only compared with the CPU in the same types, bitwise.
    auto args = [&](auto view) {
        return AdamWArgs{.param = view("param"), .master = view("master"), .m = view("m"), .v = view("v"),
                         .grad = view("grad"), .state = static_cast<const StepState*>(view("state").data),
                         .lr_scale = 0.7f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .weight_decay = 0.1f,
                         .moments_begin = state.adam_step / 10 * 10, .rng_key = rng_key(3, "model.norm.weight"),
                         .element_offset = (1ll << 33) + 5};
    };
    c.run_same_types(cuda::adamw, cpu::adamw, args);
    for (const char* tensor : {"param", "master", "m", "v"}) {
        if (state.skip) c.check_unchanged(tensor);
        else c.check_bits(tensor);
    }
}

// Adds m, v, their scales, and grad.
void add_fp8_moments(OpCase& c, int64_t n, Dtype grads) {
    HostTensor m(Dtype::kE4m3, n), v(Dtype::kUe5m3, n), scales(Dtype::kFp32, scale_blocks(n));
    for (int64_t i = 0; i < n; i++) {   // any codes but NaN's; blocks of zeros; scales far apart
        const Philox4 random = philox(31, static_cast<uint64_t>(i));
        const bool zero = i / kScaleBlock % 5 == 3;
        static_cast<uint8_t*>(m.data())[i] = zero ? 0 : static_cast<uint8_t>(random.word[0] % 127 + (i % 2) * 128);
        static_cast<uint8_t*>(v.data())[i] = zero ? 0 : static_cast<uint8_t>(1 + random.word[1] % 254);
    }
    for (int64_t b = 0; b < scales.elems(); b++) scales.set(b, std::ldexp(1.0, static_cast<int>(-20 - b * 7 % 60)));
    HostTensor grad = random_tensor(grads, n, 5, 1e-2);
    for (int64_t i = 0; i < n; i++) {   // many decades within a block
        if (i / kScaleBlock % 5 == 3) grad.set(i, 0);
        else grad.set(i, grad.get(i) * std::pow(10, -static_cast<double>(i * 7 % 13)));
    }
    if (n > 3 * kScaleBlock) grad.set(kScaleBlock + 7, 1e30);   // v's block becomes NaN, and amax its bits
    if (n > 3 * kScaleBlock) grad.set(2 * kScaleBlock + 9, INFINITY);
    c.add("m", Kind::kFixed, m);
    c.add("v", Kind::kFixed, v);
    c.add("m_scale_inv", Kind::kFixed, scales);
    c.add("v_scale_inv", Kind::kFixed, scales);
    c.add("grad", Kind::kGrad, grad);
}

// Three steps, so that the second and third read what a device wrote.
void check_adamw_fp8(int64_t n, const Types& types, int64_t shift_bytes, const StepState& state) {
    HostTensor entry(Dtype::kFp32, 4);   // fp32, so that the bits of amax are compared as NaN
    *static_cast<ScaleEntry*>(entry.data()) = ScaleEntry{};
    OpCase c(strf("adamw of %lld, moments fp8, step %lld", (long long)n, (long long)state.adam_step), types.param,
             types.grad, shift_bytes);
    c.random("param", Kind::kWork, n);
    c.random("master", Kind::kStat, n);
    add_fp8_moments(c, n, types.grad);
    c.add("state", Kind::kFixed, tensor_of(state));
    c.add("entry", Kind::kFixed, entry);
    const auto steps = [](auto adamw) {
        return [adamw](Ctx& ctx, const AdamWArgs& args) {
            for (int step = 0; step < 3; step++) adamw(ctx, args);
        };
    };
    static const auto on_gpu = steps(cuda::adamw), on_cpu = steps(cpu::adamw);
    c.run_same_types<AdamWArgs>([](Ctx& ctx, const AdamWArgs& a) { on_gpu(ctx, a); },
                                [](Ctx& ctx, const AdamWArgs& a) { on_cpu(ctx, a); }, [&](auto view) {
        return AdamWArgs{.param = view("param"), .master = view("master"), .m = view("m"), .v = view("v"),
                         .m_scale_inv = view("m_scale_inv"), .v_scale_inv = view("v_scale_inv"), .grad = view("grad"),
                         .state = static_cast<const StepState*>(view("state").data), .lr_scale = 0.5f, .beta1 = 0.9f,
                         .beta2 = 0.95f, .eps = 1e-8f, .weight_decay = 0.1f, .moments_begin = state.adam_step / 10 * 10,
                         .rng_key = rng_key(3, "model.norm.weight"), .element_offset = (1ll << 33) + 256,
                         .entry = static_cast<ScaleEntry*>(view("entry").data)};
    });
    for (const char* tensor : {"param", "master", "m", "v", "m_scale_inv", "v_scale_inv", "entry"}) {
        if (state.skip) c.check_unchanged(tensor);
        else c.check_bits(tensor, true);
    }
}

}  // namespace

TEST_CASE("gpu ops: activation functions") {
    for (const Shape& s : kShapes) {
        if (left_out(s.N * s.F)) continue;
        for (Dtype work : kFloats)
            for (const ActivationFunction& function : kActivations) {
                check_activation(function.kind, s, work, 0);
                check_activation(function.kind, s, work, 4);
            }
    }
}

TEST_CASE("gpu ops: ema is that of the CPU, bit for bit") {
    for (int64_t n : kLengths)
        for (int64_t step : {1, 5, 100000})
            for (int64_t shift_bytes : {0, 4})
                for (int32_t skip : {0, 2}) {
                    if (left_out(n)) continue;
                    OpCase c(strf("ema of %lld, step %lld", (long long)n, (long long)step), Dtype::kFp32, Dtype::kFp32,
                             shift_bytes);
                    c.random("ema", Kind::kStat, n);
                    c.add("master", Kind::kStat, random_tensor(Dtype::kFp32, n, 17));
                    c.add("state", Kind::kFixed, tensor_of(step_state(step, skip)));
                    c.run_same_types(cuda::ema, cpu::ema, [&](auto view) {
                        return EmaArgs{.ema = view("ema"), .master = view("master"),
                                       .state = static_cast<const StepState*>(view("state").data), .decay = 0.9999};
                    });
                    if (skip) c.check_unchanged("ema");
                    else c.check_bits("ema");
                }
}

TEST_CASE("gpu ops: casts round as the CPU does, bit for bit") {
    for (int64_t n : kLengths) {
        if (left_out(n)) continue;
        for (Dtype from : kFloats)
            for (Dtype to : kFloats)
                for (int64_t shift_bytes : {0, 4}) {
                    OpCase c(strf("cast of %lld to %s", (long long)n, dtype_name(to)), from, to, shift_bytes);
                    HostTensor in = random_tensor(from, n, 11);
                    // Ties to even in bf16, the largest float (rounds to infinity), infinities, subnormals.
                    const double special[] = {1 + 0x1p-8, 1 + 3 * 0x1p-8, 0x1.fffffep127, -0x1p-140, 0x1p-133,
                                              -HUGE_VAL, HUGE_VAL, -0.0, 0x1.fefffep0};
                    for (int64_t i = 0; i < n; i++) {
                        if (i % 3 == 0) in.set(i, special[i / 3 % 9]);
                    }
                    c.add("in", Kind::kWork, in);
                    c.poison("out", Kind::kGrad, n);
                    c.run_same_types(cuda::cast, cpu::cast, [&](auto view) {
                        return CastArgs{.out = view("out"), .in = view("in")};
                    });
                    c.check_bits("out");
                }
    }
    // NaN stays NaN; its payload is the device's.
    HostTensor in(Dtype::kFp32, 9), out(Dtype::kBf16, 9);
    DeviceTensor device_in(in), device_out(out.fill(1));
    cuda::cast(gpu(), {.out = device_out.view(), .in = device_in.view()});
    HostTensor got = device_out.download();
    for (int64_t i = 0; i < 9; i++) CHECK(std::isnan(got.get(i)));
}

TEST_CASE("gpu ops: initial values are bitwise equal to the CPU's") {
    for (int64_t n : {int64_t{1}, int64_t{9}, int64_t{1000003}}) {
        if (left_out(n)) continue;
        for (Dtype work : kFloats) {
            OpCase normal(strf("fill_normal of %lld", (long long)n), work, Dtype::kFp32);
            normal.poison("out", Kind::kWork, n);
            normal.run_same_types(cuda::fill_normal, cpu::fill_normal, [&](auto view) {
                return FillNormalArgs{.out = view("out"), .key = rng_key(42, "wte"),
                                      .element_offset = (1ll << 35) + 17, .mean = 0.125f, .std = 0.02f};
            });
            normal.check_bits("out");
            for (int64_t shift_bytes : {0, 4}) {
                OpCase constant(strf("fill_constant of %lld", (long long)n), work, Dtype::kFp32, shift_bytes);
                constant.poison("out", Kind::kWork, n);
                constant.run_same_types(cuda::fill_constant, cpu::fill_constant, [&](auto view) {
                    return FillConstantArgs{.out = view("out"), .value = 1.7f};
                });
                constant.check_bits("out");
            }
        }
    }
}

TEST_CASE("gpu ops: adamw is bitwise equal to the CPU's, including stochastic rounding") {
    for (Dtype param : kFloats)
        for (Dtype moment : kFloats)
            for (Dtype grad : kFloats) {
                for (int64_t n : kLengths) {
                    if (left_out(n)) continue;
                    check_adamw(n, {param, moment, grad}, 0, step_state(1, 0));
                    check_adamw(n, {param, moment, grad}, 4, step_state(123457, 0));
                }
                check_adamw(1000, {param, moment, grad}, 0, step_state(7, 1));
            }
    // A bit of the stream decides: another step gives other moments in bf16.
    HostTensor first, second;
    for (int64_t step : {5, 6}) {
        HostTensor param = random_tensor(Dtype::kFp32, 1000, 1), m = random_tensor(Dtype::kBf16, 1000, 2);
        HostTensor v = random_tensor(Dtype::kBf16, 1000, 3, 0, 0.5);
        HostTensor state = tensor_of(step_state(step, 0));
        DeviceTensor p(param), master(param), dm(m), dv(v), grad(param), ds(state);
        cuda::adamw(gpu(), {.param = p.view(), .master = master.view(), .m = dm.view(), .v = dv.view(),
                            .grad = grad.view(), .state = static_cast<const StepState*>(ds.view().data), .beta1 = 0.9f,
                            .beta2 = 0.95f, .eps = 1e-8f, .weight_decay = 0, .rng_key = 1, .element_offset = 0});
        (step == 5 ? first : second) = dm.download();
    }
    CHECK_FALSE(first.same_bits(second));
}

namespace {

const StepState* state_in(const Tensor& tensor) { return static_cast<const StepState*>(tensor.data); }

void check_muon_elements(int64_t n, const Types& types, int64_t shift_bytes, const StepState& state) {
    OpCase momentum(strf("muon_momentum of %lld, momentum %s", (long long)n, dtype_name(types.moment)), types.param,
                    types.grad, shift_bytes);
    const bool fp8 = types.moment == Dtype::kE4m3;
    if (fp8) add_fp8_moments(momentum, n, types.grad);
    else {
        momentum.add("m", Kind::kFixed, random_tensor(types.moment, n, 3, 1e-2));
        momentum.add("grad", Kind::kGrad, random_tensor(types.grad, n, 5, 1e-2));
    }
    momentum.add("state", Kind::kFixed, tensor_of(state));
    momentum.run_same_types(cuda::muon_momentum, cpu::muon_momentum, [&](auto view) {
        return MuonMomentumArgs{.m = view("m"), .m_scale_inv = fp8 ? view("m_scale_inv") : Tensor{},
                                .grad = view("grad"), .state = state_in(view("state")), .beta = 0.95f,
                                .rng_key = rng_key(3, "a"), .element_offset = (1ll << 33) + (fp8 ? 1024 : 5)};
    });
    for (const char* tensor : {"m", "m_scale_inv", "grad"})
        if (fp8 || strcmp(tensor, "m_scale_inv") != 0)
            state.skip ? momentum.check_unchanged(tensor) : momentum.check_bits(tensor, fp8);

    for (bool with_param : {true, false}) {
        OpCase update(strf("muon_update of %lld", (long long)n), types.param, types.grad, shift_bytes);
        if (with_param) update.random("param", Kind::kWork, n);
        update.random("master", Kind::kStat, n);
        update.random("direction", Kind::kGrad, n);
        update.add("state", Kind::kFixed, tensor_of(state));
        update.add("entry", Kind::kFixed, HostTensor(Dtype::kInt32, 4).fill(1));
        update.run_same_types(cuda::muon_update, cpu::muon_update, [&](auto view) {
            return MuonUpdateArgs{.param = view("param"), .master = view("master"), .direction = view("direction"),
                                  .state = state_in(view("state")), .scale = 3.7f, .weight_decay = 0.1f,
                                  .entry = static_cast<ScaleEntry*>(view("entry").data)};
        });
        for (const char* tensor : {"param", "master", "entry"}) {
            if (!with_param && tensor[0] == 'p') continue;
            state.skip ? update.check_unchanged(tensor) : update.check_bits(tensor);
        }
    }
}

}  // namespace

TEST_CASE("gpu ops: the operations of Muon are bitwise equal to the CPU's") {
    for (Dtype type : kFloats) {
        for (Dtype moment : {Dtype::kFp32, Dtype::kBf16, Dtype::kE4m3})
            for (Dtype grad : kFloats) {
                for (int64_t n : kLengths) {
                    if (left_out(n)) continue;
                    check_muon_elements(n, {type, moment, grad}, 0, step_state(1, 0));
                    check_muon_elements(n, {type, moment, grad}, 4, step_state(123457, 0));
                }
                check_muon_elements(1000, {type, moment, grad}, 0, step_state(7, 1));
            }
        for (int64_t k : {1, 3, 4, 8, 33, 300, 1030})
            for (int64_t shift_bytes : {0, 4}) {
                if (left_out(k * k)) continue;
                for (int64_t matrices : {1, 3}) {
                    OpCase polynomial(strf("muon_polynomial of %lld of %lld", (long long)matrices, (long long)k), type,
                                      Dtype::kFp32, shift_bytes);
                    polynomial.random("square", Kind::kWork, matrices * k * k);
                    polynomial.random("gram", Kind::kWork, matrices * k * k);
                    polynomial.run_same_types(cuda::muon_polynomial, cpu::muon_polynomial, [&](auto view) {
                        return MuonPolynomialArgs{.square = view("square"), .gram = view("gram"), .k = k, .a = 4.1,
                                                  .b = -2.9, .c = 0.54, .matrices = matrices};
                    });
                    polynomial.check_bits("square");
                }
                for (int skip : {0, 1}) {
                    const int64_t rows = k < 300 ? 2 * k + 1 : 3;
                    OpCase norm(strf("muon_row_norm of %lld", (long long)k), type, Dtype::kFp32, shift_bytes);
                    norm.random("matrix", Kind::kWork, rows * k);
                    norm.random("v", Kind::kStat, rows, 0.1, 1);
                    norm.random("new_v", Kind::kStat, rows);
                    norm.add("state", Kind::kFixed, tensor_of(step_state(5, skip)));
                    norm.run_same_types(cuda::muon_row_norm, cpu::muon_row_norm, [&](auto view) {
                        return MuonRowNormArgs{.matrix = view("matrix"), .v = view("v"), .new_v = view("new_v"),
                                               .state = state_in(view("state")), .rows = rows, .cols = k,
                                               .beta2 = 0.95};
                    });
                    for (const char* tensor : {"matrix", "new_v"}) norm.check_bits(tensor);
                }
                for (int64_t matrices : {1, 3}) for (double squares : {0.0, 123.5}) {
                    OpCase normalize(strf("muon_normalize of %lld of %lld", (long long)matrices, (long long)k), type,
                                     Dtype::kFp32, shift_bytes);
                    normalize.random("matrix", Kind::kWork, matrices * k * k);
                    HostTensor sums = HostTensor(Dtype::kFp64, matrices).fill(squares);
                    if (matrices > 1) sums.set(1, 7.25);
                    normalize.add("sum", Kind::kFixed, sums);
                    normalize.run_same_types(cuda::muon_normalize, cpu::muon_normalize, [&](auto view) {
                        return MuonNormalizeArgs{.matrix = view("matrix"),
                                                 .sum_squares = static_cast<const double*>(view("sum").data),
                                                 .margin = 1.01, .matrices = matrices};
                    });
                    normalize.check_bits("matrix");
                }
            }
    }
}

TEST_CASE("gpu ops: QK-clip is bitwise equal to the CPU's") {
    for (int skip : {0, 1}) {
        const int64_t NH = 6, NKV = 2, layers = 60, HS = 8;
        OpCase factors(strf("qk_clip_factors, skip %d", skip), Dtype::kFp32, Dtype::kFp32, 0);
        factors.random("factors", Kind::kStat, layers * (NH + NKV));
        factors.random("logits", Kind::kStat, layers * NH, 0.3, 2);
        factors.add("state", Kind::kFixed, tensor_of(step_state(5, skip)));
        factors.run_same_types(cuda::qk_clip_factors, cpu::qk_clip_factors, [&](auto view) {
            return QkClipFactorsArgs{.factors = view("factors"), .max_logits = view("logits"), .NH = NH, .NKV = NKV,
                                     .tau = 2.1f, .state = static_cast<StepState*>(view("state").data)};
        });
        for (const char* tensor : {"factors", "state"}) factors.check_bits(tensor);
        for (Dtype type : kFloats)
            for (int64_t cols : {1, 5, 300}) {
                const int64_t begin = 3, n = (NH + 2 * NKV) * HS * cols - begin;
                OpCase clip(strf("qk_clip of %lld", (long long)n), type, Dtype::kFp32, 0);
                clip.random("param", Kind::kWork, n);
                clip.random("master", Kind::kStat, n);
                clip.random("factors", Kind::kStat, NH + NKV, 0.1, 1);
                clip.add("state", Kind::kFixed, tensor_of(step_state(5, skip)));
                clip.add("entry", Kind::kFixed, HostTensor(Dtype::kInt32, 4).fill(1));
                clip.run_same_types(cuda::qk_clip, cpu::qk_clip, [&](auto view) {
                    return QkClipArgs{.param = view("param"), .master = view("master"), .factors = view("factors"),
                                      .begin = begin, .head_elems = HS * cols, .state = state_in(view("state")),
                                      .entry = static_cast<ScaleEntry*>(view("entry").data)};
                });
                for (const char* tensor : {"param", "master", "entry"})
                    skip ? clip.check_unchanged(tensor) : clip.check_bits(tensor);
            }
    }
}

TEST_CASE("gpu ops: adamw with fp8 moments is bitwise equal to the CPU's: weights, codes, scales and amax") {
    for (Dtype param : kFloats)
        for (Dtype grad : kFloats) {
            for (int64_t n : {1, 3, 31, 127, 128, 129, 511, 512, 640, 1000, 4096, 70001, 1 << 22}) {
                if (left_out(n)) continue;
                check_adamw_fp8(n, {param, Dtype::kE4m3, grad}, 0, step_state(1, 0));
                check_adamw_fp8(n, {param, Dtype::kE4m3, grad}, 4, step_state(123457, 0));
            }
            check_adamw_fp8(1000, {param, Dtype::kE4m3, grad}, 0, step_state(7, 1));
        }
}

TEST_CASE("gpu ops: rope and embedding at given positions") {
    constexpr int64_t N = 37, T = 100, V = 61;
    HostTensor positions(Dtype::kInt32, N), tokens(Dtype::kInt32, N);
    for (int64_t n = 0; n < N; n++) {
        positions.set(n, static_cast<double>(n * 29 % T));
        tokens.set(n, static_cast<double>(n * 17 % V));
    }
    for (Dtype type : {Dtype::kFp32, Dtype::kBf16})
        for (int64_t HS : {6, 64, 80, 128})
            for (int64_t shift_bytes : {0, 4}) {
                constexpr int64_t NH = 3, NKV = 2;
                OpCase rope("rope_forward at positions", type, Dtype::kFp32, shift_bytes);
                rope.random("qkv", Kind::kWork, N * (NH + 2 * NKV) * HS);
                rope.random("angles", Kind::kStat, T * HS);
                rope.add("positions", Kind::kFixed, positions);
                rope.run(cuda::rope_forward, cpu::rope_forward, [&](auto view) {
                    return RopeArgs{.qkv = view("qkv"), .cos_sin = view("angles"), .N = N, .T = 1, .NH = NH,
                                    .NKV = NKV, .HS = HS, .positions = view("positions").template as<int32_t>()};
                });
                rope.check("qkv");
                OpCase embedding("embedding_forward at positions", type, Dtype::kFp32, shift_bytes);
                embedding.random("wte", Kind::kWork, V * HS);
                embedding.random("wpe", Kind::kWork, T * HS);
                embedding.poison("out", Kind::kWork, N * HS);
                embedding.add("positions", Kind::kFixed, positions);
                embedding.add("tokens", Kind::kFixed, tokens);
                embedding.add("bad", Kind::kFixed, HostTensor(Dtype::kInt32, 1).fill(0));
                embedding.run(cuda::embedding_forward, cpu::embedding_forward, [&](auto view) {
                    return EmbeddingForwardArgs{.out = view("out"), .wte = view("wte"), .wpe = view("wpe"),
                                                .tokens = view("tokens").template as<int32_t>(),
                                                .bad_tokens = view("bad").template as<int32_t>(), .N = N, .T = 1,
                                                .C = HS, .V = V, .positions = view("positions").template as<int32_t>()};
                });
                embedding.check_bits("out");
            }
}

}  // namespace ops_pointwise_test
