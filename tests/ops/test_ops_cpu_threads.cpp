// Operations of the CPU give equal bits on any number of threads. test_ops_cpu_quant_producers.cpp has those with a
// QuantOut.
#include "tests/support/random_inputs.h"

#include <array>
#include <map>
#include <numeric>

using namespace op_test;

namespace threads_test {

namespace {

// Sizes large enough for every operation to use several threads.
constexpr int64_t B = 4, T = 100, N = B * T, C = 72, NH = 6, NKV = 2, HS = 24, kWidth = (NH + 2 * NKV) * HS, V = 90;

using Outputs = std::vector<HostTensor>;
using Operation = std::function<Outputs(Dtype)>;

Outputs qk_norm_forward(Dtype type) {
    Inputs in{type};
    HostTensor x = in.random(N * kWidth), out = in.empty(N * kWidth), rstd = in.scratch(N * (NH + NKV));
    HostTensor q = in.random(HS), k = in.random(HS);
    cpu::qk_norm_forward(in.ctx, {.out = out.view(), .rstd = rstd.view(), .in = x.view(), .q_weight = q.view(),
                                  .k_weight = k.view(), .N = N, .NH = NH, .NKV = NKV, .HS = HS, .KS = HS,
                                  .eps = 1e-5f});
    return {out, rstd};
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

Outputs bias(Dtype type) {
    Inputs in{type};
    HostTensor dout = in.random(N * C), dbias = in.random(C), scratch = in.scratch(kPartialRows * C);
    cpu::bias_backward(in.ctx, {.dbias = dbias.view(), .scratch = scratch.view(), .dout = dout.view(), .N = N, .C = C});
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
    cpu::sum_losses(in.ctx, {.sum = sums.as<double>(), .losses = losses.view(), .scratch = partial.view(), .N = N});
    cpu::sum_squares(in.ctx, {.sum = sums.as<double>() + 1, .in = logits.view(), .scratch = partial.view()});
    sums.set(2, state.bad_tokens);
    return {logits, losses, sums};
}

Outputs matmul(Dtype type) {
    Inputs in{type};
    Outputs all;
    for (const auto& [rows, columns, K] : {std::array{N, V, C}, {97, 545, 300}, {1, 530, 700}, {203, 33, 64}})
        for (GemmLayout layout : {GemmLayout::kForward, GemmLayout::kDgrad, GemmLayout::kWgrad}) {
            HostTensor a = in.random(rows * K), b = in.random(columns * K), d = in.random(rows * columns);
            cpu::gemm(in.ctx, {.D = d.view(), .A = a.view(), .B = b.view(), .M = rows, .N = columns, .K = K,
                               .layout = layout, .accumulate = true});
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
    {"qk_norm_forward", qk_norm_forward}, {"embedding", embedding}, {"bias_backward", bias},
    {"classifier and sums", loss}, {"gemm", matmul}, {"adamw, fill_normal, cast", optimizer},
};

}  // namespace

TEST_CASE("cpu operations do not depend on the number of threads") {
    for (auto& [name, run] : kOperations)
        for (Dtype type : {Dtype::kFp32, Dtype::kBf16, Dtype::kFp64}) {
            INFO(name << ", " << dtype_name(type));
            check_threads([&] { return run(type); });
        }
}

}  // namespace threads_test
