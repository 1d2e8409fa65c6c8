// Arguments of attention; conventions as in ops.h.
#pragma once
#include <cstdint>

#include "llmc/ops/quantized_output.h"

struct StepState;

// Packed QKV: row n is [NH query heads | NKV key heads | NKV value heads], HS elements each. Applies RMSNorm over HS to
// each query and key head, with one weight for all query heads and one for all key heads (Qwen3); copies the values.
// Key and value heads may have another number of elements, KS: with grouped queries, all heads of K and of V together
// are one each, as those of Q are (OLMo-2).
struct QkNormForwardArgs {
    Tensor out;        // (N, NH HS + 2 NKV KS) T, =
    Tensor rstd;       // (N, NH + NKV) stat, =
    Tensor in;         // as out
    Tensor q_weight;   // (HS) T
    Tensor k_weight;   // (KS) T
    int64_t N, NH, NKV, HS, KS;   // KS <= HS; another one than HS needs NH = NKV = 1
    float eps;
    int64_t width() const { return NH * HS + 2 * NKV * KS; }
};
struct QkNormBackwardArgs {
    Tensor dqkv;                  // (N, NH HS + 2 NKV KS) T: gradient of out, = gradient of in; unspecified
                                  // afterwards if quant.copies()
    Tensor dq_weight, dk_weight;  // (HS) and (KS) grad, +=
    Tensor scratch;               // (2 * kPartialRows * HS) stat, =
    Tensor in;                    // as dqkv, input of the forward pass
    Tensor rstd;                  // (N, NH + NKV) stat
    Tensor q_weight, k_weight;    // (HS) and (KS) T
    int64_t N, NH, NKV, HS, KS;   // as in the forward
    QuantOut quant = {};          // of the new dqkv
    int64_t width() const { return NH * HS + 2 * NKV * KS; }
};

// Rotary position embedding in place on the first R = rotated or HS elements of the query and key heads, rotate-half
// pairing (i, i + R/2), position n % T. backward applies the transpose: it rotates the gradient by the negative angle.
// Source: Su et al., arXiv 2104.09864.
struct RopeArgs {
    Tensor qkv;       // (N, (NH + 2 NKV) HS) T, in and =; unspecified afterwards if quant.copies()
    Tensor cos_sin;   // (>= T, R/2, 2) stat: cosine, sine, maybe times a factor (YaRN)
    int64_t N, T, NH, NKV, HS;
    QuantOut quant = {};   // of the whole new qkv, values included
    const int32_t* positions = nullptr;   // (N) optional: as in EmbeddingForwardArgs
    int64_t rotated = 0;                  // even; 0: HS
    int64_t R() const { return rotated > 0 ? rotated : HS; }
};

// Packed QKV quantized for FP8 attention: V to E4M3, Q and K to INT8, after head_mix, which leaves their products as
// they are and spreads outliers. 128 tokens of a head are a block with one scale (head_scale_of). Blocks of Q and K are
// stored as (128, HS); blocks of V are transposed, (HS, 128), with every 16 tokens in the order head_token_order.
// Elements beyond T are 0. A block with a value that is not finite becomes NaN: of Q and K by its scale.
// Source of INT8 and of the mixing: Zhang et al., SageAttention, arXiv 2410.02367; Shah et al., FlashAttention-3, arXiv
// 2407.08608, section 3.3.
struct Fp8Heads {
    Tensor bytes;   // (B, NH + 2 NKV, head_blocks(T), 128 HS) e4m3, or int8 in the dtype's bytes
    Tensor scales;  // (B, NH + 2 NKV, head_blocks(T)) fp32: scale_inv
    explicit operator bool() const { return static_cast<bool>(bytes); }
};
inline constexpr int64_t kHeadBlock = 128;
HOST_DEVICE constexpr int64_t head_blocks(int64_t T) { return (T + kHeadBlock - 1) / kHeadBlock; }
// Returns which of 16 tokens is stored at position i. wgmma leaves a lane with P for two adjacent keys of every 8, but
// reads its FP8 A operand as four adjacent ones.
HOST_DEVICE constexpr int64_t head_token_order(int64_t i) { return i % 4 / 2 * 8 + i / 4 * 2 + i % 2; }
// v = 4 H v with the orthogonal Hadamard matrix of 16, which is its own inverse. v: elements d to d + 7 and HS / 2 + d
// to HS / 2 + d + 7 of a token, for d a multiple of 8.
HOST_DEVICE inline void head_mix(float (&v)[16]) {
    for (int step = 1; step < 16; step *= 2) {
        for (int i = 0; i < 16; i++) {
            if (i & step) continue;
            const float a = v[i], b = v[i + step];
            v[i] = a + b, v[i + step] = a - b;
        }
    }
}

// Applies rope_forward to qkv if cos_sin is given, quantizes it to heads (=), and writes the dequantized values back:
// of V exactly, of Q and K rounded to bf16.
struct QuantizeHeadsArgs {
    Fp8Heads heads;
    Tensor qkv;       // (B, T, (NH + 2 NKV) HS) bf16, in and =
    Tensor cos_sin;   // (>= T, HS/2, 2) fp32, optional
    int64_t B, T, NH, NKV, HS;
    const int32_t* positions = nullptr;   // (B, T) optional, for rope: as in EmbeddingForwardArgs
};

// Causal softmax(q k^T * softmax_mul) v per head; query head h reads key/value head h / (NH / NKV).
// The online softmax never stores T x T. Source: Dao, FlashAttention-2, arXiv 2307.08691.
// With documents, a query attends to keys of its own document only. documents[0][b][t] is the start of the document of
// token t within sequence b, documents[1][b][t] its end (exclusive): 0 <= start <= t < end <= T. Documents are
// contiguous.
// With a window of W tokens, the query at t attends to none of the keys before t - W + 1. A window of 0, or of at least
// T tokens, hides nothing.
// With sinks, a head's learned logit joins every softmax as a key without a value (Xiao et al., arXiv 2309.17453; as in
// gpt-oss): exp(sink) is in the log-sum-exp, and P and out follow from that. It is not multiplied by softmax_mul. A
// sink of -infinity changes no bit.
// With a soft cap c > 0, a scaled score s becomes c tanh(s / c) before the softmax (Gemma-2, arXiv 2408.00118). FP8
// heads and max_logits are not for it.
struct AttentionForwardArgs {
    Tensor out;        // (B, T, NH, HS) T, =
    Tensor lse;        // (B, NH, T) stat, =: natural log of the sum of exp of the scaled scores
    Tensor qkv;        // (B, T, (NH + 2 NKV) HS) T
    int64_t B, T, NH, NKV, HS;
    float softmax_mul;
    const int32_t* documents = nullptr;   // (2, B, T) optional: starts, ends
    int64_t window = 0;                   // tokens
    QuantOut quant = {};                  // of out, N = B T
    Fp8Heads heads = {};                  // optional: qkv after quantize_heads; the matmuls then use E4M3
    float* max_logits = nullptr;          // (NH) optional, >= 0: max_logits = max(itself, the scaled scores)
    Tensor sinks = {};                    // (NH) T, optional
    float softcap = 0;                    // 0: none
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
    int64_t window = 0;                   // tokens, as in the forward
    QuantOut quant = {};                  // of dqkv, N = B T
    Tensor sums = {};                     // (attention_sums_elems(...)) fp32, =: scratch, such as dq accumulators
    Tensor sinks = {};                    // (NH) T, optional, as in the forward
    Tensor dsinks = {};                   // (NH) grad, with sinks, += - sum over rows of exp(sink - lse) delta
    float softcap = 0;                    // as in the forward
};

// Context parallelism: each of `ranks` ranks has T tokens of every one of B sequences. Attention runs on whole
// sequences, with 1 / ranks of the query heads on each rank. All-to-alls exchange the heads before and after attention.
// Source: Jacobs et al., DeepSpeed-Ulysses, arXiv 2309.14509.
// If the number of key heads is a multiple of `ranks`, each rank gets its share of them. If `ranks` is a multiple of
// the number of key heads, every rank whose query heads read a key head gets a copy of it.
HOST_DEVICE constexpr int64_t heads_of_rank(int64_t heads, int64_t ranks) {
    return heads == 0 || heads >= ranks ? heads / ranks : 1;
}
// out[b][r] = the heads that rank r computes, of this rank's tokens of sequence b: what the all-to-all sends to rank r.
struct SplitHeadsArgs {
    Tensor out;   // (B, ranks, T, (NH / ranks + 2 heads_of_rank(NKV)) HS) T, =
    Tensor in;    // (B, T, (NH + 2 NKV) HS) T; NKV = 0: query heads only, as in the output of attention
    int64_t B, T, ranks, NH, NKV, HS;
};
// The reverse, for what an all-to-all of gradients or outputs has received. If several ranks had a copy of a key or
// value head, its gradients are added in fp32 (fp64 when T is fp64), in the order of ranks, and rounded once.
struct JoinHeadsArgs {
    Tensor out;   // (B, T, (NH + 2 NKV) HS) T, =
    Tensor in;    // (B, ranks, T, (NH / ranks + 2 heads_of_rank(NKV)) HS) T
    int64_t B, T, ranks, NH, NKV, HS;
};

// QK-clip (MuonClip: Kimi K2, arXiv 2507.20534): scales the largest attention logit S of a head to tau if it is larger.
// W_k is scaled by f = min(1, sqrt(tau / S)), with the largest S of the query heads that share the key head, and W_q of
// each of these by what remains, min(1, tau / its own S) / f: heads within tau keep their logits. The paper, whose
// heads have keys of their own, gives both the root.
struct QkClipFactorsArgs {
    Tensor factors;      // (layers, NH + NKV) fp32, =
    Tensor max_logits;   // (layers, NH) fp32, >= 0
    int64_t NH, NKV;
    float tau;
    StepState* state;    // max_logit and clipped_heads, =
};
// Scales n consecutive elements of the parameter that computes Q, K and V; does nothing if state->skip.
//   master *= factors[head of its row], but not of V; param = master rounded to T
struct QkClipArgs {
    Tensor param;      // (n) T, =; optional
    Tensor master;     // (n) stat, in and =
    Tensor factors;    // (NH + NKV) fp32, of the layer
    int64_t begin;     // index of element 0 within the parameter
    int64_t head_elems;   // of a head within the parameter
    const StepState* state;
    ScaleEntry* entry = nullptr;   // optional: amax_bits = max(amax_bits, |new master rounded to bf16|)
};
