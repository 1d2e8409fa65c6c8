#include "llmc/config/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "llmc/base/check.h"

namespace {

// Interpolates from min_lr (share 0) to lr (share 1); the ends are exact.
double between(const Config& config, double share_of_lr) {
    if (share_of_lr >= 1) return config.lr;
    if (share_of_lr <= 0) return config.min_lr;
    return config.min_lr + (config.lr - config.min_lr) * share_of_lr;
}

double wsd_rate(const Config& config, int64_t step) {
    int64_t decay = config.lr_wsd_decay_iters;
    if (decay == 0) decay = std::max<int64_t>(config.train_iters / 10, 1);
    int64_t left = config.train_iters - 1 - step;   // steps after this one
    return between(config, static_cast<double>(left) / static_cast<double>(decay));
}

}  // namespace

double learning_rate(const Config& config, int64_t step) {
    CHECK(config.train_iters > 0 && step >= 0, "learning rate of step %lld of %lld", ll(step), ll(config.train_iters));
    step = std::min(step, config.train_iters - 1);
    const int64_t warmup = config.lr_warmup_iters;
    if (step < warmup) return config.lr * (static_cast<double>(step + 1) / static_cast<double>(warmup));
    if (config.lr_decay_style == LrDecay::kConstant) return config.lr;
    if (config.lr_decay_style == LrDecay::kWsd) return wsd_rate(config, step);
    const int64_t span = config.train_iters - 1 - warmup;
    if (span <= 0) return config.lr;
    double progress = static_cast<double>(step - warmup) / static_cast<double>(span);
    bool linear = config.lr_decay_style == LrDecay::kLinear;
    return between(config, linear ? 1 - progress : 0.5 * (1 + std::cos(std::numbers::pi * progress)));
}

Fp8Steps fp8_steps(const Config& config) {
    const auto steps = [&](double given) -> int64_t {
        if (given == 0 || given >= 1) return static_cast<int64_t>(given);
        if (config.train_iters == 0) return 0;
        const double part = given * static_cast<double>(config.train_iters);
        return std::clamp<int64_t>(std::llround(part), 1, config.train_iters);
    };
    Fp8Steps fp8{.begin = steps(config.fp8_first_bf16)};
    if (config.fp8_final_bf16 > 0 && config.train_iters > 0)
        fp8.end = config.train_iters - steps(config.fp8_final_bf16);
    return fp8;
}

Config in_bf16(Config config) {
    config.fp8_recipe = Fp8Recipe::kNone;
    config.fp8_attention = false;
    config.fp8_first_bf16 = config.fp8_final_bf16 = 0;
    return config;
}

std::string bf16_steps_text(const Config& config) {
    const Fp8Steps fp8 = fp8_steps(config);
    std::vector<std::string> parts;
    const auto add = [&](int64_t first, int64_t last) {
        if (first <= last)
            parts.push_back(std::to_string(first) + (first < last ? "-" + std::to_string(last) : ""));
    };
    add(1, fp8.begin);
    if (fp8.end < INT64_MAX) add(fp8.end + 1, config.train_iters);
    if (parts.empty()) return "";
    const bool one = parts.size() == 1 && parts[0].find('-') == std::string::npos;
    return strf("BF16 in step%s ", one ? "" : "s") + list_text(parts, " and ");
}

double all_steps_ms(const Config& config, double ms, double bf16_ms) {
    const Fp8Steps fp8 = fp8_steps(config);
    const int64_t in_fp8 = std::min(fp8.end, config.train_iters) - fp8.begin;
    return ms * static_cast<double>(in_fp8) + bf16_ms * static_cast<double>(config.train_iters - in_fp8);
}

int64_t batch_size_at(const Config& config, int64_t samples) {
    CHECK(samples >= 0, "%lld samples consumed", ll(samples));
    if (config.rampup_start == 0 || samples >= config.rampup_samples) return config.global_batch_size;
    int64_t increments = (config.global_batch_size - config.rampup_start) / config.rampup_increment;
    // 128 bits, because samples x increments may overflow 64.
    int64_t done = static_cast<int64_t>(static_cast<__int128>(samples) * increments / config.rampup_samples);
    return config.rampup_start + done * config.rampup_increment;
}

int64_t samples_after(const Config& config, int64_t steps) {
    int64_t samples = 0;
    for (int64_t batch; steps > 0 && (batch = batch_size_at(config, samples)) < config.global_batch_size; steps--)
        samples += batch;
    return samples + steps * config.global_batch_size;
}

int64_t steps_for_samples(const Config& config, int64_t samples) {
    int64_t steps = 0;
    for (int64_t used = batch_size_at(config, 0); used <= samples; used += batch_size_at(config, used)) steps++;
    return steps;
}
