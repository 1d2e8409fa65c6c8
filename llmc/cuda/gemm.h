// Private state of the CUDA matmul: cuBLASLt handle, workspace, and one plan (algorithm) per shape.
#pragma once
#include <cublasLt.h>

#include <compare>
#include <map>
#include <string>

#include "llmc/ops.h"

// Everything that decides which algorithms are legal and fast: calls with equal keys run the same algorithm.
struct GemmKey {
    GemmLayout layout;
    GemmEpilogue epilogue;
    Dtype operands, result;
    bool bias, pre, accumulate;
    int align_a, align_b, align_d;  // bytes, the largest power of two that divides the address, at most 16
    int64_t M, N, K;
    auto operator<=>(const GemmKey&) const = default;
};

struct GemmPlan {
    cublasLtMatmulAlgo_t algo;
    float us = 0;          // time measured by the search, 0 if the library's first answer was taken
    bool checked = false;  // known to fit this library and our workspace
};

struct GemmState {
    cublasLtHandle_t handle = nullptr;
    void* workspace = nullptr;  // kGemmWorkspaceBytes; its users are not ordered, so one stream only
    bool search = false;
    std::string library, gpu;   // what plans are valid for
    std::map<GemmKey, GemmPlan> plans;
    int64_t matmuls[8] = {};    // executed, by Dtype of the operands
};

// cuBLAS asks for 32 MiB on Hopper; twice that lets more split-K algorithms take part in the search.
inline constexpr int64_t kGemmWorkspaceBytes = 64ll << 20;

// Open and close ctx.gemm; ctx.stream is set and the device is current. Exit 2 when cuBLASLt does not start.
void gemm_state_create(Ctx& ctx);
void gemm_state_destroy(Ctx& ctx);

// Matmuls executed since gemm_state_create with operands of this type, those of searches left out.
int64_t gemm_count(const Ctx& ctx, Dtype operands);

// One line for messages: layout, sizes, types, epilogue, alignment.
std::string gemm_describe(const GemmKey& key);
