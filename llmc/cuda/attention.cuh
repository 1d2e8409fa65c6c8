// Shared by the attention kernels: offsets within the packed projections, and the launchers that attention.cu chooses
// from. A row of qkv holds a token's [NH query heads | NKV key heads | NKV value heads], HS elements each.
#pragma once
#include "llmc/cuda/common.cuh"
#include "llmc/cuda/ptx.cuh"
#include "llmc/cuda/soft_cap.cuh"

namespace cuda {

struct AttentionShape {
    int64_t B, T, NH, NKV, HS;
    float softmax_mul, softcap = 0;       // AttentionForwardArgs::softcap
    const int32_t* documents = nullptr;   // (2, B, T): starts, ends; null: every sequence is one document
    int window = 0;                       // tokens; T: the whole sequence
    const void* sinks = nullptr;          // (NH) T: AttentionForwardArgs::sinks

    // Whether some query does not attend to every key before it.
    bool has_borders() const { return documents || window < T; }
    // first_key: the first key that query t attends to. end_query: one past the last query that attends to key t. Both
    // increase with t.
    __device__ int first_key(int64_t b, int t) const { return first_key_of_row(b * T + t, t); }
    template <typename Row> __device__ int first_key_of_row(Row row, int t) const {   // row: b T + t
        return max(documents ? documents[row] : 0, t - window + 1);
    }
    __device__ int end_query(int64_t b, int t) const {
        return min(documents ? documents[(B + b) * T + t] : static_cast<int>(T), t + window);
    }
    template <typename T> __device__ float sink(int64_t h) const {
        return sinks ? to_float(static_cast<const T*>(sinks)[h]) : -INFINITY;
    }
    template <typename T, bool kCap> __device__ SoftCap<T, kCap> scores() const { return {softmax_mul, softcap}; }
    __host__ __device__ int64_t row() const { return (NH + 2 * NKV) * HS; }   // elements per token in qkv
    __host__ __device__ int64_t group() const { return NH / NKV; }            // query heads per key head
    // Offset of a token's head in qkv; the stride between tokens is row().
    __device__ int64_t query(int64_t b, int64_t t, int64_t h) const { return (b * T + t) * row() + h * HS; }
    __device__ int64_t key(int64_t b, int64_t t, int64_t kv) const { return query(b, t, NH + kv); }
    __device__ int64_t value(int64_t b, int64_t t, int64_t kv) const { return query(b, t, NH + NKV + kv); }
    // Offset in out and dout; the stride between tokens is NH * HS.
    __device__ int64_t output(int64_t b, int64_t t, int64_t h) const { return ((b * T + t) * NH + h) * HS; }
    // Offset in lse and delta; the stride between tokens is 1.
    __device__ int64_t stat(int64_t b, int64_t t, int64_t h) const { return (b * NH + h) * T + t; }
};

inline constexpr float kLog2e = 1.44269504f, kLn2 = 0.69314718f;

// The end of a row's softmax: the sink joins `sum`, that of 2^(score - reference) for scores in log2 units. Without a
// sink (-infinity), mul has the bits of numerator / sum, and lse those of the sum's logarithm.
struct RowEnd {
    float mul, lse;   // numerator / the whole sum, for sums relative to the reference

    __device__ RowEnd(float numerator, float reference, float sum, float sink) {
        const float most = fmaxf(reference, sink * kLog2e), keep = exp2_approx(reference - most);
        sum = sum * keep + exp2_approx(sink * kLog2e - most);
        mul = __fdividef(numerator * keep, sum), lse = most * kLn2 + logf(sum);
    }
};

// AttentionForwardArgs::max_logits of a head. logit: at least 0, so that its bits are in the order of the values.
__device__ inline void raise_logit(float* max_logit, float logit) {
    atomicMax(reinterpret_cast<unsigned int*>(max_logit), __float_as_uint(logit));
}
// score: the largest of this lane, in log2 units, at least 0.
__device__ inline void record_logit(float* max_logit, float score) {
    score = warp_max(score) * kLn2;
    if (threadIdx.x % 32 == 0) raise_logit(max_logit, score);
}

// Any type and even head dim up to 256, on the CUDA cores; with soft caps.
void attention_forward_plain(Ctx& ctx, const AttentionForwardArgs& args, const AttentionShape& shape);
void attention_backward_plain(Ctx& ctx, const AttentionBackwardArgs& args, const AttentionShape& shape);

// bf16, head dim 64 or 128, 16-byte aligned tensors, mma.sync.
void attention_forward_mma(Ctx& ctx, const AttentionForwardArgs& args, const AttentionShape& shape);
void attention_backward_mma(Ctx& ctx, const AttentionBackwardArgs& args, const AttentionShape& shape);

// As above, on compute capability 9.0 in an sm_90a build, also head dim 256 and multiples of 8 from 72 to 96.
void attention_forward_sm90(Ctx& ctx, const AttentionForwardArgs& args, const AttentionShape& shape);
void attention_backward_sm90(Ctx& ctx, const AttentionBackwardArgs& args, const AttentionShape& shape);
int64_t attention_sums_elems_sm90(int64_t B, int64_t T, int64_t NH, int64_t HS);
// Reads args.heads instead of args.qkv.
void attention_forward_fp8_sm90(Ctx& ctx, const AttentionForwardArgs& args, const AttentionShape& shape);

}  // namespace cuda
