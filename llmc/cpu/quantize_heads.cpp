// Quantization of packed QKV for FP8 attention. CPU.
#include <cmath>

#include "llmc/cpu/cast_lines.h"

namespace cpu {
namespace {

// `count` tokens of one head from `first` on, row_elems apart.
struct HeadTokens {
    bf16* first;
    int64_t row_elems, count, HS;
    bf16* row(int64_t t) const { return first + t * row_elems; }
};

uint32_t amax_of_block(const HeadTokens& tokens) {
    uint32_t amax_bits = 0;
    for (int64_t t = 0; t < tokens.count; t++) amax_bits = std::max(amax_bits, amax_of_line(tokens.row(t), tokens.HS));
    return amax_bits;
}

// Quantizes a block of V, transposed, and replaces it by the dequantized values.
void quantize_values(const HeadTokens& tokens, uint8_t* codes, float* scale_inv) {
    const uint32_t amax_bits = amax_of_block(tokens);
    const float scale = head_scale_of(amax_bits, false);
    *scale_inv = amax_bits < kInfinityBits ? 1 / scale : 1;
    for (int64_t place = 0; place < kHeadBlock; place++) {
        const int64_t t = place / 16 * 16 + head_token_order(place % 16);
        for (int64_t d = 0; d < tokens.HS; d++) {
            uint8_t& code = codes[d * kHeadBlock + place];
            code = 0;
            if (t >= tokens.count) continue;
            bf16& x = tokens.row(t)[d];
            code = fp8_cast<Dtype::kE4m3>(widen(x) * scale);
            x = bf16(from_fp8(Dtype::kE4m3, code) * *scale_inv);
        }
    }
}

// Mixes a token of Q or K: x(d) = bf16(mul * (what head_mix makes of x)).
template <typename Read> void mix_token(bf16* to, int64_t HS, float mul, Read&& read) {
    for (int64_t first = 0; first < HS / 2; first += 8) {
        float v[16];
        const auto place = [&](int i) { return first + i % 8 + i / 8 * (HS / 2); };
        for (int i = 0; i < 16; i++) v[i] = read(place(i));
        head_mix(v);
        for (int i = 0; i < 16; i++) to[place(i)] = bf16(v[i] * mul);
    }
}

// The same for a block of Q or K.
void quantize_mixed(const HeadTokens& tokens, uint8_t* codes, float* scale_inv) {
    const int64_t HS = tokens.HS;
    for (int64_t t = 0; t < tokens.count; t++)
        mix_token(tokens.row(t), HS, 0.25f, [&](int64_t d) { return widen(tokens.row(t)[d]); });
    const uint32_t amax_bits = amax_of_block(tokens);
    const bool finite = amax_bits < kInfinityBits;
    const float scale = head_scale_of(amax_bits, true);
    *scale_inv = finite ? 1 / scale : scale;
    std::fill(codes + tokens.count * HS, codes + kHeadBlock * HS, uint8_t{0});
    for (int64_t t = 0; t < tokens.count; t++) {
        auto* to = reinterpret_cast<int8_t*>(codes + t * HS);
        for (int64_t d = 0; d < HS; d++)
            to[d] = finite ? static_cast<int8_t>(std::nearbyint(widen(tokens.row(t)[d]) * scale)) : int8_t{0};
        mix_token(tokens.row(t), HS, 0.25f * *scale_inv, [&](int64_t d) { return static_cast<float>(to[d]); });
    }
}

}  // namespace

void quantize_heads(Ctx& ctx, const QuantizeHeadsArgs& args) {
    const char* op = "quantize_heads";
    const int64_t heads = args.NH + 2 * args.NKV, blocks = head_blocks(args.T), HS = args.HS;
    check_tensor(op, "qkv", args.qkv, Dtype::kBf16, args.B * args.T * heads * HS);
    check_tensor(op, "bytes", args.heads.bytes, Dtype::kE4m3, args.B * heads * blocks * kHeadBlock * HS);
    check_tensor(op, "scales", args.heads.scales, Dtype::kFp32, args.B * heads * blocks);
    if (args.cos_sin) {
        rope_forward(ctx, {.qkv = args.qkv, .cos_sin = args.cos_sin, .N = args.B * args.T, .T = args.T, .NH = args.NH,
                           .NKV = args.NKV, .HS = HS, .positions = args.positions});
    }
    auto* codes = static_cast<uint8_t*>(args.heads.bytes.data);
#pragma omp parallel for schedule(static)
    for (int64_t item = 0; item < args.B * heads * blocks; item++) {
        const int64_t block = item % blocks, head = item / blocks % heads, b = item / blocks / heads;
        const int64_t first = block * kHeadBlock, row_elems = heads * HS;
        (head < args.NH + args.NKV ? quantize_mixed : quantize_values)(
            {.first = args.qkv.as<bf16>() + (b * args.T + first) * row_elems + head * HS, .row_elems = row_elems,
             .count = std::min(kHeadBlock, args.T - first), .HS = HS},
            codes + item * kHeadBlock * HS, args.heads.scales.as<float>() + item);
    }
}

}  // namespace cpu
