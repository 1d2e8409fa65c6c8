// The arithmetic of the optimizer step, shared by both devices so that they agree bit for bit.
// Every multiply that feeds an addition is an explicit fma, and the only library functions are correctly rounded
// (fma, division, square root): contraction of products by a compiler cannot change a bit.
#pragma once
#include <cmath>
#include <cstdint>

#include "llmc/base/dtype.h"
#include "llmc/ops/ops.h"

// base^exponent by repeated squaring, exponent >= 0. Products only, in a fixed order.
HOST_DEVICE inline double power_by_squaring(double base, int64_t exponent) {
    double result = 1.0;
    while (exponent > 0) {
        if (exponent & 1) result = result * base;
        base = base * base;
        exponent >>= 1;
    }
    return result;
}

HOST_DEVICE inline float adam_fma(float a, float b, float c) { return fmaf(a, b, c); }
HOST_DEVICE inline double adam_fma(double a, double b, double c) { return fma(a, b, c); }
HOST_DEVICE inline float adam_sqrt(float x) { return sqrtf(x); }
HOST_DEVICE inline double adam_sqrt(double x) { return sqrt(x); }

// Constants of one adamw call. Acc is float, or double for fp64 tensors.
template <typename Acc> struct AdamConstants {
    Acc beta1, beta2, one_minus_beta1, one_minus_beta2;
    Acc inv_correction1, inv_correction2;   // 1 / (1 - beta^t), divided in double, then rounded to Acc
    Acc lr, eps, weight_decay, grad_mul;
};

// t >= 1 is the number of this update of the moments. In a kernel one thread per block should compute this.
template <typename Acc>
HOST_DEVICE inline AdamConstants<Acc> adam_constants(float beta1, float beta2, float eps, float weight_decay,
                                                     float lr, float grad_mul, int64_t t) {
    AdamConstants<Acc> c;
    c.beta1 = beta1;
    c.beta2 = beta2;
    c.one_minus_beta1 = Acc(1) - Acc(beta1);
    c.one_minus_beta2 = Acc(1) - Acc(beta2);
    // fma(p, -1, 1) is 1 - p with one rounding: it keeps the last product of the power from being contracted
    // into the subtraction.
    c.inv_correction1 = static_cast<Acc>(1.0 / fma(power_by_squaring(beta1, t), -1.0, 1.0));
    c.inv_correction2 = static_cast<Acc>(1.0 / fma(power_by_squaring(beta2, t), -1.0, 1.0));
    c.lr = lr;
    c.eps = eps;
    c.weight_decay = weight_decay;
    c.grad_mul = grad_mul;
    return c;
}

// Updates m and v of one element in place.
template <typename Acc> HOST_DEVICE inline void update_moments(const AdamConstants<Acc>& c, Acc grad, Acc& m, Acc& v) {
    Acc g = grad * c.grad_mul;
    m = adam_fma(c.beta1, m, c.one_minus_beta1 * g);
    v = adam_fma(c.beta2, v, c.one_minus_beta2 * (g * g));
}
// The direction of the step, from moments times the bias corrections.
template <typename Acc> HOST_DEVICE inline Acc adam_direction(Acc m_hat, Acc v_hat, Acc eps) {
    return m_hat / (adam_sqrt(v_hat) + eps);
}
// Returns the new master.
template <typename Acc> HOST_DEVICE inline Acc moved(const AdamConstants<Acc>& c, Acc direction, Acc master) {
    return adam_fma(-c.lr, adam_fma(c.weight_decay, master, direction), master);
}
// Updates m, v and master of one element in place. master uses the new moments before the caller rounds them to their
// storage type.
template <typename Acc>
HOST_DEVICE inline void adam_update(const AdamConstants<Acc>& c, Acc grad, Acc& m, Acc& v, Acc& master) {
    update_moments(c, grad, m, v);
    master = moved(c, adam_direction(m * c.inv_correction1, v * c.inv_correction2, c.eps), master);
}

// What `ema` (ops.h) adds of master - ema in the update adam_step.
HOST_DEVICE inline double ema_share(double decay, int64_t adam_step) {
    const auto t = static_cast<double>(adam_step);
    const double warm_up = (1.0 + t) / (10.0 + t);
    return 1.0 - (decay < warm_up ? decay : warm_up);
}

// ---- Muon, as in ops.h

// Updates m of one element and returns the Nesterov update, from m before the caller rounds it.
template <typename Acc> HOST_DEVICE inline Acc nesterov_update(Acc beta, Acc grad, Acc& m) {
    const Acc new_part = (Acc(1) - beta) * grad;
    m = adam_fma(beta, m, new_part);
    return adam_fma(beta, m, new_part);
}
// What the matrix is multiplied by.
HOST_DEVICE inline double muon_norm_inv(double sum_squares, double margin) {
    return sum_squares == 0.0 ? 0.0 : 1.0 / (margin * sqrt(sum_squares));
}
template <typename Acc>
HOST_DEVICE inline Acc polynomial_element(Acc a, Acc b, Acc c, Acc gram, Acc square, bool diagonal) {
    const Acc rest = adam_fma(b, gram, c * square);
    return diagonal ? rest + a : rest;
}
// The new second moment of a row, and what the row is multiplied by.
template <typename Acc>
HOST_DEVICE inline Acc row_moment(double beta2, Acc v, double sum_squares, int64_t cols) {
    return static_cast<Acc>(adam_fma(beta2, static_cast<double>(v),
                                     (1.0 - beta2) * (sum_squares / static_cast<double>(cols))));
}
template <typename Acc> HOST_DEVICE inline Acc row_norm_inv(Acc v) {
    return static_cast<Acc>(1.0 / (sqrt(static_cast<double>(v)) + kRowNormEps));
}
template <typename Acc>
HOST_DEVICE inline Acc decayed_step(Acc lr, Acc scale, Acc weight_decay, Acc direction, Acc master) {
    return adam_fma(-lr, adam_fma(weight_decay, master, scale * direction), master);
}

// ---- QK-clip, as in ops.h

// The factor of a head of a layer: query heads, then key heads.
HOST_DEVICE inline float qk_clip_factor(const float* max_logits, int64_t NH, int64_t NKV, int64_t head, float tau) {
    const int64_t group = NH / NKV, first = (head < NH ? head / group : head - NH) * group;
    float most = 0;
    for (int64_t h = first; h < first + group; h++) most = max_logits[h] > most ? max_logits[h] : most;
    const float key = most > tau ? sqrtf(tau / most) : 1.0f;
    if (head >= NH) return key;
    return (max_logits[head] > tau ? tau / max_logits[head] : 1.0f) / key;
}

// ---- mixtures of experts: router_summary of ops_moe.h

struct RouterTotals {
    double loss = 0, entropy = 0, load = 0;   // entropy: the sum over layers
    int32_t dead = 0;

    HOST_DEVICE void add(const RouterTotals& layer) {
        loss += layer.loss, entropy += layer.entropy, dead += layer.dead;
        load = layer.load > load ? layer.load : load;
    }
    HOST_DEVICE void store(const RouterSummaryArgs& args) const {
        args.state->router_loss = loss;
        args.state->router_entropy = static_cast<float>(entropy / static_cast<double>(args.layers));
        args.state->expert_load = static_cast<float>(load);
        args.state->dead_experts = dead;
    }
};
// Those of one layer, whose load it updates.
HOST_DEVICE inline RouterTotals router_layer(const RouterSummaryArgs& args, const double* stats, double* load) {
    const int64_t E = args.E;
    RouterTotals totals;
    double rows = 0, shares = 0, most = 0;
    for (int64_t e = 0; e < E; e++) rows += stats[e];
    const double tokens = rows / static_cast<double>(args.K), experts = static_cast<double>(E);
    for (int64_t e = 0; e < E; e++) {
        shares += stats[e] / rows * (stats[E + e] / tokens);
        most = stats[e] > most ? stats[e] : most;
        totals.dead += stats[e] == 0;
        if (!args.state->skip) load[e] = stats[e];
    }
    totals.loss = static_cast<double>(args.aux) * experts * shares
                  + static_cast<double>(args.z) * (stats[2 * E + 1] / tokens);
    totals.entropy = stats[2 * E] / tokens;
    totals.load = most * experts / rows;
    return totals;
}

// By which router_bias changes the bias of an expert. Numbers of rows are exact.
HOST_DEVICE inline float router_bias_change(const double* load, int64_t E, int64_t expert, float rate) {
    double rows = 0;
    for (int64_t e = 0; e < E; e++) rows += load[e];
    const double error = rows - static_cast<double>(E) * load[expert];
    return error > 0 ? rate : error < 0 ? -rate : 0.0f;
}

// The norms that step_guard compares with, and whether norms[index] is their median.
HOST_DEVICE inline int64_t norms_held(const StepState& state) {
    return state.norm_count < kNormWindow ? state.norm_count : kNormWindow;
}
HOST_DEVICE inline bool is_median_norm(const StepState& state, int64_t index) {
    const int64_t held = norms_held(state);
    int64_t below = 0;
    for (int64_t i = 0; i < held; i++)
        below += state.norms[i] < state.norms[index] || (state.norms[i] == state.norms[index] && i < index);
    return index < held && below == held / 2;
}

// Implements step_guard (ops.h) for a median norm that is already known; called by one thread. x - x is 0 for finite x
// only.
HOST_DEVICE inline void decide_step(const StepGuardArgs& args, float median) {
    StepState& state = *args.state;
    const auto* rows = static_cast<const int32_t*>(args.expert_rows.data);
    state.expert_rows = state.fullest_layer = 0;
    for (int layer = 0; layer < args.expert_rows.elems; layer++)
        if (rows[layer] > state.expert_rows) state.expert_rows = rows[layer], state.fullest_layer = layer;
    float norm = static_cast<float>(sqrt(state.sum_squares));
    bool finite = state.loss_sum - state.loss_sum == 0.0 && norm - norm == 0.0f && state.bad_tokens == 0
                  && state.expert_rows <= args.capacity;
    state.grad_norm = norm;
    state.norm_limit = state.norm_count < kLeastNorms ? 0.0f : args.skip_norm * median;
    bool large = state.norm_limit > 0.0f && norm > state.norm_limit;
    state.skip = !finite ? StepState::kNotFinite : large ? StepState::kLargeNorm : 0;
    state.grad_mul = args.clip > 0.0f && norm > args.clip ? args.clip / norm : 1.0f;
    if (!state.skip) state.adam_step += 1;
    if (finite) state.norms[state.norm_count++ % kNormWindow] = norm;
}
