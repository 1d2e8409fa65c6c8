// FP8 attention of the CPU: quantize_heads against its definition, and the forward pass against loops in double.
#include "tests/support/reference_attention_fp8.h"

using namespace documents_test;
using namespace op_test;

namespace attention_fp8_test {

namespace {

// Code of element d of a token of a head in the layout of Fp8Heads.
uint8_t code_at(const Fp8Attention& a, const Fp8Attention::Result& r, int64_t b, int64_t head, int64_t t, int64_t d) {
    const int64_t block = (b * a.heads() + head) * head_blocks(a.T) + t / kHeadBlock, token = t % kHeadBlock;
    const auto* codes = static_cast<const uint8_t*>(r.bytes.data()) + block * kHeadBlock * a.HS;
    if (head < a.NH + a.NKV) return codes[token * a.HS + d];
    for (int64_t i = 0; i < 16; i++)
        if (head_token_order(i) == token % 16) return codes[d * kHeadBlock + token / 16 * 16 + i];
    return 0;
}

void check_copies(const Fp8Attention& a, const HostTensor& before, const Fp8Attention::Result& r) {
    int64_t wrong = 0;
    for (int64_t item = 0; item < a.B * a.heads() * head_blocks(a.T); item++) {
        const int64_t block = item % head_blocks(a.T), head = item / head_blocks(a.T) % a.heads();
        const int64_t b = item / head_blocks(a.T) / a.heads(), first = block * kHeadBlock;
        const int64_t end = std::min(a.T, first + kHeadBlock);
        float amax = 0;
        for (int64_t t = first; t < end; t++)
            for (int64_t d = 0; d < a.HS; d++)
                amax = std::max(amax, std::fabs(static_cast<float>(before.get(a.q(b, t, head) + d))));
        const auto scale_inv = static_cast<float>(r.scales.get(item));
        int exponent;
        wrong += std::frexp(scale_inv, &exponent) != 0.5f;                       // a power of two
        wrong += amax > 0 && (amax / scale_inv > 448 || amax / scale_inv <= 224);   // as small as possible
        for (int64_t t = first; t < end; t++)
            for (int64_t d = 0; d < a.HS; d++) {
                const int64_t i = a.q(b, t, head) + d;
                const uint8_t code = code_at(a, r, b, head, t, d);
                wrong += code != to_fp8(Dtype::kE4m3, static_cast<float>(before.get(i)) / scale_inv);
                wrong += r.qkv.get(i) != static_cast<double>(from_fp8(Dtype::kE4m3, code)) * scale_inv;
            }
    }
    CHECK_EQ(wrong, 0);
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
        check_copies(a, qkv, r);
        CHECK(a.on_cpu(r.qkv).qkv.same_bits(r.qkv));   // idempotent
        // Elements beyond T are 0.
        int64_t codes = 0, there = 0;
        const auto* bytes = static_cast<const uint8_t*>(r.bytes.data());
        for (int64_t i = 0; i < r.bytes.elems(); i++) codes += bytes[i] % 128 != 0;
        for (int64_t i = 0; i < r.qkv.elems(); i++) there += r.qkv.get(i) != 0;
        CHECK_EQ(codes, there);
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
        CHECK_EQ(r.scales.get(2 * 3 + 1), 1.0);
    }
}

TEST_CASE("cpu FP8 attention against loops in double") {
    for (const Fp8Attention& a :
         {Fp8Attention{2, 1, 2, 1, 64}, Fp8Attention{1, 17, 4, 2, 128}, Fp8Attention{1, 129, 8, 1, 64},
          Fp8Attention{2, 300, 2, 2, 64}, Fp8Attention{1, 300, 2, 1, 128, 4},
          with_documents(Fp8Attention{2, 200, 2, 1, 64}, {{1, 130, 69}, {128, 72}}),
          with_window(Fp8Attention{1, 300, 2, 1, 64}, 129), with_window(Fp8Attention{2, 200, 2, 1, 128}, 7),
          with_documents(with_window(Fp8Attention{2, 200, 2, 1, 64}, 100), {{1, 130, 69}, {128, 72}})}) {
        INFO(a.name());
        check_fp8_attention(a, a.on_cpu(a.random_qkv()), false);
    }
    // Tests on GPUs use the wider bounds of tensor cores, which must also detect a changed element.
    for (const Fp8Attention& a : {Fp8Attention{1, 129, 4, 2, 64}, Fp8Attention{2, 193, 4, 1, 128}})
        check_fp8_attention(a, a.on_cpu(a.random_qkv()), true);
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
