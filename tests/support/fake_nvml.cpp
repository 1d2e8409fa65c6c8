// Replaces NVML's library where there is no driver: two GPUs, at 0000:18:00.0 and 0000:2a:00.0, whose values a test
// sets with fake_nvml_set(GPU, name, value). A value below 0 counts as not supported.
//
//   names: utilization (percent), milliwatts, sm_mhz, max_sm_mhz, celsius, used_bytes, throttle (bits), and
//   millijoules: of the energy counter, which grows by as much at every query of it
#include <cstring>
#include <map>
#include <mutex>
#include <string>

namespace {

enum Result { kSuccess = 0, kInvalid = 2, kNotSupported = 3, kNotFound = 6 };
struct Gpu {
    std::map<std::string, long long> values;
    unsigned long long energy = 0;
};
Gpu gpus[2];
std::mutex mutex;

template <typename T> int get(void* gpu, const char* name, T* to) {
    const std::lock_guard lock(mutex);
    auto& values = static_cast<Gpu*>(gpu)->values;
    const auto found = values.find(name);
    if (found == values.end() || found->second < 0) return kNotSupported;
    *to = static_cast<T>(found->second);
    return kSuccess;
}

}  // namespace

extern "C" {

void fake_nvml_set(int gpu, const char* name, long long value) {
    const std::lock_guard lock(mutex);
    gpus[gpu].values[name] = value;
}

int nvmlInit_v2() { return kSuccess; }
int nvmlShutdown() { return kSuccess; }

int nvmlDeviceGetHandleByPciBusId_v2(const char* bus, void** device) {
    const char* const known[] = {"0000:18:00.0", "0000:2a:00.0"};
    for (int i = 0; i < 2; i++)
        if (std::strcmp(bus, known[i]) == 0) return *device = &gpus[i], kSuccess;
    return kNotFound;
}

struct Utilization { unsigned gpu, memory; };
int nvmlDeviceGetUtilizationRates(void* gpu, Utilization* to) {
    to->memory = 77;
    return get(gpu, "utilization", &to->gpu);
}
struct Memory { unsigned long long total, free, used; };
int nvmlDeviceGetMemoryInfo(void* gpu, Memory* to) {
    to->total = to->free = 88;
    return get(gpu, "used_bytes", &to->used);
}
int nvmlDeviceGetPowerUsage(void* gpu, unsigned* to) { return get(gpu, "milliwatts", to); }
int nvmlDeviceGetClockInfo(void* gpu, int clock, unsigned* to) {
    return clock == 1 ? get(gpu, "sm_mhz", to) : kInvalid;
}
int nvmlDeviceGetMaxClockInfo(void* gpu, int clock, unsigned* to) {
    return clock == 1 ? get(gpu, "max_sm_mhz", to) : kInvalid;
}
int nvmlDeviceGetTemperature(void* gpu, int sensor, unsigned* to) {
    return sensor == 0 ? get(gpu, "celsius", to) : kInvalid;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(void* gpu, unsigned long long* to) { return get(gpu, "throttle", to); }
int nvmlDeviceGetTotalEnergyConsumption(void* gpu, unsigned long long* to) {
    unsigned long long step = 0;
    if (const int result = get(gpu, "millijoules", &step); result != kSuccess) return result;
    const std::lock_guard lock(mutex);
    *to = static_cast<Gpu*>(gpu)->energy += step;
    return kSuccess;
}

}  // extern "C"
