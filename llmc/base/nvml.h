// The state of a GPU from NVML, the driver's management library. It is opened at run time; nvml.cpp declares the
// functions that it uses, so that the build needs no NVML header.
#pragma once
#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <thread>

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
};

// nvmlClocksThrottleReasons.
inline constexpr uint64_t kThrottleClocksSet = 0x2, kThrottlePowerCap = 0x4, kThrottleHardware = 0x8,
                          kThrottleSoftwareThermal = 0x20, kThrottleHardwareThermal = 0x40, kThrottlePowerBrake = 0x80;

// Queries the GPU at a PCI address ("0000:18:00.0"). Returns "" or the reason why it cannot.
std::string read_gpu_state(const std::string& bus, GpuState& state, const char* library = "libnvidia-ml.so.1");

// Clocks and power during a measurement.
struct ClockSamples {
    int64_t count = 0;   // 0: `error` says why
    double sm_mhz = 0, watts = 0;   // means
    int64_t least_sm_mhz = 0, most_sm_mhz = 0;   // of the samples
    int64_t max_sm_mhz = 0;                      // of this GPU
    uint64_t throttle = 0;   // of any sample
    std::string error;
};
// "power cap, hardware thermal", "none".
std::string throttle_text(uint64_t bits);

// A thread that samples ten times a second until it is stopped.
class ClockSampler {
public:
    explicit ClockSampler(std::string bus, const char* library = "libnvidia-ml.so.1");
    ~ClockSampler() { stop(); }
    ClockSampler(const ClockSampler&) = delete;
    ClockSamples stop();

private:
    void run(const char* library);
    const std::string bus_;
    std::atomic<bool> stopping_{false};
    ClockSamples samples_;   // written by the thread until it has ended
    std::thread thread_;
};
