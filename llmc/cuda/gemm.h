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

// Everything that decides which algorithms are legal and fast: calls with equal keys run the same algorithm.
struct GemmKey {
    GemmLayout layout;
    GemmEpilogue epilogue;
    Dtype a, b, result;
    bool bias, pre, accumulate;
    int align_a, align_b, align_d;  // bytes, the largest power of two that divides the address, at most 16
    int64_t M, N, K;
    // FP8 operands only; their scales always lie on 16 bytes.
    Granularity a_granularity = Granularity::kTensor, b_granularity = Granularity::kTensor;
    bool fast_accumulation = false;
    auto operator<=>(const GemmKey&) const = default;
};

struct GemmPlan {
    cublasLtMatmulAlgo_t algo;
    bool own = false;      // our own kernel (gemm_blocks), not `algo`
    float us = 0;          // time measured by the search, 0 if the library's first answer was taken
    bool checked = false;  // known to fit this library and our workspace
};

struct GemmState {
    cublasLtHandle_t handle = nullptr;
    void* workspace = nullptr;  // kGemmWorkspaceBytes; its users are not ordered, so one stream only
    bool search = false, search_own = true;   // see gemm_set_search; whether it may choose our own kernels
    std::string library, gpu;   // what plans are valid for
    std::map<GemmKey, GemmPlan> plans;
};

// cuBLAS asks for 32 MiB on Hopper; twice that lets more split-K algorithms take part in the search.
inline constexpr int64_t kGemmWorkspaceBytes = 64ll << 20;

// Open and close ctx.gemm; ctx.stream is set and the device is current. Exit 2 when cuBLASLt does not start.
void gemm_state_create(Ctx& ctx);
void gemm_state_destroy(Ctx& ctx);

// One line for messages: layout, sizes, types, scales, epilogue, alignment.
std::string gemm_describe(const GemmKey& key);
// Every error about a call names the whole call, `key`.
#define CHECK_CALL(condition, what) CHECK(condition, "%s: %s", gemm_describe(key).c_str(), what)

// cuBLASLt's view of one call. The descriptors are plain structs without resources, built anew for each call.
struct GemmProblem {
    cublasLtMatmulDescOpaque_t op;
    cublasLtMatrixLayoutOpaque_t first, second, result;
    const void *first_data, *second_data;
    void* result_data;
    float beta;
};

// The plan of this call, found now if there is none (see gemm_set_search); leaves D as it was or as one plain call
// would leave it.
const GemmPlan& gemm_plan_for(Ctx& ctx, GemmProblem& problem, const GemmKey& key, const GemmArgs& args);

// One run of a plan, and the library's answer.
cublasStatus_t gemm_launch(Ctx& ctx, GemmProblem& problem, const GemmPlan& plan, const GemmArgs& args);

// ---- blockwise products of our own (gemm_blocks_sm90.cu), with the library's bits but for a bf16 D that is added to,
// which the library rounds twice
namespace cuda {
// This build and device have them; and they take this call: E4M3 operands, A of 1x128 scales, B of 128x128 ones.
bool gemm_blocks_here(const Ctx& ctx);
bool gemm_blocks_fits(const Ctx& ctx, const GemmArgs& args);
void gemm_blocks(Ctx& ctx, const GemmArgs& args);
}  // namespace cuda
