#include "llmc/base/fp8.h"

#include <array>
#include <cmath>
#include <limits>

#include "llmc/base/fp8_cast.h"

namespace {

template <Dtype format> float decode(unsigned code) {
    using F = Fp8Traits<format>;
    const unsigned magnitude = code & 0x7fu, fraction = magnitude & ((1u << F::kMantissaBits) - 1);
    const int exponent = static_cast<int>(magnitude >> F::kMantissaBits);
    float value;
    if (format == Dtype::kE4m3 ? magnitude == 0x7f : magnitude > 0x7c) {
        value = std::numeric_limits<float>::quiet_NaN();
    } else if (format == Dtype::kE5m2 && magnitude == 0x7c) {
        value = std::numeric_limits<float>::infinity();
    } else {
        const unsigned hidden = exponent > 0 ? 1u << F::kMantissaBits : 0;
        const int power = (exponent > 0 ? exponent : 1) - F::kBias - F::kMantissaBits;
        value = std::ldexp(static_cast<float>(hidden + fraction), power);
    }
    return std::copysign(value, code & 0x80u ? -1.0f : 1.0f);
}

template <Dtype format> std::array<float, 256> decode_all() {
    std::array<float, 256> table;
    for (unsigned code = 0; code < 256; code++) table[code] = decode<format>(code);
    return table;
}

}  // namespace

const float* fp8_values(Dtype format) {
    CHECK(is_fp8(format), "values of %s", dtype_name(format));
    static const std::array<float, 256> e4m3 = decode_all<Dtype::kE4m3>(), e5m2 = decode_all<Dtype::kE5m2>();
    return (format == Dtype::kE4m3 ? e4m3 : e5m2).data();
}
