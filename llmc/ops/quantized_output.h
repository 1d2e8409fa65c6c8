// FP8 copies that operations make of their results. Matmuls want both operands with the contraction index innermost, so
// a tensor of shape (N, C) may be needed as stored ("rowwise") and transposed, each quantised along its own innermost
// index.
#pragma once
#include <cstdint>

#include "llmc/base/dtype.h"

// How many elements share one scale, and where the scales lie ("grid"), for a quantised matrix of R rows, K columns:
enum class Granularity : uint8_t {
    kTensor,         // one scale, scale_inv of a slot: grid (1)
    kBlock1x128,     // 128 elements of a row: grid (ceil(K / 128), R), the rows innermost
    kBlock128x128,   // 128 rows x 128 columns: grid (ceil(R / 128), ceil(K / 128) rounded up to a multiple of 4)
};
// Floats of the grid of a quantised (R, K) matrix.
constexpr int64_t scale_inv_elems(Granularity granularity, int64_t R, int64_t K) {
    const int64_t k_blocks = (K + 127) / 128;
    switch (granularity) {
        case Granularity::kTensor: return 1;
        case Granularity::kBlock1x128: return k_blocks * R;
        case Granularity::kBlock128x128: return (R + 127) / 128 * ((k_blocks + 3) / 4 * 4);
    }
    return 0;
}

// State of one FP8 tensor in device memory; 16 bytes, the alignment that cuBLASLt wants of scale_inv.
struct alignas(16) Fp8Slot {
    float scale_inv;        // of the bytes as cast last (kTensor)
    float scale;          // delayed: of the next cast, = by fp8_update; current: of the last cast
    uint32_t amax_bits;       // max with amax_bits_of every value recorded since fp8_clear or fp8_update
    uint32_t step_amax_bits;  // for reports: largest amax of the optimizer step
};

// Counts for reports, of one FP8 tensor; +=.
struct Fp8Counts {
    unsigned long long elems;       // values cast
    unsigned long long saturated;   // finite values beyond the largest number
    unsigned long long flushed;     // values other than 0 that became 0
    unsigned long long nonfinite;   // infinities and NaN
};

// Where scale comes from. Blocks (granularities other than kTensor) always have their own: block_scale_of the
// block's amax.
enum class Scaling : uint8_t {
    kDelayed,   // slot->scale as it is; slot->scale_inv = 1 / scale
    kCurrent,   // slot->scale = scale_of(slot->amax_bits), recorded before; slot->scale_inv = 1 / scale
};

// What an operation does, besides or instead of writing its bf16 result X of shape (N, C), to make X an operand of FP8
// matmuls, and to add up the bias gradient that X is the dy of, in FP8 or BF16. X is rounded to bf16 first and that
// value is quantised: to_fp8(x * scale). All parts are optional; a default QuantOut asks for nothing. Columns C
// must be a multiple of 16, without copies of 8 (activation_backward of a gated function: 16), and with `transposed`
// rows N of 16 as well.
struct QuantOut {
    Tensor rowwise;              // (N, C) fp8, =
    Tensor transposed;           // (C, N) fp8, =
    Granularity granularity = Granularity::kTensor;
    Scaling scaling = Scaling::kDelayed;
    Fp8Slot* slot = nullptr;     // needed by kTensor copies, and by record
    Tensor rowwise_scale_inv;         // blocks: scale_inv_elems(granularity, N, C) fp32, =: scale_inv
    Tensor transposed_scale_inv;      // blocks: scale_inv_elems(granularity, C, N) fp32, =: scale_inv
    bool record = false;         // slot->amax_bits = max with every |x|; copies made in current scaling record nothing
    Fp8Counts* counts = nullptr; // += of this cast (one cast, though there may be two copies), counted in the rowwise
                                 // one, else in the transposed one
    uint32_t* first_nonfinite = nullptr;   // (1) = min with `event` if a value is not finite
    uint32_t event = 0;
    Tensor dbias;                // (C) grad, +=: sums of X over its rows
    Tensor dbias_scratch;        // (quant_partial_rows(N) * C) stat, =, with dbias

    bool copies() const { return rowwise || transposed; }
    bool only_records() const { return record && !copies() && !dbias; }
    bool only_sums() const { return dbias && !copies() && !record; }
    explicit operator bool() const { return copies() || record || dbias; }
};
constexpr int64_t quant_partial_rows(int64_t N) { return (N + 127) / 128; }
