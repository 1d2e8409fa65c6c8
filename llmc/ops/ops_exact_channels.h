// Arguments of the operations of exact channels; conventions as in ops.h.
//
// --fp8-exact-channels K gives K channels of x and w, the columns channels[0] < channels[1] < ... of both, a second
// term. With x8 and w8 the dequantized E4M3 numbers, and c these channels,
//   y = x8 w8^T + [x_c - x8_c | x_c] [w8_c | w_c - w8_c]^T
// equals x w^T if K = C; the second product is a matmul in bf16. A number is code * scale_inv in fp32; w8, and both
// differences in fp32, are rounded to bf16.
#pragma once
#include <cstdint>

#include "llmc/ops/quantized_output.h"

struct StepState;

// An (R, C) E4M3 matrix and its scales.
struct QuantizedMatrix {
    Tensor codes;       // (R, C) e4m3; of a shard range: its elements
    Tensor scale_inv;   // scale_inv_elems(granularity, R, C) fp32
    Granularity granularity = Granularity::kTensor;
};
// energies[c] = sum of the squares of column c in every kEnergyRows-th row, in fp32; a NaN counts as 0. Of these rows
// each kEnergySlices-th is in one sum (a chain of fma); the sums are added in ascending order.
inline constexpr int64_t kEnergyRows = 16, kEnergySlices = 32;
struct ChannelEnergyArgs {
    Tensor energies;     // (C) fp32, =
    QuantizedMatrix x;   // (N, C); kTensor or kBlock1x128
    int64_t N, C;
};
// For each of `rows` linears: channels = the K channels of largest energy, ascending; of equal energies the lower
// channel. Does nothing for a linear whose energies are all 0.
struct TopChannelsArgs {
    Tensor channels;   // (rows, K) int32, =
    Tensor energies;   // (rows, C) fp32, >= 0
    int64_t rows, C, K;
    const StepState* state = nullptr;   // optional: does nothing if state->skip
};
// out[r][j] = w8 and out[r][K + j] = w - w8 of w[r][channels[j]], for the elements in a shard range; w is `in` rounded
// to bf16. Other elements of out are left as they are.
struct ExactWeightArgs {
    Tensor out;          // (R, 2 K) bf16, =
    Tensor in;           // (n) fp32 or bf16: elements [begin, begin + n) of the matrix
    QuantizedMatrix w;   // (R, C); codes: (n)
    Tensor channels;     // (K) int32
    int64_t begin, R, C;
};
// out[n][j] = x - x8 and out[n][K + j] = x of channel channels[j] of x, a norm's result rounded to bf16. The norm's
// arguments are those of NormForwardArgs, after it.
struct ExactNormArgs {
    Tensor out;              // (N, 2 K) bf16, =
    Tensor in;               // (N, C) bf16: its residual_out, or `in` without one
    Tensor mean, rstd;       // (N) fp32; mean for layernorm only
    Tensor weight, bias;     // (C) bf16; bias optional (layernorm)
    QuantizedMatrix x;       // (N, C); kTensor or kBlock1x128
    Tensor channels;         // (K) int32
    int64_t N, C;
};
