// Attention as plain loops in double, with error bounds derived from every rounding; documents of given lengths.
#pragma once
#include "tests/support/op_test.h"

namespace documents_test {

// Lengths of the documents of each sequence; those of a sequence add up to T.
using Lengths = std::vector<std::vector<int64_t>>;

// (2, B, T): AttentionForwardArgs::documents.
inline std::vector<int32_t> documents_of(const Lengths& lengths, int64_t T) {
    const size_t plane = lengths.size() * static_cast<size_t>(T);
    std::vector<int32_t> documents(2 * plane);
    size_t row = 0;
    for (const std::vector<int64_t>& sequence : lengths) {
        int64_t start = 0;
        for (int64_t length : sequence) {
            for (int64_t t = 0; t < length; t++, row++) {
                documents[row] = static_cast<int32_t>(start);
                documents[plane + row] = static_cast<int32_t>(start + length);
            }
            start += length;
        }
    }
    return documents;
}

// Documents of `length` tokens; the last one may be shorter.
inline std::vector<int64_t> equal_parts(int64_t T, int64_t length) {
    std::vector<int64_t> parts;
    for (int64_t at = 0; at < T; at += length) parts.push_back(length < T - at ? length : T - at);
    return parts;
}

// Calls f(b, begin, length) for every document.
template <typename F> void for_each_document(const Lengths& lengths, F&& f) {
    for (size_t b = 0; b < lengths.size(); b++) {
        int64_t begin = 0;
        for (int64_t length : lengths[b]) f(static_cast<int64_t>(b), begin, length), begin += length;
    }
}

// Around tiles of 16, 32, 64, 128 and 192 rows: documents of one token, ending on and next to tile borders, many in
// one tile, one over many tiles, and sequences cut in different ways. All have T = 400.
inline const std::vector<Lengths> kBorders = {
    {{400}, {1, 399}}, {{399, 1}, {1, 1, 1, 61, 64, 64, 1, 15, 192}}, {{63, 1, 64, 65, 207}, {127, 1, 1, 127, 144}},
    {equal_parts(400, 1), equal_parts(400, 7)}, {equal_parts(400, 16), equal_parts(400, 128)},
    {{129, 271}, {191, 1, 1, 207}},
};

}  // namespace documents_test

namespace op_test {

using documents_test::Lengths;

struct AttentionShape {
    int64_t B, T, NH, NKV, HS;
    double magnitude = 1;                  // of random QKV
    float softmax_mul = 1.3f / std::sqrt(static_cast<float>(HS));
    std::vector<int32_t> documents = {};   // as AttentionForwardArgs::documents; may be empty
    int64_t window = 0;                    // as AttentionForwardArgs::window
    std::vector<double> sinks = {};        // as AttentionForwardArgs::sinks; may be empty
    double softcap = 0;                    // as AttentionForwardArgs::softcap

    int64_t heads() const { return NH + 2 * NKV; }
    int64_t width() const { return heads() * HS; }
    const int32_t* ranges() const { return documents.empty() ? nullptr : documents.data(); }
    // First key that a query attends to.
    int64_t start(int64_t b, int64_t t) const {
        const int64_t document = documents.empty() ? 0 : documents[static_cast<size_t>(b * T + t)];
        return window > 0 ? std::max(document, t - window + 1) : document;
    }
    // Random QKV, whose keys grow along the sequence, so that the largest score keeps moving, in some heads by a lot.
    HostTensor growing_qkv(Dtype type, uint64_t key = 1) const {
        HostTensor qkv = random_tensor(type, B * T * width(), key, magnitude);
        for (int64_t i = 0; i < qkv.elems(); i++) {
            const int64_t n = i / width(), head = i % width() / HS;
            const double growth = 0.5 + 2.0 * static_cast<double>(n % T) / static_cast<double>(T);
            if (NH <= head && head < NH + NKV) qkv.set(i, qkv.get(i) * growth);
        }
        return qkv;
    }
    HostTensor sink_tensor(Dtype type) const {
        HostTensor t(type, static_cast<int64_t>(sinks.size()));
        for (int64_t h = 0; h < t.elems(); h++) t.set(h, sinks[static_cast<size_t>(h)]);
        return t;
    }
    AttentionForwardArgs forward_args(Tensor out, Tensor lse, Tensor qkv, const int32_t* ranges,
                                      Fp8Heads fp8_heads = {}, Tensor sink_view = {}) const {
        return {.out = out, .lse = lse, .qkv = qkv, .B = B, .T = T, .NH = NH, .NKV = NKV, .HS = HS,
                .softmax_mul = softmax_mul, .documents = ranges, .window = window, .heads = fp8_heads,
                .sinks = sink_view, .softcap = static_cast<float>(softcap)};
    }
    // Index of element 0 of a head vector.
    int64_t q(int64_t b, int64_t t, int64_t h) const { return ((b * T + t) * heads() + h) * HS; }
    int64_t k(int64_t b, int64_t t, int64_t h) const { return q(b, t, NH + h / (NH / NKV)); }
    int64_t v(int64_t b, int64_t t, int64_t h) const { return k(b, t, h) + NKV * HS; }
    int64_t o(int64_t b, int64_t t, int64_t h) const { return ((b * T + t) * NH + h) * HS; }
    int64_t row(int64_t b, int64_t t, int64_t h) const { return (b * NH + h) * T + t; }
    std::string name() const {
        std::string text = strf("B %lld T %lld heads %lld over %lld head size %lld magnitude %g window %lld ",
                                (long long)B, (long long)T, (long long)NH, (long long)NKV, (long long)HS, magnitude,
                                (long long)window);
        for (const double sink : sinks) text += strf("sink %g ", sink);
        if (softcap > 0) text += strf("soft cap %g ", softcap);
        for (int64_t n = 0; n < B * T && !documents.empty(); n++)   // first positions of documents
            if (documents[static_cast<size_t>(n)] == n % T) text += strf("%lld ", (long long)(n % T));
        return text;
    }
};

// The same problem, cut into documents, or within a window.
template <typename Problem> Problem with_documents(Problem a, const Lengths& lengths) {
    a.documents = documents_test::documents_of(lengths, a.T);
    return a;
}
template <typename Problem> Problem with_window(Problem a, int64_t window) {
    a.window = window;
    return a;
}
template <typename Problem> Problem with_softcap(Problem a, double softcap) {
    a.softcap = softcap;
    return a;
}
// Each head has one of these sinks, which bf16 represents: below, among and above the scores.
template <typename Problem> Problem with_sinks(Problem a, const std::vector<double>& sinks = {1.25, -3, 5, 0, 12}) {
    for (int64_t h = 0; h < a.NH; h++) a.sinks.push_back(sinks[static_cast<size_t>(h) % sinks.size()]);
    return a;
}

// One problem. The backward pass on a GPU reads `out` and `lse` of the CPU, so that both start from the same values.
struct Attention : AttentionShape {
    Dtype type;
    HostTensor qkv, dout;
    bool bf16_dsinks = false;   // as with --grad-dtype bf16

    Attention(const AttentionShape& shape, Dtype dtype)
        : AttentionShape(shape), type(dtype), qkv(growing_qkv(dtype)),
          dout(random_tensor(dtype, B * T * NH * HS, 2, 1, 0.1)) {}
    AttentionBackwardArgs backward_args(Tensor dqkv, Tensor delta, Tensor dout_view, Tensor out, Tensor lse,
                                        Tensor qkv_view, const int32_t* ranges, Tensor sums = {},
                                        Tensor sink_view = {}, Tensor dsinks = {}) const {
        return {.dqkv = dqkv, .delta = delta, .dout = dout_view, .out = out, .lse = lse, .qkv = qkv_view,
                .B = B, .T = T, .NH = NH, .NKV = NKV, .HS = HS, .softmax_mul = softmax_mul,
                .documents = ranges, .window = window, .sums = sums, .sinks = sink_view, .dsinks = dsinks,
                .softcap = static_cast<float>(softcap)};
    }
    static constexpr double kDsink = 0.125;   // what dsinks is added to
    struct Result {
        HostTensor out, lse, dqkv, delta, dsinks = {};

        bool same_bits(const Result& other) const {
            return out.same_bits(other.out) && lse.same_bits(other.lse) && dqkv.same_bits(other.dqkv)
                   && dsinks.same_bits(other.dsinks);
        }
    };
    Result fresh(Dtype dtype) const {
        Dtype stat = stat_dtype(dtype);
        Result r{HostTensor(dtype, B * T * NH * HS), HostTensor(stat, B * T * NH), HostTensor(dtype, B * T * width()),
                 HostTensor(stat, B * T * NH), sink_tensor(bf16_dsinks ? Dtype::kBf16 : stat)};
        for (int64_t h = 0; h < r.dsinks.elems(); h++) r.dsinks.set(h, kDsink);
        return r;
    }
    // Both passes on the CPU, in the type of the result.
    void cpu_forward(Result& r) const {
        HostTensor x = qkv.to(r.out.dtype()), s = sink_tensor(r.out.dtype());
        Ctx ctx;
        cpu::attention_forward(ctx, forward_args(r.out.view(), r.lse.view(), x.view(), ranges(), {}, s.view()));
    }
    void cpu_backward(Result& r) const {
        HostTensor x = qkv.to(r.out.dtype()), dy = dout.to(r.out.dtype()), s = sink_tensor(r.out.dtype());
        Ctx ctx;
        cpu::attention_backward(ctx, backward_args(r.dqkv.view(), r.delta.view(), dy.view(), r.out.view(),
                                                   r.lse.view(), x.view(), ranges(), {}, s.view(),
                                                   r.dsinks.view()));
    }
    Result on_cpu(Dtype dtype) const {
        Result r = fresh(dtype);
        cpu_forward(r), cpu_backward(r);
        return r;
    }
    std::string name() const { return AttentionShape::name() + dtype_name(type) + " "; }
};

// Results in double, with the largest error that each element may have.
struct Reference {
    std::vector<double> out, lse, dqkv, delta, dsinks;
    std::vector<double> out_error, lse_error, dqkv_error, delta_error, dsinks_error;
};

// Runs forward(args) with max_logits, of which one is large already, and compares these with scores in double, of `x`.
// `terms`: roundings in a score.
template <typename Forward>
void check_max_logits(const AttentionShape& a, const std::vector<double>& x, HostTensor logits, double terms,
                      Forward&& forward) {
    for (int64_t h = 0; h < a.NH; h++) logits.set(h, h == 1 ? 1e4 : 0);
    forward(logits);
    for (int64_t h = 0; h < a.NH; h++) {
        double most = h == 1 ? 1e4 : 0, size = 0;
        for (int64_t row = 0; row < a.B * a.T; row++)
            for (int64_t b = row / a.T, t = row % a.T, j = a.start(b, t); j <= t; j++) {
                double score = 0, magnitude = 0;
                for (int64_t d = 0; d < a.HS; d++) {
                    const double term = x[a.q(b, t, h) + d] * x[a.k(b, j, h) + d] * a.softmax_mul;
                    score += term, magnitude += std::fabs(term);
                }
                most = std::max(most, score), size = std::max(size, magnitude);
            }
        INFO(a.name() << "head " << h);
        CHECK_LE(std::fabs(logits.get(h) - most), terms * 0x1p-23 * size);
    }
}

// P of one query for its keys from number `first` on, and the relative error that each P may have.
struct Probabilities {
    int64_t first;
    std::vector<double> p, error;
    double lse = 0, lse_error = 0;
    double sink = 0, sink_error = 0;   // P of the sink, 0 without one
    std::vector<double> slope = {}, slope_error = {};   // the derivatives of capped scores, 1 without a cap
};

inline Probabilities probabilities_of(const Attention& a, const std::vector<double>& qkv, int64_t b, int64_t h,
                                      int64_t t) {
    const double u = 2 * acc_roundoff(a.type);   // tensor cores truncate
    Probabilities w{.first = a.start(b, t), .p = {}, .error = {}};
    std::vector<double> score;
    double largest = -1e300;
    for (int64_t j = w.first; j <= t; j++) {
        double dot = 0, magnitude = 0;
        for (int64_t d = 0; d < a.HS; d++) {
            double term = qkv[a.q(b, t, h) + d] * qkv[a.k(b, j, h) + d] * a.softmax_mul;
            dot += term, magnitude += std::fabs(term);
        }
        double error = (a.HS + 4) * u * magnitude, slope = 1, slope_error = 0;
        if (a.softcap > 0) {
            // tanh of the CPU and of fp32 on a GPU: 2 ulp, and the roundings before and after it; of bf16 on a GPU: see
            // cuda/soft_cap.cuh.
            const double t = std::tanh(dot / a.softcap);
            const double t_error = error / a.softcap + 8 * u * std::fabs(t) + (a.type == Dtype::kBf16 ? 0x1p-20 : 0);
            dot = a.softcap * t, error = a.softcap * t_error;
            slope = 1 - t * t, slope_error = (2 * std::fabs(t) + t_error) * t_error + 4 * u;
        }
        score.push_back(dot), w.error.push_back(error);
        w.slope.push_back(slope), w.slope_error.push_back(slope_error);
        largest = std::max(largest, dot);
    }
    const double sink = a.sinks.empty() ? -HUGE_VAL : a.sinks[static_cast<size_t>(h)];
    largest = std::max(largest, sink);
    double sum = std::exp(sink - largest), spread = a.sinks.empty() ? 0 : std::fabs(sink), most = 0;
    for (size_t i = 0; i < score.size(); i++) {
        sum += std::exp(score[i] - largest);
        spread = std::max(spread, std::fabs(score[i]));
        most = std::max(most, w.error[i]);
    }
    w.lse = largest + std::log(sum);
    // The argument of an exponential is rounded too, in proportion to the scores and the lse.
    const double argument = u * (4 * spread + 2 * std::fabs(w.lse) + 8);
    w.lse_error = most + argument + (t / 4.0 + 8) * u;
    w.sink = std::exp(sink - w.lse), w.sink_error = argument + w.lse_error;
    for (size_t i = 0; i < score.size(); i++) {
        w.p.push_back(std::exp(score[i] - w.lse));
        // Exponentials below 2^-126 are 0; those of the forward pass are relative to a reference that may differ from
        // the sum by a factor of 2^8.
        w.error[i] += w.p.back() < 0x1p-118 ? 1 : argument + w.lse_error;
    }
    return w;
}

// operand: the relative error of P and dS as operands of tensor cores (bf16), 0 without tensor cores.
inline Reference reference_of(const Attention& a, const Attention::Result& given, double operand) {
    const double u = 2 * acc_roundoff(a.type), round = 1.01 * unit_roundoff(a.type), mul = a.softmax_mul;
    const double chain = static_cast<double>(a.T * (a.NH / a.NKV) + 16) * u;   // error of sums over T
    const std::vector<double> qkv = a.qkv.values(), douts = a.dout.values(), outs = given.out.values();
    Reference r;
    r.out.resize(outs.size()), r.out_error = r.out;
    r.dqkv.resize(qkv.size()), r.dqkv_error = r.dqkv;
    r.lse.resize(static_cast<size_t>(a.B * a.T * a.NH)), r.lse_error = r.delta = r.delta_error = r.lse;
    r.dsinks.resize(a.sinks.size(), Attention::kDsink), r.dsinks_error.resize(a.sinks.size());
    auto add_query = [&](int64_t task) {
        const int64_t t = task % a.T, h = task / a.T % a.NH, b = task / a.T / a.NH;
        const Probabilities w = probabilities_of(a, qkv, b, h, t);
        const int64_t row = a.row(b, t, h), o = a.o(b, t, h), q = a.q(b, t, h);
        r.lse[row] = w.lse, r.lse_error[row] = w.lse_error + u * std::fabs(w.lse);
        double delta = 0, delta_error = 0;
        for (int64_t d = 0; d < a.HS; d++) {
            double term = douts[o + d] * outs[o + d];
            delta += term, delta_error += (a.HS + 4) * u * std::fabs(term);
        }
        r.delta[row] = delta, r.delta_error[row] = delta_error;
        if (!a.sinks.empty()) {
            r.dsinks[h] -= w.sink * delta;
            r.dsinks_error[h] += w.sink * (std::fabs(delta) * (w.sink_error + static_cast<double>(a.B * a.T + 16) * u)
                                           + delta_error);
        }
        for (int64_t j = w.first; j <= t; j++) {
            const int64_t k = a.k(b, j, h), v = a.v(b, j, h);
            const double p = w.p[j - w.first], own_error = w.error[j - w.first], p_error = own_error + operand;
            double dp = 0, dp_error = 0;
            for (int64_t d = 0; d < a.HS; d++) {
                double term = douts[o + d] * qkv[v + d];
                dp += term, dp_error += (a.HS + 4) * u * std::fabs(term);
                r.out[o + d] += p * qkv[v + d];
                r.out_error[o + d] += p * std::fabs(qkv[v + d]) * (p_error + chain);
                r.dqkv[v + d] += p * douts[o + d];
                r.dqkv_error[v + d] += p * std::fabs(douts[o + d]) * (p_error + chain);
            }
            const double slope = w.slope[j - w.first], slope_error = w.slope_error[j - w.first];
            const double ds = p * (dp - delta) * mul * slope;
            const double ds_error = std::fabs(ds) * (operand + chain)
                                    + p * mul * (slope + slope_error)
                                          * (own_error * (std::fabs(dp) + std::fabs(delta)) + dp_error + delta_error
                                             + 4 * u * (std::fabs(dp) + std::fabs(delta)))
                                    + p * mul * slope_error * (std::fabs(dp) + std::fabs(delta));
            for (int64_t d = 0; d < a.HS; d++) {
                r.dqkv[q + d] += ds * qkv[k + d], r.dqkv_error[q + d] += ds_error * std::fabs(qkv[k + d]);
                r.dqkv[k + d] += ds * qkv[q + d], r.dqkv_error[k + d] += ds_error * std::fabs(qkv[q + d]);
            }
        }
    };
    const int64_t group = a.NH / a.NKV * a.T;   // tasks that add to the same dk and dv
#pragma omp parallel for if (a.sinks.empty())   // a sink's gradient is a sum over sequences
    for (int64_t head = 0; head < a.B * a.NKV; head++)
        for (int64_t task = head * group; task < (head + 1) * group; task++) add_query(task);
    auto add_rounding = [&](const std::vector<double>& value, std::vector<double>& error) {
        for (size_t i = 0; i < value.size(); i++)
            error[i] += round * (std::fabs(value[i]) + error[i]) + kTiny;
    };
    for (size_t h = 0; h < r.dsinks.size(); h++)
        r.dsinks_error[h] += 1.01 * unit_roundoff(given.dsinks.dtype()) * (std::fabs(r.dsinks[h]) + r.dsinks_error[h]);
    add_rounding(r.out, r.out_error), add_rounding(r.dqkv, r.dqkv_error);
    return r;
}

inline void check_attention(const Attention& a, const Attention::Result& got, const Attention::Result& given,
                            double operand = 0) {
    const Reference want = reference_of(a, given, operand);
    auto check = [](const char* name, const HostTensor& value, const std::vector<double>& expected,
                    const std::vector<double>& error) {
        HostTensor tensor(Dtype::kFp64, static_cast<int64_t>(expected.size()));
        for (int64_t i = 0; i < tensor.elems(); i++) tensor.set(i, expected[i]);
        check_close(name, value, tensor, [&](int64_t i) { return error[i]; });
    };
    check("out", got.out, want.out, want.out_error);
    check("lse", got.lse, want.lse, want.lse_error);
    check("delta", got.delta, want.delta, want.delta_error);
    if (!a.sinks.empty()) check("dsinks", got.dsinks, want.dsinks, want.dsinks_error);
    // dk of a single key is 0 except for rounding, so a wrong element cannot be detected there.
    if (a.T > 1) check("dqkv", got.dqkv, want.dqkv, want.dqkv_error);
}

// The results without sinks, with sinks of -infinity, and with sinks of 8192.
inline void check_extreme_sinks(const Attention& a, const Attention::Result& none, const Attention::Result& lowest,
                                const Attention::Result& large) {
    INFO(a.name());
    CHECK((lowest.out.same_bits(none.out) && lowest.lse.same_bits(none.lse) && lowest.dqkv.same_bits(none.dqkv)));
    int64_t wrong = 0;
    for (int64_t i = 0; i < large.out.elems(); i++) wrong += large.out.get(i) != 0;
    for (int64_t i = 0; i < large.lse.elems(); i++) wrong += std::fabs(large.lse.get(i) - 8192) > 8192 * 0x1p-22;
    for (int64_t h = 0; h < a.NH; h++)
        wrong += (lowest.dsinks.get(h) != Attention::kDsink) + (large.dsinks.get(h) != Attention::kDsink);
    CHECK_EQ(wrong, 0);
}

// Counts the results of rows [begin, begin + rows) of sequence b that differ from those of another problem.
inline int64_t differences(const Attention& a, const Attention::Result& x, int64_t b, int64_t begin, int64_t rows,
                           const Attention& other, const Attention::Result& y, int64_t other_b, int64_t other_begin) {
    int64_t count = 0;
    for (int64_t t = 0; t < rows; t++) {
        const int64_t at = a.q(b, begin + t, 0), out = a.o(b, begin + t, 0);
        const int64_t other_at = other.q(other_b, other_begin + t, 0), other_out = other.o(other_b, other_begin + t, 0);
        for (int64_t i = 0; i < a.width(); i++) count += x.dqkv.get(at + i) != y.dqkv.get(other_at + i);
        for (int64_t i = 0; i < a.NH * a.HS; i++) count += x.out.get(out + i) != y.out.get(other_out + i);
        for (int64_t h = 0; h < a.NH; h++) {
            const int64_t row = a.row(b, begin + t, h), other_row = other.row(other_b, other_begin + t, h);
            count += (x.lse.get(row) != y.lse.get(other_row)) + (x.delta.get(row) != y.delta.get(other_row));
        }
    }
    return count;
}

}  // namespace op_test
