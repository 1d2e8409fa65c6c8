// Quantized results of operations. FP8 matmuls need both operands with the contraction index innermost, so a tensor of
// shape (N, C) may be needed as stored ("rowwise") and transposed, each quantized along its own innermost index.
#pragma once
#include <cstdint>

#include "llmc/base/fp8.h"

// How many elements of a quantized (R, K) matrix share one scale, and the layout of scale_inv:
enum class Granularity : uint8_t {
    kTensor,         // per tensor: (1), scale_inv of a scale entry
    kBlock1x128,     // 128 elements of a row: (ceil(K / 128), R)
    kBlock128x128,   // 128 rows x 128 columns: (ceil(R / 128), ceil(K / 128) rounded up to a multiple of 4)
    kRow,            // a row, of INT8: (R)
};
// Number of floats of scale_inv of a quantized (R, K) matrix.
HOST_DEVICE constexpr int64_t scale_inv_elems(Granularity granularity, int64_t R, int64_t K) {
    switch (granularity) {
        case Granularity::kTensor: return 1;
        case Granularity::kBlock1x128: return scale_blocks(K) * R;
        case Granularity::kBlock128x128: return scale_blocks(R) * ((scale_blocks(K) + 3) / 4 * 4);
        case Granularity::kRow: return R;
    }
    return 0;
}

// State of one FP8 tensor in device memory. cuBLASLt needs scale_inv 16-byte aligned.
struct alignas(16) ScaleEntry {
    float scale_inv;          // of the last cast (kTensor)
    float scale;              // delayed: for the next cast, = by fp8_update; current: of the last cast
    uint32_t amax_bits;       // amax of the values recorded since fp8_clear or fp8_update
    uint32_t step_amax_bits;  // for reports: largest amax of the optimizer step
};

// Statistics of the casts of one FP8 tensor, for reports; +=.
struct Fp8Counts {
    unsigned long long elems;       // values cast
    unsigned long long saturated;   // finite values above the largest number
    unsigned long long flushed;     // nonzero values that became 0
    unsigned long long nonfinite;   // infinities and NaN
};

// Where the scale of a kTensor cast comes from. Blocks always use block_scale_of their amax.
enum class Scaling : uint8_t {
    kDelayed,   // entry->scale; entry->scale_inv = 1 / scale
    kCurrent,   // entry->scale = scale_of(entry->amax_bits), recorded before; entry->scale_inv = 1 / scale
};

// What an operation computes from its bf16 result X of shape (N, C), in addition to or instead of writing X: quantized
// operands of FP8 matmuls, and the bias gradient if X is a dy. X is rounded to bf16, then quantized: to_fp8(x * scale).
// All parts are optional; a default QuantOut asks for nothing. C must be a multiple of 16, or of 8 without copies()
// (activation_backward of a gated function: 16); with `transposed` N must be a multiple of 16 as well.
struct QuantOut {
    Tensor rowwise = {};         // (N, C) fp8, =
    Tensor transposed = {};      // (C, N) fp8, =
    Granularity granularity = Granularity::kTensor;
    Scaling scaling = Scaling::kDelayed;
    ScaleEntry* entry = nullptr;     // required by kTensor and by record
    Tensor rowwise_scale_inv = {};      // blocks: scale_inv_elems(granularity, N, C) fp32, =
    Tensor transposed_scale_inv = {};   // blocks: scale_inv_elems(granularity, C, N) fp32, =
    bool record = false;         // entry->amax_bits = max(entry->amax_bits, |x|); ignored by casts in current scaling
    Fp8Counts* counts = nullptr; // += statistics of the rowwise cast, or of the transposed one if that is the only one
    uint32_t* first_nonfinite = nullptr;   // (1) = min(itself, event) if a value is not finite
    uint32_t event = 0;
    Tensor dbias = {};           // (C) grad, +=: sum of X over its rows
    Tensor dbias_scratch = {};   // (quant_partial_rows(N) * C) stat, =, with dbias

    bool copies() const { return rowwise || transposed; }
    bool only_records() const { return record && !copies() && !dbias; }
    bool only_sums() const { return dbias && !copies() && !record; }
    explicit operator bool() const { return copies() || record || dbias; }
};
// The part of matrix `number` of the results of several matrices that follow each other.
inline QuantOut of_matrix(const QuantOut& all, int64_t number, int64_t matrices) {
    QuantOut one = all;
    for (Tensor* part : {&one.rowwise, &one.transposed, &one.rowwise_scale_inv, &one.transposed_scale_inv})
        *part = part->slice(part->elems / matrices * number, part->elems / matrices);
    return one;
}
constexpr int64_t quant_partial_rows(int64_t N) { return scale_blocks(N); }
