#include "llmc/nvml.h"

#include <dlfcn.h>

#include "llmc/check.h"

namespace {

// Source: the reference of NVML's C interface, docs.nvidia.com/deploy/nvml-api. nvmlReturn_t and enumerations are int.
using Device = void*;
constexpr int kSuccess = 0, kSmClock = 1, kMemoryClock = 2, kUncorrected = 1, kVolatile = 0, kGpuTemperature = 0;

class Nvml {
public:
    // Never closed: other libraries of the process may have opened it, too.
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
    // -1 where the library does not have the function.
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

}  // namespace

std::string read_gpu_state(const std::string& bus, GpuState& state, const char* library) {
    Nvml nvml(library);
    if (!nvml.opened()) return strf("%s, which comes with the driver, cannot be opened", library);
    if (const int result = nvml.start(); result != kSuccess) return strf("nvmlInit_v2 returns %d", result);
    Device device = nullptr;
    const int found = nvml.call<int(const char*, Device*)>("nvmlDeviceGetHandleByPciBusId_v2", bus.c_str(), &device);
    if (found != kSuccess) return strf("NVML does not find the GPU at %s: it returns %d", bus.c_str(), found);

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
