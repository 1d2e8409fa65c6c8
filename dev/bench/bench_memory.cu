// Speed of the memory-bound operations at the shapes of Llama-3-8B, GPT-2 124M and Qwen3-30B-A3B; see memory_bench.h.
//   usage: bench_memory [part of a name]
#include "dev/bench/memory_bench.h"

namespace {

const Dims kLlama8B = {.N = 8192, .T = 8192, .C = 4096, .F = 14336, .V = 128256, .Vp = 128256, .NH = 32,
                       .NKV = 8, .HS = 128, .elems = int64_t{1} << 27};
const Dims kGpt2 = {.N = 65536, .T = 1024, .C = 768, .F = 3072, .V = 50257, .Vp = 50304, .NH = 12, .NKV = 12,
                    .HS = 64, .elems = int64_t{1} << 25};

// V: experts, of which a token has kExperts.
const Dims kQwen30B = {.N = 8192, .T = 4096, .C = 2048, .F = 768, .V = 128, .Vp = 128, .NH = 32, .NKV = 4, .HS = 128,
                       .elems = 0};

std::vector<Field> norm_fields(const Dims& d) {
    const int64_t NC = d.N * d.C;
    return {{"x", kB, NC}, {"residual", kB, NC}, {"out", kB, NC}, {"sum", kB, NC}, {"weight", kB, d.C},
            {"bias", kB, d.C}, {"dweight", kF, d.C}, {"dbias", kF, d.C}, {"mean", kF, d.N},
            {"rstd", kF, d.N, Fill::kSmallSquares}, {"scratch", kF, 2 * kPartialRows * d.C, Fill::kScratch}};
}
template <bool layer> NormForwardArgs norm_forward(const View& v, const Dims& d) {
    return {.out = v("out"), .residual_out = v("sum"), .mean = layer ? v("mean") : Tensor{},
            .rstd = v("rstd"), .in = v("x"), .residual = v("residual"), .weight = v("weight"),
            .bias = layer ? v("bias") : Tensor{}, .N = d.N, .C = d.C, .eps = 1e-5f};
}
template <bool layer> NormBackwardArgs norm_backward(const View& v, const Dims& d) {
    return {.dx = v("out"), .dresidual = v("residual"), .dweight = v("dweight"),
            .dbias = layer ? v("dbias") : Tensor{}, .scratch = v("scratch"), .dout = v("sum"), .x = v("x"),
            .mean = layer ? v("mean") : Tensor{}, .rstd = v("rstd"), .weight = v("weight"), .N = d.N,
            .C = d.C};
}

std::vector<Field> qkv_fields(const Dims& d) {
    const int64_t elems = d.N * (d.NH + 2 * d.NKV) * d.HS;
    return {{"qkv", kB, elems}, {"out", kB, elems}, {"cos_sin", kF, d.T * d.HS},
            {"rstd", kF, d.N * (d.NH + d.NKV), Fill::kSmallSquares}, {"q_weight", kB, d.HS},
            {"k_weight", kB, d.HS}, {"dq_weight", kF, d.HS}, {"dk_weight", kF, d.HS},
            {"scratch", kF, 2 * kPartialRows * d.HS, Fill::kScratch}};
}
std::vector<Field> rope_fields(const Dims& d) {
    return {{"qkv", kB, d.N * (d.NH + 2 * d.NKV) * d.HS}, {"cos_sin", kF, d.T * d.HS, Fill::kSmallSquares}};
}
RopeArgs rope_args(const View& v, const Dims& d) {
    return {.qkv = v("qkv"), .cos_sin = v("cos_sin"), .N = d.N, .T = d.T, .NH = d.NH, .NKV = d.NKV,
            .HS = d.HS};
}
QkNormForwardArgs qk_forward(const View& v, const Dims& d) {
    return {.out = v("out"), .rstd = v("rstd"), .in = v("qkv"), .q_weight = v("q_weight"),
            .k_weight = v("k_weight"), .N = d.N, .NH = d.NH, .NKV = d.NKV, .HS = d.HS, .KS = d.HS,
            .eps = 1e-6f};
}
QkNormBackwardArgs qk_backward(const View& v, const Dims& d) {
    return {.dqkv = v("out"), .dq_weight = v("dq_weight"), .dk_weight = v("dk_weight"),
            .scratch = v("scratch"), .in = v("qkv"), .rstd = v("rstd"), .q_weight = v("q_weight"),
            .k_weight = v("k_weight"), .N = d.N, .NH = d.NH, .NKV = d.NKV, .HS = d.HS, .KS = d.HS};
}

// The rows of all heads, and those of 4 ranks.
std::vector<Field> heads_fields(const Dims& d) {
    const int64_t all = d.N * (d.NH + 2 * d.NKV) * d.HS;
    return {{"all", kB, all}, {"own", kB, d.N * (d.NH + 2 * heads_of_rank(d.NKV, 4) * 4) * d.HS}};
}
SplitHeadsArgs split_heads_args(const View& v, const Dims& d) {
    return {.out = v("own"), .in = v("all"), .B = 1, .T = d.N, .ranks = 4, .NH = d.NH, .NKV = d.NKV, .HS = d.HS};
}
JoinHeadsArgs join_heads_args(const View& v, const Dims& d) {
    return {.out = v("all"), .in = v("own"), .B = 1, .T = d.N, .ranks = 4, .NH = d.NH, .NKV = d.NKV, .HS = d.HS};
}

constexpr Activation kGelu = Activation::kGelu, kSwiglu = Activation::kSwiglu;
template <Activation kind> std::vector<Field> activation_fields(const Dims& d) {
    return {{"in", kB, d.N * activation_inputs(kind, d.F)}, {"out", kB, d.N * d.F}};
}
template <Activation kind> std::vector<Field> activation_backward_fields(const Dims& d) {
    const int64_t inputs = d.N * activation_inputs(kind, d.F);
    return {{"in", kB, inputs}, {"dout", kB, d.N * d.F}, {"din", kB, inputs}};
}
template <Activation kind> ActivationForwardArgs activation(const View& v, const Dims& d) {
    return {.kind = kind, .out = v("out"), .in = v("in"), .N = d.N, .F = d.F};
}
template <Activation kind> ActivationBackwardArgs activation_backward(const View& v, const Dims& d) {
    return {.kind = kind, .din = v("din"), .dout = v("dout"), .in = v("in"), .N = d.N, .F = d.F};
}
std::vector<Field> bias_fields(const Dims& d) {
    return {{"dout", kB, d.N * d.F}, {"dbias", kF, d.F}, {"scratch", kF, kPartialRows * d.F, Fill::kScratch}};
}
BiasBackwardArgs bias_args(const View& v, const Dims& d) {
    return {.dbias = v("dbias"), .scratch = v("scratch"), .dout = v("dout"), .N = d.N, .C = d.F};
}

std::vector<Field> classifier_fields(const Dims& d) {
    return {{"logits", kB, d.N * d.Vp}, {"losses", kF, d.N}, {"targets", kI, d.N, Fill::kTokens},
            {"state", kI, sizeof(StepState) / 4, Fill::kState}};
}
template <bool write, bool capped = false> ClassifierArgs classifier_args(const View& v, const Dims& d) {
    return {.logits = v("logits"), .losses = v("losses"), .targets = v("targets").as<int32_t>(),
            .state = static_cast<StepState*>(v("state").data), .N = d.N, .V = d.V, .Vp = d.Vp,
            .write_dlogits = write, .softcap = capped ? 30.0f : 0.0f};
}

std::vector<Field> residual_fields(const Dims& d) {
    return {{"dx", kB, d.N * d.C}, {"dlogits", kB, d.N * d.Vp}, {"codes", Dtype::kE5m2, d.N * d.Vp, Fill::kZero},
            {"scale_inv", kF, 1}, {"weight", kB, d.Vp * d.C}, {"targets", kI, d.N, Fill::kTokens}};
}
DlogitsResidualArgs residual_args(const View& v, const Dims& d) {
    return {.dx = v("dx"), .dlogits = v("dlogits"), .codes = v("codes"), .scale_inv = v("scale_inv"),
            .granularity = Granularity::kTensor, .weight = v("weight"), .targets = v("targets").as<int32_t>(),
            .N = d.N, .C = d.C, .V = d.V, .Vp = d.Vp};
}

// The slots of rows that are sorted by expert.
std::vector<Field> rows_fields(const Dims& d) {
    return {{"in", kB, d.N * d.C}, {"rows", kB, d.N * kExperts * d.C}, {"slots", kI, d.N * kExperts, Fill::kOrder},
            {"experts", kI, d.N * kExperts, Fill::kTokens}};
}
GatherRowsArgs gather_args(const View& v, const Dims& d) {
    return {.out = v("rows"), .in = v("in"), .slot_rows = v("slots"), .N = d.N, .K = kExperts, .C = d.C};
}
CombineRowsArgs combine_args(const View& v, const Dims& d) {
    return {.out = v("in"), .in = v("rows"), .slot_rows = v("slots"), .experts = v("experts"), .N = d.N, .K = kExperts,
            .C = d.C, .E = d.V};
}
std::vector<Field> expert_activation_fields(const Dims& d) {
    const int64_t R = d.N * kExperts;
    return {{"in", kB, R * 2 * d.F}, {"out", kB, R * d.F}, {"weights", kF, R}, {"dweights", kF, R},
            {"slots", kI, R, Fill::kOrder}};
}
ExpertActivationForwardArgs expert_forward_args(const View& v, const Dims& d) {
    return {.kind = kSwiglu, .out = v("out"), .in = v("in"), .weights = v("weights"), .row_slots = v("slots"),
            .R = d.N * kExperts, .F = d.F};
}
ExpertActivationBackwardArgs expert_backward_args(const View& v, const Dims& d) {
    return {.kind = kSwiglu, .din = v("in"), .dweights = v("dweights"), .dout = v("out"), .in = v("in"),
            .weights = v("weights"), .row_slots = v("slots"), .R = d.N * kExperts, .F = d.F};
}
std::vector<Field> router_fields(const Dims& d) {
    const int64_t R = d.N * kExperts;
    return {{"probs", kF, d.N * d.V}, {"lse", kF, d.N}, {"weights", kF, R}, {"chosen", kI, R, Fill::kZero},
            {"experts", kI, R, Fill::kTokens}, {"offsets", kI, d.V + 1, Fill::kZero},
            {"scratch", kI, ceil_div(R, kSortChunk) * d.V, Fill::kScratch}, {"row_slots", kI, R, Fill::kZero},
            {"slot_rows", kI, R, Fill::kZero}};
}
RouterForwardArgs router_args(const View& v, const Dims& d) {
    return {.probs = v("probs"), .lse = v("lse"), .experts = v("chosen"), .weights = v("weights"), .bias = {},
            .N = d.N, .E = d.V, .K = kExperts, .form = {}, .chosen = false};
}
SortExpertsArgs sort_args(const View& v, const Dims& d) {
    return {.offsets = v("offsets"), .scratch = v("scratch"), .row_slots = v("row_slots"),
            .slot_rows = v("slot_rows"), .experts = v("experts"), .N = d.N, .E = d.V, .K = kExperts};
}

std::vector<Field> embedding_fields(const Dims& d) {
    return {{"wte", kB, d.Vp * d.C}, {"out", kB, d.N * d.C}, {"tokens", kI, d.N, Fill::kTokens},
            {"bad", kI, 1, Fill::kZero}};
}
std::vector<Field> embedding_backward_fields(const Dims& d) {
    return {{"dwte", kF, d.Vp * d.C}, {"dout", kB, d.N * d.C}, {"tokens", kI, d.N, Fill::kTokens},
            {"order", kI, d.N, Fill::kOrder}};
}
EmbeddingForwardArgs embedding_args(const View& v, const Dims& d) {
    return {.out = v("out"), .wte = v("wte"), .wpe = {}, .tokens = v("tokens").as<int32_t>(),
            .bad_tokens = v("bad").as<int32_t>(), .N = d.N, .T = d.T, .C = d.C, .V = d.V};
}
EmbeddingBackwardArgs embedding_backward_args(const View& v, const Dims& d) {
    return {.dwte = v("dwte"), .dwpe = {}, .dout = v("dout"), .tokens = v("tokens").as<int32_t>(),
            .token_order = v("order").as<int32_t>(), .N = d.N, .T = d.T, .C = d.C, .V = d.V};
}

template <Dtype moment, Dtype grad> std::vector<Field> adamw_fields(const Dims& d) {
    return {{"param", kB, d.elems}, {"master", kF, d.elems}, {"m", moment, d.elems},
            {"v", moment, d.elems, Fill::kSmallSquares}, {"grad", grad, d.elems},
            {"state", kI, sizeof(StepState) / 4, Fill::kState}};
}
AdamWArgs adamw_args(const View& v, const Dims&) {
    return {.param = v("param"), .master = v("master"), .m = v("m"), .v = v("v"), .grad = v("grad"),
            .state = static_cast<const StepState*>(v("state").data), .beta1 = 0.9f, .beta2 = 0.95f,
            .eps = 1e-8f, .weight_decay = 0.1f, .rng_key = 99, .element_offset = 0};
}
template <Dtype grad> std::vector<Field> adamw_fp8_fields(const Dims& d) {
    return {{"param", kB, d.elems}, {"master", kF, d.elems}, {"m", Dtype::kE4m3, d.elems, Fill::kZero},
            {"v", Dtype::kUe5m3, d.elems, Fill::kZero}, {"m_scale_inv", kF, scale_blocks(d.elems), Fill::kZero},
            {"v_scale_inv", kF, scale_blocks(d.elems), Fill::kZero}, {"grad", grad, d.elems},
            {"state", kI, sizeof(StepState) / 4, Fill::kState}};
}
AdamWArgs adamw_fp8_args(const View& v, const Dims& d) {
    AdamWArgs args = adamw_args(v, d);
    args.m_scale_inv = v("m_scale_inv"), args.v_scale_inv = v("v_scale_inv");
    return args;
}
template <Dtype type> std::vector<Field> squares_fields(const Dims& d) {
    return {{"in", type, d.elems}, {"sum", Dtype::kFp64, 1, Fill::kZero},
            {"scratch", Dtype::kFp64, kPartialSums, Fill::kScratch}};
}
SumSquaresArgs squares_args(const View& v, const Dims&) {
    return {.sum = v("sum").as<double>(), .in = v("in"), .scratch = v("scratch")};
}
template <Dtype to, Dtype from> std::vector<Field> cast_fields(const Dims& d) {
    return {{"out", to, d.elems}, {"in", from, d.elems}};
}
CastArgs cast_args(const View& v, const Dims&) { return {.out = v("out"), .in = v("in")}; }

std::vector<Bench> benches() {
    std::vector<Bench> all;
    const Dims &L = kLlama8B, &G = kGpt2;
    auto NC = [](const Dims& d) { return static_cast<double>(d.N * d.C); };
    auto NF = [](const Dims& d) { return static_cast<double>(d.N * d.F); };
    auto NV = [](const Dims& d) { return static_cast<double>(d.N * d.Vp); };
    auto heads = [](const Dims& d, int64_t count) { return static_cast<double>(d.N * count * d.HS); };
    all.push_back(bench("rmsnorm_forward 8B", L, norm_fields, cuda::rmsnorm_forward, cpu::rmsnorm_forward,
                        norm_forward<false>, 8 * NC(L)));
    all.push_back(bench("rmsnorm_backward 8B", L, norm_fields, cuda::rmsnorm_backward,
                        cpu::rmsnorm_backward, norm_backward<false>, 8 * NC(L)));
    all.push_back(bench("swiglu_forward 8B", L, activation_fields<kSwiglu>, cuda::activation_forward,
                        cpu::activation_forward, activation<kSwiglu>, 6 * NF(L)));
    all.push_back(bench("swiglu_backward 8B", L, activation_backward_fields<kSwiglu>, cuda::activation_backward,
                        cpu::activation_backward, activation_backward<kSwiglu>, 10 * NF(L)));
    all.push_back(bench("rope_forward 8B", L, rope_fields, cuda::rope_forward, cpu::rope_forward, rope_args,
                        4 * heads(L, L.NH + L.NKV) + 4.0 * static_cast<double>(L.T * L.HS)));
    const Dims O = {.N = 8192, .T = 4096, .C = 0, .F = 0, .V = 0, .Vp = 0, .NH = 1, .NKV = 1, .HS = 2048, .elems = 0};
    for (const Dims& d : {L, O}) {   // OLMoE's qk-norm is over all heads: one of Q and one of K
        all.push_back(bench(d.NH > 1 ? "qk_norm_forward 8B" : "qk_norm_forward OLMoE", d, qkv_fields,
                            cuda::qk_norm_forward, cpu::qk_norm_forward, qk_forward, 4 * heads(d, d.NH + 2 * d.NKV)));
        all.push_back(bench(d.NH > 1 ? "qk_norm_backward 8B" : "qk_norm_backward OLMoE", d, qkv_fields,
                            cuda::qk_norm_backward, cpu::qk_norm_backward, qk_backward, 6 * heads(d, d.NH + d.NKV)));
    }
    for (const int64_t key_heads : {L.NKV, int64_t{2}}) {
        Dims d = L;
        d.NKV = key_heads;
        const double own = heads(d, d.NH + 2 * 4 * heads_of_rank(d.NKV, 4)), whole = heads(d, d.NH + 2 * d.NKV);
        const std::string shape = key_heads == L.NKV ? " 8B" : " 8B, 2 key heads";
        all.push_back(bench("split_heads" + shape, d, heads_fields, cuda::split_heads, cpu::split_heads,
                            split_heads_args, 2 * (own + whole)));
        all.push_back(bench("join_heads" + shape, d, heads_fields, cuda::join_heads, cpu::join_heads, join_heads_args,
                            2 * (own + whole)));
    }
    all.push_back(bench("classifier 8B", L, classifier_fields, cuda::classifier, cpu::classifier,
                        classifier_args<true>, 4 * NV(L)));
    all.push_back(bench("classifier 8B soft cap", L, classifier_fields, cuda::classifier, cpu::classifier,
                        classifier_args<true, true>, 4 * NV(L)));
    all.push_back(bench("dlogits_residual 8B", L, residual_fields, cuda::dlogits_residual, cpu::dlogits_residual,
                        residual_args, 3 * NV(L) + 6 * NC(L)));
    all.push_back(bench("classifier 8B losses only", L, classifier_fields, cuda::classifier, cpu::classifier,
                        classifier_args<false>, 2 * NV(L)));
    for (const Dims* d : {&L, &G}) {
        const double distinct = static_cast<double>(distinct_tokens(*d) * d->C);
        const std::string shape = d == &L ? " 8B" : " 124M";
        // One row is counted for every token, although the L2 cache has the frequent ones.
        all.push_back(bench("embedding_forward" + shape, *d, embedding_fields, cuda::embedding_forward,
                            cpu::embedding_forward, embedding_args, 4 * NC(*d)));
        all.push_back(bench("embedding_backward" + shape, *d, embedding_backward_fields,
                            cuda::embedding_backward, cpu::embedding_backward, embedding_backward_args,
                            2 * NC(*d) + 8 * distinct));
    }
    const Dims& Q = kQwen30B;
    const double R = static_cast<double>(Q.N * kExperts), RC = R * static_cast<double>(Q.C),
                 RF = R * static_cast<double>(Q.F);
    all.push_back(bench("gather_rows 30B-A3B", Q, rows_fields, cuda::gather_rows, cpu::gather_rows, gather_args,
                        2 * (NC(Q) + RC)));
    all.push_back(bench("combine_rows 30B-A3B", Q, rows_fields, cuda::combine_rows, cpu::combine_rows, combine_args,
                        2 * (NC(Q) + RC)));
    all.push_back(bench("expert_activation_forward 30B-A3B", Q, expert_activation_fields,
                        cuda::expert_activation_forward, cpu::expert_activation_forward, expert_forward_args, 6 * RF));
    all.push_back(bench("expert_activation_backward 30B-A3B", Q, expert_activation_fields,
                        cuda::expert_activation_backward, cpu::expert_activation_backward, expert_backward_args,
                        10 * RF));
    all.push_back(bench("router_forward 30B-A3B", Q, router_fields, cuda::router_forward, cpu::router_forward,
                        router_args, 8 * NV(Q) + 8 * R));
    all.push_back(bench("sort_experts 30B-A3B", Q, router_fields, cuda::sort_experts, cpu::sort_experts, sort_args,
                        12 * R));
    const double n = static_cast<double>(L.elems);
    all.push_back(bench("adamw fp32 moments, fp32 grads", L, adamw_fields<kF, kF>, cuda::adamw, cpu::adamw,
                        adamw_args, 30 * n));
    all.push_back(bench("adamw bf16 moments, fp32 grads", L, adamw_fields<kB, kF>, cuda::adamw, cpu::adamw,
                        adamw_args, 22 * n));
    all.push_back(bench("adamw bf16 moments, bf16 grads", L, adamw_fields<kB, kB>, cuda::adamw, cpu::adamw,
                        adamw_args, 20 * n));
    all.push_back(bench("adamw fp8 moments, fp32 grads", L, adamw_fp8_fields<kF>, cuda::adamw, cpu::adamw,
                        adamw_fp8_args, (18 + 16.0 / kScaleBlock) * n));
    all.push_back(bench("adamw fp8 moments, bf16 grads", L, adamw_fp8_fields<kB>, cuda::adamw, cpu::adamw,
                        adamw_fp8_args, (16 + 16.0 / kScaleBlock) * n));
    all.push_back(bench("sum_squares fp32", L, squares_fields<kF>, cuda::sum_squares, cpu::sum_squares,
                        squares_args, 4 * n));
    all.push_back(bench("sum_squares bf16", L, squares_fields<kB>, cuda::sum_squares, cpu::sum_squares,
                        squares_args, 2 * n));
    all.push_back(bench("cast fp32 to bf16", L, cast_fields<kB, kF>, cuda::cast, cpu::cast, cast_args,
                        6 * n));
    all.push_back(bench("cast bf16 to fp32", L, cast_fields<kF, kB>, cuda::cast, cpu::cast, cast_args,
                        6 * n));
    all.push_back(bench("layernorm_forward 124M", G, norm_fields, cuda::layernorm_forward,
                        cpu::layernorm_forward, norm_forward<true>, 8 * NC(G)));
    all.push_back(bench("layernorm_backward 124M", G, norm_fields, cuda::layernorm_backward,
                        cpu::layernorm_backward, norm_backward<true>, 8 * NC(G)));
    all.push_back(bench("gelu_forward 124M", G, activation_fields<kGelu>, cuda::activation_forward,
                        cpu::activation_forward, activation<kGelu>, 4 * NF(G)));
    all.push_back(bench("gelu_backward 124M", G, activation_backward_fields<kGelu>, cuda::activation_backward,
                        cpu::activation_backward, activation_backward<kGelu>, 6 * NF(G)));
    all.push_back(bench("bias_backward 124M (3072)", G, bias_fields, cuda::bias_backward, cpu::bias_backward,
                        bias_args, 2 * NF(G)));
    all.push_back(bench("classifier 124M", G, classifier_fields, cuda::classifier, cpu::classifier,
                        classifier_args<true>, 4 * NV(G)));
    return all;
}

}  // namespace

int main(int argc, char** argv) { return memory_bench_main(argc, argv, "bench_memory", benches()); }
