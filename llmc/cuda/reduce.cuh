// The second stage of column sums (gradients of norms, qk-norm and bias) and of sums of whole tensors.
#pragma once
#include "llmc/cuda/common.cuh"

namespace cuda {

// A gradient and its partial sums.
struct ColumnSum {
    Tensor out;             // (C) fp32 or bf16, +=; absent: skipped
    const float* partial;   // (rows, C)
};

// first.out[c] += sum over r of first.partial[r, c], and the same for second; fixed order.
void add_column_sums(Ctx& ctx, const ColumnSum& first, const ColumnSum& second, int64_t rows, int64_t C);

// sums[s] += sum of partial[s * kPartialSums + i] over i < count, for `sets` sums; fixed order.
void add_partial_sums(Ctx& ctx, double* sums, const double* partial, int64_t count, int64_t sets);

}  // namespace cuda
