// FP8 casts compared with the definition of the formats, and scales from amaxes.
#include "tests/support/fp8_format.h"

#include "llmc/base/fp8.h"
#include "llmc/base/fp8_cast.h"

using namespace op_test;

namespace {

constexpr Dtype kFormats[] = {Dtype::kE4m3, Dtype::kE5m2};
constexpr float kInf = std::numeric_limits<float>::infinity(), kMax = std::numeric_limits<float>::max();

float float_of(uint32_t bits) { return std::bit_cast<float>(bits); }
uint32_t bits_of(double value) { return std::bit_cast<uint32_t>(static_cast<float>(value)); }

bool is_power_of_two(float value) {
    return (std::bit_cast<uint32_t>(value) & 0x807fffffu) == 0 && value > 0;
}

}  // namespace

TEST_CASE("fp8: special values of both formats") {
    const Fp8Numbers e4m3(Dtype::kE4m3), e5m2(Dtype::kE5m2);
    CHECK_EQ(e4m3.largest(), 448.0);
    CHECK_EQ(e5m2.largest(), 57344.0);
    CHECK_EQ(e4m3.count(), 127);
    CHECK_EQ(e5m2.count(), 124);
    CHECK_EQ(e4m3.value(1), 0x1p-9);
    CHECK_EQ(e5m2.value(1), 0x1p-16);
    CHECK_EQ(e4m3.value(8), 0x1p-6);
    CHECK_EQ(e5m2.value(4), 0x1p-14);
    for (Dtype format : kFormats) CHECK_EQ(fp8_largest(format), Fp8Numbers(format).largest());
    CHECK_FALSE(is_fp8(Dtype::kBf16));
    CHECK_THROWS_AS(from_fp8(Dtype::kFp32, 1), Error);
}

TEST_CASE("fp8: all 256 codes of both formats, and back") {
    for (Dtype format : kFormats)
        for (int code = 0; code < 256; code++) {
            INFO(dtype_name(format) << " code " << code);
            const double want = fp8_value(format, code);
            const float got = from_fp8(format, static_cast<uint8_t>(code));
            CHECK_EQ(std::signbit(got), (code & 0x80) != 0);
            if (std::isnan(want)) {
                CHECK(std::isnan(got));
                CHECK_EQ(to_fp8(format, got), 0x7f);
            } else {
                CHECK_EQ(static_cast<double>(got), want);
                // An infinity becomes the largest number.
                CHECK_EQ(to_fp8(format, got), std::isinf(got) ? code - 1 : code);
            }
        }
}

TEST_CASE("fp8: any float becomes the nearest one (around every number and tie, and random floats)") {
    for (Dtype format : kFormats) {
        const Fp8Numbers numbers(format);
        int wrong = 0;
        auto check = [&](float x) {
            for (float value : {x, -x}) {
                const int want = numbers.nearest(static_cast<double>(value));
                wrong += to_fp8(format, value) != want;
                wrong += format == Dtype::kE4m3 ? fp8_cast<Dtype::kE4m3>(value) != want
                                                : fp8_cast<Dtype::kE5m2>(value) != want;
            }
        };
        for (int code = 0; code + 1 < numbers.count(); code++) {
            const float tie = static_cast<float>((numbers.value(code) + numbers.value(code + 1)) / 2);
            CHECK_EQ(to_fp8(format, tie), code + code % 2);   // the even neighbour
            CHECK_EQ(to_fp8(format, std::nextafter(tie, kInf)), code + 1);
            CHECK_EQ(to_fp8(format, std::nextafter(tie, 0.0f)), code);
            for (double number : {numbers.value(code), static_cast<double>(tie)})
                for (float towards : {0.0f, kInf}) check(std::nextafter(static_cast<float>(number), towards));
        }
        for (uint64_t i = 0; i < 50000; i++) {
            const uint32_t random = philox(1, i).word[0] & 0x7fffffffu;
            check(float_of(random));
            // Most of the range of floats lies outside the format's: the same bits with an exponent near 1.
            check(float_of((random & 0x7fffffu) | (107 + random % 40) << 23));
        }
        CHECK_EQ(wrong, 0);
    }
}

TEST_CASE("fp8: saturation, NaN and signed zero") {
    for (Dtype format : kFormats) {
        const float largest = fp8_largest(format);
        const int top = to_fp8(format, largest);
        CHECK_EQ(top, format == Dtype::kE4m3 ? 0x7e : 0x7b);
        for (float x : {std::nextafter(largest, kInf), largest * 1.1f, largest * 2, 1e30f, kMax, kInf}) {
            CHECK_EQ(to_fp8(format, x), top);
            CHECK_EQ(to_fp8(format, -x), top | 0x80);
        }
        for (uint32_t nan : {0x7fc00000u, 0xffc00000u, 0x7f800001u, 0xffffffffu, 0x7fffffffu})
            CHECK_EQ(to_fp8(format, float_of(nan)), 0x7f);
        CHECK_EQ(to_fp8(format, 0.0f), 0x00);
        CHECK_EQ(to_fp8(format, -0.0f), 0x80);
        CHECK_EQ(to_fp8(format, -float_of(1)), 0x80);   // smallest denormal float
    }
}

TEST_CASE("fp8: amax bits order like the numbers and keep a NaN") {
    const float rising[] = {0, float_of(1), 1e-38f, 0.5f, 1, 448, kMax, kInf, std::nanf("")};
    for (size_t i = 1; i < std::size(rising); i++) {
        CHECK_LT(amax_bits_of(rising[i - 1]), amax_bits_of(rising[i]));
        CHECK_EQ(amax_bits_of(-rising[i]), amax_bits_of(rising[i]));
    }
    CHECK_EQ(amax_bits_of(kInf), kInfinityBits);
}

TEST_CASE("fp8: scale of an amax") {
    for (float largest : {448.0f, 57344.0f, 28.0f}) {
        for (uint32_t odd : {0u, kInfinityBits, 0x7fc00000u, 0x7fffffffu}) {
            CHECK_EQ(scale_of(odd, largest), 1.0f);
            CHECK_EQ(block_scale_of(odd, largest), 1.0f);
        }
        CHECK_EQ(scale_of(bits_of(largest), largest), 1.0f);
        // If the quotient overflows: the largest float, whose power of two is 2^127.
        for (double tiny : {0x1p-149, 0x1p-140, 0x1p-126}) {
            CHECK_EQ(scale_of(bits_of(tiny), largest), kMax);
            CHECK_EQ(block_scale_of(bits_of(tiny), largest), 0x1p127f);
        }
        // The nearest float to the quotient: through double, which has bits enough for one rounding.
        for (uint64_t i = 0; i < 20000; i++) {
            const uint32_t bits = philox(2, i).word[0] % kInfinityBits;
            const double amax = static_cast<double>(float_of(bits)), quotient = static_cast<double>(largest) / amax;
            if (bits == 0 || quotient >= static_cast<double>(kMax)) continue;
            CHECK_EQ(scale_of(bits, largest), static_cast<float>(quotient));
        }
    }
}

TEST_CASE("fp8: a margin halves the scale exactly") {
    for (Dtype format : kFormats)
        for (uint64_t i = 0; i < 20000; i++) {
            const uint32_t bits = philox(3, i).word[0] % kInfinityBits;
            const float whole = scale_of(bits, fp8_largest(format));
            if (bits == 0 || whole == kMax) continue;
            for (int margin = 0; margin <= 4; margin++) {
                const float largest = std::ldexp(fp8_largest(format), -margin);
                CHECK_EQ(scale_of(bits, largest), std::ldexp(whole, -margin));
            }
        }
}

TEST_CASE("fp8: the scale of a block is a power of two, invertible, large, and never overflows the format") {
    for (Dtype format : kFormats) {
        const double largest = static_cast<double>(fp8_largest(format));
        int wrong = 0;
        auto check = [&](uint32_t bits) {
            const float scale = block_scale_of(bits, fp8_largest(format));
            const double amax = static_cast<double>(float_of(bits)), scaled = amax * static_cast<double>(scale);
            wrong += !is_power_of_two(scale);
            wrong += (1 / scale) * scale != 1;
            wrong += scaled > largest;
            wrong += scale != 0x1p127f && 2 * scaled <= largest;
            wrong += from_fp8(format, to_fp8(format, float_of(bits) * scale)) > fp8_largest(format);
        };
        for (uint32_t bits = 1; bits < kInfinityBits >> 16; bits++) check(bits << 16);   // every bf16
        for (uint64_t i = 0; i < 20000; i++) check(1 + philox(4, i).word[0] % (kInfinityBits - 1));
        // Around the mantissa of the largest number, where the power changes, for every exponent.
        for (uint32_t exponent = 1; exponent < 255; exponent++)
            for (uint32_t mantissa : {0x5fffffu, 0x600000u, 0x600001u, 0x7fffffu, 0u})
                check(exponent << 23 | mantissa);
        CHECK_EQ(wrong, 0);
    }
}
