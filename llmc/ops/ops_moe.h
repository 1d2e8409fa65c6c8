// Arguments of the operations of mixtures of experts; conventions as in ops.h. E experts; the rows of tokens are sorted
// by expert: those of expert e are [offsets[e], offsets[e + 1]), any number, also none.
#pragma once
#include "llmc/ops/ops_gemm.h"

// A matmul of each expert. Layouts and types as in GemmArgs, without FP8; the sizes of experts are read on the device.
//   kForward   D(M,N)   = A(M,K) B(E,N,K)^T : y  = x w[e]^T          rows of D and A belong to experts
//   kDgrad     D(M,N)   = A(M,K) B(E,K,N)   : dx = dy w[e]           likewise
//   kWgrad     D(E,M,N) = A(K,M)^T B(K,N)   : dw[e] = dy^T x         rows of A and B belong to experts
// What rows before offsets[0] and from offsets[E] on hold, NaN also, has no effect, and those of D stay as they are.
// The gradient of an expert without rows is 0, or stays as it is if accumulate.
struct GroupedGemmArgs {
    Tensor D;         // = , or += if accumulate: kWgrad only
    Tensor A, B;      // see above
    Tensor offsets;   // (E + 1) int32, ascending, from 0 to the number of rows
    int64_t E, M, N, K;   // the number of rows (M, or K of kWgrad): those that there is memory for
    GemmLayout layout = GemmLayout::kForward;
    bool accumulate = false;
};
