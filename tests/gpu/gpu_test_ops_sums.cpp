// Embedding, bias gradient, classifier and the sums of a step on the GPU against the CPU.
#include "tests/gpu/gpu_op.h"
#include "tests/support/quant_test.h"

#include <numeric>

using namespace op_test;

namespace ops_sums_test {

namespace {

struct Text {
    int64_t N, T, C, V;
    int repeats;   // approximate number of the most frequent token
};
// One token; odd widths; a token that occurs 29 to 32 times, where the kernel changes from one thread to several warps
// per token; a text of one token; a token with more occurrences than one pass handles; several windows of positions,
// with a token in two of them; rows of several blocks.
const Text kTexts[] = {{1, 1, 1, 1, 1},           {6, 3, 7, 5, 2},          {50, 50, 24, 9, 29},
                       {64, 16, 264, 12, 30},     {64, 16, 264, 12, 31},    {70, 7, 96, 12, 32},
                       {300, 100, 40, 1, 300},    {700, 100, 768, 50, 600}, {40, 13, 1000, 100, 3},
                       {2500, 500, 8, 40, 1300},  {90, 30, 2052, 20, 40}};

// Token 1 occurs `repeats` times, others at random, and some ids are outside [0, V).
std::vector<int32_t> tokens_of(const Text& text, bool with_bad) {
    std::vector<int32_t> tokens(static_cast<size_t>(text.N));
    for (int64_t n = 0; n < text.N; n++) {
        const uint32_t random = philox(17, static_cast<uint64_t>(n)).word[0];
        const int64_t others = std::max<int64_t>(text.V - 1, 1);
        const int64_t frequent = text.V > 1 ? 1 : 0;
        int64_t token = n < text.repeats ? frequent : static_cast<int64_t>(random) % others;
        if (token >= frequent && n >= text.repeats) token = std::min(token + 1, text.V - 1);
        if (with_bad && n % 11 == 5) token = n % 2 ? -3 : text.V + n;
        tokens[static_cast<size_t>((n * 7919) % text.N)] = static_cast<int32_t>(token);
    }
    return tokens;
}
std::vector<int32_t> order_of(const std::vector<int32_t>& tokens) {
    std::vector<int32_t> order(tokens.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
        return tokens[static_cast<size_t>(a)] < tokens[static_cast<size_t>(b)];
    });
    return order;
}

std::string name_of(const char* op, const Text& t) {
    return strf("%s N %lld T %lld C %lld V %lld, %d times", op, (long long)t.N, (long long)t.T,
                (long long)t.C, (long long)t.V, t.repeats);
}

void check_embedding(const Text& t, Dtype work, Dtype grad, int64_t shift_bytes, bool positions, bool with_bad,
                     float mul = 1) {
    const std::vector<int32_t> tokens = tokens_of(t, with_bad);
    OpCase forward(name_of("embedding_forward", t), work, grad, shift_bytes);
    forward.random("wte", Kind::kWork, (t.V + 3) * t.C);
    if (positions) forward.random("wpe", Kind::kWork, t.T * t.C);
    forward.add("tokens", Kind::kFixed, int_tensor(tokens));
    forward.add("bad", Kind::kFixed, int_tensor({5}));
    forward.poison("out", Kind::kWork, t.N * t.C);
    forward.run(cuda::embedding_forward, cpu::embedding_forward, [&](auto view) {
        return EmbeddingForwardArgs{.out = view("out"), .wte = view("wte"), .wpe = view("wpe"),
                                    .tokens = view("tokens").template as<int32_t>(),
                                    .bad_tokens = view("bad").template as<int32_t>(), .N = t.N, .T = t.T,
                                    .C = t.C, .V = t.V, .mul = mul};
    });
    forward.check_bits("bad");
    forward.check_bits("out");   // one addition or product: its rounding is the CPU's

    // Positions that restart: as many rows of the first ones as the most frequent token has.
    std::vector<int32_t> restarted;
    for (int64_t n = 0; n < t.N; n++)
        restarted.push_back(static_cast<int32_t>(n % std::max<int64_t>(1, std::min(t.T, t.N / t.repeats))));
    for (bool restart : {false, true}) {
        if (restart && !positions) continue;
        OpCase backward(name_of(restart ? "embedding_backward, positions restart" : "embedding_backward", t), work,
                        grad, shift_bytes);
        backward.random("dout", Kind::kWork, t.N * t.C);
        backward.random("dwte", Kind::kGrad, (t.V + 3) * t.C);
        if (positions) backward.random("dwpe", Kind::kGrad, t.T * t.C);
        backward.add("tokens", Kind::kFixed, int_tensor(tokens));
        backward.add("order", Kind::kFixed, int_tensor(order_of(tokens)));
        if (restart) {
            backward.add("positions", Kind::kFixed, int_tensor(restarted));
            backward.add("position order", Kind::kFixed, int_tensor(order_of(restarted)));
        }
        backward.run(cuda::embedding_backward, cpu::embedding_backward, [&](auto view) {
            return EmbeddingBackwardArgs{.dwte = view("dwte"), .dwpe = view("dwpe"), .dout = view("dout"),
                                         .tokens = view("tokens").template as<int32_t>(),
                                         .token_order = view("order").template as<int32_t>(), .N = t.N, .T = t.T,
                                         .C = t.C, .V = t.V, .positions = object_in<const int32_t>(view("positions")),
                                         .position_order = object_in<const int32_t>(view("position order")),
                                         .mul = mul};
        });
        backward.check("dwte");
        if (positions) backward.check("dwpe");
    }
}

void check_bias(int64_t N, int64_t C, Dtype work, Dtype grad, int64_t shift_bytes) {
    OpCase c(strf("bias_backward %lld x %lld", (long long)N, (long long)C), work, grad, shift_bytes);
    c.random("dout", Kind::kWork, N * C);
    c.random("dbias", Kind::kGrad, C);
    c.poison("scratch", Kind::kScratch, kPartialRows * C);
    c.run(cuda::bias_backward, cpu::bias_backward, [&](auto view) {
        return BiasBackwardArgs{.dbias = view("dbias"), .scratch = view("scratch"), .dout = view("dout"),
                                .N = N, .C = C};
    });
    c.check("dbias");
}

struct Logits {
    int64_t N, V, Vp;
};
// Rows that are not whole vectors; a block of few threads; of many; rows of 2, 4 and 8 blocks in bf16 or fp32; longer
// than any cluster; more rows than blocks fit the GPU.
const Logits kLogits[] = {{1, 1, 1},         {3, 7, 9},          {5, 250, 256},      {1400, 97, 128}, {2, 8192, 8192},
                            {300, 8200, 8320},  {3, 20001, 20096},  {2, 50257, 50304}, {5, 66000, 66048},
                          {70, 66001, 66048}, {2, 128256, 128256}, {2, 250001, 250112}, {1, 530000, 530048}};

HostTensor state_tensor(float dloss_mul, int32_t bad_tokens) {
    StepState state{};
    state.dloss_mul = dloss_mul;
    state.bad_tokens = bad_tokens;
    return tensor_of(state);
}

void check_classifier(const Logits& l, Dtype work, int64_t shift_bytes, bool write, float z_loss = 0, float mul = 1,
                      float softcap = 0) {
    OpCase c(strf("classifier %lld x %lld of %lld%s, z-loss %g, multiplier %g, cap %g", (long long)l.N, (long long)l.V,
                  (long long)l.Vp, write ? "" : ", losses only", static_cast<double>(z_loss), static_cast<double>(mul),
                  static_cast<double>(softcap)),
             work, Dtype::kFp32, shift_bytes);
    HostTensor logits = random_tensor(work, l.N * l.Vp, 31, 3);
    std::vector<int32_t> targets(static_cast<size_t>(l.N));
    for (int64_t n = 0; n < l.N; n++) {
        const auto random = static_cast<int64_t>(philox(19, static_cast<uint64_t>(n)).word[1]);
        int64_t target = n == 0 ? l.V - 1 : n == 1 ? 0 : random % l.V;
        if (n % 7 == 3) target = kIgnoreIndex;
        if (n % 7 == 5) target = n % 2 ? l.V : -2;
        targets[static_cast<size_t>(n)] = static_cast<int32_t>(target);
        // Padded columns have no effect, however large, and neither has a constant offset of a row.
        for (int64_t v = l.V; v < l.Vp; v++) logits.set(n * l.Vp + v, 60);
        if (n % 3 == 1) logits.set(n * l.Vp + random % l.V, 40);
    }
    c.add("logits", Kind::kWork, logits);
    c.poison("losses", Kind::kStat, l.N);
    c.poison("squares", Kind::kStat, l.N);
    c.add("targets", Kind::kFixed, int_tensor(targets));
    c.add("state", Kind::kFixed, state_tensor(1.0f / 64, 2));
    c.run(cuda::classifier, cpu::classifier, [&](auto view) {
        return ClassifierArgs{.logits = view("logits"), .losses = view("losses"),
                              .targets = view("targets").template as<int32_t>(),
                              .state = static_cast<StepState*>(view("state").data), .N = l.N, .V = l.V,
                              .Vp = l.Vp, .write_dlogits = write, .logit_mul = mul, .z_loss = z_loss,
                              .squares = view("squares"), .softcap = softcap};
    });
    // A multiplier or a soft cap rounds each logit, of which a loss is a difference; a cap on bf16 logits has an error
    // of 2^-21 (soft_cap.cuh). A gradient has the error of expf, one unit in the last place, on top.
    const double most = softcap > 0 ? static_cast<double>(softcap) : 40 * static_cast<double>(mul);
    const double of_logit =
        mul == 1 && softcap == 0 ? 0 : most * (work == Dtype::kBf16 && softcap > 0 ? 0x1.2p-21 : 0x1p-24);
    c.check("losses", 2 * of_logit);
    if (z_loss > 0) c.check("squares", 2 * (most + std::log(static_cast<double>(l.V))) * of_logit);
    c.check_bits("state");
    if (!write) return c.check_unchanged("logits");
    c.check("logits", of_logit > 0 ? mul / 64.0 * (of_logit + 0x1p-23) : 0);
    // Gradients of ignored rows and padding are exactly 0.
    int64_t wrong = 0;
    for (int64_t n = 0; n < l.N; n++) {
        const int32_t target = targets[static_cast<size_t>(n)];
        const bool counted = target >= 0 && target < l.V;
        for (int64_t v = counted ? l.V : 0; v < l.Vp; v++) wrong += c.on_gpu("logits").get(n * l.Vp + v) != 0;
    }
    INFO(c.name());
    CHECK_EQ(wrong, 0);
}

double as_double(const HostTensor& t) { return t.get(0); }

}  // namespace

TEST_CASE("gpu ops: embedding, forward and backward") {
    for (const Text& t : kTexts) {
        if (left_out(t.N * t.C)) continue;
        for_gpu_types([&](Dtype work, Dtype grad, int64_t shift_bytes) {
            check_embedding(t, work, grad, shift_bytes, true, true);
            check_embedding(t, work, grad, shift_bytes, false, false);
            if (grad == Dtype::kFp32) check_embedding(t, work, grad, shift_bytes, false, true, 33.94f);
        });
    }
}

TEST_CASE("gpu ops: bias gradient") {
    for (auto [N, C] : {std::pair<int64_t, int64_t>{1, 1}, {3, 7}, {9, 24}, {200, 96}, {5000, 96},
                        {700, 1000}, {33, 3072}, {129, 5001}}) {
        if (left_out(N * C)) continue;
        for_gpu_types([&](Dtype work, Dtype grad, int64_t shift_bytes) {
            check_bias(N, C, work, grad, shift_bytes);
        });
    }
}

TEST_CASE("gpu ops: classifier") {
    for (const Logits& l : kLogits) {
        if (left_out(l.N * l.Vp / 20)) continue;
        for (Dtype work : {Dtype::kFp32, Dtype::kBf16}) {
            check_classifier(l, work, 0, true);
            check_classifier(l, work, 0, true, 1e-2f);
            check_classifier(l, work, 0, false);
            check_classifier(l, work, 0, true, 1e-2f, 0.3f);
            check_classifier(l, work, 0, false, 0, 0.3f);
            // Logits up to 40: a cap that bends all, and one that bends the largest.
            check_classifier(l, work, 0, true, 1e-2f, 1, 30);
            check_classifier(l, work, 0, true, 0, 0.3f, 2.5f);
            check_classifier(l, work, 0, false, 0, 1, 30);
            if (l.N * l.Vp < 200000) check_classifier(l, work, 4, true, 1e-2f, 1, 7.5f);
            if (l.N * l.Vp < 200000) check_classifier(l, work, 4, true);
            if (l.N * l.Vp < 200000) check_classifier(l, work, 4, true, 1e-2f);
            if (l.N * l.Vp < 200000) check_classifier(l, work, 4, true, 1e-2f, 0.3f);
        }
    }
}

TEST_CASE("gpu ops: the classifier with one dominant logit and with equal logits") {
    for (int64_t V : {int64_t{128}, int64_t{20000}}) {
        HostTensor logits(Dtype::kFp32, 2 * V), losses(Dtype::kFp32, 2);
        logits.fill(0);
        for (int64_t v = 0; v < V; v++) logits.set(v, v == 5 ? 0 : -1e4);
        DeviceTensor dl(logits), dlosses(losses), targets(int_tensor({5, 7})), state(state_tensor(1, 0));
        cuda::classifier(gpu(), {.logits = dl.view(), .losses = dlosses.view(), .targets = targets.view().as<int32_t>(),
                                 .state = static_cast<StepState*>(state.view().data), .N = 2, .V = V, .Vp = V,
                                 .write_dlogits = true});
        losses = dlosses.download();
        CHECK_EQ(losses.get(0), 0);
        CHECK(std::fabs(losses.get(1) - std::log(static_cast<double>(V))) < 1e-5);
        CHECK_EQ(dl.download().get(5), 0);
    }
}

// Both devices sum in fp64, so that the order does not show in the rounded sum.
TEST_CASE("gpu ops: the residual of quantized dlogits") {
    for (auto [N, C, V, Vp] : {std::array<int64_t, 4>{1, 16, 20, 32}, {33, 48, 250, 256}, {150, 576, 4990, 4992},
                               {40, 48, 50257, 50304}, {3, 4096, 250, 256}}) {
        if (left_out(N * Vp)) continue;
        for (const char* name : {"delayed, rowwise only", "1x128, rowwise only"})
            for (Dtype format : {Dtype::kE4m3, Dtype::kE5m2}) {
                QuantRequest request = quant_request(name);
                request.format = format;
                QuantMemory codes(request, N, Vp);
                HostTensor dlogits = random_tensor(Dtype::kBf16, N * Vp, 51);
                Ctx ctx;
                cpu::quantize(ctx, {.quant = codes.out(), .in = dlogits.view(), .N = N, .C = Vp});
                OpCase c(strf("dlogits_residual %lld x %lld of %lld, %s", (long long)N, (long long)C, (long long)Vp,
                              name), Dtype::kBf16);
                std::vector<int32_t> targets(static_cast<size_t>(N));
                for (int64_t n = 0; n < N; n++)
                    targets[static_cast<size_t>(n)] = static_cast<int32_t>(
                        n % 7 == 3 ? kIgnoreIndex : n % 7 == 5 ? V : n == 0 ? V - 1 : n * 7919 % V);
                HostTensor scale_inv = codes.rowwise_scale_inv;
                if (request.granularity == Granularity::kTensor)
                    scale_inv = HostTensor(Dtype::kFp32, 1).fill(double{codes.entry.scale_inv});
                c.add("dlogits", Kind::kFixed, dlogits);
                c.add("codes", Kind::kFixed, codes.rowwise);
                c.add("scale_inv", Kind::kFixed, scale_inv);
                c.add("targets", Kind::kFixed, int_tensor(targets));
                c.random("weight", Kind::kWork, Vp * C);
                c.random("dx", Kind::kWork, N * C);
                c.run_same_types(cuda::dlogits_residual, cpu::dlogits_residual, [&](auto view) {
                    return DlogitsResidualArgs{.dx = view("dx"), .dlogits = view("dlogits"), .codes = view("codes"),
                                               .scale_inv = view("scale_inv"), .granularity = request.granularity,
                                               .weight = view("weight"),
                                               .targets = view("targets").template as<int32_t>(), .N = N, .C = C,
                                               .V = V, .Vp = Vp};
                });
                c.check_bits("dx");
            }
    }
}

TEST_CASE("gpu ops: sums of squares of several matrices have the bits of each alone") {
    constexpr int64_t kCount = 5;
    for (Dtype type : {Dtype::kFp32, Dtype::kBf16})
        for (int64_t n : {8, 264, 8192, 100008}) {
            INFO(n << " of " << dtype_name(type));
            const HostTensor start = HostTensor(Dtype::kFp64, kCount).fill(0.5);
            DeviceTensor in(random_tensor(type, kCount * n, 41)), all(start), each(start);
            DeviceTensor scratch(HostTensor(Dtype::kFp64, kCount * kPartialSums));
            cuda::sum_squares(gpu(), {.sum = all.view().as<double>(), .in = in.view(), .scratch = scratch.view(),
                                      .matrices = kCount});
            for (int64_t i = 0; i < kCount; i++)
                cuda::sum_squares(gpu(), {.sum = each.view().as<double>() + i, .in = in.view().slice(i * n, n),
                                          .scratch = scratch.view()});
            cuda::synchronize(gpu());
            CHECK(all.download().same_bits(each.download()));
        }
}

TEST_CASE("gpu ops: sums of squares and of losses in fp64") {
    for (int64_t n : {int64_t{1}, int64_t{3}, int64_t{8}, int64_t{8191}, int64_t{3000007}}) {
        if (left_out(n)) continue;
        for (Dtype type : {Dtype::kFp32, Dtype::kBf16})
            for (int64_t shift_bytes : {0, 4}) {
                double results[2] = {};
                for (int moved : {0, 1}) {
                    OpCase c(strf("sum_squares of %lld", (long long)n), type, Dtype::kFp32, shift_bytes);
                    HostTensor in = random_tensor(type, n, 41);
                    if (moved) in.set(n - 1, 3);   // the last element counts
                    c.add("in", Kind::kFixed, in);
                    c.add("sum", Kind::kFixed, HostTensor(Dtype::kFp64, 1).fill(0.5));
                    c.add("scratch", Kind::kFixed, HostTensor(Dtype::kFp64, kPartialSums));
                    c.run_same_types(cuda::sum_squares, cpu::sum_squares, [&](auto view) {
                        return SumSquaresArgs{.sum = view("sum").template as<double>(), .in = view("in"),
                                              .scratch = view("scratch")};
                    });
                    INFO(c.name());
                    results[moved] = as_double(c.on_gpu("sum"));
                    const double want = as_double(c.on_cpu("sum"));
                    CHECK(std::fabs(results[moved] - want) <= 1e-14 * static_cast<double>(n) + 1e-12 * want);
                }
                CHECK(results[0] != results[1]);
            }
        OpCase c(strf("sum_losses of %lld", (long long)n), Dtype::kFp32);
        HostTensor losses = random_tensor(Dtype::kFp32, n, 43, 1, 9);
        c.add("losses", Kind::kFixed, losses);
        c.add("sum", Kind::kFixed, HostTensor(Dtype::kFp64, 1).fill(-2));
        c.add("scratch", Kind::kFixed, HostTensor(Dtype::kFp64, kPartialSums));
        c.run_same_types(cuda::sum_losses, cpu::sum_losses, [&](auto view) {
            return SumLossesArgs{.sum = view("sum").template as<double>(), .losses = view("losses"),
                                 .scratch = view("scratch"), .N = n};
        });
        INFO(c.name());
        const double want = as_double(c.on_cpu("sum"));
        CHECK(std::fabs(as_double(c.on_gpu("sum")) - want) <= 1e-13 * std::fabs(want));
    }
}

TEST_CASE("gpu ops: step_guard decides as the CPU does") {
    const double kNan = std::nan(""), kInf = HUGE_VAL;
    struct Situation {
        double loss, squares;
        int32_t bad;
        float clip;
    };
    for (const Situation& s : {Situation{1, 4, 0, 1}, {1, 0.25, 0, 1}, {1, 4, 0, 0}, {kNan, 4, 0, 1}, {1, kNan, 0, 1},
                               {kInf, 4, 0, 1}, {1, kInf, 0, 1}, {1, 1e300, 0, 1}, {1, 4, 1, 1}, {1, 0, 0, 1}}) {
        StepState state{};
        state.loss_sum = s.loss, state.sum_squares = s.squares;
        state.bad_tokens = s.bad, state.adam_step = 41;
        OpCase c("step_guard", Dtype::kFp32);
        c.add("state", Kind::kFixed, tensor_of(state));
        c.run_same_types(cuda::step_guard, cpu::step_guard, [&](auto view) {
            return StepGuardArgs{.state = static_cast<StepState*>(view("state").data), .clip = s.clip};
        });
        c.check_bits("state");
    }
    for (int64_t capacity : {8, 9, 10}) {
        StepState state{};
        HostTensor rows(Dtype::kInt32, 3);
        for (int64_t layer = 0; layer < 3; layer++) rows.set(layer, layer == 1 ? 9 : 4);
        OpCase c("step_guard", Dtype::kFp32);
        c.add("state", Kind::kFixed, tensor_of(state));
        c.add("rows", Kind::kFixed, rows);
        c.run_same_types(cuda::step_guard, cpu::step_guard, [&](auto view) {
            return StepGuardArgs{.state = static_cast<StepState*>(view("state").data), .clip = 1,
                                 .expert_rows = view("rows"), .capacity = capacity};
        });
        c.check_bits("state");
    }
    for (int64_t held : {int64_t{0}, kLeastNorms - 1, kLeastNorms, int64_t{77}, kNormWindow, kNormWindow + 5})
        for (float norm : {1.0f, 29.0f, 31.0f, 1000.0f}) {
            StepState state{};
            state.sum_squares = static_cast<double>(norm * norm);
            for (int64_t i = 0; i < held; i++)
                state.norms[state.norm_count++ % kNormWindow] = static_cast<float>(1 + i * 7919 % 31);
            OpCase c("step_guard", Dtype::kFp32);
            c.add("state", Kind::kFixed, tensor_of(state));
            c.run_same_types(cuda::step_guard, cpu::step_guard, [&](auto view) {
                return StepGuardArgs{.state = static_cast<StepState*>(view("state").data), .clip = 1,
                                     .skip_norm = 1.9f};
            });
            c.check_bits("state");
        }
}

}  // namespace ops_sums_test
