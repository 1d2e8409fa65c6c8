// Mixtures of experts: every operation of the GPU against the CPU.
#include "tests/gpu/gpu_quant.h"
#include "tests/support/fp8_gemm_test.h"

#include <numeric>

using namespace op_test;

namespace moe_test {
namespace {

struct Shape {
    int64_t N, E, K, C, F;
};
// One token, all experts, odd sizes, more than one chunk of the sort, experts without rows, most experts, wide rows,
// wide experts.
const Shape kShapes[] = {{1, 1, 1, 8, 1},     {3, 5, 2, 24, 40},    {7, 3, 3, 33, 7},  {200, 64, 8, 64, 96},
                         {513, 128, 8, 136, 72}, {300, 200, 4, 16, 24}, {40, 1000, 32, 8, 8}, {9, 4, 2, 2056, 8},
                         {33, 16, 12, 520, 8},  {21, 6, 3, 16, 1032}};

std::string name_of(const char* op, const Shape& s) {
    return strf("%s %lld x %lld of %lld", op, ll(s.N), ll(s.K), ll(s.E));
}

// Different experts for each token, ascending; the first half of the experts is more likely.
HostTensor random_experts(const Shape& s, uint64_t key) {
    HostTensor experts(Dtype::kInt32, s.N * s.K);
    for (int64_t n = 0; n < s.N; n++) {
        std::vector<int64_t> all(static_cast<size_t>(s.E));
        std::iota(all.begin(), all.end(), int64_t{0});
        for (int64_t k = 0; k < s.K; k++) {
            const int64_t left = s.E - k, random = philox(key, static_cast<uint64_t>(n * s.K + k)).word[0];
            const int64_t drawn = k + random % (n % 2 ? left : (left + 1) / 2);
            std::swap(all[static_cast<size_t>(k)], all[static_cast<size_t>(drawn)]);
        }
        std::sort(all.begin(), all.begin() + s.K);
        for (int64_t k = 0; k < s.K; k++) experts.set(n * s.K + k, static_cast<double>(all[static_cast<size_t>(k)]));
    }
    return experts;
}

// A permutation of the R slots; holes: every third is -1.
HostTensor random_slots(int64_t R, bool holes = false) {
    std::vector<int64_t> slots(static_cast<size_t>(R));
    std::iota(slots.begin(), slots.end(), int64_t{0});
    for (uint64_t r = static_cast<uint64_t>(R) - 1; r > 0; r--) std::swap(slots[r], slots[philox(3, r).word[0] % r]);
    HostTensor tensor(Dtype::kInt32, R);
    for (int64_t r = 0; r < R; r++)
        tensor.set(r, holes && r % 3 == 2 ? -1.0 : static_cast<double>(slots[static_cast<size_t>(r)]));
    return tensor;
}

// Every form of a router.
const RouterForm kForms[] = {{.normalize = false}, {.normalize = true},
                             {.sigmoid = true, .normalize = true, .scale = 2.5f},
                             {.sigmoid = true, .normalize = false, .scale = 0.5f}};

// Softmax of random logits, or their sigmoids.
void add_router(OpCase& c, const Shape& s, const RouterForm& form) {
    HostTensor probs = random_tensor(Dtype::kFp32, s.N * s.E, 5, 1), weights(Dtype::kFp32, s.N * s.K);
    const HostTensor experts = random_experts(s, 9);
    for (int64_t n = 0; n < s.N; n++) {
        double sum = 0, chosen = 0;
        for (int64_t e = 0; e < s.E; e++) sum += std::exp(probs.get(n * s.E + e));
        for (int64_t e = 0; e < s.E; e++) {
            const double value = std::exp(probs.get(n * s.E + e));
            probs.set(n * s.E + e, value / (form.sigmoid ? 1 + value : sum));
        }
        const auto p = [&](int64_t k) { return probs.get(n * s.E + static_cast<int64_t>(experts.get(n * s.K + k))); };
        for (int64_t k = 0; k < s.K; k++) chosen += p(k);
        for (int64_t k = 0; k < s.K; k++)
            weights.set(n * s.K + k, form.scale * p(k) / (form.normalize ? chosen : 1));
    }
    c.add("probs", Kind::kStat, probs);
    c.add("weights", Kind::kStat, weights);
    c.add("experts", Kind::kFixed, experts);
    c.random("lse", Kind::kStat, s.N, 1, 3);
}

}  // namespace

TEST_CASE("gpu moe: router_forward") {
    for (const Shape& s : kShapes)
        for (const RouterForm& form : kForms)
            for (const auto& [chosen, even] : {std::pair(false, false), {true, false}, {false, true}}) {
                OpCase c(name_of("router_forward", s), form.normalize ? Dtype::kBf16 : Dtype::kFp32);
                c.random("probs", Kind::kStat, s.N * s.E, 2);
                if (form.sigmoid) c.random("bias", Kind::kWork, s.E, 0.5);   // also scores below 0
                else c.random("logit_bias", Kind::kWork, s.E, 1), c.poison("spread", Kind::kWork, s.N * s.E);
                c.poison("lse", Kind::kStat, s.N);
                c.poison("weights", Kind::kStat, s.N * s.K);
                c.add("experts", Kind::kFixed, chosen ? random_experts(s, 4) : HostTensor(Dtype::kInt32, s.N * s.K));
                c.run(cuda::router_forward, cpu::router_forward, [&](auto view) {
                    return RouterForwardArgs{.probs = view("probs"), .lse = view("lse"), .experts = view("experts"),
                                             .weights = view("weights"),
                                             .bias = form.sigmoid ? view("bias") : Tensor{}, .N = s.N, .E = s.E,
                                             .K = s.K, .form = form, .chosen = chosen, .even = even,
                                             .logit_bias = view("logit_bias"), .spread = view("spread")};
                });
                if (!form.sigmoid) c.check("spread");
                c.check_bits("experts");
                for (const char* tensor : {"probs", "lse", "weights"}) c.check(tensor);
            }
}

TEST_CASE("gpu moe: of equal probabilities the lower numbers are chosen, and NaN chooses different experts") {
    for (double logit : {0.0, std::nan("")}) {
        const Shape s{5, 100, 7, 8, 8};
        OpCase c("router_forward of equal logits", Dtype::kFp32);
        HostTensor probs(Dtype::kFp32, s.N * s.E);
        for (int64_t i = 0; i < probs.elems(); i++) probs.set(i, logit);
        c.add("probs", Kind::kStat, probs);
        c.poison("lse", Kind::kStat, s.N);
        c.poison("weights", Kind::kStat, s.N * s.K);
        c.add("experts", Kind::kFixed, HostTensor(Dtype::kInt32, s.N * s.K));
        c.run_same_types(cuda::router_forward, cpu::router_forward, [&](auto view) {
            return RouterForwardArgs{.probs = view("probs"), .lse = view("lse"), .experts = view("experts"),
                                     .weights = view("weights"), .bias = {}, .N = s.N, .E = s.E, .K = s.K,
                                     .form = {}, .chosen = false};
        });
        c.check_bits("experts");
    }
}

TEST_CASE("gpu moe: router_stats and router_summary") {
    for (const Shape& s : kShapes) {
        const int64_t elems = router_stats_elems(s.E);
        const RouterForm& form = kForms[s.N % std::size(kForms)];
        OpCase c(name_of("router_stats", s), Dtype::kFp32);
        add_router(c, s, form);
        c.add("stats", Kind::kFixed, random_tensor(Dtype::kFp64, elems, 8, 1));
        c.add("scratch", Kind::kFixed, HostTensor(Dtype::kFp64, kRouterPartials * elems));
        c.run_same_types(cuda::router_stats, cpu::router_stats, [&](auto view) {
            return RouterStatsArgs{.stats = view("stats"), .scratch = view("scratch"), .probs = view("probs"),
                                   .lse = view("lse"), .experts = view("experts"), .N = s.N, .E = s.E, .K = s.K,
                                   .sigmoid = form.sigmoid};
        });
        // Sums of N equal terms, none negative, onto a start below 9, in two orders: N + 1 roundings each. Entropies
        // have logarithms in FP32.
        const HostTensor want = c.on_cpu("stats");
        check_close(name_of("router_stats", s), c.on_gpu("stats"), want, [&](int64_t i) {
            const double terms = static_cast<double>(s.N), sum = std::fabs(want.get(i)) + 18;
            // Entropies, and probabilities of a sigmoid, which are divided by a sum, are rounded to FP32.
            const bool fp32 = i == 2 * s.E || (form.sigmoid && i >= s.E && i < 2 * s.E);
            return 2 * (terms + 1) * 0x1p-53 * sum + (fp32 ? 10 * terms * 0x1p-22 : 0);
        }, 1);
        OpCase summary(name_of("router_summary", s), Dtype::kFp32);
        HostTensor stats(Dtype::kFp64, 3 * elems);
        for (int64_t i = 0; i < stats.elems(); i++) stats.set(i, 1 + static_cast<double>(i % 17));
        summary.add("stats", Kind::kFixed, stats);
        summary.add("load", Kind::kFixed, HostTensor(Dtype::kFp64, 3 * s.E));
        summary.add("state", Kind::kFixed, tensor_of(StepState{}));
        summary.run_same_types(cuda::router_summary, cpu::router_summary, [&](auto view) {
            return RouterSummaryArgs{.state = object_in<StepState>(view("state")), .stats = view("stats"),
                                     .load = view("load"), .layers = 3, .E = s.E, .K = s.K, .aux = 0.1f, .z = 0.01f};
        });
        summary.check_bits("load");
        const auto gpu = object_of<StepState>(summary.on_gpu("state"));
        const auto cpu = object_of<StepState>(summary.on_cpu("state"));
        CHECK(std::fabs(gpu.router_loss - cpu.router_loss) <= 1e-12 * cpu.router_loss);
        CHECK_EQ(gpu.expert_load, cpu.expert_load);
        CHECK_EQ(gpu.dead_experts, cpu.dead_experts);
        CHECK(std::fabs(gpu.router_entropy - cpu.router_entropy) <= 1e-6f * cpu.router_entropy);
    }
}

TEST_CASE("gpu moe: router_backward") {
    for (const Shape& s : kShapes)
        for (const RouterForm& form : kForms)
            for (Dtype work : {Dtype::kFp32, Dtype::kBf16}) {
                OpCase c(name_of("router_backward", s), work);
                add_router(c, s, form);
                c.random("dweights", Kind::kStat, s.N * s.K);
                if (!form.sigmoid) c.random("dspread", Kind::kWork, s.N * s.E);
                c.poison("dlogits", Kind::kWork, s.N * s.E);
                HostTensor load(Dtype::kFp64, s.E);
                for (int64_t e = 0; e < s.E; e++) load.set(e, static_cast<double>(e % 5));
                c.add("load", Kind::kFixed, load);
                StepState state{};
                state.token_mul = 0.01f;
                c.add("state", Kind::kFixed, tensor_of(state));
                c.run(cuda::router_backward, cpu::router_backward, [&](auto view) {
                    return RouterBackwardArgs{
                        .dlogits = view("dlogits"), .dweights = view("dweights"), .probs = view("probs"),
                        .lse = view("lse"), .experts = view("experts"), .weights = view("weights"),
                        .load = view("load"), .state = object_in<StepState>(view("state")), .N = s.N, .E = s.E,
                        .K = s.K, .form = form, .aux = form.sigmoid ? 0 : 0.3f, .z = form.sigmoid ? 0 : 0.2f,
                        .dspread = view("dspread")};
                });
                c.check("dlogits");
            }
}

TEST_CASE("gpu moe: router_bias") {
    for (const Shape& s : kShapes)
        for (Dtype work : {Dtype::kFp32, Dtype::kBf16})
            for (int32_t skip : {0, 1}) {
                const int64_t first = s.E / 3, n = s.E - first;
                OpCase c(name_of("router_bias", s), work);
                c.random("master", Kind::kStat, n);
                c.random("bias", Kind::kWork, n);
                HostTensor load(Dtype::kFp64, s.E);
                for (int64_t e = 0; e < s.E; e++) load.set(e, static_cast<double>(e % 3));   // 1 is the mean of most
                c.add("load", Kind::kFixed, load);
                StepState state{};
                state.skip = skip;
                c.add("state", Kind::kFixed, tensor_of(state));
                c.run_same_types(cuda::router_bias, cpu::router_bias, [&](auto view) {
                    return RouterBiasArgs{.bias = view("bias"), .master = view("master"), .load = view("load"),
                                          .state = object_in<StepState>(view("state")), .first = first,
                                          .rate = 0.03f};
                });
                for (const char* tensor : {"master", "bias"}) c.check_bits(tensor);
            }
}

TEST_CASE("gpu moe: sort_experts is stable, with any number of rows of an expert") {
    std::vector<Shape> shapes(std::begin(kShapes), std::end(kShapes));
    shapes.push_back({20000, 128, 8, 8, 8});
    for (const Shape& s : shapes)
        for (int path = 0; path < 3; path++) {   // all experts; those but the first and the last; memory for few rows
            if (left_out(s.N * s.K)) continue;
            const int64_t slots = s.N * s.K, R = path < 2 ? slots : slots / 3 + 1;
            const int64_t first = path > 0 && s.E > 2, E = s.E - 2 * first;
            OpCase c(name_of("sort_experts", s), Dtype::kFp32);
            c.add("experts", Kind::kFixed, random_experts(s, 6));
            c.add("row_slots", Kind::kFixed, HostTensor(Dtype::kInt32, R));
            c.add("slot_rows", Kind::kFixed, HostTensor(Dtype::kInt32, slots));
            c.add("offsets", Kind::kFixed, HostTensor(Dtype::kInt32, E + 1));
            c.add("load", Kind::kFixed, HostTensor(Dtype::kInt32, 1));
            c.add("scratch", Kind::kFixed, HostTensor(Dtype::kInt32, ceil_div(slots, kSortChunk) * E));
            c.run_same_types(cuda::sort_experts, cpu::sort_experts, [&](auto view) {
                return SortExpertsArgs{.offsets = view("offsets"), .scratch = view("scratch"),
                                       .row_slots = view("row_slots"), .slot_rows = view("slot_rows"),
                                       .experts = view("experts"), .N = s.N, .E = E, .K = s.K, .first = first,
                                       .load = view("load")};
            });
            for (const char* tensor : {"offsets", "row_slots", "slot_rows", "load"}) c.check_bits(tensor);
        }
}

TEST_CASE("gpu moe: gather_rows and combine_rows") {
    for (const Shape& s : kShapes)
        for (Dtype work : {Dtype::kFp32, Dtype::kBf16})
            for (int64_t shift : {0, 4}) {
                const int64_t R = s.N * s.K;
                OpCase gather(name_of("gather_rows", s), work, Dtype::kFp32, shift);
                gather.random("in", Kind::kWork, s.N * s.C);
                gather.poison("out", Kind::kWork, R * s.C);
                gather.add("slots", Kind::kFixed, random_slots(R, shift > 0));
                gather.run_same_types(cuda::gather_rows, cpu::gather_rows, [&](auto view) {
                    return GatherRowsArgs{.out = view("out"), .in = view("in"), .slot_rows = view("slots"), .N = s.N,
                                          .K = s.K, .C = s.C};
                });
                gather.check_bits("out");
                for (int path = 0; path < 5; path++) {   // all experts here; some; fp32 from these; from ranks; in T
                    const bool accumulate = path % 2 == 1, from_ranks = path >= 3;
                    const int64_t ranks = 4, rows = from_ranks ? s.N * ranks : R;
                    OpCase combine(name_of("combine_rows", s), work, Dtype::kFp32, shift);
                    combine.random("in", path == 3 ? Kind::kStat : Kind::kWork, rows * s.C);
                    combine.random("out", path == 2 ? Kind::kStat : Kind::kWork, s.N * s.C);
                    combine.add("slots", Kind::kFixed, random_slots(R, path > 0));
                    combine.add("experts", Kind::kFixed, random_experts(s, 6));
                    combine.run_same_types(cuda::combine_rows, cpu::combine_rows, [&](auto view) {
                        return CombineRowsArgs{.out = view("out"), .in = view("in"), .slot_rows = view("slots"),
                                               .experts = from_ranks ? Tensor{} : view("experts"), .N = s.N,
                                               .K = from_ranks ? ranks : s.K, .C = s.C, .E = from_ranks ? ranks : s.E,
                                               .accumulate = accumulate};
                    });
                    combine.check_bits("out");
                }
            }
}

TEST_CASE("gpu moe: activations of experts") {
    for (const Shape& s : kShapes)
        for (Dtype work : {Dtype::kFp32, Dtype::kBf16})
            for (int64_t shift : {0, 4})
                for (Activation kind : {Activation::kSwiglu, Activation::kClampedSwiglu}) {
                    const int64_t R = s.N * s.K, first = s.E / 3;
                    const std::string name = strf("%s expert_activation", activation_function(kind).name);
                    OpCase forward(name_of((name + "_forward").c_str(), s), work, Dtype::kFp32, shift);
                    OpCase backward(name_of((name + "_backward").c_str(), s), work, Dtype::kFp32, shift);
                    for (OpCase* c : {&forward, &backward}) {
                        c->random("in", Kind::kWork, R * 2 * s.F, 3);
                        c->random("weights", Kind::kStat, R, 0.1, 0.5);
                        c->add("slots", Kind::kFixed, random_slots(R, shift > 0));
                        if (kind == Activation::kSwiglu) continue;
                        c->random("bias", Kind::kWork, (s.E - first) * 2 * s.F, 2);
                        HostTensor experts = random_experts(s, 6);
                        for (int64_t i = 0; i < R; i++)
                            experts.set(i, std::max(experts.get(i), static_cast<double>(first)));
                        c->add("experts", Kind::kFixed, experts);
                    }
                    const auto bias = [first](auto view) {
                        return ExpertBias{.values = view("bias"), .experts = view("experts"), .first = first};
                    };
                    forward.random("out", Kind::kWork, R * s.F);   // rows without a slot keep it
                    forward.run(cuda::expert_activation_forward, cpu::expert_activation_forward, [&](auto view) {
                        return ExpertActivationForwardArgs{.kind = kind, .out = view("out"), .in = view("in"),
                                                           .weights = view("weights"), .row_slots = view("slots"),
                                                           .R = R, .F = s.F, .bias = bias(view)};
                    });
                    forward.check("out");
                    backward.random("dout", Kind::kWork, R * s.F);
                    backward.random("dweights", Kind::kStat, R);
                    backward.run(cuda::expert_activation_backward, cpu::expert_activation_backward, [&](auto view) {
                        return ExpertActivationBackwardArgs{.kind = kind, .din = view("in"),
                                                            .dweights = view("dweights"), .dout = view("dout"),
                                                            .in = view("in"), .weights = view("weights"),
                                                            .row_slots = view("slots"), .R = R, .F = s.F,
                                                            .bias = bias(view)};
                    });
                    backward.check("in");
                    backward.check("dweights");
                }
}

// Experts without rows, rows before and after those of experts, and more than the warps of a block take at once.
TEST_CASE("gpu moe: expert_bias_backward") {
    for (int64_t C : {1, 33, 64, 264, 2880})
        for (Dtype work : {Dtype::kFp32, Dtype::kBf16})
            for (Dtype grad : {Dtype::kFp32, Dtype::kBf16})
                for (int64_t shift : {0, 4}) {
                    const double offsets[] = {2, 2, 3, 40, 1000, 1000};
                    const int64_t E = std::size(offsets) - 1, R = 1003;
                    if (left_out(R * C)) continue;
                    OpCase c(strf("expert_bias_backward of %lld", ll(C)), work, grad, shift);
                    HostTensor rows(Dtype::kInt32, E + 1), dout = random_tensor(work, R * C, 3);
                    for (int64_t e = 0; e <= E; e++) rows.set(e, offsets[e]);
                    for (int64_t i = 0; i < C; i++) dout.set(i, std::nan("")), dout.set((R - 1) * C + i, std::nan(""));
                    c.add("dout", Kind::kWork, dout);
                    c.add("offsets", Kind::kFixed, rows);
                    c.random("dbias", Kind::kGrad, E * C);
                    c.run(cuda::expert_bias_backward, cpu::expert_bias_backward, [&](auto view) {
                        return ExpertBiasBackwardArgs{.dbias = view("dbias"), .dout = view("dout"),
                                                      .offsets = view("offsets"), .E = E, .R = R, .C = C};
                    });
                    c.check("dbias");
                }
}

TEST_CASE("gpu moe: gather_rows of FP8 codes and scales") {
    for (const Shape& s : kShapes)
        for (int64_t C : {16, 144, 4112}) {
            const int64_t R = s.N * s.K, blocks = scale_blocks(C);
            if (left_out(R * C)) continue;
            OpCase c(strf("gather_rows of %lld codes", ll(C)), Dtype::kBf16);
            c.add("in", Kind::kFixed, random_codes(Dtype::kE4m3, s.N * C, 1));
            c.add("out", Kind::kFixed, HostTensor(Dtype::kE4m3, R * C));
            c.random("scales", Kind::kStat, blocks * s.N);
            c.poison("scales out", Kind::kStat, blocks * R);
            c.add("slots", Kind::kFixed, random_slots(R));
            c.run_same_types(cuda::gather_rows, cpu::gather_rows, [&](auto view) {
                return GatherRowsArgs{.out = view("out"), .in = view("in"), .slot_rows = view("slots"), .N = s.N,
                                      .K = s.K, .C = C, .out_scale_inv = view("scales out"),
                                      .in_scale_inv = view("scales")};
            });
            c.check_bits("out");
            c.check_bits("scales out");
        }
}

// Columns of one and of several blocks, blocks with results of both halves, and incomplete ones.
TEST_CASE("gpu moe: activations of experts give the same as quantize on their bf16 results") {
    for (int64_t R : {1, 80, 515})
        for (int64_t F : {16, 96, 128, 144, 768, 1040})
            for (bool clamped : {false, true})   // with biases
                for (const char* result : {"out", "din", "in"}) {   // forward, backward, backward in place
                    if (left_out(R * F)) continue;
                    const Activation kind = clamped ? Activation::kClampedSwiglu : Activation::kSwiglu;
                    const bool backward = result != std::string("out"), in_place = result == std::string("in");
                    Producer p{.name = strf("%lld rows of %lld experts' activations %s, %s", ll(R), ll(F),
                                            activation_function(kind).name, result),
                               .result = result, .N = R, .C = backward ? 2 * F : F, .result_optional = !in_place,
                               .result_kept = in_place, .rows_only = true};
                    p.tensors["in"] = random_tensor(Dtype::kBf16, R * 2 * F, 1, 3);
                    if (!in_place) p.tensors[result] = HostTensor(Dtype::kBf16, R * p.C);
                    p.tensors["weights"] = random_tensor(Dtype::kFp32, R, 2, 0.1, 0.5);
                    p.tensors["slots"] = random_slots(R);
                    p.tensors["bias"] = random_tensor(Dtype::kBf16, 3 * 2 * F, 4);
                    p.tensors["experts"] = HostTensor(Dtype::kInt32, R);
                    for (int64_t r = 0; r < R; r++) p.tensors["experts"].set(r, static_cast<double>(r % 3));
                    const auto bias = [clamped](const View& view) {
                        return clamped ? ExpertBias{.values = view("bias"), .experts = view("experts")} : ExpertBias{};
                    };
                    if (backward) {
                        p.tensors["dout"] = random_tensor(Dtype::kBf16, R * F, 3);
                        p.tensors["dweights"] = HostTensor(Dtype::kFp32, R);
                        p.same = {"dweights"};
                        p.run = [=](const View& view, const QuantOut& quant) {
                            cuda::expert_activation_backward(
                                gpu(), {.kind = kind, .din = view(result), .dweights = view("dweights"),
                                        .dout = view("dout"), .in = view("in"), .weights = view("weights"),
                                        .row_slots = view("slots"), .R = R, .F = F, .quant = quant,
                                        .bias = bias(view)});
                        };
                    } else {
                        p.run = [=](const View& view, const QuantOut& quant) {
                            cuda::expert_activation_forward(
                                gpu(), {.kind = kind, .out = view("out"), .in = view("in"), .weights = view("weights"),
                                        .row_slots = view("slots"), .R = R, .F = F, .quant = quant,
                                        .bias = bias(view)});
                        };
                    }
                    check_producer(p, false);
                }
}

TEST_CASE("gpu moe: activations of experts count the codes of rows of tokens, and no others") {
    const int64_t R = 515;
    for (int64_t F : {16, 144, 1040})
        for (bool backward : {false, true}) {
            const int64_t C = backward ? 2 * F : F;
            OpCase c(strf("%lld rows, F %lld, backward %d", ll(R), ll(F), backward), Dtype::kBf16);
            c.random("in", Kind::kWork, R * 2 * F);
            c.random("dout", Kind::kWork, R * F);
            c.random("weights", Kind::kStat, R);
            c.add("dweights", Kind::kFixed, HostTensor(Dtype::kFp32, R));
            c.add("slots", Kind::kFixed, random_slots(R, true));
            c.add("codes", Kind::kFixed, HostTensor(Dtype::kE4m3, R * C));
            c.add("scales", Kind::kFixed, HostTensor(Dtype::kFp32, scale_blocks(C) * R));
            c.add("counts", Kind::kFixed, tensor_of(Fp8Counts{}));
            const auto quant = [](auto view) {
                return QuantOut{.rowwise = view("codes"), .granularity = Granularity::kBlock1x128,
                                .rowwise_scale_inv = view("scales"), .counts = object_in<Fp8Counts>(view("counts"))};
            };
            if (backward)
                c.run_same_types(cuda::expert_activation_backward, cpu::expert_activation_backward, [&](auto view) {
                    return ExpertActivationBackwardArgs{
                        .kind = Activation::kSwiglu, .din = {}, .dweights = view("dweights"), .dout = view("dout"),
                        .in = view("in"), .weights = view("weights"), .row_slots = view("slots"), .R = R, .F = F,
                        .quant = quant(view), .bias = {}};
                });
            else
                c.run_same_types(cuda::expert_activation_forward, cpu::expert_activation_forward, [&](auto view) {
                    return ExpertActivationForwardArgs{
                        .kind = Activation::kSwiglu, .out = {}, .in = view("in"), .weights = view("weights"),
                        .row_slots = view("slots"), .R = R, .F = F, .quant = quant(view), .bias = {}};
                });
            for (const HostTensor* after : {&c.on_gpu("counts"), &c.on_cpu("counts")}) {
                const auto found = object_of<Fp8Counts>(*after);
                CHECK_EQ(found.elems, static_cast<unsigned long long>((R - R / 3) * C));
                CHECK_EQ(found.nonfinite, 0u);
            }
        }
}

}  // namespace moe_test
