// Types that all subcommands of the executables share; main.cpp has their table.
#pragma once
#include <functional>
#include <map>
#include <string>
#include <vector>

struct Invocation {
    std::string family;                // "gpt2" or "llama": presets and defaults
    std::vector<const char*> words;    // the executable and the options, without the subcommand
    std::string line;                  // the whole command line
    std::vector<std::string> notes = {};   // on how it was started, for the log of a run
};

// The options of a command that takes no training options. Each option has a value, or is a flag.
struct CommandOptions {
    const char* command;
    std::map<std::string, std::string*> texts;
    std::map<std::string, bool*> flags;
};
// Sets them from "--name value", "--name=value" and "--name" words; exit 2 for any other word.
void read_command_options(const std::vector<std::string>& words, const CommandOptions& options);

// Runs a command whose options have been parsed; returns the exit code. The Job is empty if help was printed.
using Job = std::function<int()>;
