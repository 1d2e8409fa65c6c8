// Arguments of attention; conventions as in ops.h.
#pragma once
#include <cstdint>

#include "llmc/ops/quantized_output.h"

// E4M3 copies of packed projections for FP8 attention. 128 tokens of a head are a block with a factor of its own, a
// power of two (head_scale_of). A block of query and key heads lies as its tokens' rows; one of value heads lies
// transposed, HS rows of 128 tokens, where every 16 tokens lie in the order head_token_order. What lies beyond T is 0.
// A block with a value that is not finite is NaN throughout.
struct Fp8Heads {
    Tensor bytes;     // (B, NH + 2 NKV, head_blocks(T), 128 HS) e4m3
    Tensor scales;   // (B, NH + 2 NKV, head_blocks(T)) fp32: scale_inv
    explicit operator bool() const { return static_cast<bool>(bytes); }
};
inline constexpr int64_t kHeadBlock = 128;
HOST_DEVICE constexpr int64_t head_blocks(int64_t T) { return (T + kHeadBlock - 1) / kHeadBlock; }
// The token of 16 that lies at place i: the tensor cores leave weights of two neighbours of each 8 with a lane, and
// take four neighbours from it.
HOST_DEVICE constexpr int64_t head_token_order(int64_t i) { return i % 4 / 2 * 8 + i / 4 * 2 + i % 2; }

// qkv = qkv, turned as by rope_forward if there is a table, rounded to what the copies (heads, =) hold. bf16.
struct QuantizeHeadsArgs {
    Fp8Heads heads;
    Tensor qkv;       // (B, T, (NH + 2 NKV) HS) bf16, in and =
    Tensor cos_sin;   // (>= T, HS/2, 2) fp32, optional
    int64_t B, T, NH, NKV, HS;
};

// Causal softmax(q k^T * softmax_mul) v per head; query head h reads key/value head h / (NH / NKV).
// The online softmax never stores T x T. Source: Dao, FlashAttention-2, arXiv 2307.08691.
// With documents, a query sees the keys of its own document only. documents[0][b][t] is the first position of t's
// document within sequence b, documents[1][b][t] the one after its last: 0 <= start <= t < end <= T, and documents
// follow each other without gaps.
struct AttentionForwardArgs {
    Tensor out;        // (B, T, NH, HS) T, =
    Tensor lse;        // (B, NH, T) stat, =: log sum exp of the scaled scores, natural logarithm
    Tensor qkv;        // (B, T, (NH + 2 NKV) HS) T
    int64_t B, T, NH, NKV, HS;
    float softmax_mul;
    const int32_t* documents = nullptr;   // (2, B, T) optional: starts, ends
    QuantOut quant = {};                  // of out, N = B T
    Fp8Heads heads = {};                  // optional: of qkv, by quantize_heads; the products then are of E4M3
};
struct AttentionBackwardArgs {
    Tensor dqkv;       // (B, T, (NH + 2 NKV) HS) T, =
    Tensor delta;      // (B, NH, T) stat, =: scratch, row sums of dout * out
    Tensor dout;       // (B, T, NH, HS) T
    Tensor out;        // (B, T, NH, HS) T
    Tensor lse;        // (B, NH, T) stat
    Tensor qkv;        // (B, T, (NH + 2 NKV) HS) T
    int64_t B, T, NH, NKV, HS;
    float softmax_mul;
    const int32_t* documents = nullptr;   // (2, B, T) optional: starts, ends, as in the forward
    QuantOut quant = {};                  // of dqkv, N = B T
    Tensor sums = {};                     // (attention_sums_elems(...)) fp32, =: scratch, sums of dq
    bool fast = false;                    // dq may differ in its last bits between equal runs
};
