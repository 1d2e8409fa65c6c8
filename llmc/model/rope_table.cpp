#include "llmc/model/rope_table.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace {

double d(int64_t x) { return static_cast<double>(x); }

// Returns how much of a frequency is kept, 0 to 1; the rest is divided by the factor.
double llama3_share(const RopeScaling& s, double freq) {
    const double wavelength = 2.0 * std::numbers::pi / freq;
    const double share = (d(s.original_max_positions) / wavelength - s.low_freq_factor)
                         / (s.high_freq_factor - s.low_freq_factor);
    return std::fmin(1.0, std::fmax(0.0, share));
}

double yarn_share(const ModelConfig& c, int64_t pair) {
    const RopeScaling& s = c.rope_scaling;
    const double R = d(c.rotated());
    // The fractional index of the pair that makes `turns` rotations within the original length.
    auto pair_of = [&](double turns) {
        const double tokens = turns * 2 * std::numbers::pi;   // in which a pair of frequency 1 makes these rotations
        return R * std::log(d(s.original_max_positions) / tokens) / (2 * std::log(c.rotary_base));
    };
    double low = pair_of(s.beta_fast), high = pair_of(s.beta_slow);
    if (s.truncate) low = std::floor(low), high = std::ceil(high);
    low = std::max(low, 0.0), high = std::min(high, R - 1);
    if (low == high) high += 0.001;
    return 1 - std::clamp((d(pair) - low) / (high - low), 0.0, 1.0);
}

double attention_factor(const RopeScaling& s) {
    const bool longrope = s.type == RopeScalingType::kLongrope;
    if (s.factor == 0 || (s.type != RopeScalingType::kYarn && !longrope)) return 1;
    if (s.attention_factor > 0) return s.attention_factor;
    if (longrope) return s.factor > 1 ? std::sqrt(1 + std::log(s.factor) / std::log(d(s.original_max_positions))) : 1;
    return s.factor > 1 ? 0.1 * std::log(s.factor) + 1 : 1;
}

}  // namespace

std::vector<double> rope_table(const ModelConfig& config, int64_t T, bool local) {
    const int64_t half = config.rotated() / 2;
    const RopeScaling s = local ? RopeScaling{} : config.rope_scaling;
    const double base = local ? config.local_rotary_base : config.rotary_base;
    const double m = attention_factor(s);
    std::vector<double> table(static_cast<size_t>(T * half * 2));
    for (int64_t i = 0; i < half; i++) {
        double freq = std::pow(base, -2.0 * d(i) / d(2 * half));
        if (s.type == RopeScalingType::kLongrope) {
            freq /= (T > s.original_max_positions ? s.long_factors : s.short_factors)[static_cast<size_t>(i)];
        } else if (s.factor > 0) {
            const double keep = s.type == RopeScalingType::kYarn     ? yarn_share(config, i)
                                : s.type == RopeScalingType::kLinear ? 0
                                                                     : llama3_share(s, freq);
            freq = (1.0 - keep) * freq / s.factor + keep * freq;
        }
        for (int64_t t = 0; t < T; t++) {
            table[static_cast<size_t>((t * half + i) * 2)] = m * std::cos(d(t) * freq);
            table[static_cast<size_t>((t * half + i) * 2 + 1)] = m * std::sin(d(t) * freq);
        }
    }
    return table;
}
