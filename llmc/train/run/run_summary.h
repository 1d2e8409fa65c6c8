// The first lines of a run on the screen: what is trained, on what, how, and what the user changed.
#pragma once
#include <string>
#include <vector>

#include "llmc/config/config.h"
#include "llmc/data/dataloader.h"
#include "llmc/model/parameters/fp8_recipe.h"
#include "llmc/parallel/comm/comm.h"
#include "llmc/train/plan.h"

// What the summary tells of; all of it must outlive the call.
struct SummarizedRun {
    const Config& config;
    const std::vector<std::string>& changed;   // ParsedConfig::changed
    const ParamTable& table;
    const Fp8Plan& fp8_plan;
    const MemoryPlan& plan;
    const DeviceInfo& device;
    const World& world;
    const DataLoader& train;
    const DataLoader* valid;    // null: none
    double predicted_ms;        // of a step, in FP8 if the run switches; 0: unknown
    double all_steps_ms;
};

// At most 18 lines: model and parameters, device and commit, precision, batch, data, memory, predicted time,
// where it saves, options that the user changed.
std::string summary_text(const SummarizedRun& run);

// A run has no more lines than this before its first step.
inline constexpr size_t kStartLines = 25;
// How many of `notes` fit: all, or as many as leave a line to say how many more there are.
size_t notes_that_fit(const std::string& summary, size_t notes);
