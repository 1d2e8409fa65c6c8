// Watts and clock of one GPU over short times, for bench_gemm_power. llmc/base/system/nvml.h samples ten times a
// second, and NVML's watts are means over a second; here the energy counter is read every 2 ms, and its steps have
// exact times.
#pragma once
#include <dlfcn.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "llmc/base/system/nvml.h"

class PowerMeter {
public:
    using Clock = std::chrono::steady_clock;
    using Time = Clock::time_point;
    struct Reading {
        std::optional<double> watts, mhz;
    };

    explicit PowerMeter(const std::string& bus) : library_(dlopen(kNvmlLibrary, RTLD_NOW | RTLD_LOCAL)) {
        const auto init = function<int()>("nvmlInit_v2");
        const auto find = function<int(const char*, void**)>("nvmlDeviceGetHandleByPciBusId_v2");
        if (init && find && init() == 0 && find(bus.c_str(), &device_) == 0) thread_ = std::thread([this] { run(); });
    }
    ~PowerMeter() {
        stopping_ = true;
        if (thread_.joinable()) thread_.join();
    }
    PowerMeter(const PowerMeter&) = delete;

    // Means over a time. The energy is that between the first and the last step of the counter within it.
    Reading between(Time begin, Time end) {
        const std::lock_guard lock(mutex_);
        Reading reading{.watts = mean(watts_, begin, end), .mhz = mean(mhz_, begin, end)};
        const Sample *first = nullptr, *last = nullptr;
        for (const Sample& s : joules_) {
            if (s.time < begin || s.time > end) continue;
            if (!first) first = &s;
            last = &s;
        }
        if (first && seconds(first->time, last->time) > 0.3 * seconds(begin, end))
            reading.watts = (last->value - first->value) / seconds(first->time, last->time);
        return reading;
    }
    static double seconds(Time begin, Time end) { return std::chrono::duration<double>(end - begin).count(); }

private:
    struct Sample {
        Time time;
        double value;
    };
    template <typename F> F* function(const char* name) const {
        return library_ ? reinterpret_cast<F*>(dlsym(library_, name)) : nullptr;
    }
    static std::optional<double> mean(const std::vector<Sample>& samples, Time begin, Time end) {
        double sum = 0, count = 0;
        for (const Sample& s : samples)
            if (s.time >= begin && s.time <= end) sum += s.value, count++;
        return count > 0 ? std::optional(sum / count) : std::nullopt;
    }
    void run() {
        const auto energy = function<int(void*, unsigned long long*)>("nvmlDeviceGetTotalEnergyConsumption");
        const auto power = function<int(void*, unsigned*)>("nvmlDeviceGetPowerUsage");
        const auto clock = function<int(void*, int, unsigned*)>("nvmlDeviceGetClockInfo");
        constexpr int kSmClock = 1;
        for (int i = 0; !stopping_; i++) {
            unsigned long long millijoules = 0;
            unsigned milliwatts = 0, mhz = 0;
            const bool slow = i % 5 == 0;
            const bool has_joules = energy && energy(device_, &millijoules) == 0;
            const bool has_watts = slow && power && power(device_, &milliwatts) == 0;
            const bool has_mhz = slow && clock && clock(device_, kSmClock, &mhz) == 0;
            const Time now = Clock::now();
            const double joules = 1e-3 * static_cast<double>(millijoules);
            {
                const std::lock_guard lock(mutex_);
                if (has_joules && (joules_.empty() || joules_.back().value != joules)) joules_.push_back({now, joules});
                if (has_watts) watts_.push_back({now, 1e-3 * milliwatts});
                if (has_mhz) mhz_.push_back({now, static_cast<double>(mhz)});
            }
            std::this_thread::sleep_for(std::chrono::milliseconds(2));
        }
    }

    void* library_;
    void* device_ = nullptr;
    std::atomic<bool> stopping_{false};
    std::mutex mutex_;
    std::vector<Sample> joules_, watts_, mhz_;   // under mutex_
    std::thread thread_;
};
