// What `bench` prints, as text and as JSON.
#pragma once
#include <string>
#include <vector>

#include "llmc/commands/bench/step_bench.h"
#include "llmc/config/config.h"

// The run that was measured.
struct BenchSubject {
    const Config& config;
    std::string commit;
    const DeviceInfo& device;
    int ranks = 1;
    const std::vector<std::string>& notes;
};
std::string bench_text(const BenchSubject& run, const StepBench& bench);
std::string bench_json(const BenchSubject& run, const StepBench& bench);
