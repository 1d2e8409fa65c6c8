// Every operation of the CPU gives equal bits on any number of threads.
#include "tests/support/random_inputs.h"

#include <map>
#include <numeric>

#include "llmc/cpu/threads.h"

using namespace op_test;

namespace threads_test {

namespace {

// Sizes large enough for every operation to use several threads.
constexpr int64_t B = 4, T = 100, N = B * T, C = 72, NH = 6, NKV = 2, HS = 24, kWidth = (NH + 2 * NKV) * HS,
                  V = 90;

using Outputs = std::vector<HostTensor>;
using Operation = std::function<Outputs(Dtype)>;

template <auto forward> Outputs norm_forward(Dtype type) {
    Inputs in{type};
    HostTensor x = in.random(N * C), residual = in.random(N * C), w = in.random(C), b = in.random(C);
    HostTensor out = in.empty(N * C), sum = out, mean = in.scratch(N), rstd = mean;
    forward(in.ctx, {.out = out.view(), .residual_out = sum.view(), .mean = mean.view(), .rstd = rstd.view(),
                     .in = x.view(), .residual = residual.view(), .weight = w.view(), .bias = b.view(), .N = N, .C = C,
                     .eps = 1e-5f});
    return {out, sum, rstd};
}

template <auto backward> Outputs norm_backward(Dtype type) {
    Inputs in{type};
    HostTensor dx = in.empty(N * C), below = in.random(N * C), dw = in.random(C), db = in.random(C);
    HostTensor dout = in.random(N * C), x = in.random(N * C), mean = in.statistics(N),
               rstd = in.statistics(N);
    HostTensor w = in.random(C), scratch = in.scratch(2 * kPartialRows * C);
    backward(in.ctx, {.dx = dx.view(), .dresidual = below.view(), .dweight = dw.view(), .dbias = db.view(),
                      .scratch = scratch.view(), .dout = dout.view(), .x = x.view(), .mean = mean.view(),
                      .rstd = rstd.view(), .weight = w.view(), .N = N, .C = C});
    return {dx, dw, db};
}

template <auto rotate> Outputs rope(Dtype type) {
    Inputs in{type};
    HostTensor qkv = in.random(N * kWidth), table = in.statistics(T * HS);
    rotate(in.ctx,
           {.qkv = qkv.view(), .cos_sin = table.view(), .N = N, .T = T, .NH = NH, .NKV = NKV, .HS = HS});
    return {qkv};
}

Outputs qk_norm(Dtype type) {
    Inputs in{type};
    HostTensor x = in.random(N * kWidth), out = in.empty(N * kWidth), rstd = in.scratch(N * (NH + NKV));
    HostTensor q = in.random(HS), k = in.random(HS), dq = in.random(HS), dk = in.random(HS);
    HostTensor scratch = in.scratch(2 * kPartialRows * HS), dqkv = in.random(N * kWidth);
    cpu::qk_norm_forward(in.ctx, {.out = out.view(), .rstd = rstd.view(), .in = x.view(), .q_weight = q.view(),
                                  .k_weight = k.view(), .N = N, .NH = NH, .NKV = NKV, .HS = HS, .eps = 1e-5f});
    cpu::qk_norm_backward(in.ctx, {.dqkv = dqkv.view(), .dq_weight = dq.view(), .dk_weight = dk.view(),
                                   .scratch = scratch.view(), .in = x.view(), .rstd = rstd.view(), .q_weight = q.view(),
                                   .k_weight = k.view(), .N = N, .NH = NH, .NKV = NKV, .HS = HS});
    return {out, rstd, dqkv, dq, dk};
}

Outputs attention(Dtype type) {
    Inputs in{type};
    HostTensor qkv = in.random(N * kWidth), out = in.empty(N * NH * HS), lse = in.scratch(N * NH),
               delta = lse;
    HostTensor dout = in.random(N * NH * HS), dqkv = in.empty(N * kWidth);
    cpu::attention_forward(in.ctx, {.out = out.view(), .lse = lse.view(), .qkv = qkv.view(), .B = B, .T = T, .NH = NH,
                                    .NKV = NKV, .HS = HS, .softmax_mul = 0.2f});
    cpu::attention_backward(in.ctx, {.dqkv = dqkv.view(), .delta = delta.view(), .dout = dout.view(), .out = out.view(),
                                     .lse = lse.view(), .qkv = qkv.view(), .B = B, .T = T, .NH = NH, .NKV = NKV,
                                     .HS = HS, .softmax_mul = 0.2f});
    return {out, lse, delta, dqkv};
}

Outputs embedding(Dtype type) {
    Inputs in{type};
    HostTensor wte = in.random(V * C), wpe = in.random(T * C), out = in.empty(N * C), dout = in.random(N * C);
    HostTensor dwte = in.random(V * C), dwpe = in.random(T * C), bad(Dtype::kInt32, 1);
    bad.fill(0);
    std::vector<int32_t> tokens(N), order(N);
    for (int64_t n = 0; n < N; n++)
        tokens[n] = static_cast<int32_t>(philox(3, n).word[0] % (V + 5));  // some bad
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return tokens[a] < tokens[b]; });
    cpu::embedding_forward(in.ctx, {.out = out.view(), .wte = wte.view(), .wpe = wpe.view(), .tokens = tokens.data(),
                                    .bad_tokens = bad.as<int32_t>(), .N = N, .T = T, .C = C, .V = V});
    cpu::embedding_backward(in.ctx, {.dwte = dwte.view(), .dwpe = dwpe.view(), .dout = dout.view(),
                                     .tokens = tokens.data(), .token_order = order.data(), .N = N, .T = T, .C = C,
                                     .V = V});
    return {out, bad, dwte, dwpe};
}

template <Activation kind> Outputs activation(Dtype type) {
    Inputs in{type};
    const int64_t inputs = N * activation_inputs(kind, C);
    HostTensor x = in.random(inputs), out = in.empty(N * C), dout = in.random(N * C), dx = in.empty(inputs);
    cpu::activation_forward(in.ctx, {.kind = kind, .out = out.view(), .in = x.view(), .N = N, .F = C});
    cpu::activation_backward(in.ctx, {.kind = kind, .din = dx.view(), .dout = dout.view(), .in = x.view(), .N = N,
                                      .F = C});
    return {out, dx};
}

Outputs bias(Dtype type) {
    Inputs in{type};
    HostTensor dout = in.random(N * C), dbias = in.random(C), scratch = in.scratch(kPartialRows * C);
    cpu::bias_backward(
        in.ctx, {.dbias = dbias.view(), .scratch = scratch.view(), .dout = dout.view(), .N = N, .C = C});
    return {dbias};
}

Outputs loss(Dtype type) {
    Inputs in{type};
    HostTensor logits = in.random(N * C), losses = in.scratch(N), partial(Dtype::kFp64, kPartialSums);
    HostTensor sums(Dtype::kFp64, 3);
    sums.fill(1);
    std::vector<int32_t> targets(N);
    for (int64_t n = 0; n < N; n++)
        targets[n] = static_cast<int32_t>(philox(4, n).word[0] % (C + 2)) - 1;  // some bad
    StepState state{};
    state.dloss_mul = 0.1f;
    cpu::classifier(in.ctx, {.logits = logits.view(), .losses = losses.view(), .targets = targets.data(),
                             .state = &state, .N = N, .V = C - 3, .Vp = C, .write_dlogits = true});
    cpu::sum_losses(in.ctx,
                    {.sum = sums.as<double>(), .losses = losses.view(), .scratch = partial.view(), .N = N});
    cpu::sum_squares(in.ctx, {.sum = sums.as<double>() + 1, .in = logits.view(), .scratch = partial.view()});
    sums.set(2, state.bad_tokens);
    return {logits, losses, sums};
}

Outputs matmul(Dtype type) {
    Inputs in{type};
    Outputs all;
    for (GemmLayout layout : {GemmLayout::kForward, GemmLayout::kDgrad, GemmLayout::kWgrad}) {
        HostTensor a = in.random(N * C), b = in.random(V * C), d = in.random(N * V);
        cpu::gemm(in.ctx, {.D = d.view(), .A = a.view(), .B = b.view(), .M = N, .N = V, .K = C, .layout = layout,
                           .accumulate = true});
        all.push_back(d);
    }
    return all;
}

Outputs optimizer(Dtype type) {
    Inputs in{type};
    HostTensor param = in.empty(N * C), master = in.statistics(N * C), grad = in.random(N * C);
    Dtype moments = type == Dtype::kFp64 ? type : Dtype::kBf16;
    HostTensor m = random_tensor(moments, N * C, 8), v(moments, N * C), wide(Dtype::kFp32, N * C);
    v.fill(0.5);
    StepState state{};
    state.lr = 0.1f, state.adam_step = 4, state.grad_mul = 1;
    cpu::adamw(in.ctx, {.param = param.view(), .master = master.view(), .m = m.view(), .v = v.view(),
                        .grad = grad.view(), .state = &state, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f,
                        .weight_decay = 0.1f, .rng_key = 3, .element_offset = 11});
    cpu::fill_normal(in.ctx, {.out = grad.view(), .key = 3, .element_offset = 5, .mean = 0, .std = 1});
    cpu::cast(in.ctx, {.out = wide.view(), .in = grad.view()});
    return {param, master, m, v, wide};
}

const std::map<std::string, Operation> kOperations = {
    {"layernorm_forward", norm_forward<cpu::layernorm_forward>},
    {"layernorm_backward", norm_backward<cpu::layernorm_backward>},
    {"rmsnorm_forward", norm_forward<cpu::rmsnorm_forward>},
    {"rmsnorm_backward", norm_backward<cpu::rmsnorm_backward>},
    {"rope_forward", rope<cpu::rope_forward>},
    {"rope_backward", rope<cpu::rope_backward>},
    {"qk_norm", qk_norm},
    {"attention", attention},
    {"embedding", embedding},
    {"gelu", activation<Activation::kGelu>},
    {"swiglu", activation<Activation::kSwiglu>},
    {"relu2", activation<Activation::kRelu2>},
    {"bias_backward", bias},
    {"classifier and sums", loss},
    {"gemm", matmul},
    {"adamw, fill_normal, cast", optimizer},
};

}  // namespace

TEST_CASE("cpu operations do not depend on the number of threads") {
    const int threads = cpu::thread_count();
    for (auto& [name, run] : kOperations)
        for (Dtype type : {Dtype::kFp32, Dtype::kBf16, Dtype::kFp64}) {
            cpu::set_thread_count(1);
            Outputs one = run(type);
            for (int n : {2, 5}) {
                cpu::set_thread_count(n);
                Outputs many = run(type);
                for (size_t i = 0; i < one.size(); i++) {
                    INFO(name << ", " << dtype_name(type) << ", " << n << " threads, output " << i);
                    CHECK(many[i].same_bits(one[i]));
                    CHECK(many[i].guards_intact());
                }
            }
        }
    cpu::set_thread_count(threads);
}

}  // namespace threads_test
