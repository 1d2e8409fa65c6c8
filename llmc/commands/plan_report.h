// Prints the plan of a run, for `plan` (--dry-run).
#pragma once
#include <string>

#include "llmc/perf/step_time_model.h"

// The inputs of a report, which must outlive it.
struct PlannedRun {
    const Config& config;
    const ParamTable& table;
    const MemoryPlan& plan;
    const DeviceInfo& device;   // the device found here
    const std::vector<std::string>& notes;
};

// Parameters, memory by purpose and the GPU's, FLOPs, tokens and steps, matmul shapes, communication, FP8 speedup of
// every linear layer, the parts of a step's time, length of the run, checkpoints.
std::string plan_text(const PlannedRun& run);
// The same as one line of JSON.
std::string plan_json(const PlannedRun& run);

// With --json plan_json, else the resolved options, plan_text and the notes.
std::string plan_output(const PlannedRun& run);
