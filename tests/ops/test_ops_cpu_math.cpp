// Elementary functions, roundings and random numbers of the CPU device.
#include "tests/support/op_test.h"

#include <limits>

#include "llmc/cpu/math.h"
#include "llmc/ops/adam_math.h"

namespace math_test {

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

template <typename A> A exp_of(A x) {
    A lane[cpu::Vec<A>::kWidth];
    cpu::store(lane, cpu::exp(cpu::Vec<A>(x)));
    return lane[0];
}

// Error in units of the last place of the exact value.
template <typename A> double ulps(A got, long double exact) {
    A rounded = static_cast<A>(exact);
    long double ulp = std::nextafter(std::fabs(rounded), std::numeric_limits<A>::infinity()) - std::fabs(rounded);
    return static_cast<double>(std::fabs(got - exact) / ulp);
}

template <typename A> double worst_exp_error(double from, double to, int steps) {
    double worst = 0;
    for (int i = 0; i <= steps; i++) {
        A x = static_cast<A>(from + (to - from) * i / steps);
        worst = std::max(worst, ulps(exp_of(x), std::exp(static_cast<long double>(x))));
    }
    return worst;
}

}  // namespace

TEST_CASE("cpu exp is accurate to 2 units in the last place") {
    CHECK_LT(worst_exp_error<float>(-87.3, 88.7, 200003), 2);
    CHECK_LT(worst_exp_error<float>(-1, 1, 100003), 2);
    CHECK_LT(worst_exp_error<double>(-708, 709.7, 200003), 2);
    CHECK_LT(worst_exp_error<double>(-1, 1, 100003), 2);
    CHECK_LT(worst_exp_error<float>(-103, -87.4, 10007), 2);   // below the normal range
    CHECK_EQ(exp_of(0.0f), 1.0f);
    CHECK_EQ(exp_of(-std::numeric_limits<float>::infinity()), 0.0f);
    CHECK_EQ(exp_of(std::numeric_limits<float>::infinity()), std::numeric_limits<float>::infinity());
    CHECK_EQ(exp_of(200.0f), std::numeric_limits<float>::infinity());
    CHECK_EQ(exp_of(-200.0f), 0.0f);
    CHECK_EQ(exp_of(-1e300), 0.0);
    CHECK_EQ(exp_of(1e300), kInfinity);
    CHECK(std::isnan(exp_of(std::numeric_limits<float>::quiet_NaN())));
    CHECK(std::isnan(exp_of(std::numeric_limits<double>::quiet_NaN())));
}

TEST_CASE("cpu log is accurate to 2 units in the last place") {
    double worst = 0;
    for (int i = 0; i < 200000; i++) {
        Philox4 p = philox(5, static_cast<uint64_t>(i));
        double x = std::ldexp(1.0 + p.word[0] * 0x1p-32, i % 2 ? static_cast<int>(p.word[1] % 2000) - 1000 : 0);
        worst = std::max(worst, ulps(cpu::log(x), std::log(static_cast<long double>(x))));
        worst = std::max(worst, ulps(cpu::log(1 / x), std::log(static_cast<long double>(1 / x))));
    }
    CHECK_LT(worst, 2);
    CHECK_EQ(cpu::log(1.0), 0.0);
    CHECK_EQ(cpu::log(0.0), -kInfinity);
    CHECK_EQ(cpu::log(kInfinity), kInfinity);
    CHECK(std::isnan(cpu::log(-1.0)));
    CHECK(std::isnan(cpu::log(std::numeric_limits<double>::quiet_NaN())));
    CHECK_LT(ulps(cpu::log(5e-324), std::log(static_cast<long double>(5e-324))), 2);
}

TEST_CASE("cpu tanh is accurate to 3 units in the last place, also near 0") {
    const auto worst = [](auto largest, int steps) {
        using A = decltype(largest);
        double error = 0;
        for (int i = -steps; i <= steps; i++) {
            const A x = largest * static_cast<A>(i) / static_cast<A>(steps);
            error = std::max(error, ulps(cpu::tanh(cpu::Vec<A>(x)).v[0], std::tanh(static_cast<long double>(x))));
        }
        return error;
    };
    for (float largest : {1e-6f, 0.1f, 1.0f, 12.0f}) CHECK_LT(worst(largest, 50021), 3);
    for (double largest : {1e-6, 0.1, 1.0, 25.0}) CHECK_LT(worst(largest, 50021), 3);
    for (float x : {1e30f, std::numeric_limits<float>::infinity()}) {
        CHECK_EQ(cpu::tanh(cpu::Vec<float>(x)).v[0], 1.0f);
        CHECK_EQ(cpu::tanh(cpu::Vec<float>(-x)).v[0], -1.0f);
    }
    CHECK(std::isnan(cpu::tanh(cpu::Vec<float>(std::numeric_limits<float>::quiet_NaN())).v[0]));
}

TEST_CASE("cpu sigmoid pair keeps relative precision on both sides") {
    for (double x = -80; x <= 80; x += 0.37) {
        cpu::SigmoidPair<double> s = cpu::sigmoid_pair(cpu::Vec<double>(x));
        CHECK_LT(ulps(s.of_x.v[0], 1 / (1 + std::exp(-static_cast<long double>(x)))), 4);
        CHECK_LT(ulps(s.of_minus_x.v[0], 1 / (1 + std::exp(static_cast<long double>(x)))), 4);
    }
}

TEST_CASE("vector stores round to bf16 as struct bf16 does") {
    for (uint32_t i = 0; i < 100000; i++) {
        Philox4 p = philox(9, i);
        float value[8];
        bf16 stored[8];
        for (int lane = 0; lane < 8; lane++) {
            uint32_t bits = p.word[lane % 4] + static_cast<uint32_t>(lane);
            if (lane == 1) bits = (bits & 0x807fffffu) | 0x7f800000u;   // infinities and NaN
            if (lane == 2) bits = (bits & 0xffff0000u) | 0x8000u;       // ties
            if (lane == 3) bits &= 0x80ffffffu;                         // below the normal range
            std::memcpy(&value[lane], &bits, 4);
        }
        cpu::store(stored, cpu::load(value));
        bool equal = true;
        for (int lane = 0; lane < 8; lane++) equal &= stored[lane].bits == bf16(value[lane]).bits;
        REQUIRE(equal);
    }
}

TEST_CASE("loads and stores of part of a vector touch nothing else") {
    for (int count = 1; count < 8; count++) {
        op_test::HostTensor from = op_test::random_tensor(Dtype::kBf16, count, 3), to(Dtype::kBf16, count);
        cpu::store(to.as<bf16>(), cpu::load(from.as<bf16>(), count), count);
        CHECK(to.same_bits(from));
        float padded[8];
        cpu::store(padded, cpu::load(from.as<bf16>(), count));
        for (int i = count; i < 8; i++) CHECK_EQ(cpu::load(from.as<bf16>(), count).v[i], 0.0f);
    }
}

// Published with Random123 (kat_vectors, philox4x32 10 rounds).
TEST_CASE("philox gives the published vectors") {
    auto equal = [](Philox4 p, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
        return p.word[0] == a && p.word[1] == b && p.word[2] == c && p.word[3] == d;
    };
    CHECK(equal(philox(0, 0, 0), 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8));
    CHECK(equal(philox(~0ull, ~0ull, ~0ull), 0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd));
    CHECK(equal(philox(0x299f31d0a4093822, 0x85a308d3243f6a88, 0x0370734413198a2e), 0xd16cfe09, 0x94fdcceb,
                0x5001e420, 0x24126ea1));
}

TEST_CASE("rng_normal has the moments of a standard normal") {
    constexpr int64_t n = 1 << 20;
    double power[5] = {}, product = 0;
    int64_t beyond_3 = 0;
    double last = 0;
    for (int64_t i = 0; i < n; i++) {
        double z = rng_normal(17, static_cast<uint64_t>(i));
        for (int k = 1; k <= 4; k++) power[k] += std::pow(z, k) / n;
        product += z * last / n;
        beyond_3 += std::fabs(z) > 3;
        last = z;
    }
    // Five standard deviations of each estimate: sqrt(Var(z^k) / n) with Var = 1, 2, 15, 96.
    double sigma = 5 / std::sqrt(static_cast<double>(n));
    CHECK_LT(std::fabs(power[1]), sigma);
    CHECK_LT(std::fabs(power[2] - 1), sigma * std::sqrt(2));
    CHECK_LT(std::fabs(power[3]), sigma * std::sqrt(15));
    CHECK_LT(std::fabs(power[4] - 3), sigma * std::sqrt(96));
    CHECK_LT(std::fabs(product), sigma);
    CHECK_LT(std::fabs(static_cast<double>(beyond_3) / n - 0.0026998), sigma * std::sqrt(0.0027));
}

TEST_CASE("stochastic rounding is unbiased and keeps what is exact") {
    const float value = 1.0f + 0x1p-10f;   // an eighth of the way to the next bf16
    double sum = 0;
    constexpr int n = 65536;
    for (uint32_t random = 0; random < n; random++)
        sum += static_cast<float>(stochastic_round_bf16(value, random));
    CHECK_EQ(sum / n, static_cast<double>(value));   // every random number once: exact
    CHECK_EQ(stochastic_round_bf16(1.5f, 0xffff).bits, bf16(1.5f).bits);
    CHECK(std::isnan(static_cast<float>(stochastic_round_bf16(std::numeric_limits<float>::quiet_NaN(), 0xffff))));
    CHECK(std::isinf(static_cast<float>(stochastic_round_bf16(std::numeric_limits<float>::infinity(), 0xffff))));
}

TEST_CASE("power_by_squaring") {
    CHECK_EQ(power_by_squaring(0.5, 10), 0x1p-10);
    CHECK_EQ(power_by_squaring(3.0, 0), 1.0);
    CHECK_EQ(power_by_squaring(3.0, 5), 243.0);
    // Squaring doubles the relative error: at most one roundoff a unit of the exponent.
    CHECK_LT(std::fabs(power_by_squaring(0.999, 12345) / std::pow(0.999, 12345) - 1), 12345 * 0x1p-53);
    CHECK_EQ(power_by_squaring(0.9, int64_t{1} << 40), 0.0);
}

}  // namespace math_test
