// The state of a GPU from NVML, the driver's management library. It is opened at run time; nvml.cpp declares the
// functions that it uses, so that the build needs no NVML header.
#pragma once
#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

// A value is absent if this GPU or driver does not report it.
struct GpuState {
    std::optional<bool> persistence;   // the driver stays loaded while no process uses the GPU
    std::optional<bool> mig;           // the GPU is partitioned into instances
    std::optional<bool> ecc;           // memory errors are corrected
    std::optional<int64_t> uncorrected_errors;   // since the driver was loaded
    std::optional<int64_t> sm_mhz, max_sm_mhz, memory_mhz, max_memory_mhz;
    std::optional<uint64_t> throttle;  // why clocks are reduced: bits of kThrottle...
    std::optional<int64_t> power_limit_mw, default_power_limit_mw;
    std::optional<int64_t> celsius;
    std::optional<int64_t> utilization;      // percent of the time in which a kernel ran
    std::optional<int64_t> milliwatts, millijoules;   // millijoules: of the energy counter
    std::optional<int64_t> memory_bytes;     // in use, by all processes
};

// nvmlClocksThrottleReasons.
inline constexpr uint64_t kThrottleClocksSet = 0x2, kThrottlePowerCap = 0x4, kThrottleHardware = 0x8,
                          kThrottleSoftwareThermal = 0x20, kThrottleHardwareThermal = 0x40, kThrottlePowerBrake = 0x80;
// "power cap, heat (hardware)", "none".
std::string throttle_text(uint64_t bits);

inline constexpr const char* kNvmlLibrary = "libnvidia-ml.so.1";

// Queries the GPU at a PCI address ("0000:18:00.0"). Returns "" or the reason why it cannot.
std::string read_gpu_state(const std::string& bus, GpuState& state, const char* library = kNvmlLibrary);

// Bytes of the GPU's memory in use; absent if it cannot be queried.
inline std::optional<int64_t> gpu_memory_in_use(const std::string& bus, const char* library = kNvmlLibrary) {
    GpuState state;
    read_gpu_state(bus, state, library);
    return state.memory_bytes;
}

// States of one GPU, in the order of time, without what doctor alone asks for.
struct GpuSamples {
    std::vector<GpuState> states = {};
    std::string error = {};   // why there will be no more

    // Over the states that have the value; NaN if none has it.
    double mean(std::optional<int64_t> GpuState::*value) const;
    double highest(std::optional<int64_t> GpuState::*value) const;
    int64_t throttle() const;   // the bits of all states, combined by OR; -1 if none has them
};

// A thread that samples ten times a second until it is stopped. It asks only the driver, so it never waits for a stream
// of the device.
class GpuSampler {
public:
    explicit GpuSampler(std::string bus, const char* library = kNvmlLibrary);
    ~GpuSampler() { stop(); }
    GpuSampler(const GpuSampler&) = delete;
    GpuSamples take();   // the samples since the last call
    GpuSamples stop();   // ends the thread, and returns the samples since the last call of take()

private:
    void run(const char* library);
    const std::string bus_;
    std::atomic<bool> stopping_{false};
    std::mutex mutex_;
    GpuSamples samples_;   // under mutex_
    std::thread thread_;
};
