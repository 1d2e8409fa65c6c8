// What the attention kernels share: where things lie in the packed projections, and the launchers that
// attention.cu chooses from. Query, key and value of a token lie in one row of qkv:
// [NH query heads | NKV key heads | NKV value heads], HS elements each.
#pragma once
#include "llmc/cuda/common.cuh"

namespace cuda {

struct AttentionShape {
    int64_t B, T, NH, NKV, HS;
    float softmax_mul;
    const int32_t* documents = nullptr;   // (2, B, T): starts, ends; null: every sequence is one document

    // Document of a token: its first position in the sequence, the one after its last.
    __device__ int document_start(int64_t b, int64_t t) const { return documents[b * T + t]; }
    __device__ int document_end(int64_t b, int64_t t) const { return documents[(B + b) * T + t]; }
    // What a query sees begins here; what sees a key ends before there.
    __device__ int64_t first_key(int64_t b, int64_t t) const { return documents ? document_start(b, t) : 0; }
    __device__ int64_t end_query(int64_t b, int64_t t) const { return documents ? document_end(b, t) : T; }
    __host__ __device__ int64_t row() const { return (NH + 2 * NKV) * HS; }   // elements of a token in qkv
    __host__ __device__ int64_t group() const { return NH / NKV; }            // query heads of a key head
    // First element of a head's token t; tokens follow each other at a distance of row().
    __device__ int64_t query(int64_t b, int64_t t, int64_t h) const { return (b * T + t) * row() + h * HS; }
    __device__ int64_t key(int64_t b, int64_t t, int64_t kv) const { return query(b, t, NH + kv); }
    __device__ int64_t value(int64_t b, int64_t t, int64_t kv) const { return query(b, t, NH + NKV + kv); }
    // The same in out and dout; tokens at a distance of NH * HS.
    __device__ int64_t output(int64_t b, int64_t t, int64_t h) const { return ((b * T + t) * NH + h) * HS; }
    // In lse and delta; tokens at a distance of 1.
    __device__ int64_t stat(int64_t b, int64_t t, int64_t h) const { return (b * NH + h) * T + t; }
};

inline constexpr float kLog2e = 1.44269504f, kLn2 = 0.69314718f;

// Any type and head size up to 256, on the CUDA cores.
void attention_forward_plain(Ctx& ctx, const AttentionForwardArgs& args, const AttentionShape& shape);
void attention_backward_plain(Ctx& ctx, const AttentionBackwardArgs& args, const AttentionShape& shape);

// bf16 and head size 64 or 128, 16-byte aligned, on the tensor cores.
void attention_forward_mma(Ctx& ctx, const AttentionForwardArgs& args, const AttentionShape& shape);
void attention_backward_mma(Ctx& ctx, const AttentionBackwardArgs& args, const AttentionShape& shape);

// The same on compute capability 9.0, in a build for sm_90a.
void attention_forward_sm90(Ctx& ctx, const AttentionForwardArgs& args, const AttentionShape& shape);
void attention_backward_sm90(Ctx& ctx, const AttentionBackwardArgs& args, const AttentionShape& shape);
// From args.heads.
void attention_forward_fp8_sm90(Ctx& ctx, const AttentionForwardArgs& args, const AttentionShape& shape);

}  // namespace cuda
