// Arguments of matmuls; conventions as in ops.h.
#pragma once
#include <cstdint>

#include "llmc/ops/quantized_output.h"

// Layouts of the two operands, named after the passes of y = x w^T.
enum class GemmLayout {
    kForward,   // D(M,N) = A(M,K) B(N,K)^T : y  = x w^T
    kDgrad,     // D(M,N) = A(M,K) B(K,N)   : dx = dy w
    kWgrad,     // D(M,N) = A(K,M)^T B(K,N) : dw = dy^T x
};
// Accumulates in fp32 (fp64 for fp64). A and B have the same dtype; D may be fp32 or bf16 for bf16 operands.
// FP8 operands (E4M3; one of the two may be E5M2): D(M,N) = A(M,K) B(N,K)^T for every layout, with each element of A
// and B multiplied by its scale_inv. K, N are multiples of 16; D is bf16 or fp32, bias bf16.
// Granularities: both kTensor; or A kBlock1x128, B either block granularity and M a multiple of 4.
// INT8 operands: kForward with both kRow, D = the INT32 sum, rounded to fp32, times the rounded product of its two
// scale_inv; with a bias as one fma; then rounded to bf16. K, N are multiples of 16, K at most 2^17, D and bias bf16,
// no accumulate. Needs compute capability 9.0 (gemm_int8_available).
struct GemmArgs {
    // The sides of a symmetric D from which on half of its tiles take less time than all: smaller ones do not fill the
    // GPU.
    static constexpr int64_t kLeastSymmetric = 2048;
    Tensor D;      // (M, N): = , or += if accumulate
    Tensor A, B;   // see layout
    Tensor bias = {};   // (N) dtype of A, optional: added to every row
    int64_t M, N, K;
    GemmLayout layout = GemmLayout::kForward;
    bool accumulate = false;
    bool symmetric = false;   // D is symmetric but for rounding (M = N): its upper half may be a copy of the lower one
    // Of bf16, fp32 or fp64 operands, without bias, with =: A, B and D are so many matrices each, one after another,
    // and the bits of a result do not depend on how many. 0: one, by what is fastest for one.
    int64_t matrices = 0;
    int64_t count() const { return matrices > 0 ? matrices : 1; }
    // FP8 and INT8 only.
    Granularity A_granularity = Granularity::kTensor, B_granularity = Granularity::kTensor;
    Tensor A_scale_inv = {}, B_scale_inv = {};   // fp32, see Granularity; kTensor: 1 element, 16-byte aligned
    bool fast_accumulation = false;   // accumulate in the tensor cores only, without promotion to fp32 registers
};
