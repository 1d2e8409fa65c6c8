// The second half of every column reduction (norm, qk-norm and bias gradients), and of sums of whole tensors.
#pragma once
#include "llmc/cuda/common.cuh"

namespace cuda {

// One gradient row and the partial sums that belong to it.
struct ColumnSum {
    Tensor out;             // (C) fp32 or bf16, +=; absent: nothing is done
    const float* partial;   // (rows, C)
};

// first.out[c] += sum over r of first.partial[r, c], and the same for second; fixed order.
void add_column_sums(Ctx& ctx, const ColumnSum& first, const ColumnSum& second, int64_t rows, int64_t C);

// sums[s] += sum of partial[s * kPartialSums ...] of `count` partial sums each, for `sets` of them; fixed order.
void add_partial_sums(Ctx& ctx, double* sums, const double* partial, int64_t count, int64_t sets);

}  // namespace cuda
