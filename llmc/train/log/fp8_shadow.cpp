#include "llmc/train/log/fp8_shadow.h"

#include <algorithm>
#include <cmath>
#include <functional>

#include "llmc/base/fp8.h"
#include "llmc/base/text.h"

namespace {

int exponent_of(size_t bin) { return static_cast<int>(bin) - 127; }

// Number of finite values that are not zero and at most `limit`. BF16 has 128 values of an exponent, which are assumed
// to be equally frequent.
double values_up_to(const ExponentHistogram& histogram, double limit) {
    const double amax = static_cast<double>(float_of_bits(histogram.amax_bits));
    double count = 0;
    for (size_t bin = 1; bin < static_cast<size_t>(kNonfiniteValues); bin++) {
        const double step = std::ldexp(1.0, exponent_of(bin) - 7), low = bin == 1 ? 0 : 128 * step;
        // No value is above the amax, unless that is not finite.
        const double high = amax >= low ? std::min(255 * step, amax) : 255 * step;
        const double part = limit < low ? 0 : (std::floor((limit - low) / step) + 1) / ((high - low) / step + 1);
        count += static_cast<double>(histogram.bins[bin]) * std::min(part, 1.0);
    }
    return count;
}

double share_of(double count, const ExponentHistogram& histogram) {
    const uint64_t values = histogram.values();
    return values > 0 ? count / static_cast<double>(values) : 0;
}

// The largest value of a fraction among the tensors that have it: "0.3% of 3.down.dy".
std::string largest(const std::vector<ExponentRecord>& records,
                    const std::function<std::optional<double>(const ShadowCasts&)>& fraction) {
    double most = -1;
    std::string name;
    for (const ExponentRecord& record : records) {
        const std::optional<double> found = record.shadow ? fraction(*record.shadow) : std::nullopt;
        if (found && *found > most) most = *found, name = record.name;
    }
    return most < 0 ? "" : strf("%.2g%% of %s", 100 * most, name.c_str());
}

}  // namespace

Dtype shadow_format(Fp8Role role) { return role == Fp8Role::kDy ? Dtype::kE5m2 : Dtype::kE4m3; }

CastShares cast_shares(const ExponentHistogram& histogram, Dtype format, double scale) {
    const double largest = static_cast<double>(fp8_largest(format));
    const double half_of_smallest = format == Dtype::kE4m3 ? 0x1p-10 : 0x1p-17;   // a tie rounds to zero, too
    uint64_t finite = 0;
    for (size_t bin = 1; bin < static_cast<size_t>(kNonfiniteValues); bin++) finite += histogram.bins[bin];
    return {.saturated = share_of(static_cast<double>(finite) - values_up_to(histogram, largest / scale), histogram),
            .flushed = share_of(values_up_to(histogram, half_of_smallest / scale), histogram)};
}

ExponentRecord exponent_record(const ExponentHistogram& histogram, Dtype format) {
    const std::vector<uint64_t>& bins = histogram.bins;
    ExponentRecord record{.name = histogram.name, .format = dtype_name(format),
                          .amax = static_cast<double>(float_of_bits(histogram.amax_bits)),
                          .scale = static_cast<double>(scale_of(histogram.amax_bits, fp8_largest(format))),
                          .zeros = bins[kZeroValues], .nonfinite = bins[kNonfiniteValues]};
    const auto begin = bins.begin() + 1, end = bins.begin() + kNonfiniteValues;
    const auto counted = [](uint64_t count) { return count > 0; };
    const auto first = std::find_if(begin, end, counted);
    if (first == end) return record;
    const auto last = std::find_if(std::make_reverse_iterator(end), std::make_reverse_iterator(first), counted);
    record.first = exponent_of(static_cast<size_t>(first - bins.begin()));
    record.counts.assign(first, last.base());
    return record;
}

void add_shadow(ExponentRecord& record, const ExponentHistogram& histogram, uint32_t amax_bits_before) {
    const Dtype format = shadow_format(histogram.role);
    const auto shares = [&](Dtype to, float scale) { return cast_shares(histogram, to, static_cast<double>(scale)); };
    const float largest = fp8_largest(format), e4m3 = fp8_largest(Dtype::kE4m3);
    ShadowCasts casts{.tensorwise_flushed = shares(format, scale_of(histogram.amax_bits, largest)).flushed,
                      // The scale of a block is at least that of a block which has the amax of the tensor.
                      .blockwise_flushed_at_most =
                          shares(Dtype::kE4m3, block_scale_of(histogram.amax_bits, e4m3)).flushed};
    if (amax_bits_before > 0) {
        // The history of a weight includes the amax of its current values; those of x and dy end with the step before.
        const bool weight = histogram.role == Fp8Role::kWeight;
        const uint32_t amax_bits = std::max(amax_bits_before, weight ? histogram.amax_bits : 0);
        const CastShares delayed = shares(format, scale_of(amax_bits, largest));
        casts.delayed_saturated = delayed.saturated;
        casts.delayed_flushed = delayed.flushed;
    }
    record.shadow = casts;
}

std::string shadow_line(const std::vector<ExponentRecord>& records) {
    const std::string flushed = largest(records, [](const ShadowCasts& s) { return s.tensorwise_flushed; });
    if (flushed.empty()) return "";
    const std::string saturated = largest(records, [](const ShadowCasts& s) { return s.delayed_saturated; });
    std::string text = "in FP8, scales per tensor would flush to zero at most " + flushed;
    if (!saturated.empty()) text += "; those from the amax of the record before would saturate at most " + saturated;
    return text;
}
