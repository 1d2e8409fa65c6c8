// FP8 attention of the CPU: quantize_heads against its definition, and the forward pass against loops in double.
#include <bit>
#include <functional>

#include "tests/support/reference_attention_fp8.h"

using namespace documents_test;
using namespace op_test;

namespace attention_fp8_test {

namespace {

// Code of element d of a token of a head of V in the layout of Fp8Heads.
uint8_t code_at(const Fp8Attention& a, const Fp8Attention::Result& r, int64_t b, int64_t head, int64_t t, int64_t d) {
    const auto* codes = static_cast<const uint8_t*>(r.bytes.data()) + a.block(b, t, head) * kHeadBlock * a.HS;
    for (int64_t i = 0; i < 16; i++)
        if (head_token_order(i) == t % 16) return codes[d * kHeadBlock + t % kHeadBlock / 16 * 16 + i];
    return 0;
}

// A token of Q or K times H, from the definition: an element of H is negative if its row and column have an odd number
// of common bits.
std::vector<double> mixed(const Fp8Attention& a, const std::function<double(int64_t)>& x) {
    std::vector<double> out(static_cast<size_t>(a.HS));
    for (int64_t d = 0; d < a.HS; d++) {
        const int64_t first = d % (a.HS / 2) / 8 * 8, row = d % 8 + d / (a.HS / 2) * 8;
        for (int64_t i = 0; i < 16; i++)
            out[d] += (std::popcount(static_cast<uint64_t>(i & row)) % 2 ? -0.25 : 0.25)
                      * x(first + i % 8 + i / 8 * (a.HS / 2));
    }
    return out;
}

// Q and K: integers are those of the mixed values, and what is written back is they mixed again, times scale_inv.
int64_t wrong_integers(const Fp8Attention& a, const HostTensor& before, const Fp8Attention::Result& r, int64_t b,
                       int64_t head, int64_t first, int64_t end) {
    std::vector<std::vector<double>> x;
    double amax = 0;
    for (int64_t t = first; t < end; t++) {
        x.push_back(mixed(a, [&](int64_t d) { return before.get(a.q(b, t, head) + d); }));
        for (double& value : x.back()) {
            value = static_cast<float>(bf16(static_cast<float>(value)));
            amax = std::max(amax, std::fabs(value));
        }
    }
    const double scale_inv = r.scales.get(a.block(b, first, head));
    int64_t wrong = amax > 0 && std::fabs(127 * scale_inv / amax - 1) > 0x1p-22;
    for (int64_t t = first; t < end; t++) {
        const int8_t* codes = a.integers(r, b, t, head);
        const std::vector<double> back = mixed(a, [&](int64_t d) { return codes[d] * scale_inv; });
        for (int64_t d = 0; d < a.HS; d++) {
            // bf16 of a sum in fp32 may be off by one unit in the last place.
            const double value = x[t - first][d] / scale_inv;
            wrong += std::fabs(codes[d] - value) > 0.5 + 0x1p-7 * std::fabs(value) + 0x1p-16;
            wrong += std::fabs(r.qkv.get(a.q(b, t, head) + d) - back[d]) > 0x1.01p-8 * std::fabs(back[d]) + 1e-30;
        }
    }
    const int64_t past = end < a.T ? 0 : head_blocks(a.T) * kHeadBlock - a.T;   // elements beyond T are 0
    for (int64_t i = 0; i < past * a.HS; i++) wrong += a.integers(r, b, end - 1, head)[a.HS + i] != 0;
    return wrong;
}

int64_t wrong_values(const Fp8Attention& a, const HostTensor& before, const Fp8Attention::Result& r, int64_t b,
                     int64_t head, int64_t first, int64_t end) {
    float amax = 0;
    for (int64_t t = first; t < end; t++)
        for (int64_t d = 0; d < a.HS; d++)
            amax = std::max(amax, std::fabs(static_cast<float>(before.get(a.q(b, t, head) + d))));
    const auto scale_inv = static_cast<float>(r.scales.get(a.block(b, first, head)));
    int exponent;
    int64_t wrong = std::frexp(scale_inv, &exponent) != 0.5f;                  // a power of two
    wrong += amax > 0 && (amax / scale_inv > 448 || amax / scale_inv <= 224);   // as small as possible
    for (int64_t t = first; t < first + kHeadBlock; t++)
        for (int64_t d = 0; d < a.HS; d++) {
            const int64_t i = a.q(b, t, head) + d;
            const uint8_t code = code_at(a, r, b, head, t, d);
            if (t >= end) {
                wrong += code != 0;
                continue;
            }
            wrong += code != to_fp8(Dtype::kE4m3, static_cast<float>(before.get(i)) / scale_inv);
            wrong += r.qkv.get(i) != static_cast<double>(from_fp8(Dtype::kE4m3, code)) * scale_inv;
        }
    return wrong;
}

int64_t wrong_copies(const Fp8Attention& a, const HostTensor& before, const Fp8Attention::Result& r) {
    int64_t wrong = 0;
    for (int64_t item = 0; item < a.blocks(); item++) {
        const int64_t first = item % head_blocks(a.T) * kHeadBlock, end = std::min(a.T, first + kHeadBlock);
        const int64_t head = item / head_blocks(a.T) % a.heads(), b = item / head_blocks(a.T) / a.heads();
        wrong += (head < a.NH + a.NKV ? wrong_integers : wrong_values)(a, before, r, b, head, first, end);
    }
    return wrong;
}

}  // namespace

TEST_CASE("cpu quantize_heads: codes, scales, and QKV dequantized in place") {
    for (const Fp8Attention& a : {Fp8Attention{2, 1, 2, 1, 64}, Fp8Attention{1, 17, 4, 2, 128},
                                  Fp8Attention{2, 128, 1, 1, 64, 100}, Fp8Attention{1, 129, 8, 1, 64, 1e-3},
                                  Fp8Attention{2, 300, 3, 3, 128, 7}}) {
        INFO(a.name());
        HostTensor qkv = a.random_qkv();
        for (int64_t d = 0; d < a.HS; d++)   // a head of zeros
            for (int64_t t = 0; t < a.T; t++) qkv.set(a.q(a.B - 1, t, 0) + d, 0);
        const Fp8Attention::Result r = a.on_cpu(qkv);
        CHECK_EQ(wrong_copies(a, qkv, r), 0);
        Fp8Attention::Result other = r;   // a changed code is found
        auto* bytes = static_cast<uint8_t*>(other.bytes.data());
        bytes[a.block(0, 0, a.NH) * kHeadBlock * a.HS] += 2;
        CHECK(wrong_copies(a, qkv, other) > 0);
    }
}

TEST_CASE("cpu quantize_heads rotates as rope does") {
    const Fp8Attention a{2, 150, 4, 2, 64};
    HostTensor turned = a.random_qkv(), angles = angle_table(a.T, a.HS);
    Ctx ctx;
    const Fp8Attention::Result fused = a.on_cpu(turned, angles.view());
    cpu::rope_forward(ctx, {.qkv = turned.view(), .cos_sin = angles.view(), .N = a.B * a.T, .T = a.T, .NH = a.NH,
                            .NKV = a.NKV, .HS = a.HS});
    const Fp8Attention::Result apart = a.on_cpu(turned);
    CHECK(fused.qkv.same_bits(apart.qkv));
    CHECK(fused.bytes.same_bits(apart.bytes));
}

TEST_CASE("cpu quantize_heads: a value that is not finite makes only its block NaN") {
    const Fp8Attention a{1, 300, 2, 1, 64};
    for (double bad : {std::nan(""), HUGE_VAL, -HUGE_VAL}) {
        HostTensor qkv = a.random_qkv();
        qkv.set(a.q(0, 130, 2) + 5, bad);
        const Fp8Attention::Result r = a.on_cpu(qkv);
        for (int64_t i = 0; i < qkv.elems(); i++) {
            const int64_t t = i / a.width(), head = i % a.width() / a.HS;
            if (std::isnan(r.qkv.get(i)) == (head == 2 && t / kHeadBlock == 1)) continue;
            FAIL("token ", t, " head ", head);
        }
        CHECK(std::isnan(r.scales.get(2 * 3 + 1)));
    }
}

TEST_CASE("cpu FP8 attention against loops in double") {
    for (const Fp8Attention& a :
         {Fp8Attention{2, 1, 2, 1, 64}, Fp8Attention{1, 17, 4, 2, 128}, Fp8Attention{1, 129, 8, 1, 64},
          Fp8Attention{2, 300, 2, 2, 64}, Fp8Attention{1, 300, 2, 1, 128, 4},
          with_documents(Fp8Attention{2, 200, 2, 1, 64}, {{1, 130, 69}, {128, 72}}),
          with_window(Fp8Attention{1, 300, 2, 1, 64}, 129), with_window(Fp8Attention{2, 200, 2, 1, 128}, 7),
          with_documents(with_window(Fp8Attention{2, 200, 2, 1, 64}, 100), {{1, 130, 69}, {128, 72}}),
          with_sinks(Fp8Attention{1, 300, 8, 2, 64}), with_sinks(with_window(Fp8Attention{2, 150, 4, 1, 128}, 1)),
          with_sinks(with_documents(with_window(Fp8Attention{2, 200, 4, 1, 64}, 100), {{1, 130, 69}, {128, 72}}))}) {
        INFO(a.name());
        check_fp8_attention(a, a.on_cpu(a.random_qkv()), false);
    }
    // Tests on GPUs use the wider bounds of tensor cores, which must also detect a changed element.
    for (const Fp8Attention& a : {Fp8Attention{1, 129, 4, 2, 64}, Fp8Attention{2, 193, 4, 1, 128},
                                  with_sinks(Fp8Attention{2, 193, 4, 1, 128})})
        check_fp8_attention(a, a.on_cpu(a.random_qkv()), true);
}

TEST_CASE("cpu FP8 attention: the largest score of each head") {
    for (const AttentionShape& s : {AttentionShape{2, 150, 4, 2, 64}, AttentionShape{1, 300, 2, 2, 128}}) {
        const Fp8Attention a{s};
        Fp8Attention::Result r = a.on_cpu(a.random_qkv());
        check_max_logits(a, a.operands(r).values(), HostTensor(Dtype::kFp32, a.NH), 8, [&](HostTensor& logits) {
            AttentionForwardArgs args = a.forward_args(r.out.view(), r.lse.view(), r.qkv.view(), nullptr,
                                                       {r.bytes.view(), r.scales.view()});
            args.max_logits = logits.as<float>();
            Ctx ctx;
            cpu::attention_forward(ctx, args);
        });
    }
}

TEST_CASE("cpu FP8 attention: the largest sums of integers") {
    for (int64_t HS : {64, 128}) {
        const Fp8Attention a{1, 150, 4, 2, HS};
        const Fp8Attention::Result r = a.on_cpu(a.largest_sums());
        for (int64_t d = 0; d < HS; d++) CHECK_EQ(std::abs(a.integers(r, 0, 149, 5)[d]), 127);
        check_fp8_attention(a, r, false);
    }
}

// With context parallelism a rank has a part of the heads.
TEST_CASE("cpu quantize_heads: the bits of a head do not depend on the other heads") {
    const Fp8Attention a{2, 150, 4, 2, 64}, part{2, 150, 2, 1, 64};
    const HostTensor all = a.random_qkv();
    HostTensor own(Dtype::kBf16, part.B * part.T * part.width());
    const auto from = [&](int64_t i) {   // the second half of the heads
        const int64_t head = i % part.width() / 64;
        return i / part.width() * a.width() + (head < 2 ? 2 + head : head == 2 ? 5 : 7) * 64 + i % 64;
    };
    for (int64_t i = 0; i < own.elems(); i++)
        own.set(i, all.get(from(i)));
    const Fp8Attention::Result whole = a.on_cpu(all), half = part.on_cpu(own);
    int64_t wrong = 0;
    for (int64_t i = 0; i < own.elems(); i++)
        wrong += half.qkv.get(i) != whole.qkv.get(from(i));
    for (int64_t i = 0; i < half.out.elems(); i++)
        wrong += half.out.get(i) != whole.out.get(i / 128 * 256 + 128 + i % 128);
    CHECK_EQ(wrong, 0);
}

// The largest P is exact, so attention to one key returns its value.
TEST_CASE("cpu FP8 attention to one key returns its value") {
    const Fp8Attention a = with_documents(Fp8Attention{1, 5, 1, 1, 64}, {{1, 1, 1, 2}});
    const Fp8Attention::Result r = a.on_cpu(a.random_qkv());
    for (int64_t t = 0; t < 4; t++)
        for (int64_t d = 0; d < a.HS; d++) CHECK_EQ(r.out.get(t * a.HS + d), r.qkv.get(a.v(0, t, 0) + d));
}

TEST_CASE("cpu FP8 attention supports only bf16") {
    const Fp8Attention a{1, 3, 1, 1, 64};
    Fp8Attention::Result r = a.on_cpu(a.random_qkv());
    HostTensor wide = r.qkv.to(Dtype::kFp32), out(Dtype::kFp32, r.out.elems());
    Ctx ctx;
    CHECK_THROWS_AS(cpu::attention_forward(ctx, a.forward_args(out.view(), r.lse.view(), wide.view(), nullptr,
                                                               {r.bytes.view(), r.scales.view()})), Error);
}

}  // namespace attention_fp8_test
