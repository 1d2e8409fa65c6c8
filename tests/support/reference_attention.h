// Attention as plain loops in double, with error bounds derived from every rounding.
#pragma once
#include "tests/support/reference.h"

namespace reference {

struct QkvShape {
    int64_t B, T, NH, NKV, HS;
};

// One problem. The backward pass reads `out` and `lse` of the CPU, so that both devices start from the same values.
struct AttentionProblem {
    QkvShape s;
    Dtype type;
    int64_t width = (s.NH + 2 * s.NKV) * s.HS, N = s.B * s.T;
    float softmax_mul = 1.3f / std::sqrt(static_cast<float>(s.HS));
    HostTensor qkv, dout;
    std::vector<int32_t> documents;   // as AttentionForwardArgs::documents; may be empty
    int64_t window = 0;               // as AttentionForwardArgs::window

    AttentionProblem(QkvShape shape, Dtype dtype, double magnitude = 1) : s(shape), type(dtype) {
        qkv = random_tensor(type, N * width, 1, magnitude);
        dout = random_tensor(type, N * s.NH * s.HS, 2, 1, 0.1);
        // Keys grow along the sequence, so that the largest score keeps moving, in some heads by a lot.
        for (int64_t n = 0; n < N; n++) {
            const double growth = 0.5 + 2.0 * static_cast<double>(n % s.T) / static_cast<double>(s.T);
            for (int64_t c = n * width + s.NH * s.HS; c < n * width + (s.NH + s.NKV) * s.HS; c++)
                qkv.set(c, qkv.get(c) * growth);
        }
    }
    // First key that a query attends to.
    int64_t start(int64_t b, int64_t t) const {
        const int64_t document = documents.empty() ? 0 : documents[static_cast<size_t>(b * s.T + t)];
        return window > 0 ? std::max(document, t - window + 1) : document;
    }
    AttentionForwardArgs forward_args(Tensor out, Tensor lse, Tensor qkv_view, const int32_t* ranges) const {
        return {.out = out, .lse = lse, .qkv = qkv_view, .B = s.B, .T = s.T, .NH = s.NH, .NKV = s.NKV,
                .HS = s.HS, .softmax_mul = softmax_mul, .documents = ranges, .window = window};
    }
    AttentionBackwardArgs backward_args(Tensor dqkv, Tensor delta, Tensor dout_view, Tensor out, Tensor lse,
                                        Tensor qkv_view, const int32_t* ranges, Tensor sums = {}) const {
        return {.dqkv = dqkv, .delta = delta, .dout = dout_view, .out = out, .lse = lse, .qkv = qkv_view,
                .B = s.B, .T = s.T, .NH = s.NH, .NKV = s.NKV, .HS = s.HS, .softmax_mul = softmax_mul,
                .documents = ranges, .window = window, .sums = sums};
    }
    struct Result {
        HostTensor out, lse, dqkv, delta;
    };
    Result fresh(Dtype dtype) const {
        Dtype stat = stat_dtype(dtype);
        return {HostTensor(dtype, N * s.NH * s.HS), HostTensor(stat, N * s.NH), HostTensor(dtype, N * width),
                HostTensor(stat, N * s.NH)};
    }
    // Runs forward and backward on the CPU in `dtype`.
    Result on_cpu(Dtype dtype) const {
        Result r = fresh(dtype);
        HostTensor x = qkv.to(dtype), dy = dout.to(dtype);
        Ctx ctx;
        const int32_t* ranges = documents.empty() ? nullptr : documents.data();
        cpu::attention_forward(ctx, forward_args(r.out.view(), r.lse.view(), x.view(), ranges));
        cpu::attention_backward(ctx, backward_args(r.dqkv.view(), r.delta.view(), dy.view(), r.out.view(),
                                                   r.lse.view(), x.view(), ranges));
        return r;
    }
    // Index of element 0 of a head vector.
    int64_t q(int64_t b, int64_t t, int64_t h) const { return (b * s.T + t) * width + h * s.HS; }
    int64_t k(int64_t b, int64_t t, int64_t h) const { return q(b, t, s.NH + h / (s.NH / s.NKV)); }
    int64_t v(int64_t b, int64_t t, int64_t h) const { return k(b, t, h) + s.NKV * s.HS; }
    int64_t o(int64_t b, int64_t t, int64_t h) const { return ((b * s.T + t) * s.NH + h) * s.HS; }
    int64_t row(int64_t b, int64_t t, int64_t h) const { return (b * s.NH + h) * s.T + t; }
};

// Results in double, with the largest error that each element may have.
struct Reference {
    std::vector<double> out, lse, dqkv, delta;
    std::vector<double> out_error, lse_error, dqkv_error, delta_error;
};

// P of one query for its keys from number `first` on, and the relative error that each P may have.
struct Probabilities {
    int64_t first;
    std::vector<double> p, error;
    double lse = 0, lse_error = 0;
};

inline Probabilities probabilities_of(const AttentionProblem& a, const std::vector<double>& qkv, int64_t b, int64_t h,
                                      int64_t t) {
    const double u = 2 * 0x1p-24;   // a rounding of fp32; tensor cores truncate instead
    Probabilities w{.first = a.start(b, t), .p = {}, .error = {}};
    std::vector<double> score;
    double largest = -1e300;
    for (int64_t j = w.first; j <= t; j++) {
        double dot = 0, magnitude = 0;
        for (int64_t d = 0; d < a.s.HS; d++) {
            double term = qkv[a.q(b, t, h) + d] * qkv[a.k(b, j, h) + d] * a.softmax_mul;
            dot += term, magnitude += std::fabs(term);
        }
        score.push_back(dot), w.error.push_back((a.s.HS + 4) * u * magnitude);
        largest = std::max(largest, dot);
    }
    double sum = 0, spread = 0, most = 0;
    for (size_t i = 0; i < score.size(); i++) {
        sum += std::exp(score[i] - largest);
        spread = std::max(spread, std::fabs(score[i]));
        most = std::max(most, w.error[i]);
    }
    w.lse = largest + std::log(sum);
    // The argument of an exponential is rounded too, in proportion to the scores and the lse.
    const double argument = u * (4 * spread + 2 * std::fabs(w.lse) + 8);
    w.lse_error = most + argument + (t / 4.0 + 8) * u;
    for (size_t i = 0; i < score.size(); i++) {
        w.p.push_back(std::exp(score[i] - w.lse));
        // Exponentials below 2^-126 are 0; those of the forward pass are relative to a reference that may differ from
        // the sum by a factor of 2^8.
        w.error[i] += w.p.back() < 0x1p-118 ? 1 : argument + w.lse_error;
    }
    return w;
}

// operand: the relative error of P and dS as operands of tensor cores (bf16), 0 without tensor cores.
inline Reference reference_of(const AttentionProblem& a, const AttentionProblem::Result& given, double operand) {
    const double u = 2 * 0x1p-24, round = 1.01 * unit_roundoff(a.type), mul = a.softmax_mul;
    const double chain = static_cast<double>(a.s.T * (a.s.NH / a.s.NKV) + 16) * u;   // error of sums over T
    const std::vector<double> qkv = a.qkv.values(), douts = a.dout.values(), outs = given.out.values();
    Reference r;
    r.out.resize(outs.size()), r.out_error = r.out;
    r.dqkv.resize(qkv.size()), r.dqkv_error = r.dqkv;
    r.lse.resize(static_cast<size_t>(a.N * a.s.NH)), r.lse_error = r.delta = r.delta_error = r.lse;
    for (int64_t task = 0; task < a.N * a.s.NH; task++) {
        const int64_t t = task % a.s.T, h = task / a.s.T % a.s.NH, b = task / a.s.T / a.s.NH;
        const Probabilities w = probabilities_of(a, qkv, b, h, t);
        const int64_t row = a.row(b, t, h), o = a.o(b, t, h), q = a.q(b, t, h);
        r.lse[row] = w.lse, r.lse_error[row] = w.lse_error + u * std::fabs(w.lse);
        double delta = 0, delta_error = 0;
        for (int64_t d = 0; d < a.s.HS; d++) {
            double term = douts[o + d] * outs[o + d];
            delta += term, delta_error += (a.s.HS + 4) * u * std::fabs(term);
        }
        r.delta[row] = delta, r.delta_error[row] = delta_error;
        for (int64_t j = w.first; j <= t; j++) {
            const int64_t k = a.k(b, j, h), v = a.v(b, j, h);
            const double p = w.p[j - w.first], own_error = w.error[j - w.first], p_error = own_error + operand;
            double dp = 0, dp_error = 0;
            for (int64_t d = 0; d < a.s.HS; d++) {
                double term = douts[o + d] * qkv[v + d];
                dp += term, dp_error += (a.s.HS + 4) * u * std::fabs(term);
                r.out[o + d] += p * qkv[v + d];
                r.out_error[o + d] += p * std::fabs(qkv[v + d]) * (p_error + chain);
                r.dqkv[v + d] += p * douts[o + d];
                r.dqkv_error[v + d] += p * std::fabs(douts[o + d]) * (p_error + chain);
            }
            const double ds = p * (dp - delta) * mul;
            const double ds_error = std::fabs(ds) * (operand + chain)
                                    + p * mul * (own_error * (std::fabs(dp) + std::fabs(delta)) + dp_error
                                                 + delta_error + 4 * u * (std::fabs(dp) + std::fabs(delta)));
            for (int64_t d = 0; d < a.s.HS; d++) {
                r.dqkv[q + d] += ds * qkv[k + d], r.dqkv_error[q + d] += ds_error * std::fabs(qkv[k + d]);
                r.dqkv[k + d] += ds * qkv[q + d], r.dqkv_error[k + d] += ds_error * std::fabs(qkv[q + d]);
            }
        }
    }
    auto add_rounding = [&](const std::vector<double>& value, std::vector<double>& error) {
        for (size_t i = 0; i < value.size(); i++)
            error[i] += round * (std::fabs(value[i]) + error[i]) + kTiny;
    };
    add_rounding(r.out, r.out_error), add_rounding(r.dqkv, r.dqkv_error);
    return r;
}

inline bool on_tensor_cores(const AttentionProblem& a) {
    return a.type == Dtype::kBf16 && (a.s.HS == 64 || a.s.HS == 128);
}

}  // namespace reference
