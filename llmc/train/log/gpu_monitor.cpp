#include "llmc/train/log/gpu_monitor.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "llmc/base/text.h"

namespace {

// One rank's part of a record, which is sent to the other ranks as bytes; nan: not reported.
struct RankPart {
    int64_t samples = 0, failed = 0;
    int64_t throttle = -1;   // bits, -1: not reported
    double utilization = NAN, watts = NAN, sm_mhz = NAN, celsius = NAN, memory_gib = NAN, joules = NAN;
};

std::optional<double> known(double value) { return std::isnan(value) ? std::nullopt : std::optional(value); }

std::optional<double> mean(const std::vector<RankPart>& parts, double RankPart::*field) {
    GpuSamples::Mean mean;
    for (const RankPart& part : parts)
        if (!std::isnan(part.*field)) mean.sum += part.*field, mean.count++;
    return mean.value();
}

std::optional<double> highest(const std::vector<RankPart>& parts, double RankPart::*field) {
    double most = NAN;
    for (const RankPart& part : parts) most = std::fmax(most, part.*field);   // ignores nan
    return known(most);
}

// Absent unless every rank has it.
std::optional<double> total(const std::vector<RankPart>& parts, double RankPart::*field) {
    double sum = 0;
    for (const RankPart& part : parts) sum += part.*field;
    return known(sum);
}

GpuRecord record_of(const std::vector<RankPart>& parts, double tokens) {
    GpuRecord record;
    record.utilization = mean(parts, &RankPart::utilization);
    record.power_w = mean(parts, &RankPart::watts);
    record.sm_clock_mhz = mean(parts, &RankPart::sm_mhz);
    record.temperature_c = highest(parts, &RankPart::celsius);
    record.memory_gib = highest(parts, &RankPart::memory_gib);
    record.energy_j = total(parts, &RankPart::joules);
    if (record.energy_j && tokens > 0) record.joules_per_token = *record.energy_j / tokens;
    std::optional<uint64_t> throttle;
    for (const RankPart& part : parts)
        if (part.throttle >= 0) throttle = throttle.value_or(0) | static_cast<uint64_t>(part.throttle);
    if (throttle) record.throttled_by = throttle_text(*throttle);
    return record;
}

}  // namespace

void GpuMonitor::start(const std::string& bus, const char* library) {
    if (!bus.empty()) sampler_ = std::make_unique<GpuSampler>(bus, library);
}

void GpuMonitor::restart() {
    if (!sampler_) return;
    const GpuSamples before = sampler_->take();
    since_ = {.error = before.error};
    if (before.joules) joules_ = before.joules;
    tokens_ = 0;
    ended_ = false;
}

void GpuMonitor::end_step() {
    if (sampler_ && !std::exchange(ended_, true)) since_.add(sampler_->take());
}

GpuRecord GpuMonitor::report(double tokens) {
    if (!sampler_) return {};
    tokens_ += tokens;
    end_step();
    ended_ = false;
    RankPart mine{.samples = since_.count, .failed = !since_.error.empty()};
    if (since_.throttle) mine.throttle = static_cast<int64_t>(*since_.throttle);
    mine.utilization = since_.utilization.value().value_or(NAN);
    mine.watts = since_.watts.value().value_or(NAN);
    mine.sm_mhz = since_.sm_mhz.value().value_or(NAN);
    if (since_.celsius) mine.celsius = static_cast<double>(*since_.celsius);
    if (since_.memory_bytes) mine.memory_gib = gib(*since_.memory_bytes);
    if (since_.joules && joules_) mine.joules = *since_.joules - *joules_;

    std::vector<RankPart> parts;
    bool failed = false;
    for (const std::string& bytes : comm_.gather({reinterpret_cast<const char*>(&mine), sizeof(mine)})) {
        std::memcpy(&parts.emplace_back(), bytes.data(), sizeof(RankPart));
        failed |= parts.back().failed != 0;
    }
    if (failed) {   // the same on all ranks
        note_ = "the log has no GPU utilization, power and energy: " + first_error(comm_, since_.error);
        sampler_.reset();
        return {};
    }
    if (std::any_of(parts.begin(), parts.end(), [](const RankPart& part) { return part.samples == 0; })) return {};
    if (since_.joules) joules_ = since_.joules;
    since_ = {};
    return record_of(parts, std::exchange(tokens_, 0.0));
}

std::string GpuMonitor::note() { return std::exchange(note_, ""); }
