// The log's values on GPUs, with a replacement for NVML's library, for one rank and for two.
#include "tests/support/doctest.h"
#include "tests/support/local_ranks.h"

#include <dlfcn.h>

#include <chrono>
#include <cmath>
#include <filesystem>

#include "llmc/train/log/gpu_monitor.h"

namespace {

constexpr const char* kBus[] = {"0000:18:00.0", "0000:2a:00.0"};

// The GPUs of the replacement library beside this executable, which is opened by its path.
struct FakeNvml {
    const std::string path = std::filesystem::read_symlink("/proc/self/exe").parent_path() / "fake/libnvidia-ml.so.1";
    void (*set)(int gpu, const char* name, long long value) = nullptr;

    FakeNvml() {
        void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
        REQUIRE_MESSAGE(library != nullptr, path << ": make tests builds it");
        set = reinterpret_cast<decltype(set)>(dlsym(library, "fake_nvml_set"));
        for (int gpu = 0; gpu < 2; gpu++) {
            const long long more = gpu;
            set(gpu, "utilization", 90 + 6 * more);
            set(gpu, "milliwatts", 650500 + 30000 * more);
            set(gpu, "sm_mhz", 1700 + 100 * more);
            set(gpu, "max_sm_mhz", 1980);
            set(gpu, "celsius", 61 + more);
            set(gpu, "used_bytes", (10 + 2 * more) << 30);
            set(gpu, "throttle", 4 << more * 4);   // power cap, then heat
            set(gpu, "millijoules", 0);
        }
    }
};

void pause(int milliseconds) { std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds)); }

// Makes steps of 10 tokens until there is a record. Returns the number of steps.
int steps_until_record(GpuMonitor& monitor, GpuRecord& record) {
    for (int steps = 1; steps < 200; steps++) {
        pause(20);
        record = monitor.report(10);
        if (record.power_w) return steps;
    }
    return 0;
}

}  // namespace

TEST_CASE("GPU samples: mean, highest and reasons of those states that have the value") {
    GpuSamples samples;
    samples.states.resize(3);
    samples.states[0].sm_mhz = 1500, samples.states[2].sm_mhz = 1800;
    samples.states[1].throttle = 4, samples.states[2].throttle = 0;
    CHECK_EQ(samples.mean(&GpuState::sm_mhz), 1650);
    CHECK_EQ(samples.highest(&GpuState::sm_mhz), 1800);
    CHECK_EQ(samples.throttle(), 4);
    CHECK(std::isnan(samples.mean(&GpuState::celsius)));
    CHECK(std::isnan(samples.highest(&GpuState::celsius)));
    CHECK_EQ(GpuSamples().throttle(), -1);
}

TEST_CASE("GPU monitor: one GPU") {
    FakeNvml nvml;
    const auto comm = open_single();
    GpuMonitor monitor(*comm);
    monitor.start(kBus[0], nvml.path.c_str());
    GpuRecord record;
    REQUIRE_GT(steps_until_record(monitor, record), 0);
    CHECK_EQ(*record.utilization, 90);
    CHECK_EQ(*record.power_w, 650.5);
    CHECK_EQ(*record.sm_clock_mhz, 1700);
    CHECK_EQ(*record.temperature_c, 61);
    CHECK_EQ(*record.memory_gib, 10);
    CHECK_EQ(record.throttled_by, "power cap");
    CHECK_FALSE(record.energy_j);   // there is no earlier value to subtract

    // The mean lies between what was before and after; the energy is that of the samples in between.
    nvml.set(0, "millijoules", 2500);
    nvml.set(0, "utilization", 50);
    pause(250);
    nvml.set(0, "utilization", 100);
    pause(250);
    record = monitor.report(30);
    CHECK_GT(*record.utilization, 50);
    CHECK_LT(*record.utilization, 100);
    const double queries = *record.energy_j / 2.5;   // of 100 ms each; a machine under load is late
    CHECK_EQ(queries, std::round(queries));
    CHECK_GE(queries, 2);
    CHECK_LE(queries, 6);
    CHECK_EQ(*record.joules_per_token, *record.energy_j / 30);

    // The energy of an evaluation is in no step.
    nvml.set(0, "millijoules", 1000000);
    pause(350);
    nvml.set(0, "millijoules", 1000);
    pause(150);
    monitor.restart();
    const int steps = steps_until_record(monitor, record);
    CHECK_GT(*record.energy_j, 0);
    CHECK_LT(*record.energy_j, 200);
    CHECK_EQ(*record.joules_per_token, *record.energy_j / (10 * steps));   // also of the steps without a sample
    CHECK_EQ(monitor.note(), "");
}

TEST_CASE("GPU monitor: what happens between the end of a step and its report belongs to the next step") {
    FakeNvml nvml;
    const auto comm = open_single();
    GpuMonitor monitor(*comm);
    monitor.start(kBus[0], nvml.path.c_str());
    GpuRecord record;
    REQUIRE_GT(steps_until_record(monitor, record), 0);
    nvml.set(0, "millijoules", 1000);   // a query
    pause(350);
    monitor.end_step();
    nvml.set(0, "utilization", 10);
    nvml.set(0, "millijoules", 1000000);
    pause(350);
    monitor.end_step();   // changes nothing
    record = monitor.report(10);
    CHECK_EQ(*record.utilization, 90);
    CHECK_LT(*record.energy_j, 100);
    pause(350);
    record = monitor.report(10);
    CHECK_LT(*record.utilization, 50);   // one sample may have begun before the step ended
    CHECK_GE(*record.energy_j, 1000);
}

TEST_CASE("GPU monitor: two ranks with a GPU each") {
    FakeNvml nvml;
    nvml.set(0, "millijoules", 1000);
    nvml.set(1, "millijoules", 64000);
    LocalRanks ranks(2);
    std::vector<GpuRecord> records(2);
    std::vector<int> steps(2);
    ranks.run([&](Comm& comm) {
        const auto rank = static_cast<size_t>(comm.world().rank);
        GpuMonitor monitor(comm);
        monitor.start(kBus[rank], nvml.path.c_str());
        steps_until_record(monitor, records[rank]);
        for (steps[rank] = 1; !(records[rank] = monitor.report(10)).power_w; steps[rank]++) pause(20);
    });
    CHECK_EQ(steps[0], steps[1]);
    for (const GpuRecord& record : records) {   // equal on every rank
        CHECK_EQ(*record.utilization, 93);
        CHECK_EQ(*record.power_w, 665.5);
        CHECK_EQ(*record.sm_clock_mhz, 1750);
        CHECK_EQ(*record.temperature_c, 62);
        CHECK_EQ(*record.memory_gib, 12);
        CHECK_EQ(record.throttled_by, "power cap, heat (hardware)");
        CHECK_GE(*record.energy_j, 65);   // of both
        CHECK_EQ(*record.energy_j, *records[0].energy_j);
        CHECK_EQ(*record.joules_per_token, *record.energy_j / (10 * steps[0]));
    }
}

TEST_CASE("GPU monitor: what a GPU does not report is absent") {
    FakeNvml nvml;
    for (const char* name : {"utilization", "celsius", "used_bytes", "throttle", "millijoules"}) nvml.set(0, name, -1);
    const auto comm = open_single();
    GpuMonitor monitor(*comm);
    monitor.start(kBus[0], nvml.path.c_str());
    GpuRecord record;
    steps_until_record(monitor, record);
    steps_until_record(monitor, record);
    CHECK_EQ(*record.power_w, 650.5);
    CHECK_EQ(*record.sm_clock_mhz, 1700);
    for (const std::optional<double>& value : {record.utilization, record.temperature_c, record.memory_gib,
                                               record.energy_j, record.joules_per_token})
        CHECK_FALSE(value);
    CHECK_EQ(record.throttled_by, "");
    CHECK_EQ(monitor.note(), "");
}

TEST_CASE("GPU monitor: without NVML one note and no values, on all ranks") {
    FakeNvml nvml;
    // (bus, library) of rank 1, and the expected note
    const std::tuple<const char*, std::string, const char*> cases[] = {
        {kBus[1], "libno-such-library.so.1", "libno-such-library.so.1, which comes with the driver, cannot be opened"},
        {"0000:ff:00.0", nvml.path, "NVML does not find the GPU at 0000:ff:00.0: it returns 6"}};
    for (const auto& [bus, library, said] : cases) {
        LocalRanks(2).run([&, bus = bus, library = library, said = said](Comm& comm) {
            const bool broken = comm.world().rank == 1;
            GpuMonitor monitor(comm);
            monitor.start(broken ? bus : kBus[0], broken ? library.c_str() : nvml.path.c_str());
            std::string note;
            for (int step = 0; step < 200 && note.empty(); step++) {
                pause(10);
                const GpuRecord record = monitor.report(10);
                note = monitor.note();
                CHECK_FALSE(record.power_w);
            }
            CHECK_NE(note.find(said), std::string::npos);
            monitor.restart();
            CHECK_FALSE(monitor.report(10).power_w);
            CHECK_EQ(monitor.note(), "");
        });
    }
    const auto comm = open_single();   // a CPU
    GpuMonitor none(*comm);
    none.start("");
    CHECK_FALSE(none.report(10).power_w);
    CHECK_EQ(none.note(), "");
}

TEST_CASE("nvml: memory in use on a GPU") {
    const FakeNvml nvml;
    CHECK(gpu_memory_in_use(kBus[1], nvml.path.c_str()) == int64_t{12} << 30);
    nvml.set(0, "used_bytes", -1);
    CHECK(!gpu_memory_in_use(kBus[0], nvml.path.c_str()));
    CHECK(!gpu_memory_in_use("0000:99:00.0", nvml.path.c_str()));
    CHECK(!gpu_memory_in_use(kBus[0], "no_such_library.so"));
}
