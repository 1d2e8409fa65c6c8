#include "llmc/base/system/nvml.h"

#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "llmc/base/check.h"
#include "llmc/base/system/signals_blocked.h"

namespace {

// Source: docs.nvidia.com/deploy/nvml-api. nvmlReturn_t and enumerations are int.
using Device = void*;
constexpr int kSuccess = 0, kSmClock = 1, kMemoryClock = 2, kUncorrected = 1, kVolatile = 0, kGpuTemperature = 0;

class Nvml {
public:
    // The library is never closed, because other libraries of the process may use it.
    explicit Nvml(const char* library) : library_(dlopen(library, RTLD_NOW | RTLD_LOCAL)) {}
    ~Nvml() {
        if (started_) call<int()>("nvmlShutdown");
    }
    Nvml(const Nvml&) = delete;

    bool opened() const { return library_ != nullptr; }
    int start() {
        const int result = call<int()>("nvmlInit_v2");
        started_ = result == kSuccess;
        return result;
    }
    // Returns -1 if the library does not have the function.
    template <typename F, typename... Args> int call(const char* name, Args... args) const {
        auto* function = reinterpret_cast<F*>(dlsym(library_, name));
        return function ? function(args...) : -1;
    }
    template <typename To, typename Number, typename... Args>
    void ask(std::optional<To>& to, const char* name, Device device, Args... args) const {
        Number value{};
        if (call<int(Device, Args..., Number*)>(name, device, args..., &value) == kSuccess)
            to = static_cast<To>(value);
    }

private:
    void* library_;
    bool started_ = false;
};

// Returns "" or the reason why the GPU cannot be queried.
std::string find_device(Nvml& nvml, const char* library, const std::string& bus, Device& device) {
    if (!nvml.opened()) return strf("%s, which comes with the driver, cannot be opened", library);
    if (const int result = nvml.start(); result != kSuccess) return strf("nvmlInit_v2 returns %d", result);
    const int found = nvml.call<int(const char*, Device*)>("nvmlDeviceGetHandleByPciBusId_v2", bus.c_str(), &device);
    return found == kSuccess ? "" : strf("NVML does not find the GPU at %s: it returns %d", bus.c_str(), found);
}

std::optional<int64_t> memory_in_use(const Nvml& nvml, Device device) {
    struct Memory { unsigned long long total, free, used; } memory{};
    if (nvml.call<int(Device, Memory*)>("nvmlDeviceGetMemoryInfo", device, &memory) != kSuccess) return std::nullopt;
    return static_cast<int64_t>(memory.used);
}

// One sample; with an error if this GPU reports nothing at all.
GpuSamples sample_gpu(const Nvml& nvml, Device device) {
    struct Utilization { unsigned gpu, memory; };
    std::optional<int64_t> mhz, most, milliwatts, celsius;
    std::optional<uint64_t> throttle;
    std::optional<double> millijoules;
    nvml.ask<int64_t, unsigned>(mhz, "nvmlDeviceGetClockInfo", device, kSmClock);
    nvml.ask<int64_t, unsigned>(most, "nvmlDeviceGetMaxClockInfo", device, kSmClock);
    nvml.ask<int64_t, unsigned>(milliwatts, "nvmlDeviceGetPowerUsage", device);
    nvml.ask<int64_t, unsigned>(celsius, "nvmlDeviceGetTemperature", device, kGpuTemperature);
    nvml.ask<uint64_t, unsigned long long>(throttle, "nvmlDeviceGetCurrentClocksThrottleReasons", device);
    nvml.ask<double, unsigned long long>(millijoules, "nvmlDeviceGetTotalEnergyConsumption", device);
    GpuSamples s{.count = 1, .max_sm_mhz = most.value_or(0), .celsius = celsius, .throttle = throttle};
    if (mhz) s.sm_mhz = {static_cast<double>(*mhz), 1};
    s.least_sm_mhz = s.most_sm_mhz = mhz.value_or(0);
    if (milliwatts) s.watts = {1e-3 * static_cast<double>(*milliwatts), 1};
    if (millijoules) s.joules = 1e-3 * *millijoules;
    Utilization utilization{};
    if (nvml.call<int(Device, Utilization*)>("nvmlDeviceGetUtilizationRates", device, &utilization) == kSuccess)
        s.utilization = {static_cast<double>(utilization.gpu), 1};
    s.memory_bytes = memory_in_use(nvml, device);
    if (!mhz && !milliwatts && !millijoules && s.utilization.count == 0)
        return {.error = "this GPU reports neither its utilization nor clocks, power and energy"};
    return s;
}

}  // namespace

std::string read_gpu_state(const std::string& bus, GpuState& state, const char* library) {
    Nvml nvml(library);
    Device device = nullptr;
    const std::string error = find_device(nvml, library, bus, device);
    if (!error.empty()) return error;

    nvml.ask<bool, int>(state.persistence, "nvmlDeviceGetPersistenceMode", device);
    unsigned mig = 0;
    int ecc = 0;
    unsigned next_mig = 0;   // after a reset
    int next_ecc = 0;
    if (nvml.call<int(Device, unsigned*, unsigned*)>("nvmlDeviceGetMigMode", device, &mig, &next_mig) == kSuccess)
        state.mig = mig != 0;
    if (nvml.call<int(Device, int*, int*)>("nvmlDeviceGetEccMode", device, &ecc, &next_ecc) == kSuccess)
        state.ecc = ecc != 0;
    nvml.ask<int64_t, unsigned long long>(state.uncorrected_errors, "nvmlDeviceGetTotalEccErrors", device, kUncorrected,
                                          kVolatile);
    nvml.ask<int64_t, unsigned>(state.sm_mhz, "nvmlDeviceGetClockInfo", device, kSmClock);
    nvml.ask<int64_t, unsigned>(state.max_sm_mhz, "nvmlDeviceGetMaxClockInfo", device, kSmClock);
    nvml.ask<int64_t, unsigned>(state.memory_mhz, "nvmlDeviceGetClockInfo", device, kMemoryClock);
    nvml.ask<int64_t, unsigned>(state.max_memory_mhz, "nvmlDeviceGetMaxClockInfo", device, kMemoryClock);
    nvml.ask<uint64_t, unsigned long long>(state.throttle, "nvmlDeviceGetCurrentClocksThrottleReasons", device);
    nvml.ask<int64_t, unsigned>(state.power_limit_mw, "nvmlDeviceGetPowerManagementLimit", device);
    nvml.ask<int64_t, unsigned>(state.default_power_limit_mw, "nvmlDeviceGetPowerManagementDefaultLimit", device);
    nvml.ask<int64_t, unsigned>(state.celsius, "nvmlDeviceGetTemperature", device, kGpuTemperature);
    return "";
}

std::optional<int64_t> gpu_memory_in_use(const std::string& bus, const char* library) {
    Nvml nvml(library);
    Device device = nullptr;
    if (!find_device(nvml, library, bus, device).empty()) return std::nullopt;
    return memory_in_use(nvml, device);
}

std::string throttle_text(uint64_t bits) {
    const std::pair<uint64_t, const char*> names[] = {
        {kThrottleClocksSet, "clocks set by the user"}, {kThrottlePowerCap, "power cap"},
        {kThrottleHardware, "slowdown by hardware"}, {kThrottleSoftwareThermal, "heat (software)"},
        {kThrottleHardwareThermal, "heat (hardware)"}, {kThrottlePowerBrake, "power brake"}};
    std::string text;
    for (const auto& [bit, name] : names)
        if (bits & bit) text += (text.empty() ? "" : ", ") + std::string(name);
    return text.empty() ? "none" : text;
}

void GpuSamples::add(const GpuSamples& later) {
    auto join = [](Mean& mean, const Mean& other) {
        mean.sum += other.sum;
        mean.count += other.count;
    };
    join(utilization, later.utilization);
    join(watts, later.watts);
    join(sm_mhz, later.sm_mhz);
    if (later.least_sm_mhz > 0)
        least_sm_mhz = least_sm_mhz > 0 ? std::min(least_sm_mhz, later.least_sm_mhz) : later.least_sm_mhz;
    most_sm_mhz = std::max(most_sm_mhz, later.most_sm_mhz);
    max_sm_mhz = std::max(max_sm_mhz, later.max_sm_mhz);
    celsius = std::max(celsius, later.celsius);   // an absent one is less than any
    memory_bytes = std::max(memory_bytes, later.memory_bytes);
    if (later.throttle) throttle = throttle.value_or(0) | *later.throttle;
    if (later.joules) joules = later.joules;
    if (!later.error.empty()) error = later.error;
    count += later.count;
}

GpuSampler::GpuSampler(std::string bus, const char* library) : bus_(std::move(bus)) {
    if (bus_.empty()) {
        samples_.error = "this device has no clocks";
        return;
    }
    const SignalsBlocked blocked;
    thread_ = std::thread([this, library] { run(library); });
}

void GpuSampler::run(const char* library) {
    Nvml nvml(library);
    Device device = nullptr;
    const std::string error = find_device(nvml, library, bus_, device);
    do {
        const GpuSamples sample = error.empty() ? sample_gpu(nvml, device) : GpuSamples{.error = error};
        {
            const std::lock_guard lock(mutex_);
            samples_.add(sample);
        }
        if (!sample.error.empty()) return;
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
    } while (!stopping_);
}

GpuSamples GpuSampler::take() {
    const std::lock_guard lock(mutex_);
    GpuSamples taken = std::exchange(samples_, GpuSamples{});
    samples_.error = taken.error;
    return taken;
}

GpuSamples GpuSampler::stop() {
    stopping_ = true;
    if (thread_.joinable()) thread_.join();
    return take();
}
