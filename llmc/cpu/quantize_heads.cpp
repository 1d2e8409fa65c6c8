// Quantization of packed QKV to E4M3 for FP8 attention. CPU.
#include "llmc/cpu/cast_lines.h"

namespace cpu {
namespace {

// `count` tokens of one head from `first` on, row_elems apart.
struct HeadTokens {
    bf16* first;
    int64_t row_elems, count, HS;
    bf16* row(int64_t t) const { return first + t * row_elems; }
};

// Quantizes one block and replaces it by the dequantized values. Blocks of V are transposed.
void quantize_block(const HeadTokens& tokens, bool transposed, uint8_t* codes, float* scale_inv) {
    const int64_t HS = tokens.HS;
    uint32_t amax_bits = 0;
    for (int64_t t = 0; t < tokens.count; t++) amax_bits = std::max(amax_bits, amax_of_line(tokens.row(t), HS));
    const float scale = head_scale_of(amax_bits);
    *scale_inv = amax_bits < kInfinityBits ? 1 / scale : 1;
    for (int64_t place = 0; place < kHeadBlock; place++) {
        const int64_t t = transposed ? place / 16 * 16 + head_token_order(place % 16) : place;
        for (int64_t d = 0; d < HS; d++) {
            uint8_t& code = codes[transposed ? d * kHeadBlock + place : place * HS + d];
            code = 0;
            if (t >= tokens.count) continue;
            bf16& x = tokens.row(t)[d];
            code = fp8_cast<Dtype::kE4m3>(widen(x) * scale);
            x = bf16(from_fp8(Dtype::kE4m3, code) * *scale_inv);
        }
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
        quantize_block({.first = args.qkv.as<bf16>() + (b * args.T + first) * row_elems + head * HS,
                        .row_elems = row_elems, .count = std::min(kHeadBlock, args.T - first), .HS = HS},
                       head >= args.NH + args.NKV, codes + item * kHeadBlock * HS,
                       args.heads.scales.as<float>() + item);
    }
}

}  // namespace cpu
