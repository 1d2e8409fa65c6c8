// Options with which a run needs less memory, each tried by a rehearsal.
#pragma once
#include <string>
#include <vector>

#include "llmc/commands/plan_report.h"

struct MemoryChange {
    std::string options;
    int64_t arena_bytes;
    bool fits;
};
// For a run that does not fit: each option alone that saves memory, then those together that can be combined, if need
// be with --zero and on more ranks. For a run that fits: a lower level of --zero and a smaller --offload-fraction that
// fit, too.
std::vector<MemoryChange> memory_changes(const PlannedRun& run, int64_t gpu_bytes);
