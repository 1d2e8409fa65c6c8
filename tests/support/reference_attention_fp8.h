// FP8 attention: packed QKV, results of the CPU, and attention in double with error bounds for P in E4M3 and for tensor
// cores, which keep 14 bits of a sum of E4M3 products.
#pragma once
#include "llmc/base/fp8.h"
#include "tests/support/reference_attention.h"

namespace op_test {

struct Fp8Attention : AttentionShape {
    int64_t blocks() const { return B * heads() * head_blocks(T); }
    // V differs in magnitude between tokens.
    HostTensor random_qkv(uint64_t key = 1) const {
        HostTensor qkv = growing_qkv(Dtype::kBf16, key);
        for (int64_t i = 0; i < qkv.elems(); i++)
            if (i % width() / HS >= NH + NKV)
                qkv.set(i, qkv.get(i) * std::ldexp(1.0, static_cast<int>(i / width() / 64 % 3)));
        return qkv;
    }
    // The same with the largest sums of integers: one element of each mixed group is set, so that all become +-127.
    HostTensor largest_sums() const {
        HostTensor qkv = random_qkv();
        for (int64_t i = 0; i < qkv.elems(); i++) {
            const int64_t n = i / width(), head = i % width() / HS, d = i % HS;
            if (head >= NH + NKV) continue;
            qkv.set(i, d >= HS / 2 || d % 8 > 0 ? 0.0 : (n * (head + 3) + d / 8 * (n % 5)) % 7 < 3 ? -1.0 : 1.0);
        }
        return qkv;
    }
    QuantizeHeadsArgs quantize_args(Fp8Heads fp8_heads, Tensor qkv, Tensor cos_sin) const {
        return {.heads = fp8_heads, .qkv = qkv, .cos_sin = cos_sin, .B = B, .T = T, .NH = NH, .NKV = NKV, .HS = HS};
    }
    struct Result {
        HostTensor qkv, bytes, scales, out, lse;
    };
    // Of a token, numbered as in q(): its block, and its codes there (Q and K).
    int64_t block(int64_t b, int64_t t, int64_t head) const {
        return (b * heads() + head) * head_blocks(T) + t / kHeadBlock;
    }
    const int8_t* integers(const Result& r, int64_t b, int64_t t, int64_t head) const {
        return static_cast<const int8_t*>(r.bytes.data()) + (block(b, t, head) * kHeadBlock + t % kHeadBlock) * HS;
    }
    // What attention computes with, in double: Q and K mixed, as their integers times scale_inv, and V as written back.
    HostTensor operands(const Result& r) const {
        HostTensor x = r.qkv.to(Dtype::kFp64);
        for (int64_t row = 0; row < B * T * (NH + NKV); row++) {
            const int64_t head = row % (NH + NKV), b = row / (NH + NKV) / T, t = row / (NH + NKV) % T;
            for (int64_t d = 0; d < HS; d++)
                x.set(q(b, t, head) + d, integers(r, b, t, head)[d] * r.scales.get(block(b, t, head)));
        }
        return x;
    }
    Result fresh(const HostTensor& qkv) const {
        return {qkv, HostTensor(Dtype::kE4m3, blocks() * kHeadBlock * HS), HostTensor(Dtype::kFp32, blocks()),
                HostTensor(Dtype::kBf16, B * T * NH * HS), HostTensor(Dtype::kFp32, B * NH * T)};
    }
    Result on_cpu(const HostTensor& qkv, Tensor cos_sin = {}) const {
        Result r = fresh(qkv);
        HostTensor s = sink_tensor(Dtype::kBf16);
        const Fp8Heads fp8_heads{r.bytes.view(), r.scales.view()};
        Ctx ctx;
        cpu::quantize_heads(ctx, quantize_args(fp8_heads, r.qkv.view(), cos_sin));
        cpu::attention_forward(ctx, forward_args(r.out.view(), r.lse.view(), r.qkv.view(), ranges(), fp8_heads,
                                                 s.view()));
        return r;
    }
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

// Computes attention of the quantized heads in double.
inline Fp8Reference fp8_attention_reference(const Fp8Attention& a, const Fp8Attention::Result& quantised,
                                            bool tensor_cores) {
    const double u = 2 * 0x1p-24;   // a rounding of fp32
    const std::vector<double> x = a.operands(quantised).values();
    Fp8Reference r{HostTensor(Dtype::kFp64, a.B * a.T * a.NH * a.HS), HostTensor(Dtype::kFp64, a.B * a.NH * a.T), {},
                   {}};
    r.out_error.resize(static_cast<size_t>(r.out.elems())), r.lse_error.resize(static_cast<size_t>(r.lse.elems()));
    for (int64_t task = 0; task < a.B * a.NH * a.T; task++) {
        const int64_t t = task % a.T, h = task / a.T % a.NH, b = task / a.T / a.NH;
        const int64_t first = a.start(b, t), count = t - first + 1;
        std::vector<double> p(static_cast<size_t>(count)), p_error(p.size());
        double largest = -1e300, sum = 0, most_error = 0, spread = 0;
        for (int64_t j = 0; j < count; j++) {
            double dot = 0;
            for (int64_t d = 0; d < a.HS; d++)
                dot += x[a.q(b, t, h) + d] * x[a.k(b, first + j, h) + d] * a.softmax_mul;
            // Sums of integers are exact, the factors of a score rounded. `unit` is the score of an integer of 1. A
            // score is (integer + 1.5 * 2^23) unit - (reference + 1.5 * 2^23 unit). The subtrahend is off by at most
            // 2^-24 of itself when it is rounded: by 3/4 of a unit and u / 2 of the reference.
            const double unit = quantised.scales.get(a.block(b, t, h)) * a.softmax_mul
                                * quantised.scales.get(a.block(b, first + j, a.NH + h / (a.NH / a.NKV)));
            p[j] = dot, p_error[j] = 8 * u * std::fabs(dot) + 0.75 * unit;
            largest = std::max(largest, dot), most_error = std::max(most_error, p_error[j]);
            spread = std::max(spread, std::fabs(dot));
        }
        const double sink = a.sinks.empty() ? -HUGE_VAL : a.sinks[static_cast<size_t>(h)];
        const double most = std::max(largest, sink);
        if (!a.sinks.empty()) spread = std::max(spread, std::fabs(sink));
        for (int64_t j = 0; j < count; j++) sum += std::exp(p[j] - most);
        const double lse = most + std::log(sum + std::exp(sink - most));
        const double argument = u * (6 * spread + 4 * std::fabs(lse) + 16);
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

// Compares with the reference. An error of 1/4 in one element must be detected.
inline void check_fp8_attention(const Fp8Attention& a, const Fp8Attention::Result& got, bool tensor_cores) {
    const Fp8Reference want = fp8_attention_reference(a, got, tensor_cores);
    check_close("out", got.out, want.out, [&](int64_t i) { return want.out_error[i]; }, 1.0 / 4);
    check_close("lse", got.lse, want.lse, [&](int64_t i) { return want.lse_error[i]; }, 1.0 / 4);
}

}  // namespace op_test
