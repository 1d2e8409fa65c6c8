// Environment variables that others told people to set: which of them act here. The trainer's own begin with LLMFP8_.
#pragma once
#include <string>
#include <vector>

// What one of them does here.
struct VariableEffect {
    std::string name, value, effect;   // value: printable, cut off where it is long
    bool warn = false;                 // it slows down, or does nothing that whoever set it may expect
};
std::vector<VariableEffect> environment_effects(const std::vector<std::string>& variables, int ranks, bool gpu);
std::vector<std::string> own_environment();   // "NAME=value" entries of this process

// A line for each variable ("NAME=value" entries) that begins with NVTE_, NCCL_ or LLMFP8_, and for
// CUDA_DEVICE_MAX_CONNECTIONS: used, passed to NCCL, or unused and why. `ranks` of the run, `gpu` whether it runs on
// one. An unknown variable with our own prefix is an error with the nearest name (exit 2).
std::vector<std::string> environment_lines(const std::vector<std::string>& variables, int ranks, bool gpu);

// The same of this process.
std::vector<std::string> environment_lines(int ranks, bool gpu);

// Of the machine that this process runs on, or LLMFP8_HOST.
std::string host_name();

// LLMFP8_FORCE_BF16_LINEAR, "" if it is not set: the linear ("3.down") that runs in BF16 although the plan says FP8.
// Only for the test that the trainer notices.
std::string forced_bf16_linear();
