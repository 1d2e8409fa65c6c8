// The plan of a run as `plan` (--dry-run) prints it.
#pragma once
#include <string>

#include "llmc/perf/step_time_model.h"

// What a plan was made of; all of it outlives the report.
struct PlannedRun {
    const Config& config;
    const ParamTable& table;
    const MemoryPlan& plan;
    const DeviceInfo& device;   // that was found
    const std::vector<std::string>& notes;
};

// Parameters, bytes by purpose against the GPU's memory, FLOPs, tokens and steps, matmul shapes, communication, FP8
// speedup of every linear, the time of a step by what it is spent on, length of the run, checkpoints.
std::string plan_text(const PlannedRun& run);
// The same as one line of JSON.
std::string plan_json(const PlannedRun& run);

// With --json the latter, else the resolved options, the text and the notes.
std::string plan_output(const PlannedRun& run);
