// Operations: argument structs, and the declarations of ops.inl in namespace cpu (the reference) and namespace cuda.
// The rest of the project calls ops::name(ctx, args). It runs the operation on the device of the build, and times it if
// there is an OpTimer. In a rehearsal it only records the operation's work (op_cost.cpp).
//
// Conventions. Letters: B batch, T sequence, N = B*T rows, C channels, V vocabulary, Vp padded vocabulary, NH query
// heads, NKV key/value heads, HS head dim, F feed-forward width; M, N, K in gemm only. Matrices are row-major. "="
// marks what is overwritten, "+=" what is added to. An "optional" Tensor may be empty, which means absent. Every
// operation is deterministic: equal inputs give equal bits. Shapes are checked by Tensor::elems; a mismatch is a bug of
// the caller (exit 1). Names of types:
//   T      the working type: bf16 or fp32, in tests on the CPU also fp64
//   stat   fp32, or fp64 if T is fp64: statistics, and the type in which reductions run
//   grad   fp32 or bf16, or fp64 if T is fp64
#pragma once
#include <cstddef>
#include <cstdint>

#include "llmc/base/activation.h"
#include "llmc/base/dtype.h"
#include "llmc/ops/device.h"
#include "llmc/ops/ops_attention.h"
#include "llmc/ops/ops_gemm.h"
#include "llmc/ops/ops_int8.h"
#include "llmc/ops/ops_moe.h"
#include "llmc/ops/quantized_output.h"

// Rows of partial sums in the scratch memory of column reductions (norm and bias gradients).
inline constexpr int64_t kPartialRows = 512;
// Partial sums of whole-tensor reductions (sum_squares, sum_losses), in fp64.
inline constexpr int64_t kPartialSums = 1024;

// Gradient norms that a step's norm is compared with (--skip-grad-norm), and how many must be there.
inline constexpr int64_t kNormWindow = 128, kLeastNorms = 16;

// State of the optimizer step in device memory. Written by the host between steps and by step_guard, read by
// adamw and classifier; lives on the device so that the step needs no host synchronisation.
struct StepState {
    // Written by the host at the start of a step: the first kStepInputBytes.
    double loss_sum;       // = 0; += by sum_losses: losses of the global batch without ignored tokens
    double sum_squares;    // = 0; += by sum_squares: squared norm of the gradients
    double z_sum;          // = 0; += by sum_losses: squared log-sum-exps of the counted tokens (--z-loss)
    float lr;              // learning rate of this step
    float dloss_mul;       // 1 / number of tokens of the global batch without ignored ones
    float token_mul;       // 1 / number of all tokens of the global batch
    int32_t bad_tokens;    // = 0; += by embedding_forward and classifier: ids outside the vocabulary
    // Owned by the device.
    int32_t skip;          // = by step_guard: kNotFinite or kLargeNorm if the step is skipped, else 0
    float grad_norm;       // = by step_guard
    float grad_mul;        // = by step_guard: gradient clipping (1 if the norm is within the limit)
    int64_t adam_step;     // updates applied so far; step_guard advances it
    float norm_limit;      // = by step_guard: a larger norm skips the step; 0: there is no limit
    float norms[kNormWindow];   // the latest finite norms, number n (from 0) at n % kNormWindow; by step_guard
    int64_t norm_count;    // finite norms so far
    float max_logit;       // = by qk_clip_factors: the largest attention logit, 0 if all are negative
    int32_t clipped_heads; // = by qk_clip_factors: heads whose largest logit exceeds its limit, or 0 if skip
    // = by router_summary, of all layers: their auxiliary and z-losses; the mean entropy of a token's probabilities;
    // the largest number of rows of an expert, by the mean of its layer's experts; experts without rows
    double router_loss;
    float router_entropy, expert_load;
    int32_t dead_experts;
    int32_t expert_rows, fullest_layer;   // = by step_guard: the most StepGuardArgs::expert_rows of a layer, its number
    static constexpr int32_t kNotFinite = 1, kLargeNorm = 2;
};
inline constexpr int64_t kStepInputBytes = offsetof(StepState, skip);

// ---- FP8

// Executes quant for X = in rounded to bf16. Several matrices follow each other, as do their results: kBlock128x128,
// without amax and dbias.
struct QuantizeArgs {
    QuantOut quant;
    Tensor in;                          // (matrices, N, C) bf16 or fp32
    int64_t N, C;
    const StepState* state = nullptr;   // optional: does nothing if state->skip
    int64_t matrices = 1;
};
// entry->amax_bits = max(entry->amax_bits, |in rounded to bf16|).
struct AmaxArgs {
    ScaleEntry* entry;
    Tensor in;   // bf16 or fp32
};
// For `count` entries: step_amax_bits = max(step_amax_bits, amax_bits), or 0 if `step`; amax_bits = 0.
struct Fp8ClearArgs {
    ScaleEntry* entries;
    int64_t count;
    bool step = false;
    const StepState* state = nullptr;   // optional: does nothing if state->skip
};
// Updates the delayed scaling of `count` tensors, each with an amax history of `length` floats, 0 at first:
//   last = amax_bits; step_amax_bits = max(step_amax_bits, last); amax_bits = 0
//   stops here if state->skip or last == 0 (the tensor was not produced)
//   history[updates % length] = last; amax = max(history) (a NaN or infinity wins), or last (most_recent)
//   if updates % interval == 0 and amax is finite and > 0: scale = scale_of(amax, largest)
//   updates += 1
// Source: Transformer Engine's delayed scaling, whose history includes the current amax.
struct Fp8UpdateArgs {
    ScaleEntry* entries;         // (count)
    float* history;         // (count, length), in and =
    int32_t* updates;       // (count), in and =
    const float* largest;   // (count): largest number of the format / 2^margin
    int64_t count, length, interval;
    bool most_recent;
    const StepState* state;   // optional
};

// bins[e] += number of blocks of a quantized (R, K) matrix whose scale, a power of two, is 2^(127 - e); e is the value
// of the exponent bits of scale_inv. Blocks of zeros always have the scale 1 and count in bins[kZeroBlocks] instead.
inline constexpr int64_t kScaleBins = 256, kZeroBlocks = 255;
struct CountScalesArgs {
    unsigned long long* bins;   // (kScaleBins), +=
    Tensor codes;               // (matrices, R, K) fp8
    Tensor scale_inv;           // (matrices, scale_inv_elems(granularity, R, K)) fp32
    Granularity granularity;    // of blocks
    int64_t R, K;               // K: a multiple of 16
    int64_t matrices = 1;
};

// ---- layers

// out[n] = mul wte[tokens[n]] + wpe[position of row n].
struct EmbeddingForwardArgs {
    Tensor out;                // (N, C) T, =
    Tensor wte;                // (Vp, C) T
    Tensor wpe;                // (>= T, C) T, optional
    const int32_t* tokens;     // (N); an id outside [0, V) reads row 0 and adds to bad_tokens
    int32_t* bad_tokens;       // (1), +=
    int64_t N, T, C, V;
    const int32_t* positions = nullptr;   // (N) optional: of the rows, >= 0, instead of n % T
    float mul = 1;
};

// dwte[v] += mul (sum of dout over the rows with tokens[n] == v); dwpe[t] += sum over the rows at position t.
// The rows of a token are added in the order of token_order, those of a position in that of position_order.
struct EmbeddingBackwardArgs {
    Tensor dwte;                  // (Vp, C) grad, +=
    Tensor dwpe;                  // (>= T, C) grad, +=, optional
    Tensor dout;                  // (N, C) T
    const int32_t* tokens;        // (N); ids outside [0, V) contribute nothing to dwte
    const int32_t* token_order;   // (N) row numbers sorted by token, ties by row number
    int64_t N, T, C, V;
    // (N) both or neither, with dwpe: positions of the rows in [0, T) instead of n % T, and row numbers sorted by them
    const int32_t *positions = nullptr, *position_order = nullptr;
    float mul = 1;
};

// x = in + residual; residual_out = x (rounded to T); out = normalise(x) * weight + bias, from the rounded x.
// layernorm: (x - mean) * rstd, rstd = 1 / sqrt(var + eps). Source: Ba et al., arXiv 1607.06450.
// rmsnorm: x * rstd, rstd = 1 / sqrt(mean(x^2) + eps). Source: Zhang and Sennrich, arXiv 1910.07467.
struct NormForwardArgs {
    Tensor out;            // (N, C) T, =; optional if quant.copies()
    Tensor residual_out;   // (N, C) T, =, optional: x; required if residual is given
    Tensor mean;           // (N) stat, =; layernorm only
    Tensor rstd;           // (N) stat, =
    Tensor in;             // (N, C) T
    Tensor residual;       // (N, C) T, optional
    Tensor weight;         // (C) T
    Tensor bias;           // (C) T, optional (layernorm)
    int64_t N, C;
    float eps;
    QuantOut quant = {};   // of out
    // (N, C) T, optional, without residual_out and quant, rmsnorm only: out = stream + the norm's result rounded to T,
    // as after a branch (OLMo-2, arXiv 2501.00656)
    Tensor stream = {};
};

// dx = dresidual + d(norm)/dx, the gradient of the residual stream below the norm.
struct NormBackwardArgs {
    Tensor dx;          // (N, C) T, =; may be the same memory as dresidual
    Tensor dresidual;   // (N, C) T, optional: gradient of x from the residual connection
    Tensor dweight;     // (C) grad, +=
    Tensor dbias;       // (C) grad, +=, optional
    Tensor scratch;     // (2 * kPartialRows * C) stat, =
    Tensor dout;        // (N, C) T
    Tensor x;           // (N, C) T, input of the norm (residual_out of the forward pass)
    Tensor mean, rstd;  // (N) stat; mean for layernorm only
    Tensor weight;      // (C) T
    int64_t N, C;
    QuantOut quant = {};   // of dx
};

// gelu, tanh form: 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))). Source: Hendrycks, Gimpel, arXiv 1606.08415.
// swiglu: in row = [gate (F) | up (F)], out = gate * sigmoid(gate) * up; geglu: out = gelu(gate) * up. Source: Shazeer,
// arXiv 2002.05202. clamped_swiglu: see kActivations; gradients are 0 where a value is clamped.
struct ActivationForwardArgs {
    Activation kind;
    Tensor out;   // (N, F) T, =; optional if quant.copies()
    Tensor in;    // (N, F) T; gated functions: (N, 2F)
    int64_t N, F;
    QuantOut quant = {};   // of out
};
struct ActivationBackwardArgs {
    Activation kind;
    Tensor din;    // as in, T, =; may be the same memory as in; optional if quant.copies()
    Tensor dout;   // (N, F) T
    Tensor in;     // input of the forward pass
    int64_t N, F;
    QuantOut quant = {};   // of din (C = F; gated functions: 2F)
};

// dbias[c] += sum over n of dout[n, c].
struct BiasBackwardArgs {
    Tensor dbias;     // (C) grad, +=
    Tensor scratch;   // (kPartialRows * C) stat, =
    Tensor dout;      // (N, C) T
    int64_t N, C;
};

// Cross entropy of softmax(logit_mul logits[:, :V]) against targets, fused with its gradient:
// losses[n] = -log p(target), 0 where ignored; dlogits = (p - onehot) * state->dloss_mul * logit_mul in place of the
// logits, 0 for ignored rows and for the padded columns [V, Vp). With z_loss W, the gradient of W lse^2 is added to it,
// where lse = log sum exp(logit_mul logits[:, :V]): dlogits = (p (1 + 2 W lse) - onehot) * state->dloss_mul * logit_mul
// (the z-loss of Chowdhery et al., arXiv 2204.02311). With a soft cap c > 0, y = c tanh(logit_mul logits / c) is in the
// place of logit_mul logits, and dlogits has the factor 1 - (y / c)^2 (Gemma-2, arXiv 2408.00118).
struct ClassifierArgs {
    Tensor logits;            // (N, Vp) T; = dlogits if write_dlogits
    Tensor losses;            // (N) stat, =
    const int32_t* targets;   // (N); ids outside [0, V) are ignored and, except for kIgnoreIndex, add to bad_tokens
    StepState* state;         // dloss_mul; bad_tokens: +=
    int64_t N, V, Vp;
    bool write_dlogits;
    float logit_mul = 1;      // > 0: 1 / logits_scaling of Granite
    float z_loss = 0;         // with write_dlogits only
    Tensor squares = {};      // (N) stat, =: lse^2, 0 where ignored; needed if z_loss > 0
    float softcap = 0;        // 0: none
};

// Adds to the gradient of the head's input what quantization took from the sums of dlogits over the vocabulary, as if
// it had been left in the target's column: dx[n] += (sum over v of dlogits[n][v] - its quantized value) weight[t], with
// t = targets[n]. Without a z-loss the sum is 0 again. What it was instead has a mean over the tokens, and the rows of
// the weight have one, too: in the gradients of norms this error was half as large as their mean (dev/LOG.md).
struct DlogitsResidualArgs {
    Tensor dx;                 // (N, C) bf16, +=, rounded once
    Tensor dlogits;            // (N, Vp) bf16, summed in fp64
    Tensor codes;              // (N, Vp) fp8: dlogits quantized
    Tensor scale_inv;          // fp32, see Granularity
    Granularity granularity;   // kTensor or kBlock1x128
    Tensor weight;             // (Vp, C) bf16
    const int32_t* targets;    // (N); an id outside [0, V) leaves its row as it is
    int64_t N, C, V, Vp;       // C, Vp: multiples of 16
};

// *sum += sum of losses, in fp64 in a fixed order.
struct SumLossesArgs {
    double* sum;       // (1), +=
    Tensor losses;     // (N) stat
    Tensor scratch;    // (kPartialSums) fp64, =
    int64_t N;
};

// sum[i] += sum of squares of matrix i, in fp64 in a fixed order, which does not depend on the number of matrices if
// their bytes are multiples of 16.
struct SumSquaresArgs {
    double* sum;       // (matrices), +=
    Tensor in;         // (matrices, n) fp32, bf16 or fp64
    Tensor scratch;    // (matrices, kPartialSums) fp64, =
    int64_t matrices = 1;   // at most 65535
};

// grad_norm = sqrt(sum_squares); norm_limit = skip_norm * median(norms), or 0 if these are fewer than kLeastNorms;
// skip = kNotFinite if loss_sum or grad_norm is not finite, or bad_tokens > 0 or expert_rows > capacity, else
// kLargeNorm if norm_limit is not 0 and grad_norm is larger, else 0; grad_mul = min(1, clip / grad_norm) (1 if clip
// is 0); adam_step += !skip; a finite grad_norm, also of a skipped step, is added to norms. All fields are those of
// state. The median of an even number of norms is the larger one in the middle.
struct StepGuardArgs {
    StepState* state;
    float clip, skip_norm = 0;
    Tensor expert_rows = {};   // (layers) int32, optional: the most rows of a rank's experts in a micro-batch
    int64_t capacity = 0;      // the rows that there is memory for
};

// AdamW with decoupled weight decay on n consecutive elements of a parameter; does nothing if state->skip.
//   g = grad * grad_mul; m = b1 m + (1-b1) g; v = b2 v + (1-b2) g^2; t = state->adam_step - moments_begin
//   master -= lr * lr_scale * (m / (1-b1^t) / (sqrt(v / (1-b2^t)) + eps) + decay * master); param = master rounded to T
// bf16 moments are rounded stochastically with philox(rng_key, element_offset + i, state->adam_step); fp8 moments
// (moment_codes.h) with word e % 4 of philox(rng_key, e / 4, state->adam_step), e = element_offset + i, its low half
// for m and its high half for v.
// Source: Loshchilov and Hutter, arXiv 1711.05101.
struct AdamWArgs {
    Tensor param;             // (n) T, =; optional: absent if a linear keeps only FP8 weights
    Tensor master;            // (n) stat, in and =
    Tensor m, v;              // (n) fp32 or bf16 (fp64 when T is fp64), or e4m3 and ue5m3, in and =
    Tensor m_scale_inv = {}, v_scale_inv = {};   // (scale_blocks(n)) fp32, in and =; of fp8 moments only
    Tensor grad;              // (n) grad
    const StepState* state;
    float lr_scale = 1;       // of state->lr
    float beta1, beta2, eps, weight_decay;
    int64_t moments_begin = 0;   // the value of state->adam_step at which the moments were 0
    uint64_t rng_key;         // of the parameter
    int64_t element_offset;   // index of element 0 within the parameter; fp8 moments: a multiple of kScaleBlock
    ScaleEntry* entry = nullptr;  // optional: amax_bits = max(amax_bits, |new master rounded to bf16|)
};

// ema += (1 - d) (master - ema) with d = min(decay, (1 + t) / (10 + t)), t = state->adam_step: in a short run the
// initial weights do not stay (the warm-up of TensorFlow's ExponentialMovingAverage). Does nothing if state->skip.
struct EmaArgs {
    Tensor ema;       // (n) stat, in and =
    Tensor master;    // (n) stat
    const StepState* state;
    double decay;
};

// Muon: the update of a matrix is its Nesterov momentum with all singular values near 1, found by a few steps
// X = (a I + b X X^T + c (X X^T)^2) X. The operations are what AdamW and matmuls do not have.
// Source: Jordan et al., "Muon", 2024; Amsel et al., "The Polar Express", arXiv 2505.16932.

// Of n consecutive elements of a parameter; does nothing if state->skip.
//   g = grad * grad_mul; m = beta m + (1 - beta) g; grad = beta m + (1 - beta) g
// A bf16 or fp8 m (moment_codes.h) is rounded stochastically, after grad used it, with the random bits of AdamWArgs' m.
struct MuonMomentumArgs {
    Tensor m;                 // (n) fp32 or bf16 (fp64 if grad is), or e4m3, in and =
    Tensor m_scale_inv = {};  // (scale_blocks(n)) fp32, in and =; of an e4m3 m only
    Tensor grad;              // (n) grad, in and =
    const StepState* state;
    float beta;
    uint64_t rng_key;         // of the parameter
    int64_t element_offset;   // index of element 0 within the parameter; an e4m3 m: a multiple of kScaleBlock
};
// Of each matrix: *= 1 / (margin sqrt(sum_squares[i])), or 0 if the sum is 0: no singular value is above 1 / margin.
struct MuonNormalizeArgs {
    Tensor matrix;               // (matrices, n) T, in and =
    const double* sum_squares;   // (matrices)
    double margin;
    int64_t matrices = 1;        // at most 65535
};
// Of each matrix: square = a I + b gram + c square.
struct MuonPolynomialArgs {
    Tensor square;   // (matrices, k, k) T, in and =: gram^2
    Tensor gram;     // (matrices, k, k) T
    int64_t k;
    double a, b, c;
    int64_t matrices = 1;
};
// Second moments of rows (NorMuon: Li et al., arXiv 2510.05491):
//   new_v[r] = beta2 v[r] + (1 - beta2) mean(matrix[r]^2), or v[r] if state->skip
//   matrix[r] /= sqrt(new_v[r]) + kRowNormEps
inline constexpr double kRowNormEps = 1e-10;
struct MuonRowNormArgs {
    Tensor matrix;   // (rows, cols) T, in and =
    Tensor v;        // (rows) stat
    Tensor new_v;    // (rows) stat, =
    const StepState* state;
    int64_t rows, cols;
    double beta2;
};
// Of n consecutive elements of a parameter; does nothing if state->skip.
//   master -= lr * (scale * direction + weight_decay * master); param = master rounded to T
struct MuonUpdateArgs {
    Tensor param;                 // (n) T, =; optional: absent if a linear keeps only FP8 weights
    Tensor master;                // (n) stat, in and =
    Tensor direction;             // (n) grad
    const StepState* state;
    float scale, weight_decay;
    ScaleEntry* entry = nullptr;  // optional: amax_bits = max(amax_bits, |new master rounded to bf16|)
};

// out[i] = mean + std * rng_normal(key, element_offset + i), with one fmaf.
struct FillNormalArgs {
    Tensor out;   // fp32 or bf16, =
    uint64_t key;
    int64_t element_offset;
    float mean, std;
};
struct FillConstantArgs {
    Tensor out;   // any float type, =
    float value;
};
// out[i] = in[i], rounded to nearest even.
struct CastArgs {
    Tensor out;   // fp32, bf16 (fp64 on the CPU), =
    Tensor in;
};

// ---- communication of gradients and FP8 weights

// Elements of a gradient that share one scale when it is communicated in FP8.
inline constexpr int64_t kGradCommChunk = 128;

// Quantizes a gradient for communication, in chunks of kGradCommChunk elements: out = to_fp8(in * scale), scale =
// chunk_scale(amax): 448 / amax; 1 for zeros; NaN if a value is not finite, so that the whole chunk becomes NaN.
struct QuantizeChunksArgs {
    Tensor out;                    // (n) e4m3, =; n a multiple of kGradCommChunk
    Tensor scales;                 // (n / kGradCommChunk) fp32, =: scale_inv
    Tensor in;                     // (n) fp32 or bf16
    Fp8Counts* counts = nullptr;   // +=, optional
};
// Local reduction: out[i] (+)= sum over r of in[r][i] (times its scale if there are scales), in fp32, in order of r.
struct SumRanksArgs {
    Tensor out;       // (n) fp32, or bf16, to which the result is rounded; = or, if accumulate, += the sum
    Tensor in;        // (ranks, n) fp32, bf16 or e4m3
    Tensor scales;    // (ranks, n / kGradCommChunk) fp32: scale_inv; e4m3 only
    Tensor own = {};  // (n) in's dtype, optional: read in place of in[own_rank]; not e4m3
    int64_t own_rank = 0;
    int64_t ranks;
    bool accumulate = false;   // the sum over the ranks is rounded to fp32 before it is added
};
// Compares two vectors: sums[0..3] += a.a, b.b, a.b, (a-b).(a-b), in fp64 in a fixed order.
struct CompareSumsArgs {
    double* sums;     // (4), +=
    Tensor a, b;      // (n) fp32
    Tensor scratch;   // (4 * kPartialSums) fp64, =
};

// Quantization of (R, C) weight matrices in a row by several ranks, each with a shard range, in the steps of quantize.
// 1. Blocks: amaxes[m][r / 128][c / 128] = max(itself, |in rounded to bf16|), as bits; (ceil(R / 128), ceil(C / 128)).
struct BlockAmaxArgs {
    uint32_t* amaxes;
    Tensor in;        // (n) fp32: elements [begin, begin + n) of the matrices
    int64_t begin, R, C;
    int64_t matrices = 1;
};
// 2. One scale: sets the entries as quantize does. kCurrent: scale = scale_of(amax_bits); both: scale_inv = 1 / scale.
struct Fp8ScalesArgs {
    ScaleEntry* entries;   // (count)
    int64_t count;
    Scaling scaling;
    Dtype format;
    const StepState* state = nullptr;   // optional: does nothing if state->skip
};
// 3. out = in, rounded to bf16 and cast with the scale of the tensor or block.
struct QuantizeRunArgs {
    Tensor out;                            // (n) fp8, =
    Tensor in;                             // (n) fp32 or bf16: elements [begin, begin + n) of the matrices
    int64_t begin, R, C;
    const ScaleEntry* entry = nullptr;         // one scale: has that scale; block scales: null
    const uint32_t* block_amaxes = nullptr;   // block scales: the all-reduced results of block_amax
    Fp8Counts* counts = nullptr;           // +=, optional
    int64_t matrices = 1;
};
// 4. Blocks: scale_inv (kBlock128x128) of the matrices and of their transposes, from the all-reduced amaxes.
struct BlockScalesArgs {
    Tensor scale_inv;              // (matrices, scale_inv_elems(kBlock128x128, R, C)) fp32, =
    Tensor transposed_scale_inv;   // (matrices, scale_inv_elems(kBlock128x128, C, R)) fp32, =
    const uint32_t* amaxes;
    int64_t R, C;
    Dtype format;
    int64_t matrices = 1;
};
// 5. out[m][c][r] = in[m][r][c], bytes; R and C multiples of 16.
struct TransposeBytesArgs {
    Tensor out;   // (matrices, C, R) fp8, =
    Tensor in;    // (matrices, R, C) fp8
    int64_t R, C;
    int64_t matrices = 1;
};

#define OP(name, Args) void name(Ctx& ctx, const Args& args);
namespace cpu {
#include "llmc/ops/ops.inl"
}
#ifdef LLMC_CUDA
namespace cuda {
#include "llmc/ops/ops.inl"
}
#endif
namespace ops {   // dispatches to the device
#include "llmc/ops/ops.inl"
}
#undef OP

// The rows of ops.inl in order.
enum class OpKind {
#define OP(name, Args) name,
#include "llmc/ops/ops.inl"
#undef OP
};

// Records the work of an operation in a rehearsal. There is one overload per argument struct in op_cost.cpp, so that an
// operation without a cost does not link.
#define OP(name, Args) void rehearse_op(Ctx& ctx, OpKind kind, const Args& args);
#include "llmc/ops/ops.inl"
#undef OP
