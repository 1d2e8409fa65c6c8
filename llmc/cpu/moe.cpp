// Mixtures of experts. CPU.
#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>
#include <utility>

#include "llmc/cpu/common.h"
#include "llmc/cpu/math.h"
#include "llmc/cpu/quantize.h"
#include "llmc/cpu/swiglu.h"
#include "llmc/ops/adam_math.h"

namespace cpu {
namespace {

// ---- router

// Replaces E logits by their softmax; returns log sum exp.
template <typename A> A softmax_row(A* row, int64_t E) {
    const A largest = *std::max_element(row, row + E);
    for_lanes<A>(E, [&](int64_t i, auto n) { store(row + i, exp(load(row + i, n) - Vec<A>(largest)), n); });
    const A total = std::accumulate(row, row + E, A(0));
    for (int64_t e = 0; e < E; e++) row[e] /= total;
    return largest + static_cast<A>(log(static_cast<double>(total)));
}

// The sigmoid likewise; returns the log of the sum.
template <typename A> A sigmoid_row(A* row, int64_t E) {
    for_lanes<A>(E, [&](int64_t i, auto n) { store(row + i, sigmoid_pair(load(row + i, n)).of_x, n); });
    return static_cast<A>(log(static_cast<double>(std::accumulate(row, row + E, A(0)))));
}

// The K largest sums of a score and a bias (null: 0), or those that are evenly_chosen, in ascending order of their
// numbers. They are different numbers even of NaN.
template <typename A>
void choose_experts(const RouterForwardArgs& args, int64_t n, const A* scores, const A* bias, int32_t* experts) {
    const int64_t E = args.E, K = args.K;
    A probs[kMaxRouterExperts];
    for (int64_t e = 0; e < E; e++)
        probs[e] = args.even ? A(evenly_chosen(n, e, E, K)) : scores[e] + (bias ? bias[e] : A(0));
    bool taken[kMaxRouterExperts] = {};
    for (int64_t k = 0; k < K; k++) {
        int64_t best = -1;
        for (int64_t e = 0; e < E; e++)
            if (!taken[e] && (best < 0 || probs[e] > probs[best])) best = e;
        taken[best] = true;
    }
    for (int64_t e = 0; e < E; e++)
        if (taken[e]) *experts++ = static_cast<int32_t>(e);
}

template <typename T> void router_row(const RouterForwardArgs& args, const Acc<T>* bias, int64_t n) {
    using A = Acc<T>;
    const int64_t E = args.E, K = args.K;
    A *probs = args.probs.as<A>() + n * E, *weights = args.weights.as<A>() + n * K;
    int32_t* experts = args.experts.as<int32_t>() + n * K;
    for (int64_t e = 0; args.logit_bias && e < E; e++) probs[e] += widen(args.logit_bias.as<T>()[e]);
    args.lse.as<A>()[n] = args.form.sigmoid ? sigmoid_row(probs, E) : softmax_row(probs, E);
    if (!args.chosen) choose_experts(args, n, probs, bias, experts);
    A sum(0);
    for (int64_t k = 0; k < K; k++) sum += weights[k] = probs[experts[k]];
    for (int64_t k = 0; k < K; k++) weights[k] = weights[k] / (args.form.normalize ? sum : A(1)) * A(args.form.scale);
    if (!args.spread) return;
    T* spread = args.spread.as<T>() + n * E;
    std::fill(spread, spread + E, T(0));
    for (int64_t k = 0; k < K; k++) spread[experts[k]] = T(weights[k]);
}

// weights = scale p of the chosen, or scale p / s with s = their sum; then through the softmax or sigmoid.
template <typename T> void router_backward_row(const RouterBackwardArgs& args, double load_mul, int64_t n) {
    using A = Acc<T>;
    const int64_t E = args.E, K = args.K;
    const A *p = args.probs.as<A>() + n * E, *w = args.weights.as<A>() + n * K;
    const int32_t* experts = args.experts.as<int32_t>() + n * K;
    const double* load = args.load.as<double>();
    A dp[kMaxRouterExperts], dw[kMaxRouterExperts], sum(0), mean(0), dot(0);
    for (int64_t k = 0; k < K; k++)
        dw[k] = args.dweights.as<A>()[n * K + k] + (args.dspread ? widen(args.dspread.as<T>()[n * E + experts[k]])
                                                                 : A(0));
    for (int64_t e = 0; e < E; e++) dp[e] = static_cast<A>(load_mul * load[e]);
    const A scale(args.form.scale);
    for (int64_t k = 0; args.form.normalize && k < K; k++) sum += p[experts[k]], mean += dw[k] * w[k];
    for (int64_t k = 0; k < K; k++)
        dp[experts[k]] += args.form.normalize ? (scale * dw[k] - mean) / sum : scale * dw[k];
    for (int64_t e = 0; e < E; e++) dot += dp[e] * p[e];
    const A of_lse = 2 * A(args.z) * A(args.state->token_mul) * args.lse.as<A>()[n];
    T* out = args.dlogits.as<T>() + n * E;
    for (int64_t e = 0; e < E; e++)
        out[e] = T(p[e] * (args.form.sigmoid ? dp[e] * (1 - p[e]) : dp[e] - dot + of_lse));
}

// The sum over the tokens of a column of E probabilities.
template <typename A> void add_stats(const RouterStatsArgs& args) {
    double* stats = args.stats.as<double>();
    const A *probs = args.probs.as<A>(), *lse = args.lse.as<A>();
    const int32_t* experts = args.experts.as<int32_t>();
    for (int64_t i = 0; i < args.N * args.K; i++) stats[experts[i]] += 1;
    double entropy = 0, squares = 0;
    for (int64_t n = 0; n < args.N; n++) {
        const double mul = args.sigmoid ? exp(-static_cast<double>(lse[n])) : 1;
        for (int64_t e = 0; e < args.E; e++) {
            const double p = mul * static_cast<double>(probs[n * args.E + e]);
            stats[args.E + e] += p;
            if (p > 0) entropy -= p * log(p);
        }
        squares += static_cast<double>(lse[n]) * static_cast<double>(lse[n]);
    }
    stats[2 * args.E] += entropy;
    stats[2 * args.E + 1] += squares;
}

template <typename Args> void check_router(const char* op, const Args& args, Dtype stat) {
    check_tensor(op, "probs", args.probs, stat, args.N * args.E);
    check_tensor(op, "lse", args.lse, stat, args.N);
    check_tensor(op, "experts", args.experts, Dtype::kInt32, args.N * args.K);
    CHECK(args.K > 0 && args.K <= args.E && args.E <= kMaxRouterExperts, "%s: %lld of %lld experts", op,
          (long long)args.K, (long long)args.E);
}

// ---- experts

// sums[l] is that of the slots so far that share a node of level l with the latest one; a child is added to its parent
// once its last slot is in it.
template <typename Out, typename In> void combine_row(const CombineRowsArgs& args, int64_t n) {
    using A = Acc<In>;
    constexpr int kLevels = std::bit_width(static_cast<uint64_t>(kCombineGroups)) - 1;
    const int64_t first = n * args.K, of_group = experts_of_group(args.E);
    Out* out = args.out.as<Out>() + n * args.C;
    for_lanes<A>(args.C, [&](int64_t i, auto count) {
        Vec<A> sums[kLevels + 1] = {};
        int64_t group = 0;
        const auto close = [&](int64_t next) {   // nodes of which the group `next` is no part
            for (int l = 0; l < kLevels && (group ^ next) >> l != 0; l++)
                sums[l + 1] = sums[l + 1] + sums[l], sums[l] = Vec<A>();
            group = next;
        };
        for (int64_t k = 0; k < args.K; k++) {
            const int64_t row = args.experts ? args.slot_rows.as<int32_t>()[first + k] : k * args.N + n;
            if (row < 0) continue;
            close((args.experts ? args.experts.as<int32_t>()[first + k] : k) / of_group);
            sums[0] = sums[0] + load(args.in.as<In>() + row * args.C + i, count);
        }
        close(group ^ kCombineGroups);
        store(out + i, args.accumulate ? load(out + i, count) + sums[kLevels] : sums[kLevels], count);
    });
}

// Gates and ups of a row, and the bias of its expert.
template <typename T> struct GatedRow {
    const T *gate, *up, *bias = nullptr;   // bias: of both
    int64_t F;

    GatedRow(const Tensor& in, const ExpertBias& of, int64_t r, int32_t slot, int64_t width)
        : gate(in.as<T>() + r * 2 * width), up(gate + width), F(width) {
        if (of.values) bias = of.values.as<T>() + (of.experts.as<int32_t>()[slot] - of.first) * 2 * F;
    }
    template <typename Lanes> Vec<Acc<T>> at(const T* half, int64_t i, Lanes n) const {
        const Vec<Acc<T>> x = load(half + i, n);
        return bias ? x + load(bias + (half - gate) + i, n) : x;
    }
};

template <typename T, typename F> void activation_row(F, const ExpertActivationForwardArgs& args, int64_t r) {
    using A = Acc<T>;
    T* out = args.out.as<T>() + r * args.F;
    const int32_t slot = args.row_slots.as<int32_t>()[r];
    if (slot < 0) {
        if (args.quant) std::fill(out, out + args.F, T(0));   // not counted
        return;
    }
    const GatedRow<T> in(args.in, args.bias, r, slot, args.F);
    const Vec<A> weight(args.weights.as<A>()[slot]);
    for_lanes<A>(args.F, [&](int64_t i, auto n) {
        store(out + i, F::value(in.at(in.gate, i, n), in.at(in.up, i, n)) * weight, n);
    });
}

template <typename T, typename F> void activation_backward_row(F, const ExpertActivationBackwardArgs& args, int64_t r) {
    using A = Acc<T>;
    const T* dout = args.dout.as<T>() + r * args.F;
    T *dgate = args.din.as<T>() + r * 2 * args.F, *dup = dgate + args.F;
    const int32_t slot = args.row_slots.as<int32_t>()[r];
    if (slot < 0) {
        if (args.quant) std::fill(dgate, dgate + 2 * args.F, T(0));   // not counted
        return;
    }
    const GatedRow<T> in(args.in, args.bias, r, slot, args.F);
    const Vec<A> weight(args.weights.as<A>()[slot]);
    Vec<A> sum;
    for_lanes<A>(args.F, [&](int64_t i, auto n) {
        Vec<A> g = in.at(in.gate, i, n), u = in.at(in.up, i, n);
        const Vec<A> d = load(dout + i, n);
        sum = fma(d, F::value(g, u), sum);
        F::gradient(d * weight, g, u);
        store(dgate + i, g, n);
        store(dup + i, u, n);
    });
    args.dweights.as<A>()[slot] = sum_lanes(sum);
}

void check_bias(const char* op, const ExpertBias& bias, const Tensor& in, const Tensor& weights, int64_t F) {
    check_optional(op, "bias", bias.values, in.dtype, bias.values.elems / (2 * F) * (2 * F));
    if (bias.values) check_tensor(op, "experts", bias.experts, Dtype::kInt32, weights.elems);
}

// Calls row(Tag<T>, r) for all rows.
template <typename Row>
void for_rows(const char* op, Dtype working, int64_t rows, int64_t columns, Row&& row) {
    for_working_type(op, working, [&](auto tag) {
        parallel_for(rows, rows * columns, [&](int64_t r) { row(tag, r); });
    });
}

}  // namespace

void router_forward(Ctx&, const RouterForwardArgs& args) {
    constexpr const char* kOp = "router_forward";
    check_router(kOp, args, args.probs.dtype);
    check_tensor(kOp, "weights", args.weights, args.probs.dtype, args.N * args.K);
    const Tensor& working = args.bias ? args.bias : args.logit_bias;
    for_working_type(kOp, working ? working.dtype : args.probs.dtype, [&]<typename T>(Tag<T>) {
        using A = Acc<T>;
        check_optional(kOp, "logit_bias", args.logit_bias, dtype_of<T>, args.E);
        check_optional(kOp, "spread", args.spread, dtype_of<T>, args.N * args.E);
        A bias[kMaxRouterExperts];
        for (int64_t e = 0; args.bias && e < args.E; e++) bias[e] = widen(args.bias.as<T>()[e]);
        for_rows(kOp, stat_dtype<T>, args.N, args.E,
                 [&](auto, int64_t n) { router_row<T>(args, args.bias ? bias : nullptr, n); });
    });
}

void router_stats(Ctx&, const RouterStatsArgs& args) {
    constexpr const char* kOp = "router_stats";
    check_router(kOp, args, args.probs.dtype);
    check_tensor(kOp, "stats", args.stats, Dtype::kFp64, router_stats_elems(args.E));
    check_tensor(kOp, "scratch", args.scratch, Dtype::kFp64, kRouterPartials * router_stats_elems(args.E));
    if (args.probs.dtype == Dtype::kFp64) add_stats<double>(args);
    else add_stats<float>(args);
}

void router_backward(Ctx&, const RouterBackwardArgs& args) {
    constexpr const char* kOp = "router_backward";
    check_router(kOp, args, args.probs.dtype);
    for (const Tensor& t : {args.weights, args.dweights})
        check_tensor(kOp, "weights", t, args.probs.dtype, args.N * args.K);
    check_tensor(kOp, "dlogits", args.dlogits, args.dlogits.dtype, args.N * args.E);
    check_tensor(kOp, "load", args.load, Dtype::kFp64, args.E);
    check_optional(kOp, "dspread", args.dspread, args.dlogits.dtype, args.N * args.E);
    const double* load = args.load.as<double>();
    const double rows = std::accumulate(load, load + args.E, 0.0);
    const double mul = rows > 0 ? static_cast<double>(args.aux) * static_cast<double>(args.E)
                                      * static_cast<double>(args.state->token_mul) / rows
                                : 0;
    for_rows(kOp, args.dlogits.dtype, args.N, args.E,
             [&]<typename T>(Tag<T>, int64_t n) { router_backward_row<T>(args, mul, n); });
}

void router_summary(Ctx&, const RouterSummaryArgs& args) {
    constexpr const char* kOp = "router_summary";
    const int64_t E = args.E, width = router_stats_elems(E);
    check_tensor(kOp, "stats", args.stats, Dtype::kFp64, args.layers * width);
    check_tensor(kOp, "load", args.load, Dtype::kFp64, args.layers * E);
    RouterTotals totals;
    for (int64_t layer = 0; layer < args.layers; layer++)
        totals.add(router_layer(args, args.stats.as<double>() + layer * width, args.load.as<double>() + layer * E));
    totals.store(args);
}

void router_bias(Ctx&, const RouterBiasArgs& args) {
    check_tensor("router_bias", "load", args.load, Dtype::kFp64, args.load.elems);
    if (args.state->skip) return;
    for_working_type("router_bias", args.bias ? args.bias.dtype : args.master.dtype, [&]<typename T>(Tag<T>) {
        check_tensor("router_bias", "master", args.master, stat_dtype<T>, args.master.elems);
        auto* master = args.master.as<Acc<T>>();
        for (int64_t i = 0; i < args.master.elems; i++) {
            master[i] += router_bias_change(args.load.as<double>(), args.load.elems, args.first + i, args.rate);
            if (args.bias) args.bias.as<T>()[i] = T(master[i]);
        }
    });
}

void sort_experts(Ctx&, const SortExpertsArgs& args) {
    constexpr const char* kOp = "sort_experts";
    const int64_t slots = args.N * args.K, R = args.row_slots.elems;
    check_tensor(kOp, "offsets", args.offsets, Dtype::kInt32, args.E + 1);
    for (const Tensor& t : {args.experts, args.slot_rows}) check_tensor(kOp, "slots", t, Dtype::kInt32, slots);
    check_tensor(kOp, "rows", args.row_slots, Dtype::kInt32, R);
    check_tensor(kOp, "scratch", args.scratch, Dtype::kInt32, ceil_div(slots, kSortChunk) * args.E);
    const auto here = [&](int64_t slot) {   // of the experts, E: none of them
        const int64_t e = args.experts.as<int32_t>()[slot] - args.first;
        return e < 0 ? args.E : std::min(e, args.E);
    };
    int32_t *offsets = args.offsets.as<int32_t>(), *row_slots = args.row_slots.as<int32_t>();
    int64_t next[kMaxRouterExperts + 1] = {}, total = 0;
    for (int64_t slot = 0; slot < slots; slot++) next[here(slot)]++;
    for (int64_t e = 0; e <= args.E; e++) {
        offsets[e] = static_cast<int32_t>(std::min(total, R));
        if (e < args.E) total += std::exchange(next[e], total);
    }
    std::fill(row_slots, row_slots + R, -1);
    for (int64_t slot = 0; slot < slots; slot++) {
        const int64_t e = here(slot), row = e < args.E ? next[e]++ : R;
        args.slot_rows.as<int32_t>()[slot] = row < R ? static_cast<int32_t>(row) : -1;
        if (row < R) row_slots[row] = static_cast<int32_t>(slot);
    }
    if (args.load) *args.load.as<int32_t>() = std::max(*args.load.as<int32_t>(), static_cast<int32_t>(total));
}

void gather_rows(Ctx&, const GatherRowsArgs& args) {
    constexpr const char* kOp = "gather_rows";
    const int64_t R = args.out.elems / args.C;
    check_tensor(kOp, "slot_rows", args.slot_rows, Dtype::kInt32, args.N * args.K);
    check_tensor(kOp, "in", args.in, args.in.dtype, args.N * args.C);
    check_tensor(kOp, "out", args.out, args.in.dtype, R * args.C);
    const int64_t bytes = args.C * dtype_bytes(args.in.dtype),
                  blocks = is_fp8(args.in.dtype) ? scale_blocks(args.C) : 0, of_part = args.N / args.parts;
    check_tensor(kOp, "in_scale_inv", args.in_scale_inv, args.in_scale_inv.dtype, blocks * args.N);
    check_tensor(kOp, "out_scale_inv", args.out_scale_inv, args.in_scale_inv.dtype, blocks * R);
    parallel_for(args.slot_rows.elems, R * args.C, [&](int64_t slot) {
        const int64_t r = args.slot_rows.as<int32_t>()[slot], n = slot / args.K;
        if (r < 0) return;
        std::memcpy(static_cast<char*>(args.out.data) + r * bytes, static_cast<const char*>(args.in.data) + n * bytes,
                    static_cast<size_t>(bytes));
        for (int64_t b = 0; b < blocks; b++)
            args.out_scale_inv.as<float>()[b * R + r] =
                args.in_scale_inv.as<float>()[(n / of_part * blocks + b) * of_part + n % of_part];
    });
}

void combine_rows(Ctx&, const CombineRowsArgs& args) {
    constexpr const char* kOp = "combine_rows";
    for (const Tensor& t : {args.slot_rows, args.experts})
        if (args.experts) check_tensor(kOp, "slots", t, Dtype::kInt32, args.N * args.K);
    check_tensor(kOp, "in", args.in, args.in.dtype, args.in.elems);
    check_tensor(kOp, "out", args.out, args.out.dtype, args.N * args.C);
    CHECK(args.experts || (args.E == args.K && args.in.elems == args.N * args.K * args.C), "%s: no experts", kOp);
    for_rows(kOp, args.in.dtype, args.N, args.K * args.C, [&]<typename T>(Tag<T>, int64_t n) {
        if (args.out.dtype == args.in.dtype) combine_row<T, T>(args, n);
        else if constexpr (std::is_same_v<T, bf16>) combine_row<float, bf16>(args, n);
        else if constexpr (std::is_same_v<T, float>) combine_row<bf16, float>(args, n);
    });
}

// Quantizes all rows, of which those of no token are zeros, and counts those of tokens.
static void quantize_rows_of_tokens(const QuantResult& result, Fp8Counts* counts, const Tensor& row_slots, int64_t C) {
    result.quantize();
    if (!counts) return;
    const auto* slots = row_slots.as<int32_t>();
    counts->elems -= static_cast<uint64_t>(C * std::count(slots, slots + row_slots.elems, -1));
}

void expert_activation_forward(Ctx&, const ExpertActivationForwardArgs& given) {
    constexpr const char* kOp = "expert_activation_forward";
    ExpertActivationForwardArgs args = given;
    const QuantResult result(kOp, given.quant, given.out, args.in.dtype, args.R, args.F);
    args.out = result.tensor();
    check_tensor(kOp, "row_slots", args.row_slots, Dtype::kInt32, args.R);
    check_tensor(kOp, "in", args.in, args.in.dtype, args.R * 2 * args.F);
    check_bias(kOp, args.bias, args.in, args.weights, args.F);
    check_tensor(kOp, "out", args.out, args.in.dtype, args.R * args.F);
    for_rows(kOp, args.in.dtype, args.R, args.F, [&]<typename T>(Tag<T>, int64_t r) {
        check_tensor(kOp, "weights", args.weights, stat_dtype<T>, args.weights.elems);
        with_expert_activation(args.kind, [&](auto function) { activation_row<T>(function, args, r); });
    });
    quantize_rows_of_tokens(result, given.quant.counts, args.row_slots, args.F);
}

void expert_activation_backward(Ctx&, const ExpertActivationBackwardArgs& given) {
    constexpr const char* kOp = "expert_activation_backward";
    ExpertActivationBackwardArgs args = given;
    const QuantResult result(kOp, given.quant, given.din, args.in.dtype, args.R, 2 * args.F);
    args.din = result.tensor();
    check_tensor(kOp, "row_slots", args.row_slots, Dtype::kInt32, args.R);
    for (const Tensor& t : {args.in, args.din}) check_tensor(kOp, "in", t, args.in.dtype, args.R * 2 * args.F);
    check_tensor(kOp, "dout", args.dout, args.in.dtype, args.R * args.F);
    check_bias(kOp, args.bias, args.in, args.weights, args.F);
    for_rows(kOp, args.in.dtype, args.R, args.F, [&]<typename T>(Tag<T>, int64_t r) {
        for (const Tensor& t : {args.weights, args.dweights})
            check_tensor(kOp, "weights", t, stat_dtype<T>, args.weights.elems);
        with_expert_activation(args.kind, [&](auto function) { activation_backward_row<T>(function, args, r); });
    });
    quantize_rows_of_tokens(result, given.quant.counts, args.row_slots, 2 * args.F);
}

void expert_bias_backward(Ctx&, const ExpertBiasBackwardArgs& args) {
    constexpr const char* kOp = "expert_bias_backward";
    check_tensor(kOp, "dout", args.dout, args.dout.dtype, args.R * args.C);
    check_tensor(kOp, "offsets", args.offsets, Dtype::kInt32, args.E + 1);
    const int32_t* offsets = args.offsets.as<int32_t>();
    for_working_type(kOp, args.dout.dtype, [&]<typename T>(Tag<T>) {
        check_grad<T>(kOp, "dbias", args.dbias, args.E * args.C);
        parallel_for(args.E, args.R * args.C, [&](int64_t e) {
            auto sum = make_buffer<Acc<T>>(args.C);
            std::fill_n(sum.get(), args.C, Acc<T>(0));
            for (int64_t r = offsets[e]; r < offsets[e + 1]; r++)
                add_row(sum.get(), args.dout.as<T>() + r * args.C, args.C);
            add_to_grad(args.dbias, e * args.C, sum.get(), args.C);
        });
    });
}

}  // namespace cpu
