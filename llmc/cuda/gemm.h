// Private state of the CUDA matmul: cuBLASLt handle, workspace, and one plan (algorithm) per shape.
#pragma once
#include <cublasLt.h>

#include <compare>
#include <map>
#include <string>

#include "llmc/ops/ops.h"

#define CUBLAS_CHECK(call)                                                                                   \
    do {                                                                                                     \
        cublasStatus_t status_ = (call);                                                                     \
        CHECK(status_ == CUBLAS_STATUS_SUCCESS, "%s", cublasLtGetStatusName(status_));                       \
    } while (0)

// Everything that determines which algorithms are valid and fast; calls with equal keys run the same algorithm.
struct GemmKey {
    GemmLayout layout;
    Dtype a, b, result;
    bool bias, accumulate;
    int align_a, align_b, align_d;  // bytes, the largest power of two that divides the address, at most 16
    int64_t M, N, K;
    // FP8 operands only; their scales are always 16-byte aligned.
    Granularity a_granularity = Granularity::kTensor, b_granularity = Granularity::kTensor;
    bool fast_accumulation = false;
    auto operator<=>(const GemmKey&) const = default;
};

struct GemmPlan {
    cublasLtMatmulAlgo_t algo;
    bool custom = false;   // runs gemm_fp8_blockwise, our custom kernel, instead of `algo`
    float us = 0;          // time measured by the search; 0 for the heuristic's first answer
    bool checked = false;  // known to be valid for this library and our workspace
};

struct GemmState {
    cublasLtHandle_t handle = nullptr;
    void* workspace = nullptr;  // kGemmWorkspaceBytes; for one stream only, since its users are not synchronised
    bool search = false, search_custom = true;   // see gemm_set_search; whether a search may choose the custom kernel
    double search_seconds = 0;   // that searches have taken
    std::string library, gpu;   // plans are valid for these
    std::map<GemmKey, GemmPlan> plans;
};

// cuBLAS asks for 32 MiB on Hopper; twice that lets more split-K algorithms take part in the search.
inline constexpr int64_t kGemmWorkspaceBytes = 64ll << 20;

// Create and destroy ctx.gemm; need ctx.stream and the current device. Exit 2 when cuBLASLt does not start.
void gemm_state_create(Ctx& ctx, const DeviceInfo& info);
void gemm_state_destroy(Ctx& ctx);

// One line for messages: layout, sizes, types, scales, bias, alignment.
std::string gemm_describe(const GemmKey& key);
// Errors name the whole call: needs a GemmKey `key` in scope.
#define CHECK_CALL(condition, what) CHECK(condition, "%s: %s", gemm_describe(key).c_str(), what)

// The arguments of one cuBLASLt call. The descriptors are plain structs without resources, filled for each call.
struct GemmProblem {
    cublasLtMatmulDescOpaque_t op;
    cublasLtMatrixLayoutOpaque_t first, second, result;
    const void *first_data, *second_data;
    void* result_data;
    float beta;
};

// Returns the plan of this call, chosen now if there is none (see gemm_set_search). Choosing leaves D unchanged or as
// one plain call leaves it.
const GemmPlan& gemm_plan_for(Ctx& ctx, GemmProblem& problem, const GemmKey& key, const GemmArgs& args);

// Runs a plan once and returns the library's status.
cublasStatus_t gemm_launch(Ctx& ctx, GemmProblem& problem, const GemmPlan& plan, const GemmArgs& args);

// ---- custom blockwise FP8 kernel (gemm_fp8_blockwise_sm90.cu). Same bits as the library; with 1x128 scales of B only
// if the scales are powers of two, as all of ours are.
namespace cuda {
// Whether this build and device have it, and whether it supports a call: E4M3 operands, A in 1x128 blocks, B in 1x128
// or 128x128.
bool gemm_fp8_blockwise_available(const Ctx& ctx);
bool gemm_fp8_blockwise_supports(const Ctx& ctx, const GemmArgs& args);
void gemm_fp8_blockwise(Ctx& ctx, const GemmArgs& args);
// The same kernel for the matmuls of experts; grouped_gemm calls it.
void grouped_gemm_fp8(Ctx& ctx, const GroupedGemmArgs& args);

// ---- matmul of INT8 operands (gemm_int8_sm90.cu): whether this build and device have it; gemm calls it, without a
// plan, since the library has none with scales of rows.
bool gemm_int8_available(const Ctx& ctx);
void gemm_int8(Ctx& ctx, const GemmArgs& args);

// ---- matmul of BF16 operands whose D is symmetric (gemm_bf16_sm90.cu): computes the lower triangle and copies it to
// the upper one. Whether this build and device have it, for these types and sizes; gemm calls it for large D, and for
// those of several matrices.
bool gemm_symmetric_supports(const Ctx& ctx, const GemmArgs& args);
void gemm_symmetric(Ctx& ctx, const GemmArgs& args);
// The same kernel for any products of several matrices, forward or dgrad.
bool gemm_matrices_supports(const Ctx& ctx, const GemmArgs& args);
void gemm_matrices(Ctx& ctx, const GemmArgs& args);
// The same kernel for the matmuls of experts; grouped_gemm calls it.
bool grouped_gemm_supports(const Ctx& ctx, const GroupedGemmArgs& args);
void grouped_gemm_sm90(Ctx& ctx, const GroupedGemmArgs& args);
}  // namespace cuda
