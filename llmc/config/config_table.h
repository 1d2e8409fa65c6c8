// The option table, from which config*.cpp make the command line, the JSON file, --help, --print-options, the banner
// and the record in the checkpoint. A new option is one field of Config and one row here. Private to config*.cpp and
// tests.
#pragma once
#include <set>
#include <string>
#include <vector>

#include "llmc/config/config_value.h"

enum class OptionGroup { kModel, kBatch, kData, kOptimizer, kPrecision, kFp8, kRanks, kCheckpoint, kOutput, kOther };
inline constexpr const char* kOptionGroupTitles[] = {"Model", "Batch and length", "Data", "Optimizer",
                                                     "Precision", "FP8", "Distributed", "Checkpoints",
                                                     "Output",  "Other"};

// What --resume makes of a value that differs from the checkpoint's.
enum class OnResume {
    kMustMatch,   // another run: refused
    kReport,      // allowed, with a note
    kSilent,      // allowed without a note, since it does not affect what is computed
};

// What defaults may depend on besides the configuration.
struct Given {
    std::set<std::string> names;   // options that the user set
    int ranks = 1;
    bool has(const char* name) const { return names.count(name) > 0; }
};

// One reason why an option may have no effect: the option acts only where the value of `option` is among `values`.
// `values` are words separated by spaces ("unset" stands for an empty value), or "!" and the words that the value must
// not be, or ">0" for a number above zero.
struct Condition {
    const char* option;
    const char* values;
    const char* reason;   // what the error says where the condition does not hold
};
using Conditions = std::vector<Condition>;
bool holds(const Condition& condition, const Config& config);

struct OptionRow {
    const char* name;                  // without the dashes
    OptionGroup group;
    OptionValue value;
    const char* help;
    const char* fallback = nullptr;         // default as text; null: of the preset, derived, or unset
    const char* fallback_llama = nullptr;   // where the llama family differs
    // Computes a default that follows from other options. Runs in table order, if the user did not set the option.
    void (*derive)(Config&, const Given&) = nullptr;
    const char* derived = nullptr;          // how --help says it
    // The option has an effect if all of these hold; the first that does not is the reason in the error.
    Conditions acts_if = {};
    // For a rule that is no list of conditions: the reason why the option has no effect, null if it acts.
    const char* (*inert)(const Config&) = nullptr;
    // The reason why a value that other trainers accept is refused, null for any other value.
    const char* (*refused)(const Json&) = nullptr;
    OnResume on_resume = OnResume::kReport;
    const char* llmc = nullptr;             // llm.c's option with the same meaning, "-b"
    bool gpu_only = false;                  // has no effect on the CPU device
    bool ranks_only = false;                // has no effect with one rank
};
// The reason why an option has no effect under a resolved configuration, null if it acts.
const char* why_inert(const OptionRow& row, const Config& config);

// The field of an option, for const and non-const configurations: what the factories of config_value.h take.
#define AT(field) [](auto& c) -> auto& { return c.field; }

const std::vector<OptionRow>& option_table();
void add_fp8(std::vector<OptionRow>& rows);              // the group FP8, in config_table_fp8.cpp
void add_ranks(std::vector<OptionRow>& rows);            // the group Distributed, in config_table_ranks.cpp
void add_samples(std::vector<OptionRow>& rows);          // of the group Output, in config_table_sampling.cpp
const std::vector<std::string>& generate_options();      // names, in config_table_sampling.cpp
const OptionRow* find_option(const std::string& name);   // null if unknown

// Raise the error of an unknown name (exit 2). It says what to write instead of another trainer's option, or suggests
// the nearest of the `known` names. `option` is as the user wrote it, `name` is the same with dashes between its words
// and none before them, `value` is the word after it. The keys of `object`, a JSON file, may show that the file is
// another trainer's. In config_foreign.cpp.
[[noreturn]] void fail_unknown_option(const std::string& option, const std::string& name, const std::string& value,
                                      const std::vector<std::string>& known);
[[noreturn]] void fail_unknown_key(const std::string& file, const std::string& key, const std::string& name,
                                   const Json& object, const std::vector<std::string>& known);
// An option of another trainer, of a file in llmc/config/foreign/.
struct ForeignRow {
    std::string trainer;
    std::string names;   // separated by spaces, without dashes before them but for llm.c's; a star matches any text
    std::string values;  // separated by spaces: the row is for these values only; "" for all
    std::string text;    // what the error says; {file} stands for the value
};
const std::vector<ForeignRow>& foreign_rows();

// Former names of options: accepted for one release, with a note. They are also read from JSON files and from the
// configuration that a checkpoint has stored. In config_names.cpp.
struct RenamedOption {
    const char *old_name, *name;
};
const std::vector<RenamedOption>& renamed_options();
const char* current_name(const std::string& old_name);   // null if it is no former name

// Flags of Megatron-LM that correspond to one value of an option here; an option that contradicts one is refused.
struct Spelling {
    const char* name;                // "fp8-param-gather"
    const char* option;              // "param-comm-dtype"
    const char *when_true, *when_false;
};
const std::vector<Spelling>& spellings();               // in config_names.cpp
const Spelling* find_spelling(const std::string& name);  // null if unknown

// The rules between options that a resolved configuration breaks, one line each. In config_rules.cpp.
std::vector<std::string> config_errors(const Config& config, int ranks);
// Warnings for the banner about combinations that are allowed.
std::vector<std::string> config_warnings(const Config& config);

// What --help and --print-options print; `defaults` is the configuration of a run without options. In config_help.cpp.
std::string help_text(const Config& defaults, const std::string& family);
std::string options_json(const Config& defaults, const std::string& family);
std::string generate_help_text(const Config& defaults, const std::string& family);
