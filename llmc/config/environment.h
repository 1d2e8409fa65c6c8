// Environment variables that guides recommend, and the effect of each one here.
#pragma once
#include <string>
#include <vector>

struct VariableEffect {
    std::string name, value, effect;   // value: printable, shortened
    bool warn = false;                 // it costs speed, or has no effect although users may expect one
};
std::vector<VariableEffect> environment_effects(const std::vector<std::string>& variables, int ranks, bool gpu);
std::vector<std::string> own_environment();   // "NAME=value" entries of this process

// Returns a line for each of `variables` ("NAME=value") that begins with NVTE_, NCCL_ or LLMFP8_, for
// CUDA_DEVICE_MAX_CONNECTIONS, and for an OMP_NUM_THREADS that OpenMP does not accept. The line says whether the
// variable is used, passed to NCCL, or unused and why, which depends on `ranks` and `gpu`. Exit 2, with the nearest
// name, for an unknown variable with the trainer's own prefix LLMFP8_.
std::vector<std::string> environment_lines(const std::vector<std::string>& variables, int ranks, bool gpu);
