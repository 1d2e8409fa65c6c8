// Every CPU operation with a QuantOut: its results are those of quantize on its bf16 result, and nothing else changes,
// on any number of threads.
#include "tests/support/quant_test.h"

#include <deque>
#include <map>

#include "llmc/cpu/threads.h"
#include "tests/support/random_inputs.h"

using namespace op_test;

namespace quant_producers_test {

namespace {

// Tiles of 128 x 128 with edges in both directions, large enough to use several threads.
constexpr int64_t B = 3, T = 48, N = B * T, C = 144, NH = 4, NKV = 2, HS = 24, kWidth = (NH + 2 * NKV) * HS;

// The results of an operation: the quantized result, and all others.
struct Produced {
    HostTensor result;
    std::vector<HostTensor> others;
};
struct Setting {
    QuantOut quant{};
    bool with_out = true;   // where `out` is optional
    Dtype type = Dtype::kBf16;
};
struct Producer {
    int64_t columns;
    bool out_optional, in_place;
    std::function<Produced(const Setting&)> run;
};

// The slots of experts' rows, last first.
HostTensor backwards(int64_t rows) {
    HostTensor slots(Dtype::kInt32, rows);
    for (int64_t r = 0; r < rows; r++) slots.set(r, static_cast<double>(rows - 1 - r));
    return slots;
}

template <auto forward> Produced norm_forward(const Setting& setting) {
    Inputs in{setting.type};
    HostTensor x = in.random(N * C), residual = in.random(N * C), w = in.random(C), b = in.random(C);
    HostTensor out = in.empty(N * C), sum = out, mean = in.scratch(N).fill(0), rstd = in.scratch(N);
    forward(in.ctx, {.out = setting.with_out ? out.view() : Tensor{}, .residual_out = sum.view(), .mean = mean.view(),
                     .rstd = rstd.view(), .in = x.view(), .residual = residual.view(), .weight = w.view(),
                     .bias = b.view(), .N = N, .C = C, .eps = 1e-5f, .quant = setting.quant});
    return {out, {sum, mean, rstd}};
}

template <auto backward> Produced norm_backward(const Setting& setting) {
    Inputs in{setting.type};
    HostTensor dx = in.random(N * C), dw = in.random(C), db = in.random(C), dout = in.random(N * C);
    HostTensor x = in.random(N * C), mean = in.statistics(N), rstd = in.statistics(N), w = in.random(C);
    HostTensor scratch = in.scratch(2 * kPartialRows * C);
    backward(in.ctx, {.dx = dx.view(), .dresidual = dx.view(), .dweight = dw.view(), .dbias = db.view(),
                      .scratch = scratch.view(), .dout = dout.view(), .x = x.view(), .mean = mean.view(),
                      .rstd = rstd.view(), .weight = w.view(), .N = N, .C = C, .quant = setting.quant});
    return {dx, {dw, db}};
}

template <auto rotate, bool at_positions = false> Produced rope(const Setting& setting) {
    Inputs in{setting.type};
    HostTensor qkv = in.random(N * kWidth), table = in.statistics(T * HS);
    std::vector<int32_t> positions;
    for (int64_t n = 0; n < N; n++) positions.push_back(static_cast<int32_t>(n * 31 % T));
    rotate(in.ctx, {.qkv = qkv.view(), .cos_sin = table.view(), .N = N, .T = T, .NH = NH, .NKV = NKV, .HS = HS,
                    .quant = setting.quant, .positions = at_positions ? positions.data() : nullptr});
    return {qkv, {}};
}

Produced qk_norm_backward(const Setting& setting) {
    Inputs in{setting.type};
    HostTensor x = in.random(N * kWidth), rstd = in.statistics(N * (NH + NKV)), dqkv = in.random(N * kWidth);
    HostTensor q = in.random(HS), k = in.random(HS), dq = in.random(HS), dk = in.random(HS);
    HostTensor scratch = in.scratch(2 * kPartialRows * HS);
    cpu::qk_norm_backward(in.ctx, {.dqkv = dqkv.view(), .dq_weight = dq.view(), .dk_weight = dk.view(),
                                   .scratch = scratch.view(), .in = x.view(), .rstd = rstd.view(),
                                   .q_weight = q.view(), .k_weight = k.view(), .N = N, .NH = NH, .NKV = NKV,
                                   .HS = HS, .KS = HS, .quant = setting.quant});
    return {dqkv, {dq, dk}};
}

Produced attention_forward(const Setting& setting) {
    Inputs in{setting.type};
    HostTensor qkv = in.random(N * kWidth), out = in.empty(N * NH * HS), lse = in.scratch(N * NH);
    cpu::attention_forward(in.ctx, {.out = out.view(), .lse = lse.view(), .qkv = qkv.view(), .B = B, .T = T, .NH = NH,
                                    .NKV = NKV, .HS = HS, .softmax_mul = 0.2f, .quant = setting.quant});
    return {out, {lse}};
}

Produced attention_backward(const Setting& setting) {
    Inputs in{setting.type};
    HostTensor qkv = in.random(N * kWidth), out = in.empty(N * NH * HS), lse = in.scratch(N * NH), delta = lse;
    HostTensor dout = in.random(N * NH * HS), dqkv = in.empty(N * kWidth);
    cpu::attention_forward(in.ctx, {.out = out.view(), .lse = lse.view(), .qkv = qkv.view(), .B = B, .T = T, .NH = NH,
                                    .NKV = NKV, .HS = HS, .softmax_mul = 0.2f});
    cpu::attention_backward(in.ctx, {.dqkv = dqkv.view(), .delta = delta.view(), .dout = dout.view(),
                                     .out = out.view(), .lse = lse.view(), .qkv = qkv.view(), .B = B, .T = T,
                                     .NH = NH, .NKV = NKV, .HS = HS, .softmax_mul = 0.2f, .quant = setting.quant});
    return {dqkv, {delta}};
}

template <Activation kind> Produced activation_forward(const Setting& setting) {
    Inputs in{setting.type};
    HostTensor x = in.random(N * activation_inputs(kind, C)), out = in.empty(N * C);
    cpu::activation_forward(in.ctx, {.kind = kind, .out = setting.with_out ? out.view() : Tensor{}, .in = x.view(),
                                     .N = N, .F = C, .quant = setting.quant});
    return {out, {}};
}

template <Activation kind> Produced activation_backward(const Setting& setting) {
    Inputs in{setting.type};
    HostTensor x = in.random(N * activation_inputs(kind, C)), dout = in.random(N * C);
    cpu::activation_backward(in.ctx, {.kind = kind, .din = setting.with_out ? x.view() : Tensor{}, .dout = dout.view(),
                                      .in = x.view(), .N = N, .F = C, .quant = setting.quant});   // in place
    return {x, {}};
}

template <Activation kind> Produced expert_activation_forward(const Setting& setting) {
    Inputs in{setting.type};
    HostTensor x = in.random(N * 2 * C), out = in.empty(N * C), weights = in.statistics(N), slots = backwards(N);
    cpu::expert_activation_forward(in.ctx, {.kind = kind, .out = setting.with_out ? out.view() : Tensor{},
                                            .in = x.view(), .weights = weights.view(), .row_slots = slots.view(),
                                            .R = N, .F = C, .quant = setting.quant});
    return {out, {}};
}

template <Activation kind> Produced expert_activation_backward(const Setting& setting) {   // in place
    Inputs in{setting.type};
    HostTensor x = in.random(N * 2 * C), dout = in.random(N * C), weights = in.statistics(N), slots = backwards(N);
    HostTensor dweights = in.scratch(N);
    cpu::expert_activation_backward(in.ctx, {.kind = kind, .din = setting.with_out ? x.view() : Tensor{},
                                             .dweights = dweights.view(), .dout = dout.view(), .in = x.view(),
                                             .weights = weights.view(), .row_slots = slots.view(), .R = N, .F = C,
                                             .quant = setting.quant});
    return {x, {dweights}};
}

const std::map<std::string, Producer> kProducers = {
    {"layernorm_forward", {C, true, false, norm_forward<cpu::layernorm_forward>}},
    {"rmsnorm_forward", {C, true, false, norm_forward<cpu::rmsnorm_forward>}},
    {"layernorm_backward", {C, false, false, norm_backward<cpu::layernorm_backward>}},
    {"rmsnorm_backward", {C, false, false, norm_backward<cpu::rmsnorm_backward>}},
    {"rope_forward", {kWidth, false, true, rope<cpu::rope_forward>}},
    {"rope_backward", {kWidth, false, true, rope<cpu::rope_backward>}},
    {"rope_forward at positions", {kWidth, false, true, rope<cpu::rope_forward, true>}},
    {"rope_backward at positions", {kWidth, false, true, rope<cpu::rope_backward, true>}},
    {"qk_norm_backward", {kWidth, false, true, qk_norm_backward}},
    {"attention_forward", {NH * HS, false, false, attention_forward}},
    {"attention_backward", {kWidth, false, false, attention_backward}},
    {"gelu_forward", {C, true, false, activation_forward<Activation::kGelu>}},
    {"gelu_backward", {C, true, false, activation_backward<Activation::kGelu>}},
    {"relu2_forward", {C, true, false, activation_forward<Activation::kRelu2>}},
    {"relu2_backward", {C, true, false, activation_backward<Activation::kRelu2>}},
    {"geglu_forward", {C, true, false, activation_forward<Activation::kGeglu>}},
    {"geglu_backward", {2 * C, true, false, activation_backward<Activation::kGeglu>}},
    {"swiglu_forward", {C, true, false, activation_forward<Activation::kSwiglu>}},
    {"swiglu_backward", {2 * C, true, false, activation_backward<Activation::kSwiglu>}},
    {"clamped_swiglu_forward", {C, true, false, activation_forward<Activation::kClampedSwiglu>}},
    {"clamped_swiglu_backward", {2 * C, true, false, activation_backward<Activation::kClampedSwiglu>}},
    {"expert_activation_forward", {C, true, false, expert_activation_forward<Activation::kSwiglu>}},
    {"expert_activation_backward", {2 * C, true, false, expert_activation_backward<Activation::kSwiglu>}},
    {"clamped expert_activation_forward",
     {C, true, false, expert_activation_forward<Activation::kClampedSwiglu>}},
    {"clamped expert_activation_backward",
     {2 * C, true, false, expert_activation_backward<Activation::kClampedSwiglu>}},
};

void check_same(const std::vector<HostTensor>& got, const std::vector<HostTensor>& want) {
    REQUIRE_EQ(got.size(), want.size());
    for (size_t i = 0; i < got.size(); i++) {
        INFO("output " << i);
        CHECK(got[i].same_bits(want[i]));
    }
}

}  // namespace

TEST_CASE("cpu producers: QuantOut gives the same as quantize on the bf16 result") {
    Ctx ctx;
    for (auto& [name, producer] : kProducers) {
        Produced plain = producer.run({});
        for (const QuantRequest& request : quant_requests()) {
            QuantMemory want(request, N, producer.columns);
            cpu::quantize(ctx, {.quant = want.out(), .in = plain.result.view(), .N = N, .C = producer.columns});
            const bool copies = request.copies();
            for (bool with_out : {true, false}) {
                if (!with_out && !(producer.out_optional && copies)) continue;
                INFO(name << ", " << request.name << ", out " << with_out);
                QuantMemory got(request, N, producer.columns);
                const Produced fused = producer.run({.quant = got.out(), .with_out = with_out});
                CHECK_EQ(got.difference(want), "");
                CHECK(fused.result.guards_intact());
                check_same(fused.others, plain.others);
                // Results of in-place operations are unspecified if quantized; the CPU sets them to NaN.
                if (with_out) CHECK_EQ(fused.result.same_bits(plain.result), !(producer.in_place && copies));
            }
        }
    }
}

TEST_CASE("cpu producers: no result depends on the number of threads") {
    const int threads = cpu::thread_count();
    std::deque<QuantMemory> ones;   // of all producers and requests
    std::deque<Produced> plain;     // of all producers and types
    for (int n : {1, 2, 5}) {       // the outer loop, since OpenMP starts threads whenever the number changes
        cpu::set_thread_count(n);
        size_t number = 0, run = 0;
        for (auto& [name, producer] : kProducers) {
            for (Dtype type : {Dtype::kFp32, Dtype::kBf16, Dtype::kFp64}) {
                Produced many = producer.run({.type = type});
                if (n == 1) {
                    plain.push_back(std::move(many));
                    continue;
                }
                INFO(name << ", " << dtype_name(type) << ", " << n << " threads");
                CHECK(many.result.same_bits(plain[run].result));
                check_same(many.others, plain[run++].others);
            }
            for (const QuantRequest& request : quant_requests()) {
                QuantMemory many(request, N, producer.columns);
                producer.run({.quant = many.out()});
                if (n == 1) {
                    ones.push_back(std::move(many));
                    continue;
                }
                INFO(name << ", " << request.name << ", " << n << " threads");
                CHECK_EQ(many.difference(ones[number]), "");
                CHECK(many.dbias_scratch.same_bits(ones[number].dbias_scratch));
                number++;
            }
        }
    }
    cpu::set_thread_count(threads);
}

TEST_CASE("cpu producers refuse to quantize results other than bf16, and to have no output") {
    for (auto& [name, producer] : kProducers) {
        INFO(name);
        QuantMemory memory({.name = "delayed"}, N, producer.columns);
        for (Dtype type : {Dtype::kFp32, Dtype::kFp64}) {
            CHECK_NOTHROW(producer.run({.type = type}));
            CHECK_THROWS_AS(producer.run({.quant = memory.out(), .type = type}), Error);
        }
        if (!producer.out_optional) continue;
        CHECK_THROWS_AS(producer.run({.with_out = false}), Error);
        QuantMemory record({.name = "record", .rowwise = false, .transposed = false, .record = true}, N,
                           producer.columns);
        CHECK_THROWS_AS(producer.run({.quant = record.out(), .with_out = false}), Error);
    }
}

TEST_CASE("cpu adamw: the amax of the new weights, with and without bf16 ones") {
    constexpr int64_t n = 20001;
    struct Result {
        HostTensor param, master, m, v;
        ScaleEntry entry;
    };
    auto run = [&](Dtype moments, bool with_param, bool with_slot, int32_t skip, double largest) {
        Ctx ctx;
        Result r{HostTensor(Dtype::kBf16, n), random_tensor(Dtype::kFp32, n, 1), random_tensor(moments, n, 2, 0.01),
                 HostTensor(moments, n).fill(0.5), {3, 4, 5, 6}};
        r.master.set(n - 2, largest);
        HostTensor grad = random_tensor(Dtype::kBf16, n, 3);
        StepState state{};
        state.lr = 0.01f, state.grad_mul = 1, state.adam_step = 3, state.skip = skip;
        cpu::adamw(ctx, {.param = with_param ? r.param.view() : Tensor{}, .master = r.master.view(), .m = r.m.view(),
                         .v = r.v.view(), .grad = grad.view(), .state = &state, .beta1 = 0.9f, .beta2 = 0.95f,
                         .eps = 1e-8f, .weight_decay = 0.1f, .rng_key = 3, .element_offset = 11,
                         .entry = with_slot ? &r.entry : nullptr});
        return r;
    };
    for (Dtype moments : {Dtype::kFp32, Dtype::kBf16})
        for (double largest : {-20.0, std::nan("")}) {
            const Result plain = run(moments, true, false, 0, largest), both = run(moments, true, true, 0, largest);
            const Result alone = run(moments, false, true, 0, largest);
            for (const Result* r : {&both, &alone}) {
                check_same({r->master, r->m, r->v}, {plain.master, plain.m, plain.v});
                CHECK(r->param.same_bits(r == &both ? plain.param : HostTensor(Dtype::kBf16, n)));
                // The amax operation must find the same in the bf16 weights.
                ScaleEntry want = plain.entry;
                HostTensor weights = plain.param;
                Ctx ctx;
                cpu::amax(ctx, {.entry = &want, .in = weights.view()});
                CHECK_EQ(std::memcmp(&want, &r->entry, sizeof want), 0);
                CHECK_EQ(want.amax_bits > kInfinityBits, std::isnan(largest));
            }
            CHECK_EQ(plain.entry.amax_bits, 5);
            CHECK_EQ(run(moments, true, true, 1, largest).entry.amax_bits, 5);
        }
}

}  // namespace quant_producers_test
