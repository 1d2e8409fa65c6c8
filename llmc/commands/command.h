// Types that all subcommands of the executables share; main.cpp has their table.
#pragma once
#include <functional>
#include <string>
#include <vector>

struct Invocation {
    std::string family;                // "gpt2" or "llama": presets and defaults
    std::vector<const char*> words;    // the executable and the options, without the subcommand
    std::string line;                  // the whole command line
    std::vector<std::string> notes = {};   // on how it was started, for the log of a run
};

// Runs the command after its options have been parsed; returns the exit code. Empty if help was printed.
using Job = std::function<int()>;
