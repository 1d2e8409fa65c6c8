// Reference FP8 formats and quantization, from the definition in double, for the tests of casts and operations on both
// devices. Uses none of the project's casts.
#pragma once
#include <cmath>
#include <limits>
#include <vector>

#include "tests/support/op_test.h"

namespace op_test {

// sign, exponent and mantissa fields of arXiv 2209.05433, table 1.
inline double fp8_value(Dtype format, int code) {
    const int mantissa_bits = format == Dtype::kE4m3 ? 3 : 2, exponent_bits = 7 - mantissa_bits;
    const int bias = (1 << (exponent_bits - 1)) - 1, last = (1 << exponent_bits) - 1;
    const int exponent = code >> mantissa_bits & last, mantissa = code & ((1 << mantissa_bits) - 1);
    const double sign = code & 0x80 ? -1 : 1, fraction = mantissa * std::exp2(-mantissa_bits);
    if (format == Dtype::kE4m3 && exponent == last && fraction == 0.875) return std::nan("");
    if (format == Dtype::kE5m2 && exponent == last)
        return fraction == 0 ? sign * std::numeric_limits<double>::infinity() : std::nan("");
    if (exponent == 0) return sign * fraction * std::exp2(1 - bias);
    return sign * (1 + fraction) * std::exp2(exponent - bias);
}

// The finite non-negative values by code.
class Fp8Numbers {
public:
    explicit Fp8Numbers(Dtype format) {
        for (int code = 0; code < 128 && std::isfinite(fp8_value(format, code)); code++)
            values_.push_back(fp8_value(format, code));
    }
    int count() const { return static_cast<int>(values_.size()); }
    double value(int code) const { return values_[static_cast<size_t>(code)]; }
    double largest() const { return values_.back(); }
    // Returns the code of the nearest number, ties to even; larger values become the largest number, NaN 0x7f.
    int nearest(double x) const {
        if (std::isnan(x)) return 0x7f;
        const double size = std::min(std::fabs(x), largest());
        int best = 0;
        for (int code = 1; code < count(); code++) {
            const double closer = std::fabs(value(best) - size) - std::fabs(value(code) - size);
            if (closer > 0 || (closer == 0 && code % 2 == 0)) best = code;
        }
        return best | (std::signbit(x) ? 0x80 : 0);
    }

private:
    std::vector<double> values_;
};

// A quantized (R, K) matrix.
struct PlainQuantized {
    Fp8Counts counts{};
    std::vector<uint8_t> codes;
    std::vector<float> scale_inv;   // in the layout of Granularity
};

// Block scale by definition: the power of two below largest / amax; 1 for blocks of zeros or with a value that is not
// finite.
inline float plain_block_scale(double amax, double largest) {
    if (amax == 0 || !std::isfinite(amax)) return 1;
    return static_cast<float>(std::exp2(std::min(127.0, std::floor(std::log2(largest / amax)))));
}

// Largest |x| of rows [top, top + rows), columns [left, left + 128); NaN if there is one.
inline double plain_amax(const HostTensor& x, int64_t R, int64_t K, int64_t top, int64_t left, int64_t rows) {
    double amax = 0;
    for (int64_t r = top; r < std::min(R, top + rows); r++)
        for (int64_t k = left; k < std::min(K, left + 128); k++) {
            const double size = std::fabs(x.get(r * K + k));
            if (std::isnan(size)) return size;
            amax = std::max(amax, size);
        }
    return amax;
}

// x (R, K) bf16. tensor_scale is used for kTensor only.
inline PlainQuantized quantize_plainly(const HostTensor& x, int64_t R, int64_t K, Granularity granularity,
                                       Dtype format, float tensor_scale) {
    const Fp8Numbers numbers(format);
    const bool whole = granularity == Granularity::kTensor;
    const int64_t rows = granularity == Granularity::kBlock128x128 ? 128 : 1, stride = (K + 511) / 512 * 4;
    PlainQuantized result;
    result.codes.resize(static_cast<size_t>(R * K));
    result.scale_inv.assign(static_cast<size_t>(scale_inv_elems(granularity, R, K)), whole ? 1 / tensor_scale : 0.0f);
    for (int64_t top = 0; top < R; top += rows)
        for (int64_t left = 0; left < K; left += 128) {
            float scale = tensor_scale;
            if (!whole) {
                scale = plain_block_scale(plain_amax(x, R, K, top, left, rows), numbers.largest());
                const int64_t at = rows == 1 ? left / 128 * R + top : top / 128 * stride + left / 128;
                result.scale_inv[static_cast<size_t>(at)] = 1 / scale;
            }
            for (int64_t r = top; r < std::min(R, top + rows); r++)
                for (int64_t k = left; k < std::min(K, left + 128); k++) {
                    const double value = x.get(r * K + k);
                    const float product = static_cast<float>(value) * scale;   // one rounding, as in ops.h
                    const int code = numbers.nearest(static_cast<double>(product));
                    result.codes[static_cast<size_t>(r * K + k)] = static_cast<uint8_t>(code);
                    result.counts.elems++;
                    result.counts.saturated += std::isfinite(value) && std::fabs(product) > fp8_largest(format);
                    result.counts.flushed += value != 0 && code % 128 == 0;
                    result.counts.nonfinite += !std::isfinite(value);
                }
        }
    return result;
}

// (C, N) from (N, C).
inline HostTensor transpose_of(const HostTensor& x, int64_t N, int64_t C) {
    HostTensor t(x.dtype(), N * C);
    const int64_t size = dtype_bytes(x.dtype());
    const char* from = static_cast<const char*>(x.data());
    char* to = static_cast<char*>(t.data());
    for (int64_t n = 0; n < N; n++)
        for (int64_t c = 0; c < C; c++)
            std::memcpy(to + (c * N + n) * size, from + (n * C + c) * size, static_cast<size_t>(size));
    return t;
}

}  // namespace op_test
