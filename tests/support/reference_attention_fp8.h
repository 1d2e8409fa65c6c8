// FP8 attention: packed QKV, results of the CPU, and attention in double with error bounds for P in E4M3 and for tensor
// cores, which keep 14 bits of a sum.
#pragma once
#include <algorithm>

#include "tests/support/reference.h"

namespace reference {

struct Fp8Attention {
    int64_t B, T, NH, NKV, HS;
    double magnitude = 1;
    std::vector<int32_t> documents = {};   // as AttentionForwardArgs::documents; may be empty
    int64_t window = 0;                    // as AttentionForwardArgs::window

    int64_t heads() const { return NH + 2 * NKV; }
    int64_t width() const { return heads() * HS; }
    int64_t blocks() const { return B * heads() * head_blocks(T); }
    float softmax_mul() const { return 1.3f / std::sqrt(static_cast<float>(HS)); }
    const int32_t* ranges() const { return documents.empty() ? nullptr : documents.data(); }
    // First key that a query attends to.
    int64_t start(int64_t b, int64_t t) const {
        const int64_t document = documents.empty() ? 0 : documents[static_cast<size_t>(b * T + t)];
        return window > 0 ? std::max(document, t - window + 1) : document;
    }
    // Keys grow along the sequence, so that the largest score keeps moving. V differs in magnitude between tokens.
    HostTensor random_qkv(uint64_t key = 1) const {
        HostTensor qkv = random_tensor(Dtype::kBf16, B * T * width(), key, magnitude);
        for (int64_t i = 0; i < qkv.elems(); i++) {
            const int64_t n = i / width(), head = i % width() / HS;
            const double growth = 0.5 + 2.0 * static_cast<double>(n % T) / static_cast<double>(T);
            const double spread = std::ldexp(1.0, static_cast<int>(n / 64 % 3));
            qkv.set(i, qkv.get(i) * (head < NH ? 1 : head < NH + NKV ? growth : spread));
        }
        return qkv;
    }
    QuantizeHeadsArgs quantize_args(Fp8Heads fp8_heads, Tensor qkv, Tensor cos_sin) const {
        return {.heads = fp8_heads, .qkv = qkv, .cos_sin = cos_sin, .B = B, .T = T, .NH = NH, .NKV = NKV, .HS = HS};
    }
    AttentionForwardArgs forward_args(Tensor out, Tensor lse, Tensor qkv, Fp8Heads fp8_heads,
                                      const int32_t* ranges) const {
        return {.out = out, .lse = lse, .qkv = qkv, .B = B, .T = T, .NH = NH, .NKV = NKV, .HS = HS,
                .softmax_mul = softmax_mul(), .documents = ranges, .window = window, .heads = fp8_heads};
    }
    struct Result {
        HostTensor qkv, bytes, scales, out, lse;
    };
    Result fresh(const HostTensor& qkv) const {
        return {qkv, HostTensor(Dtype::kE4m3, blocks() * kHeadBlock * HS), HostTensor(Dtype::kFp32, blocks()),
                HostTensor(Dtype::kBf16, B * T * NH * HS), HostTensor(Dtype::kFp32, B * NH * T)};
    }
    Result on_cpu(const HostTensor& qkv, Tensor cos_sin = {}) const {
        Result r = fresh(qkv);
        const Fp8Heads fp8_heads{r.bytes.view(), r.scales.view()};
        Ctx ctx;
        cpu::quantize_heads(ctx, quantize_args(fp8_heads, r.qkv.view(), cos_sin));
        cpu::attention_forward(ctx, forward_args(r.out.view(), r.lse.view(), r.qkv.view(), fp8_heads, ranges()));
        return r;
    }
    int64_t q(int64_t b, int64_t t, int64_t h) const { return ((b * T + t) * heads() + h) * HS; }
    int64_t k(int64_t b, int64_t t, int64_t h) const { return q(b, t, NH + h / (NH / NKV)); }
    int64_t v(int64_t b, int64_t t, int64_t h) const { return k(b, t, h) + NKV * HS; }
};

struct Fp8Reference {
    HostTensor out, lse;
    std::vector<double> out_error, lse_error;
};

// Error bound of a sum in tensor cores, which add `step` terms at a time and truncate each term and the accumulator
// 2^-13 below the largest of them.
class SumLoss {
public:
    explicit SumLoss(int64_t step) : step_(step) {}
    void add(double term) {
        largest_ = std::max(largest_, std::fabs(term));
        sum_ += term;
        if (++count_ % step_ == 0) close();
    }
    void close() {
        loss_ += static_cast<double>(step_ + 1) * 0x1p-13 * std::max({largest_, std::fabs(sum_), before_});
        before_ = std::fabs(sum_), largest_ = 0;
    }
    double loss() const { return loss_; }

private:
    int64_t step_, count_ = 0;
    double sum_ = 0, before_ = 0, largest_ = 0, loss_ = 0;
};

// Computes attention in double. quantised: the qkv that quantize_heads has written back.
inline Fp8Reference fp8_attention_reference(const Fp8Attention& a, const HostTensor& quantised, bool tensor_cores) {
    const double u = 2 * 0x1p-24;   // a rounding of fp32
    const std::vector<double> x = quantised.values();
    Fp8Reference r{HostTensor(Dtype::kFp64, a.B * a.T * a.NH * a.HS), HostTensor(Dtype::kFp64, a.B * a.NH * a.T), {},
                   {}};
    r.out_error.resize(static_cast<size_t>(r.out.elems())), r.lse_error.resize(static_cast<size_t>(r.lse.elems()));
    for (int64_t task = 0; task < a.B * a.NH * a.T; task++) {
        const int64_t t = task % a.T, h = task / a.T % a.NH, b = task / a.T / a.NH;
        const int64_t first = a.start(b, t), count = t - first + 1;
        std::vector<double> p(static_cast<size_t>(count)), p_error(p.size());
        double largest = -1e300, sum = 0, most_error = 0, spread = 0;
        for (int64_t j = 0; j < count; j++) {
            SumLoss loss(32);
            double dot = 0, size = 0;
            for (int64_t d = 0; d < a.HS; d++) {
                const double term = x[a.q(b, t, h) + d] * x[a.k(b, first + j, h) + d] * a.softmax_mul();
                dot += term, size += std::fabs(term), loss.add(term);
            }
            p[j] = dot, p_error[j] = (a.HS + 8) * u * size + (tensor_cores ? loss.loss() : 0);
            largest = std::max(largest, dot), most_error = std::max(most_error, p_error[j]);
            spread = std::max(spread, std::fabs(dot));
        }
        for (int64_t j = 0; j < count; j++) sum += std::exp(p[j] - largest);
        const double lse = largest + std::log(sum), argument = u * (6 * spread + 4 * std::fabs(lse) + 16);
        r.lse.set(task, lse), r.lse_error[task] = most_error + argument + (static_cast<double>(count) + 16) * u;
        // The error of P in E4M3 is half a unit in the last place, or half the smallest subnormal number. P is scaled
        // so that the largest is at least 2^8.
        const double floor = std::exp(largest - lse) * 0x1p-18 * 1.1;
        for (int64_t j = 0; j < count; j++) {
            p[j] = std::exp(p[j] - lse);
            p_error[j] = p[j] * (std::expm1(p_error[j] + r.lse_error[task] + argument) * 1.07 + 0x1p-4) + floor;
        }
        for (int64_t d = 0; d < a.HS; d++) {
            const int64_t i = ((b * a.T + t) * a.NH + h) * a.HS + d;
            double out = 0, error = 0, size = 0, lost = 0;
            SumLoss loss(32);
            for (int64_t j = 0; j < count; j++) {
                const double value = x[a.v(b, first + j, h) + d];
                out += p[j] * value, error += p_error[j] * std::fabs(value), size += p[j] * std::fabs(value);
                loss.add(p[j] * value);
                if ((first + j) % kHeadBlock == kHeadBlock - 1) loss.close(), lost += loss.loss(), loss = SumLoss(32);
            }
            loss.close(), lost += loss.loss();
            error += (tensor_cores ? 2 * lost : 0) + (static_cast<double>(count) + 16) * u * size;
            r.out.set(i, out), r.out_error[i] = error + 1.01 * 0x1p-8 * (std::fabs(out) + error) + kTiny;
        }
    }
    return r;
}

}  // namespace reference
