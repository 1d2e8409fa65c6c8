// Prints the plan of a run, for `plan` (--dry-run).
#pragma once
#include <string>

#include "llmc/perf/step_time.h"

// The inputs of a report, which must outlive it.
struct PlannedRun {
    const Config& config;
    const ParamTable& table;
    const MemoryPlan& plan;
    const DeviceInfo& device;   // the device found here
    const std::vector<std::string>& notes;
    std::vector<std::string> changed = {};   // ParsedConfig::changed
};

bool plan_fits(const PlannedRun& run);

std::string plan_text(const PlannedRun& run);
std::string plan_json(const PlannedRun& run);   // the same as one line
// With --json plan_json; else plan_text, the notes and the options that the user changed.
std::string plan_output(const PlannedRun& run);
