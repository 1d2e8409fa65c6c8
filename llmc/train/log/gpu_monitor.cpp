#include "llmc/train/log/gpu_monitor.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>
#include <vector>

namespace {

// One rank's part of a record, which is sent to the other ranks as bytes; nan: not reported.
struct RankPart {
    int64_t samples, failed, throttle;   // throttle: -1: not reported
    double utilization, watts, sm_mhz, celsius, memory_gib, joules;
};

enum class Over { kMean, kHighest, kSum };   // of the ranks that have the value; a sum needs all of them
struct RankField {
    std::optional<double> GpuRecord::*record;
    double RankPart::*part;
    Over over;
};
constexpr RankField kRankFields[] = {{&GpuRecord::utilization, &RankPart::utilization, Over::kMean},
                                     {&GpuRecord::power_w, &RankPart::watts, Over::kMean},
                                     {&GpuRecord::sm_clock_mhz, &RankPart::sm_mhz, Over::kMean},
                                     {&GpuRecord::temperature_c, &RankPart::celsius, Over::kHighest},
                                     {&GpuRecord::memory_gib, &RankPart::memory_gib, Over::kHighest},
                                     {&GpuRecord::energy_j, &RankPart::joules, Over::kSum}};

std::optional<double> combined(const std::vector<RankPart>& parts, const RankField& field) {
    std::vector<double> values;
    for (const RankPart& part : parts)
        if (!std::isnan(part.*field.part)) values.push_back(part.*field.part);
    if (values.empty() || (field.over == Over::kSum && values.size() < parts.size())) return std::nullopt;
    if (field.over == Over::kHighest) return *std::max_element(values.begin(), values.end());
    const double sum = std::accumulate(values.begin(), values.end(), 0.0);
    return field.over == Over::kSum ? sum : sum / static_cast<double>(values.size());
}

GpuRecord record_of(const std::vector<RankPart>& parts, double tokens) {
    GpuRecord record;
    for (const RankField& field : kRankFields) record.*field.record = combined(parts, field);
    if (record.energy_j && tokens > 0) record.joules_per_token = *record.energy_j / tokens;
    int64_t throttle = -1;
    for (const RankPart& part : parts)
        if (part.throttle >= 0) throttle = std::max<int64_t>(0, throttle) | part.throttle;
    if (throttle >= 0) record.throttled_by = throttle_text(static_cast<uint64_t>(throttle));
    return record;
}

}  // namespace

void GpuMonitor::start(const std::string& bus, const char* library) {
    if (!bus.empty()) sampler_ = std::make_unique<GpuSampler>(bus, library);
}

void GpuMonitor::restart() {
    if (!sampler_) return;
    const double energy = sampler_->take().highest(&GpuState::millijoules);
    if (!std::isnan(energy)) millijoules_ = energy;
    since_.states.clear();
    tokens_ = 0;
    ended_ = false;
}

void GpuMonitor::end_step() {
    if (!sampler_ || std::exchange(ended_, true)) return;
    const GpuSamples later = sampler_->take();
    since_.states.insert(since_.states.end(), later.states.begin(), later.states.end());
    since_.error = later.error;
}

GpuRecord GpuMonitor::report(double tokens) {
    if (!sampler_) return {};
    tokens_ += tokens;
    end_step();
    ended_ = false;
    const double energy = since_.highest(&GpuState::millijoules);   // it only grows
    const RankPart mine{.samples = static_cast<int64_t>(since_.states.size()), .failed = !since_.error.empty(),
                        .throttle = since_.throttle(), .utilization = since_.mean(&GpuState::utilization),
                        .watts = 1e-3 * since_.mean(&GpuState::milliwatts), .sm_mhz = since_.mean(&GpuState::sm_mhz),
                        .celsius = since_.highest(&GpuState::celsius),
                        .memory_gib = since_.highest(&GpuState::memory_bytes) / kGiB,
                        .joules = 1e-3 * (energy - millijoules_)};
    std::vector<RankPart> parts;
    bool failed = false;
    for (const std::vector<RankPart>& part : gather_values<RankPart>(comm_, {mine})) {
        parts.push_back(part[0]);
        failed |= parts.back().failed != 0;
    }
    if (failed) {   // the same on all ranks
        note_ = "the log has no GPU utilization, power and energy: " + first_error(comm_, since_.error);
        sampler_.reset();
        return {};
    }
    if (std::any_of(parts.begin(), parts.end(), [](const RankPart& part) { return part.samples == 0; })) return {};
    if (!std::isnan(energy)) millijoules_ = energy;
    since_.states.clear();
    return record_of(parts, std::exchange(tokens_, 0.0));
}

std::string GpuMonitor::note() { return std::exchange(note_, ""); }
