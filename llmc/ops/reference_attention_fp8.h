// FP8 attention: packed QKV, results of the CPU, and attention in double with error bounds for P in E4M3 and for tensor
// cores, which keep 14 bits of a sum.
#pragma once
#include <algorithm>

#include "llmc/ops/reference.h"

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

// Computes attention in double. quantised: the qkv that quantize_heads has written back.
Fp8Reference fp8_attention_reference(const Fp8Attention& a, const HostTensor& quantised, bool tensor_cores);

}  // namespace reference
