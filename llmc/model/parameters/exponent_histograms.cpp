#include "llmc/model/parameters/exponent_histograms.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "llmc/model/parameters/merge_values.h"

namespace {

constexpr int64_t kBytes = kExponentBins * int64_t{sizeof(uint64_t)};   // of the bins of a tensor

}  // namespace

uint64_t ExponentHistogram::values() const { return std::accumulate(bins.begin(), bins.end(), uint64_t{0}); }

ExponentHistograms::ExponentHistograms(const Config& config, const Fp8Plan& plan, Arena& arena) {
    by_plan_.assign(plan.linears.size(), -1);
    if (config.fp8_stats == Fp8Stats::kCounts || config.fp8_stats_interval == 0) return;
    const bool shadow = config.fp8_stats == Fp8Stats::kShadow;
    std::vector<std::string> names;
    for (size_t i = 0; i < plan.linears.size(); i++) {
        const LinearPlan& linear = plan.linears[i];
        if (shadow ? linear.kind == LinearKind::kHead : !linear.fp8) continue;
        by_plan_[i] = static_cast<int>(weights_.size());
        weights_.push_back(linear.weight);
        names.push_back(linear.name);
    }
    for (int role = 0; role < kFp8Roles; role++)
        for (const std::string& name : names)
            tensors_.push_back({name + "." + fp8_role_name(static_cast<Fp8Role>(role)), static_cast<Fp8Role>(role)});
    if (on())
        memory_ = arena.take(Purpose::kFp8, Dtype::kInt32,
                             static_cast<int64_t>(tensors_.size()) * (kBytes + int64_t{sizeof(uint32_t)}) / 4);
}

void ExponentHistograms::begin_step(Ctx& ctx, bool collects) {
    collects_ = on() && collects;
    if (collects_) device::fill_bytes(ctx, memory_.data, 0, memory_.bytes());
}

void ExponentHistograms::count(Ctx& ctx, int tensor, const Tensor& in) {
    char* const bins = static_cast<char*>(memory_.data);
    char* const amaxes = bins + static_cast<int64_t>(tensors_.size()) * kBytes;
    ops::count_exponents(ctx, {.bins = reinterpret_cast<unsigned long long*>(bins + tensor * kBytes),
                               .amax_bits = reinterpret_cast<uint32_t*>(amaxes) + tensor, .in = in});
}

void ExponentHistograms::add(Ctx& ctx, int number, Fp8Role role, const Tensor& in) {
    if (collects(number)) count(ctx, number + static_cast<int>(role) * static_cast<int>(weights_.size()), in);
}

void ExponentHistograms::add_weight(Ctx& ctx, int param, const Tensor& in) {
    const auto found = std::find(weights_.begin(), weights_.end(), param);
    if (!collects_ || found == weights_.end()) return;
    const auto first = static_cast<std::ptrdiff_t>(Fp8Role::kWeight) * static_cast<std::ptrdiff_t>(weights_.size());
    count(ctx, static_cast<int>(first + (found - weights_.begin())), in);
}

// ---- reports

void ExponentHistograms::copy_report(Ctx& ctx, void* host) const {
    if (collects_) device::copy_to_host(ctx, host, memory_.data, memory_.bytes());
}

std::vector<ExponentHistogram> ExponentHistograms::read_report(const void* host) const {
    const char* bins = static_cast<const char*>(host);
    const char* amaxes = bins + static_cast<int64_t>(tensors_.size()) * kBytes;
    std::vector<ExponentHistogram> found;
    for (const Tensors& tensor : tensors_) {
        ExponentHistogram histogram{.name = tensor.name, .role = tensor.role,
                                    .bins = std::vector<uint64_t>(kExponentBins)};
        std::memcpy(histogram.bins.data(), bins, kBytes);
        std::memcpy(&histogram.amax_bits, amaxes, sizeof histogram.amax_bits);
        bins += kBytes, amaxes += sizeof histogram.amax_bits;
        found.push_back(std::move(histogram));
    }
    return found;
}

void ExponentHistograms::merge_report(void* host, const void* other) const {
    char* to = static_cast<char*>(host);
    const char* from = static_cast<const char*>(other);
    const auto tensors = static_cast<int64_t>(tensors_.size());
    merge_values<uint64_t>(to, from, tensors * kBytes, [](uint64_t& mine, uint64_t theirs) { mine += theirs; });
    merge_values<uint32_t>(to, from, tensors * int64_t{sizeof(uint32_t)},
                           [](uint32_t& mine, uint32_t theirs) { mine = std::max(mine, theirs); });
}
