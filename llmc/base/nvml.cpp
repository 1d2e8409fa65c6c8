#include "llmc/base/nvml.h"

#include <dlfcn.h>

#include <algorithm>
#include <chrono>

#include "llmc/base/check.h"

namespace {

// Source: docs.nvidia.com/deploy/nvml-api. nvmlReturn_t and enumerations are int.
using Device = void*;
constexpr int kSuccess = 0, kSmClock = 1, kMemoryClock = 2, kUncorrected = 1, kVolatile = 0, kGpuTemperature = 0;

class Nvml {
public:
    // Never closed, because other libraries of the process may use it.
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

std::string throttle_text(uint64_t bits) {
    const std::pair<uint64_t, const char*> names[] = {
        {kThrottleClocksSet, "application clocks"}, {kThrottlePowerCap, "power cap"}, {kThrottleHardware, "hardware"},
        {kThrottleSoftwareThermal, "software thermal"}, {kThrottleHardwareThermal, "hardware thermal"},
        {kThrottlePowerBrake, "power brake"}};
    std::string text;
    for (const auto& [bit, name] : names)
        if (bits & bit) text += (text.empty() ? "" : ", ") + std::string(name);
    return text.empty() ? "none" : text;
}

ClockSampler::ClockSampler(std::string bus, const char* library) : bus_(std::move(bus)) {
    if (bus_.empty()) samples_.error = "this device has no clocks";
    else thread_ = std::thread([this, library] { run(library); });
}

void ClockSampler::run(const char* library) {
    Nvml nvml(library);
    Device device = nullptr;
    samples_.error = find_device(nvml, library, bus_, device);
    while (samples_.error.empty() && !stopping_) {
        std::optional<int64_t> mhz, milliwatts, most;
        std::optional<uint64_t> throttle;
        nvml.ask<int64_t, unsigned>(mhz, "nvmlDeviceGetClockInfo", device, kSmClock);
        nvml.ask<int64_t, unsigned>(most, "nvmlDeviceGetMaxClockInfo", device, kSmClock);
        nvml.ask<int64_t, unsigned>(milliwatts, "nvmlDeviceGetPowerUsage", device);
        nvml.ask<uint64_t, unsigned long long>(throttle, "nvmlDeviceGetCurrentClocksThrottleReasons", device);
        if (!mhz) samples_.error = "this GPU does not report its clocks";
        if (!mhz) break;
        ClockSamples& s = samples_;
        s.least_sm_mhz = s.count == 0 ? *mhz : std::min(s.least_sm_mhz, *mhz);
        s.most_sm_mhz = std::max(s.most_sm_mhz, *mhz);
        s.max_sm_mhz = most.value_or(0);
        s.throttle |= throttle.value_or(0);
        s.count++;
        const double weight = 1.0 / static_cast<double>(s.count);
        s.sm_mhz += weight * (static_cast<double>(*mhz) - s.sm_mhz);
        s.watts += weight * (1e-3 * static_cast<double>(milliwatts.value_or(0)) - s.watts);
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
}

ClockSamples ClockSampler::stop() {
    stopping_ = true;
    if (thread_.joinable()) thread_.join();
    return samples_;
}
