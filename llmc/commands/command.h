// What `train_llama COMMAND` and its kin have in common; main.cpp has the table.
#pragma once
#include <functional>
#include <string>
#include <vector>

struct Invocation {
    std::string family;                // "gpt2" or "llama": presets and defaults
    std::vector<const char*> words;    // the executable and the options, without the command's name
    std::string line;                  // as it was typed
};

// What is left to do once the options are understood; returns the exit code. Empty where their help was printed.
using Job = std::function<int()>;
