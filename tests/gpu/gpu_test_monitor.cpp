// The monitor of a run with the GPU's NVML: all values are reported and plausible.
#include "tests/gpu/gpu_tensor.h"

#include <chrono>

#include "llmc/train/log/gpu_monitor.h"

namespace monitor_test {

TEST_CASE("gpu monitor: utilization, power, clocks and energy of this GPU") {
    const DeviceInfo info = device::device_info(0);
    const auto comm = open_single();
    GpuMonitor monitor(*comm);
    monitor.start(info.bus);
    Ctx& ctx = op_test::gpu();
    const int64_t bytes = int64_t{1} << 30;
    void* memory = device::device_alloc(bytes);
    // Busy for two seconds, with a first record in between: energy is the difference of two.
    GpuRecord record;
    double seconds = 0;
    std::string note;
    for (int part = 0; part < 2; part++) {
        const auto begin = std::chrono::steady_clock::now();
        auto elapsed = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(); };
        while (elapsed() < 1) {
            for (int i = 0; i < 20; i++) device::fill_bytes(ctx, memory, i, bytes);
            device::synchronize(ctx);
        }
        record = monitor.report(1000);
        note += monitor.note();
        seconds = elapsed();
    }
    device::device_free(memory);
    INFO(info.name << " at " << info.bus << ": " << note);
    REQUIRE(record.power_w);
    CHECK_EQ(note, "");
    CHECK_GT(*record.power_w, 20);
    CHECK_LT(*record.power_w, 1500);
    REQUIRE(record.utilization);   // not on an instance of a partitioned GPU
    CHECK_GT(*record.utilization, 20);
    CHECK_LE(*record.utilization, 100);
    REQUIRE(record.sm_clock_mhz);
    CHECK_GT(*record.sm_clock_mhz, 200);
    CHECK_LT(*record.sm_clock_mhz, 4000);
    REQUIRE(record.memory_gib);
    CHECK_GE(*record.memory_gib, 1);
    CHECK_LT(*record.memory_gib, gib(info.memory_bytes));
    REQUIRE(record.temperature_c);
    REQUIRE(record.energy_j);
    // Compares the energy counter with the mean power. Both are averages, and samples may be 100 ms away from the
    // ends.
    CHECK_GT(*record.energy_j, 0.3 * *record.power_w * seconds);
    CHECK_LT(*record.energy_j, 2 * *record.power_w * seconds);
    CHECK_EQ(*record.joules_per_token, *record.energy_j / 1000);
}

}  // namespace monitor_test
