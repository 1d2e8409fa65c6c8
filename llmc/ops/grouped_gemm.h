// Grouped matmuls and those of several matrices one by one: the CPU's, and where a GPU has no kernel for all of them.
#pragma once
#include "llmc/base/check.h"
#include "llmc/ops/gemm_fp8.h"

// Exits 1 if a tensor has another number of elements than the sizes say, or FP8 operands are not as GroupedGemmArgs
// says.
inline void check_grouped_gemm(const GroupedGemmArgs& a) {
    const bool wgrad = a.layout == GemmLayout::kWgrad, fp8 = is_fp8(a.A.dtype);
    const int64_t matrix = wgrad ? a.M * a.N : a.N * a.K;   // one expert's
    const int64_t K = wgrad && fp8 ? padded_rows(a.K, a.E) : a.K;
    CHECK(a.E > 0 && a.N > 0 && (wgrad ? a.M : a.K) > 0 && a.A.elems == a.M * K
              && a.B.elems == (wgrad ? a.N * K : a.E * matrix) && a.D.elems == (wgrad ? a.E * matrix : a.M * a.N)
              && a.A.dtype == a.B.dtype && a.offsets.dtype == Dtype::kInt32 && a.offsets.elems == a.E + 1
              && (wgrad || !a.accumulate),
          "grouped_gemm of %lld experts, M %lld N %lld K %lld: A, B, D or offsets does not fit", ll(a.E), ll(a.M),
          ll(a.N), ll(a.K));
    if (!fp8) return;
    const int64_t of_b = wgrad ? scale_inv_elems(Granularity::kBlock1x128, a.N, K)
                               : a.E * scale_inv_elems(Granularity::kBlock128x128, a.N, K);
    CHECK(a.A.dtype == Dtype::kE4m3 && (a.D.dtype == Dtype::kBf16 || (wgrad && a.D.dtype == Dtype::kFp32))
              && a.A_scale_inv.elems == scale_inv_elems(Granularity::kBlock1x128, a.M, K)
              && a.B_scale_inv.elems == of_b && a.M % 4 == 0 && a.N % 16 == 0 && K % 16 == 0,
          "grouped_gemm in FP8, M %lld N %lld K %lld: types or scales do not fit", ll(a.M), ll(a.N), ll(a.K));
    for (const Tensor& t : {a.A, a.B, a.D, a.A_scale_inv, a.B_scale_inv})
        CHECK(aligned_to_16(t), "grouped_gemm in FP8: A, B, D and scales 16-byte aligned");
}

// Exits 1 if a matmul of several matrices is not as GemmArgs says.
inline void check_gemm_matrices(const GemmArgs& a) {
    CHECK(a.M > 0 && a.N > 0 && a.K > 0 && a.A.elems == a.matrices * a.M * a.K && a.B.elems == a.matrices * a.N * a.K
              && a.D.elems == a.matrices * a.M * a.N && a.A.dtype == a.B.dtype && dtype_bytes(a.A.dtype) > 1 && !a.bias
              && !a.accumulate,
          "gemm of %lld matrices, M %lld N %lld K %lld: A, B or D does not fit", ll(a.matrices), ll(a.M), ll(a.N),
          ll(a.K));
}

// Calls multiply(GemmArgs) for each matrix.
template <typename Multiply> void for_matrices(const GemmArgs& a, Multiply&& multiply) {
    const auto matrix = [](const Tensor& all, int64_t number, int64_t elems) {
        return all.slice(number * elems, elems);
    };
    for (int64_t i = 0; i < a.matrices; i++) {
        GemmArgs one = a;
        one.D = matrix(a.D, i, a.M * a.N), one.A = matrix(a.A, i, a.M * a.K), one.B = matrix(a.B, i, a.N * a.K);
        one.matrices = 0;
        multiply(one);
    }
}

// Calls multiply(GemmArgs) for each expert that has rows and, of weight gradients that are not added to, clear(Tensor)
// for each other one. offsets: on the host.
template <typename Multiply, typename Clear>
void for_experts(const GroupedGemmArgs& a, const int32_t* offsets, Multiply&& multiply, Clear&& clear) {
    const bool wgrad = a.layout == GemmLayout::kWgrad;
    for (int64_t e = 0; e < a.E; e++) {
        const int64_t begin = offsets[e], rows = offsets[e + 1] - begin;
        CHECK(begin >= 0 && rows >= 0 && begin + rows <= (wgrad ? a.K : a.M), "grouped_gemm: rows of expert %lld",
              ll(e));
        const Tensor weights = (wgrad ? a.D : a.B).slice(e * (wgrad ? a.M : a.K) * a.N, (wgrad ? a.M : a.K) * a.N);
        if (rows > 0 && wgrad)
            multiply({.D = weights, .A = a.A.slice(begin * a.M, rows * a.M), .B = a.B.slice(begin * a.N, rows * a.N),
                      .M = a.M, .N = a.N, .K = rows, .layout = a.layout, .accumulate = a.accumulate});
        else if (rows > 0)
            multiply({.D = a.D.slice(begin * a.N, rows * a.N), .A = a.A.slice(begin * a.K, rows * a.K), .B = weights,
                      .M = rows, .N = a.N, .K = a.K, .layout = a.layout});
        else if (wgrad && !a.accumulate) clear(weights);
    }
}
