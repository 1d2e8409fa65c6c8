// The subcommands of the executables, whose table is in main.cpp, and types that they share.
#pragma once
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "llmc/config/config.h"
#include "llmc/parallel/comm/comm.h"

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

// A whole run, from options, plan and data to steps, evaluations and checkpoints.
Job parse_train(const Invocation& call, Comm& comm);
// Ends with the plan of a run.
Job parse_plan(const Invocation& call, Comm& comm);
// Builds the trainer of a run, times steps on synthetic tokens, then steps with events around every operation, and
// compares each operation with the least time that it could take on this device.
Job parse_bench(const Invocation& call, Comm& comm);
// Continues a prompt with the weights of a directory. Holds only weights in the working dtype and the activations of
// the text.
Job parse_generate(const Invocation& call, Comm& comm);

// Parses training options and applies --comm-timeout and --exit-duration-in-mins to this process. If the result's
// `help` is set, it has only the help text.
ParsedConfig parse_training(const Invocation& call, const std::vector<const char*>& words, Comm& comm);
