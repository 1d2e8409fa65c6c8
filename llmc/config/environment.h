// Environment variables that guides tell people to set, and what each of them does here.
#pragma once
#include <string>
#include <vector>

struct VariableEffect {
    std::string name, value, effect;   // value: printable, cut off where it is long
    bool warn = false;                 // it costs speed, or has no effect although whoever set it may expect one
};
std::vector<VariableEffect> environment_effects(const std::vector<std::string>& variables, int ranks, bool gpu);
std::vector<std::string> own_environment();   // "NAME=value" entries of this process

// One line for each variable ("NAME=value" entries) that begins with NVTE_, NCCL_ or LLMFP8_, and for
// CUDA_DEVICE_MAX_CONNECTIONS. The line says that the variable is used, passed to NCCL, or unused and why. The answer
// depends on the number of ranks and on whether the run has a GPU. An unknown variable with the trainer's own prefix
// LLMFP8_ is an error that suggests the nearest name (exit 2).
std::vector<std::string> environment_lines(const std::vector<std::string>& variables, int ranks, bool gpu);

// The same for the environment of this process.
std::vector<std::string> environment_lines(int ranks, bool gpu);
