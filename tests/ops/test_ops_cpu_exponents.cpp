// Histograms of exponents on the CPU: every BF16 number, roundings of FP32 by hand, odd sizes, wrong arguments.
#include "tests/support/quant_test.h"

#include <limits>

using namespace op_test;

namespace exponents_test {

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();

struct Counted {
    std::vector<unsigned long long> bins = std::vector<unsigned long long>(kExponentBins);
    uint32_t amax_bits = 0;
    bool operator==(const Counted&) const = default;
    void add(const Tensor& in) {
        Ctx ctx;
        cpu::count_exponents(ctx, {.bins = bins.data(), .amax_bits = &amax_bits, .in = in});
    }
};

// From the value and not from its bits.
size_t bin_by_value(float rounded) {
    if (std::isnan(rounded) || std::isinf(rounded)) return kNonfiniteValues;
    return rounded == 0 ? size_t{kZeroValues} : static_cast<size_t>(std::max(std::ilogb(rounded) + 127, 1));
}

}  // namespace

TEST_CASE("cpu count_exponents: every BF16 number has its bin") {
    HostTensor all(Dtype::kBf16, 1 << 16);
    Counted found, expected;
    for (int64_t i = 0; i < all.elems(); i++) {
        all.as<bf16>()[i] = bf16::from_bits(static_cast<uint16_t>(i));
        expected.bins[bin_by_value(static_cast<float>(all.as<bf16>()[i]))]++;
    }
    expected.amax_bits = 0x7fff0000u;   // of NaN
    found.add(all.view());
    CHECK(found == expected);
    CHECK(found.bins[kZeroValues] == 2);
    CHECK(found.bins[1] == 2 * (127 + 128));   // 127 subnormals and 128 normals of each sign
}

TEST_CASE("cpu count_exponents: FP32 values are rounded to BF16 first, and counts are added") {
    // Three of them round to 2, to 0 and to infinity.
    const std::vector<float> values = {0.0f,      -0.0f,     1.0f,           -1.5f, 0x1.fep0f, 0x1.ffp0f, 0x1p-133f,
                                       0x1p-149f, 0x1p-126f, 0x1.fffffep127f, kInf,  -kInf,     kNan,      448.0f};
    HostTensor in(Dtype::kFp32, static_cast<int64_t>(values.size()));
    for (size_t i = 0; i < values.size(); i++) in.set(static_cast<int64_t>(i), static_cast<double>(values[i]));
    Counted found;
    found.bins[135] = 7;
    found.add(in.view());
    Counted expected;
    expected.bins[kZeroValues] = 3, expected.bins[1] = 2, expected.bins[127] = 3, expected.bins[128] = 1;
    expected.bins[135] = 8, expected.bins[kNonfiniteValues] = 4;
    expected.amax_bits = found.amax_bits;
    CHECK(found == expected);
    CHECK(found.amax_bits > kInfinityBits);
}

TEST_CASE("cpu count_exponents: odd sizes, and one changed element is detected") {
    for (Dtype dtype : {Dtype::kBf16, Dtype::kFp32})
        for (int64_t n : {1, 3, 4095, 4097, 70001}) {
            INFO(n << " of " << dtype_name(dtype));
            HostTensor in = random_tensor(dtype, n, 71, 1e-3);
            Counted found, expected;
            for (int64_t i = 0; i < n; i++) {
                const auto rounded = static_cast<float>(bf16(static_cast<float>(in.get(i))));
                expected.bins[bin_by_value(rounded)]++;
                expected.amax_bits = std::max(expected.amax_bits, amax_bits_of(rounded));
            }
            found.add(in.view());
            CHECK(found == expected);
            in.set(n - 1, in.get(n - 1) * 2);
            Counted changed;
            changed.add(in.view());
            CHECK(changed.bins != expected.bins);
            CHECK(in.guards_intact());
        }
}

TEST_CASE("cpu count_exponents: wrong arguments") {
    HostTensor in(Dtype::kFp64, 8);
    Counted counted;
    CHECK_THROWS_AS(counted.add(in.view()), Error);
    Ctx ctx;
    HostTensor right = in.to(Dtype::kBf16);
    CHECK_THROWS_AS(cpu::count_exponents(ctx, {.bins = nullptr, .amax_bits = &counted.amax_bits, .in = right.view()}),
                    Error);
    CHECK_THROWS_AS(cpu::count_exponents(ctx, {.bins = counted.bins.data(), .amax_bits = nullptr, .in = right.view()}),
                    Error);
}

}  // namespace exponents_test
