// Options with which a run needs less memory, each tried by a rehearsal.
#pragma once
#include <string>
#include <vector>

#include "llmc/config/config.h"
#include "llmc/model/parameters/params.h"

// A planned run, and the memory that it may take.
struct MemoryLimit {
    const Config& config;
    const ParamTable& table;
    int ranks;
    int64_t bytes;   // of a GPU
};

struct MemoryChange {
    std::string options;
    int64_t arena_bytes;
    bool fits;
};
// First each option alone, then all those together that can be combined on as many ranks, if need be with --zero or on
// more ranks. A change that is not possible is left out.
std::vector<MemoryChange> memory_changes(const MemoryLimit& run);

// The lowest level of --zero, from the default 1 on, with which the run fits on as many ranks; 0: none.
int64_t lowest_zero(const MemoryLimit& run);
// The least --offload-fraction of offloaded optimizer state, in steps of 1/20, with which the run fits beside the CUDA
// context and libraries; 0: none.
double least_offload_fraction(const MemoryLimit& run);
