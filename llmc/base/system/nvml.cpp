#include "llmc/base/system/nvml.h"

#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

#include "llmc/base/check.h"
#include "llmc/base/system/threads.h"

namespace {

// Source: docs.nvidia.com/deploy/nvml-api. nvmlReturn_t and enumerations are int.
using Device = void*;
using Wide = unsigned long long;
constexpr int kSuccess = 0, kSmClock = 1, kMemoryClock = 2, kUncorrected = 1, kVolatile = 0, kGpuTemperature = 0;

// One GPU. The library is never closed, because other libraries of the process may use it.
class Nvml {
public:
    Nvml(const char* library, const std::string& bus) : library_(dlopen(library, RTLD_NOW | RTLD_LOCAL)) {
        if (!library_) {
            error = strf("%s, which comes with the driver, cannot be opened", library);
            return;
        }
        const int result = call<int()>("nvmlInit_v2");
        started_ = result == kSuccess;
        const int found = started_ ? call<int(const char*, Device*)>("nvmlDeviceGetHandleByPciBusId_v2", bus.c_str(),
                                                                     &device_) : 0;
        if (!started_) error = strf("nvmlInit_v2 returns %d", result);
        else if (found != kSuccess) error = strf("NVML does not find the GPU at %s: it returns %d", bus.c_str(), found);
    }
    ~Nvml() {
        if (started_) call<int()>("nvmlShutdown");
    }
    Nvml(const Nvml&) = delete;

    // What changes while the GPU works.
    void read_load(GpuState& s) const {
        struct Utilization { unsigned gpu, memory; } utilization{};
        struct Memory { Wide total, free, used; } memory{};
        ask<unsigned>(s.sm_mhz, "nvmlDeviceGetClockInfo", kSmClock);
        ask<unsigned>(s.max_sm_mhz, "nvmlDeviceGetMaxClockInfo", kSmClock);
        ask<unsigned>(s.milliwatts, "nvmlDeviceGetPowerUsage");
        ask<unsigned>(s.celsius, "nvmlDeviceGetTemperature", kGpuTemperature);
        ask<Wide>(s.throttle, "nvmlDeviceGetCurrentClocksThrottleReasons");
        ask<Wide>(s.millijoules, "nvmlDeviceGetTotalEnergyConsumption");
        if (call<int(Device, Utilization*)>("nvmlDeviceGetUtilizationRates", device_, &utilization) == kSuccess)
            s.utilization = utilization.gpu;
        if (call<int(Device, Memory*)>("nvmlDeviceGetMemoryInfo", device_, &memory) == kSuccess)
            s.memory_bytes = static_cast<int64_t>(memory.used);
    }
    void read_settings(GpuState& s) const {
        unsigned mig = 0, next_mig = 0;   // next: after a reset
        int ecc = 0, next_ecc = 0;
        ask<int>(s.persistence, "nvmlDeviceGetPersistenceMode");
        if (call<int(Device, unsigned*, unsigned*)>("nvmlDeviceGetMigMode", device_, &mig, &next_mig) == kSuccess)
            s.mig = mig != 0;
        if (call<int(Device, int*, int*)>("nvmlDeviceGetEccMode", device_, &ecc, &next_ecc) == kSuccess)
            s.ecc = ecc != 0;
        ask<Wide>(s.uncorrected_errors, "nvmlDeviceGetTotalEccErrors", kUncorrected, kVolatile);
        ask<unsigned>(s.memory_mhz, "nvmlDeviceGetClockInfo", kMemoryClock);
        ask<unsigned>(s.max_memory_mhz, "nvmlDeviceGetMaxClockInfo", kMemoryClock);
        ask<unsigned>(s.power_limit_mw, "nvmlDeviceGetPowerManagementLimit");
        ask<unsigned>(s.default_power_limit_mw, "nvmlDeviceGetPowerManagementDefaultLimit");
    }

    std::string error;   // why the GPU cannot be queried, or ""

private:
    // Returns -1 if the library does not have the function.
    template <typename F, typename... Args> int call(const char* name, Args... args) const {
        auto* function = reinterpret_cast<F*>(dlsym(library_, name));
        return function ? function(args...) : -1;
    }
    template <typename Number, typename To, typename... Args>
    void ask(std::optional<To>& to, const char* name, Args... args) const {
        Number value{};
        if (call<int(Device, Args..., Number*)>(name, device_, args..., &value) == kSuccess)
            to = static_cast<To>(value);
    }

    void* library_;
    Device device_ = nullptr;
    bool started_ = false;
};

}  // namespace

std::string read_gpu_state(const std::string& bus, GpuState& state, const char* library) {
    const Nvml nvml(library, bus);
    if (!nvml.error.empty()) return nvml.error;
    nvml.read_load(state);
    nvml.read_settings(state);
    return "";
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

double GpuSamples::mean(std::optional<int64_t> GpuState::*value) const {
    double sum = 0, count = 0;
    for (const GpuState& state : states)
        if (state.*value) sum += static_cast<double>(*(state.*value)), count++;
    return sum / count;   // 0 / 0 is NaN
}

double GpuSamples::highest(std::optional<int64_t> GpuState::*value) const {
    double found = NAN;
    for (const GpuState& state : states)
        if (state.*value) found = std::fmax(found, static_cast<double>(*(state.*value)));
    return found;
}

int64_t GpuSamples::throttle() const {
    int64_t bits = -1;
    for (const GpuState& state : states)
        if (state.throttle) bits = std::max<int64_t>(bits, 0) | static_cast<int64_t>(*state.throttle);
    return bits;
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
    const Nvml nvml(library, bus_);
    std::string error = nvml.error;
    do {
        GpuState state;
        if (error.empty()) nvml.read_load(state);
        if (error.empty() && !state.sm_mhz && !state.milliwatts && !state.millijoules && !state.utilization)
            error = "this GPU reports neither its utilization nor clocks, power and energy";
        {
            const std::lock_guard lock(mutex_);
            samples_.error = error;
            if (error.empty()) samples_.states.push_back(state);
        }
        if (!error.empty()) return;
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
    } while (!stopping_);
}

GpuSamples GpuSampler::take() {
    const std::lock_guard lock(mutex_);
    return {std::exchange(samples_.states, {}), samples_.error};
}

GpuSamples GpuSampler::stop() {
    stopping_ = true;
    if (thread_.joinable()) thread_.join();
    return take();
}
