// Requirements of FP8 and INT8 matmuls, checked on both devices, so that a run on the CPU refuses what a GPU would
// refuse.
#pragma once

#include <cstdint>
#include "llmc/base/fp8.h"
#include "llmc/ops/ops.h"

inline bool fp8_operands(const GemmArgs& args) { return is_fp8(args.A.dtype) || is_fp8(args.B.dtype); }

inline bool int8_operands(const GemmArgs& args) {
    return args.A.dtype == Dtype::kInt8 || args.B.dtype == Dtype::kInt8;
}

inline bool aligned_to_16(const Tensor& tensor) { return reinterpret_cast<uintptr_t>(tensor.data) % 16 == 0; }

// Returns what is wrong with the scales, or null. cuBLASLt's heuristic accepts scales that are not 16-byte aligned, but
// the launch then fails.
inline const char* fp8_scales_error(const GemmArgs& args) {
    const bool tensors = args.A_granularity == Granularity::kTensor && args.B_granularity == Granularity::kTensor;
    const bool blocks = args.A_granularity == Granularity::kBlock1x128 && args.B_granularity != Granularity::kTensor;
    if (!tensors && !blocks) return "scales are per tensor for both operands, or 1x128 for A and blocks for B";
    if (args.A_scale_inv.dtype != Dtype::kFp32 || args.B_scale_inv.dtype != Dtype::kFp32) return "scales are fp32";
    if (args.A_scale_inv.elems != scale_inv_elems(args.A_granularity, args.M, args.K))
        return "A_scale_inv has another number of elements";
    if (args.B_scale_inv.elems != scale_inv_elems(args.B_granularity, args.N, args.K))
        return "B_scale_inv has another number of elements";
    if (!aligned_to_16(args.A_scale_inv) || !aligned_to_16(args.B_scale_inv))
        return "A_scale_inv or B_scale_inv not 16-byte aligned";
    if (blocks && args.M % 4 != 0) return "block scales need M in multiples of 4";
    if (blocks && args.fast_accumulation) return "fast accumulation cannot apply block scales";
    return nullptr;
}

// Returns what is wrong with a matmul of FP8 operands, or null.
inline const char* fp8_gemm_error(const GemmArgs& args) {
    const Dtype a = args.A.dtype, b = args.B.dtype;
    if (!is_fp8(a) || !is_fp8(b)) return "one operand is FP8, the other is not";
    if (a == Dtype::kE5m2 && b == Dtype::kE5m2) return "no product of E5M2 and E5M2 on tensor cores";
    if (args.D.dtype != Dtype::kBf16 && args.D.dtype != Dtype::kFp32) return "FP8 operands give a bf16 or fp32 D";
    if (args.N % 16 != 0 || args.K % 16 != 0) return "FP8 operands need N and K in multiples of 16";
    if (!aligned_to_16(args.A) || !aligned_to_16(args.B) || !aligned_to_16(args.D))
        return "FP8 operands need A, B and D 16-byte aligned";
    if (args.bias && args.bias.dtype != Dtype::kBf16) return "the bias of FP8 operands is bf16";
    return fp8_scales_error(args);
}

// Returns what is wrong with a matmul of INT8 operands, or null.
inline const char* int8_gemm_error(const GemmArgs& args) {
    constexpr int64_t kLargestK = 1 << 17;   // the sum of so many products of 127 and 127 is less than 2^31
    if (args.A.dtype != Dtype::kInt8 || args.B.dtype != Dtype::kInt8) return "one operand is INT8, the other is not";
    if (args.layout != GemmLayout::kForward || args.accumulate || args.D.dtype != Dtype::kBf16)
        return "INT8 operands are multiplied only as in the forward pass, to a bf16 D, without adding to it";
    if (args.N % 16 != 0 || args.K % 16 != 0 || args.K > kLargestK)
        return "INT8 operands need N and K in multiples of 16, and K up to 131072";
    if (args.bias && args.bias.dtype != Dtype::kBf16) return "the bias of INT8 operands is bf16";
    if (args.A_granularity != Granularity::kRow || args.B_granularity != Granularity::kRow)
        return "INT8 operands have a scale per row";
    for (const Tensor& scales : {args.A_scale_inv, args.B_scale_inv})
        if (scales.dtype != Dtype::kFp32) return "scales are fp32";
    if (args.A_scale_inv.elems != args.M || args.B_scale_inv.elems != args.N)
        return "A_scale_inv needs M elements and B_scale_inv N";
    for (const Tensor& tensor : {args.A, args.B, args.D, args.bias, args.A_scale_inv, args.B_scale_inv})
        if (!aligned_to_16(tensor)) return "INT8 operands need A, B, D, bias and scales 16-byte aligned";
    return nullptr;
}
