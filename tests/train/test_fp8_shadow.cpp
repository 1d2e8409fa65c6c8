// What FP8 would do to a tensor, computed from its histogram, against casts of every value.
#include "tests/support/doctest.h"

#include <cmath>

#include "llmc/base/fp8.h"
#include "llmc/base/rng.h"
#include "tests/support/reference.h"
#include "llmc/train/log/fp8_shadow.h"

namespace {

using reference::HostTensor;

ExponentHistogram histogram_of(HostTensor& in, Fp8Role role) {
    ExponentHistogram histogram{.name = "0.up.x", .role = role, .bins = std::vector<uint64_t>(kExponentBins)};
    std::vector<unsigned long long> bins(kExponentBins);
    Ctx ctx;
    cpu::count_exponents(ctx, {.bins = bins.data(), .amax_bits = &histogram.amax_bits, .in = in.view()});
    std::copy(bins.begin(), bins.end(), histogram.bins.begin());
    return histogram;
}

// By casting each value, as Fp8Counts counts them.
CastShares by_casts(const HostTensor& in, Dtype format, float scale) {
    CastShares shares;
    for (int64_t i = 0; i < in.elems(); i++) {
        const auto scaled = static_cast<float>(in.get(i)) * scale;
        shares.saturated += std::isfinite(scaled) && std::abs(scaled) > fp8_largest(format);
        shares.flushed += in.get(i) != 0 && (to_fp8(format, scaled) & 0x7f) == 0;
    }
    shares.saturated /= static_cast<double>(in.elems());
    shares.flushed /= static_cast<double>(in.elems());
    return shares;
}

}  // namespace

TEST_CASE("fp8 shadow: shares of a histogram are near those of casts, and exact at powers of two") {
    for (Dtype format : {Dtype::kE4m3, Dtype::kE5m2})
        for (float scale : {1.0f, 0.37f, 3e5f, 0x1p-9f, 0x1p20f}) {
            INFO(dtype_name(format) << " scale " << scale);
            HostTensor in(Dtype::kBf16, 60000);
            for (int64_t i = 0; i < in.elems(); i++) {   // normal, times powers of two of a wide range
                const auto at = static_cast<uint64_t>(i);
                const double normal = static_cast<double>(rng_normal(5, at));
                in.set(i, i % 50 == 0 ? 0 : std::ldexp(normal, 8 - static_cast<int>(i % 33)));
            }
            const ExponentHistogram histogram = histogram_of(in, Fp8Role::kX);
            const CastShares found = cast_shares(histogram, format, static_cast<double>(scale)),
                             expected = by_casts(in, format, scale);
            // A limit cuts one exponent, which has at most a 33rd of the values and a half; the mean of a normal's
            // density over an octave differs from that at its ends by less than a third.
            CHECK(std::abs(found.saturated - expected.saturated) < 0.33 * 1.5 / 33);
            CHECK(std::abs(found.flushed - expected.flushed) < 0.33 * 1.5 / 33);
            // Three octaves more change it by more than that where there are values.
            const CastShares beyond = cast_shares(histogram, format, static_cast<double>(scale) / 8);
            if (expected.flushed > 0.1 && expected.flushed < 0.9)
                CHECK(std::abs(beyond.flushed - expected.flushed) > 0.33 * 1.5 / 33);
        }
}

TEST_CASE("fp8 shadow: by hand") {
    HostTensor in(Dtype::kBf16, 8);
    const double values[] = {0, 448, 2, 0x1p-9, 0x1.8p-11, -0x1p-12, 0x1p-40, INFINITY};
    for (int64_t i = 0; i < 8; i++) in.set(i, values[i]);
    ExponentHistogram histogram = histogram_of(in, Fp8Role::kX);
    histogram.amax_bits = amax_bits_of(448.0f);   // as if infinity were not there
    CHECK(histogram.values() == 8);
    CHECK(cast_shares(histogram, Dtype::kE4m3, 1).flushed == 3.0 / 8);
    CHECK(cast_shares(histogram, Dtype::kE4m3, 1).saturated == 0);
    CHECK(cast_shares(histogram, Dtype::kE4m3, 2).saturated == 1.0 / 8);
    // 2^-11 is the first of the 128 values of its exponent.
    CHECK(cast_shares(histogram, Dtype::kE4m3, 2).flushed == 2.0 / 8 + 1.0 / 128 / 8);
    CHECK(cast_shares(histogram, Dtype::kE5m2, 1).flushed == 1.0 / 8);
    const ExponentRecord record = exponent_record(histogram, Dtype::kE4m3);
    CHECK(record.first == -40);
    CHECK(record.counts.size() == 40 + 8 + 1);
    CHECK(record.counts.front() == 1);
    CHECK(record.counts.back() == 1);
    CHECK(record.zeros == 1);
    CHECK(record.nonfinite == 1);
    CHECK(record.scale == 1);
}

TEST_CASE("fp8 shadow: scales of the present amax and of that before, E5M2 for gradients, a bound for blocks") {
    HostTensor in(Dtype::kBf16, 1000);
    for (int64_t i = 0; i < 1000; i++) in.set(i, i < 10 ? 8 : i < 500 ? 0.25 : 0x1p-20);
    for (Fp8Role role : {Fp8Role::kX, Fp8Role::kDy}) {
        const ExponentHistogram histogram = histogram_of(in, role);
        ExponentRecord record = exponent_record(histogram, shadow_format(role));
        CHECK(record.format == (role == Fp8Role::kDy ? "e5m2" : "e4m3"));
        add_shadow(record, histogram, 0);
        CHECK(!record.shadow->delayed_saturated);
        CHECK(record.shadow->tensorwise_flushed == (role == Fp8Role::kX ? 0.5 : 0));
        CHECK(record.shadow->blockwise_flushed_at_most == 0.5);
        add_shadow(record, histogram, amax_bits_of(4.0f));   // a smaller amax before: the values of 8 saturate
        CHECK(*record.shadow->delayed_saturated == 0.01);
        CHECK(*record.shadow->delayed_flushed == (role == Fp8Role::kX ? 0.5 : 0));
        CHECK(shadow_line({record}).find("saturate at most 1% of 0.up.x") != std::string::npos);
        record.shadow.reset();
        CHECK(shadow_line({record}).empty());
    }
    const ExponentHistogram weight = histogram_of(in, Fp8Role::kWeight);   // whose history has its present amax
    ExponentRecord record = exponent_record(weight, Dtype::kE4m3);
    add_shadow(record, weight, amax_bits_of(4.0f));
    CHECK(*record.shadow->delayed_saturated == 0);
    add_shadow(record, weight, amax_bits_of(0x1p20f));
    CHECK(*record.shadow->delayed_flushed == 0.99);
}

TEST_CASE("fp8 shadow: an empty histogram, and one of zeros") {
    ExponentHistogram histogram{.name = "0.up.x", .role = Fp8Role::kX, .bins = std::vector<uint64_t>(kExponentBins)};
    for (uint64_t zeros : {0u, 5u}) {
        histogram.bins[kZeroValues] = zeros;
        ExponentRecord record = exponent_record(histogram, Dtype::kE4m3);
        add_shadow(record, histogram, amax_bits_of(1.0f));
        CHECK(record.counts.empty());
        CHECK(record.shadow->tensorwise_flushed == 0);
        CHECK(*record.shadow->delayed_saturated == 0);
    }
}
