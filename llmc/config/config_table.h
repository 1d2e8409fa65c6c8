// The option table: what config.cpp turns into the command line, the JSON file, --help, the banner and the record
// in the checkpoint. Adding an option is one field of Config and one row. Private to config*.cpp and tests.
#pragma once
#include <set>
#include <string>
#include <vector>

#include "llmc/config/config_value.h"

enum class OptionGroup { kModel, kBatch, kData, kOptimizer, kNumbers, kFp8, kRanks, kCheckpoint, kOutput, kOther };
inline constexpr const char* kOptionGroupTitles[] = {"Model",   "Batch and length", "Data",        "Optimizer",
                                                     "Numbers", "FP8",              "Several ranks", "Checkpoints",
                                                     "Output",  "Other"};

// What --resume makes of a value that differs from the checkpoint's.
enum class OnResume {
    kMustMatch,   // another run: refused
    kReport,      // allowed and told
    kSilent,      // says nothing about the training itself
};

// What defaults may depend on besides the configuration.
struct Given {
    std::set<std::string> names;   // options that the user set
    int ranks = 1;
    bool has(const char* name) const { return names.count(name) > 0; }
};

struct OptionRow {
    const char* name;                  // without the dashes
    OptionGroup group;
    OptionValue value;
    const char* help;
    const char* fallback = nullptr;         // default as text; null: of the preset, derived, or unset
    const char* fallback_llama = nullptr;   // where the llama family differs
    // Default that follows from other options. Runs in table order, if the option was not given.
    void (*derive)(Config&, const Given&) = nullptr;
    const char* derived = nullptr;          // how --help says it
    // Why it has no effect under the resolved configuration, null if it acts. No function: it always acts.
    const char* (*inert)(const Config&) = nullptr;
    // Why a value that other trainers take is refused, null if it is not such a value.
    const char* (*refused)(const Json&) = nullptr;
    OnResume on_resume = OnResume::kReport;
    const char* llmc = nullptr;             // llm.c's option with the same meaning, "-b"
    bool gpu_only = false;                  // has nothing to do on the CPU device
    bool ranks_only = false;                // has nothing to do with one rank
};

// The field of an option, for const and non-const configurations: what the factories of config_value.h take.
#define AT(field) [](auto& c) -> auto& { return c.field; }

const std::vector<OptionRow>& option_table();
void add_fp8(std::vector<OptionRow>& rows);              // the group FP8, in config_table_fp8.cpp
void add_ranks(std::vector<OptionRow>& rows);            // the group Several ranks, in config_table_ranks.cpp
void add_samples(std::vector<OptionRow>& rows);          // of the group Output, in config_table_samples.cpp
const std::vector<std::string>& generate_options();      // names, in config_table_samples.cpp
const OptionRow* find_option(const std::string& name);   // null if unknown

// The error of a name that is no option, exit 2: what to write instead of another trainer's, or the nearest of the
// known ones. `option` is as written, `name` has dashes and none before it, `value` is the word after it; of a file,
// keys of the object may show that it is another trainer's. In config_foreign.cpp.
[[noreturn]] void fail_unknown_option(const std::string& option, const std::string& name, const std::string& value,
                                      const std::vector<std::string>& known);
[[noreturn]] void fail_unknown_key(const std::string& file, const std::string& key, const std::string& name,
                                   const Json& object, const std::vector<std::string>& known);
struct ForeignRow {
    const char *trainer, *names, *text;
};
const std::vector<ForeignRow>& foreign_rows();

// Flags of Megatron that are one value of an option here, and none that contradicts it may stand beside.
struct Spelling {
    const char* name;                // "fp8-param-gather"
    const char* option;              // "param-comm-dtype"
    const char *when_true, *when_false;
};
const std::vector<Spelling>& spellings();               // in config_table_ranks.cpp
const Spelling* find_spelling(const std::string& name);  // null if unknown

// Rules between options of a resolved configuration, one line each; empty if sound. In config_rules.cpp.
std::vector<std::string> config_errors(const Config& config, int ranks);
// What is allowed and still worth a line in the banner.
std::vector<std::string> config_warnings(const Config& config);

// What --help prints; `defaults` is the configuration of a run without options. In config_help.cpp.
std::string help_text(const Config& defaults, const std::string& family);
std::string generate_help_text(const Config& defaults, const std::string& family);
