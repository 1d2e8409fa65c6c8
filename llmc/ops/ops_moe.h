// Arguments of the operations of mixtures of experts; conventions as in ops.h. E experts, K experts of each of N
// tokens, R = N * K rows: one for every token and each of its experts, sorted by expert, then by token: those of expert
// e are [offsets[e], offsets[e + 1]), any number, also none. Slot n * K + k is the k-th expert of token n, in ascending
// order of experts. The numbers of rows of experts stay on the device. A rank with E of more experts has the rows of
// those alone; the rows from offsets[E] on, up to those that there is memory for, have slot -1 and are nobody's.
#pragma once
#include <numeric>

#include "llmc/ops/ops_gemm.h"

struct StepState;

inline constexpr int64_t kMaxRouterExperts = 1024;

// The sums that router_stats adds to: rows of every expert, probabilities of every expert, entropies, squares of lse.
HOST_DEVICE constexpr int64_t router_stats_elems(int64_t E) { return 2 * E + 2; }

struct RouterForm {
    bool sigmoid = false;   // scores are sigmoid(logits), else their softmax
    bool normalize = true;  // weights are divided by their sum
    float scale = 1;        // and multiplied by this
};
// probs = softmax or sigmoid of the logits, in place; the K experts with the largest probabilities, or sums of these
// and `bias`, of equal ones the lower number. Their weights are their probabilities, see RouterForm. Sources: Shazeer
// et al., arXiv 1701.06538; bias: Wang et al., arXiv 2408.15664; sigmoid: DeepSeek-V3, arXiv 2412.19437.
struct RouterForwardArgs {
    Tensor probs;     // (N, E) stat: logits, = probabilities
    Tensor lse;       // (N) stat, = log sum exp(logits); sigmoid: log of the sum of probs
    Tensor experts;   // (N, K) int32, = ascending numbers; with `chosen` they are given
    Tensor weights;   // (N, K) stat, =
    Tensor bias;      // (E) T, optional
    int64_t N, E, K;
    RouterForm form;
    bool chosen;      // route as before
    bool even = false;   // unless `chosen`: to the experts that are evenly_chosen, whatever the probabilities are
    Tensor logit_bias = {};   // (E) T, optional: added to the logits
    Tensor spread = {};       // (N, E) T, = the weights of the chosen experts, 0 of the others; with logit_bias
};
// Whether token n goes to expert e, as it does to K of them. Of any m neighbouring tokens m K / E, rounded down or up,
// go to an expert, and a token goes to as many of any m neighbouring experts: experts and ranks have even loads.
HOST_DEVICE constexpr bool evenly_chosen(int64_t n, int64_t e, int64_t E, int64_t K) {
    return static_cast<uint32_t>((n % E + E - e) * K) % static_cast<uint32_t>(E) < static_cast<uint32_t>(K);
}
inline constexpr int64_t kRouterPartials = 128;
// stats += those of these tokens, in an order that only N and E decide. Probabilities of a sigmoid are divided by the
// sum of their token's.
struct RouterStatsArgs {
    Tensor stats;     // (router_stats_elems(E)) fp64, +=
    Tensor scratch;   // (kRouterPartials * router_stats_elems(E)) fp64, =
    Tensor probs, lse, experts;   // of router_forward
    int64_t N, E, K;
    bool sigmoid;
};
// dlogits = the gradient of a loss with the given gradient of `weights`, of the auxiliary loss and of the z-loss:
//   auxiliary loss  aux E sum over e of load[e] / sum(load) * mean of probs[:, e]
//   z-loss          z * mean of lse^2
// The means are over all tokens of the step. `load` is constant. Sources: Fedus et al., arXiv 2101.03961 (per layer and
// divided by K, as Megatron-LM's); over the global batch: Qiu et al., arXiv 2501.11873; z-loss: arXiv 2202.08906. With
// a sigmoid there are no such losses.
struct RouterBackwardArgs {
    Tensor dlogits;    // (N, E) T, =
    Tensor dweights;   // (N, K) stat
    Tensor probs, lse, experts, weights;   // of router_forward
    Tensor load;       // (E) fp64: rows of each expert in an earlier step; all 0: no auxiliary loss
    const StepState* state;   // token_mul
    int64_t N, E, K;
    RouterForm form;
    float aux, z;      // sigmoid: 0
    Tensor dspread = {};   // (N, E) T, optional: the gradient of RouterForwardArgs::spread, too
};
// At the end of a step, from the sums of all its tokens in all layers: router_loss, router_entropy, expert_load and
// dead_experts of state; unless state->skip, load = the rows of experts.
struct RouterSummaryArgs {
    StepState* state;
    Tensor stats;   // (layers, router_stats_elems(E)) fp64
    Tensor load;    // (layers, E) fp64, in and =
    int64_t layers, E, K;
    float aux, z;
};
// bias += rate for experts with fewer rows than the mean, -= rate for those with more; does nothing if state->skip.
// Source: Wang et al., arXiv 2408.15664.
struct RouterBiasArgs {
    Tensor bias;     // (n) T, =; optional
    Tensor master;   // (n) stat, in and =: of experts [first, first + n)
    Tensor load;     // (E) fp64: rows of each expert of the layer in this step
    const StepState* state;
    int64_t first;
    float rate;
};

inline constexpr int64_t kSortChunk = 512;   // slots that a warp sorts
// A stable counting sort of the slots of experts [first, first + E): rows of expert e are [offsets[e], offsets[e + 1]).
// Rows for which there is no memory are left out.
struct SortExpertsArgs {
    Tensor offsets;     // (E + 1) int32, =
    Tensor scratch;     // (ceil(N K / kSortChunk) * E) int32, =
    Tensor row_slots;   // (R) int32, = slot of a row, -1: none
    Tensor slot_rows;   // (N, K) int32, = row of a slot, -1: none
    Tensor experts;     // (N, K) int32
    int64_t N, E, K;
    int64_t first = 0;
    Tensor load = {};   // (1) int32, optional, = the larger of itself and the number of these slots
};
// out[slot_rows[n * K + k]] = in[n], and of FP8 codes in blocks of 1 x 128 their scales. Rows without a slot stay as
// they are. So `in` is read once; by row it would be read K times, which the L2 cache of a GPU may not hold.
struct GatherRowsArgs {
    Tensor out;         // (R, C) T or FP8, =
    Tensor in;          // (N, C) as out
    Tensor slot_rows;   // (N, K) int32, -1: none
    int64_t N, K, C;    // FP8: C a multiple of 16
    // FP8 only: (ceil(C / 128), R) fp32, =; (parts, ceil(C / 128), N / parts) fp32
    Tensor out_scale_inv = {}, in_scale_inv = {};
    int64_t parts = 1;
};
inline constexpr int64_t kCombineGroups = 8;
// out[n] = (out[n], if accumulate) + sum over k of in[slot_rows[n * K + k]], in fp32: in the order of k within each of
// the groups of neighbouring experts, of which there are gcd(E, kCombineGroups), then by pairs of groups, of pairs, ...
// So ranks that have 1 / 2, 1 / 4 or 1 / 8 of the experts each compute a subtree, and the sum has the same bits unless
// subtrees are rounded.
struct CombineRowsArgs {
    Tensor out;         // (N, C) T or fp32, = or +=
    Tensor in;          // (R, C) T or fp32
    Tensor slot_rows;   // (N, K) int32, -1: none
    Tensor experts;     // (N, K) int32; empty: expert k, with E = K, in row k * N + n
    int64_t N, K, C, E;
    bool accumulate = false;
};
constexpr int64_t experts_of_group(int64_t E) { return E / std::gcd(E, kCombineGroups); }
// The biases of `in` of the experts [first, first + E).
struct ExpertBias {
    Tensor values;       // (E, 2F) T; empty: no biases
    Tensor experts;      // (N, K) int32
    int64_t first = 0;
};
// in row = [gate (F) | up (F)], and the bias of its expert; out[r] = activation(gate, up) * weights[row_slots[r]]. A
// QuantOut of these two has rowwise E4M3 in blocks of 1 x 128, and no dbias.
struct ExpertActivationForwardArgs {
    Activation kind;    // swiglu or clamped_swiglu
    Tensor out;         // (R, F) T, =; optional if quant.copies()
    Tensor in;          // (R, 2F) T
    Tensor weights;     // (N, K) stat
    Tensor row_slots;   // (R) int32; rows without a slot stay as they are
    int64_t R, F;
    QuantOut quant = {};   // of out
    ExpertBias bias = {};
};
struct ExpertActivationBackwardArgs {
    Activation kind;
    Tensor din;         // (R, 2F) T, =; may be the same memory as in; optional if quant.copies()
    Tensor dweights;    // (N, K) stat, = that of slots with a row
    Tensor dout;        // (R, F) T
    Tensor in, weights, row_slots;   // of the forward pass
    int64_t R, F;
    QuantOut quant = {};   // of din
    ExpertBias bias = {};
};
// dbias[e] += the sum of the rows of expert e, in an order that their number decides.
struct ExpertBiasBackwardArgs {
    Tensor dbias;       // (E, C) grad, +=
    Tensor dout;        // (R, C) T; other rows than those of experts have no effect
    Tensor offsets;     // (E + 1) int32
    int64_t E, R, C;
};

// FP8 operands of weight gradients are transposed, with the rows of tokens as columns: expert e begins at column
// padded_rows(offsets[e], e) of padded_rows(rows, E), at most rows + 128 E. Those are whole blocks of scales, and leave
// room to fill up the last block of each expert with zeros, without a sum over the experts before: for n rows
// padded_rows(offset + n, e + 1) - padded_rows(offset, e) is n rounded up to a multiple of 128, or 128 more.
HOST_DEVICE constexpr int64_t padded_rows(int64_t rows, int64_t experts) {
    return (rows / kScaleBlock + experts) * kScaleBlock;
}

// A matmul of each expert. Layouts and types as in GemmArgs; the sizes of experts are read on the device.
//   kForward   D(M,N)   = A(M,K) B(E,N,K)^T : y  = x w[e]^T          rows of D and A belong to experts
//   kDgrad     D(M,N)   = A(M,K) B(E,K,N)   : dx = dy w[e]           likewise
//   kWgrad     D(E,M,N) = A(K,M)^T B(K,N)   : dw[e] = dy^T x         rows of A and B belong to experts
// What rows before offsets[0] and from offsets[E] on hold, NaN also, has no effect, and those of D stay as they are.
// The gradient of an expert without rows is 0, or stays as it is if accumulate.
// FP8: E4M3 operands with K innermost and scales of blocks, as the blockwise recipe has them; D is bf16, of kWgrad bf16
// or fp32. N and K are multiples of 16, M of 4, A, B, D and scales aligned to 16 bytes. Needs compute capability 9.0.
//   kForward, kDgrad  D(M,N) = A(M,K) B(E,N,K)^T      scales: A kBlock1x128, B kBlock128x128 of each B[e]
//   kWgrad            D(E,M,N) = A(M,P) B(N,P)^T      scales: kBlock1x128; P = padded_rows(K, E), see there
struct GroupedGemmArgs {
    Tensor D;         // = , or += if accumulate: kWgrad only
    Tensor A, B;      // see above
    Tensor offsets;   // (E + 1) int32, ascending, from 0 to the number of rows
    int64_t E, M, N, K;   // the number of rows (M, or K of kWgrad): those that there is memory for
    GemmLayout layout = GemmLayout::kForward;
    bool accumulate = false;
    Tensor A_scale_inv = {}, B_scale_inv = {};   // FP8 only: fp32
};
// Makes the operand of a weight gradient from the rowwise codes of its rows: each block of 128 rows of an expert, the
// last filled up with zeros, and one column gets a scale as if its dequantized values were quantized again. Scales are
// powers of two, so that codes are shifted and equal the values unless these are below the smallest normal number.
// Source: FP8-Flow-MoE, arXiv 2511.02302. P = padded_rows(R, E); blocks of no rows are zeros, too.
struct TransposeScaledArgs {
    Tensor out;                    // (C, P) E4M3, =
    Tensor out_scale_inv;          // (ceil(P / 128), C) fp32, = kBlock1x128
    Tensor in;                     // (R, C) E4M3
    Tensor in_scale_inv;           // (ceil(C / 128), R) fp32, powers of two: kBlock1x128
    Tensor offsets;                // (E + 1) int32, as of GroupedGemmArgs
    Fp8Counts* counts = nullptr;   // += of the values of all rows, of which `flushed` became 0; optional
    int64_t R, C, E;               // R: that there is memory for; C a multiple of 16
};
