// What casts to FP8 would do to the values of a histogram of exponents (--fp8-stats shadow). If a limit of the format
// lies between values of one exponent, they are assumed to be spread evenly over the mantissas of BF16.
#pragma once
#include <string>
#include <vector>

#include "llmc/model/parameters/exponent_histograms.h"
#include "llmc/train/log/run_log.h"

// Fractions of all values, zeros and non-finite ones included. saturated: finite and above largest / scale; flushed:
// nonzero and at most half of the smallest subnormal / scale, so that they round to zero.
struct CastShares {
    double saturated = 0, flushed = 0;
};
CastShares cast_shares(const ExponentHistogram& histogram, Dtype format, double scale);

// The format of a role in the hybrid format, in which gradients are E5M2.
Dtype shadow_format(Fp8Role role);

// The histogram as a record, with the scale that its amax gives.
ExponentRecord exponent_record(const ExponentHistogram& histogram, Dtype format);
// Adds what FP8 would do. amax_bits_before: the amax in the previous record, 0 if there is none.
void add_shadow(ExponentRecord& record, const ExponentHistogram& histogram, uint32_t amax_bits_before);
// "FP8 would flush at most 0.3% of a tensor to zero with scales per tensor (3.down.dy), and ..."; "" without shadows.
std::string shadow_line(const std::vector<ExponentRecord>& records);
