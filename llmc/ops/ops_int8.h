// Arguments of the operations of INT8 matrices; conventions as in ops.h.
//
// --fp8-recipe int8-forward multiplies in INT8 in the forward pass: x and w are turned, x' = x H and w' = w H, where H
// turns each group of 64 adjacent columns by the orthogonal Hadamard matrix of 64 (so that x w^T = x' w'^T, and no
// column is much larger than others; QuaRot, arXiv 2404.00456), and each row of x' and w' has a scale. Backward is
// in FP8. A group is turned in fp32: for the distances d = 1, 2, 4, ..., 32, elements i and i + d (i / d even) become
// their sum and their difference; then all are multiplied by 1/8.
//
// With amax the largest magnitude of a turned row: code = rint(x' * (127 / amax)), scale_inv = amax / 127. A row of
// zeros has codes 0 and scale_inv 0, and one with a value of x' that is not finite codes 0 and scale_inv NaN.
// 127 / amax is at most the largest float (amax below 4e-37).
#pragma once
#include <cstdint>

#include "llmc/ops/quantized_output.h"

struct StepState;

inline constexpr int64_t kTurnedColumns = 64;

// The scale of a row's codes (0: all are 0) and its scale_inv.
struct Int8RowScale {
    float scale, scale_inv;
};
HOST_DEVICE inline Int8RowScale int8_row_scale(uint32_t amax_bits) {
    if (amax_bits == 0) return {0.0f, 0.0f};
    if (amax_bits >= kInfinityBits) return {0.0f, float_of_bits(0x7fc00000u)};
    return {scale_of(amax_bits, 127.0f), float_of_bits(amax_bits) / 127.0f};
}

// out and scale_inv (kRow) of a whole matrix.
struct QuantizeInt8Args {
    Tensor out;         // (N, C) int8, =
    Tensor scale_inv;   // (N) fp32, =
    Tensor in;          // (N, C) fp32 or bf16; fp32 is rounded to bf16 first
    int64_t N, C;       // C: a multiple of 64
    const StepState* state = nullptr;   // optional: does nothing if state->skip
};
// The same of an (R, C) matrix by several ranks, each of which has a shard range [begin, begin + n), with begin and n
// multiples of 64.
// 1. amaxes[r] = max(itself, |x'|) as bits of fp32. A value that is not finite gives the bits of infinity.
struct RowAmaxArgs {
    uint32_t* amaxes;   // (R)
    Tensor in;          // (n) fp32 or bf16, rounded to bf16 first
    int64_t begin, R, C;
};
// 2. out = the codes, by the all-reduced amaxes.
struct QuantizeInt8RunArgs {
    Tensor out;         // (n) int8, =
    Tensor in;          // (n) fp32 or bf16, rounded to bf16 first
    const uint32_t* amaxes;   // (R)
    int64_t begin, R, C;
};
// 3. scale_inv of all rows, by the all-reduced amaxes.
struct RowScalesArgs {
    Tensor scale_inv;   // (R) fp32, =
    const uint32_t* amaxes;
    int64_t R;
};
// out = the transpose in FP8, for backward: x = the sums of the codes turned back, which are integers, times
// scale_inv / 8 of the row; then to_fp8(x * entry->scale). Sets entry->scale_inv = 1 / entry->scale.
struct TransposeInt8Args {
    Tensor out;         // (C, R) fp8, =
    Tensor in;          // (R, C) int8
    Tensor scale_inv;   // (R) fp32
    ScaleEntry* entry;
    int64_t R, C;       // R: a multiple of 16, C of 64
    Fp8Counts* counts = nullptr;   // +=, optional
};
