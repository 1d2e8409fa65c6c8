// The option table, which defines the command line, the JSON file, --help, --print-options, the banner and the
// checkpoint's record. A new option is one field of Config and one row here. Private to config*.cpp and
// tests; memory_changes.cpp uses config_errors.
#pragma once
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "llmc/config/config_value.h"

enum class OptionGroup { kModel, kBatch, kData, kOptimizer, kPrecision, kFp8, kRanks, kCheckpoint, kOutput, kOther };
inline constexpr const char* kOptionGroupTitles[] = {"Model", "Batch and length", "Data", "Optimizer",
                                                     "Precision", "FP8", "Distributed", "Checkpoints",
                                                     "Output",  "Other"};

// How --resume treats a value that differs from the checkpoint's.
enum class OnResume {
    kMustMatch,   // error: it would be another run
    kReport,      // allowed, with a note
    kSilent,      // allowed without a note, since it does not affect what is computed
    kInherited,   // allowed, with a note; an option that is not given has the checkpoint's value
    kOfGroup,     // in add_rows: kMustMatch for the model, kSilent for checkpoints and output, else kReport
};
inline constexpr OnResume kMust = OnResume::kMustMatch, kSilent = OnResume::kSilent;

// What another value of an option may change in what is trained. tests/composition holds every option to it.
enum class MayChange {
    kNothing,    // losses, norms and checkpoints are equal to the bit
    kRounding,   // the order of sums: in FP32 losses and norms agree to 1e-6
    kNumerics,   // model, data, method or precision
};
inline constexpr const char* kChangesWords[] = {"nothing", "rounding", "numerics"};

// What derived defaults depend on besides the configuration.
struct Given {
    std::set<std::string> names;   // options that the user set
    int ranks = 1;
    bool has(const char* name) const { return names.count(name) > 0; }
};

struct OptionRow {
    const char* name;                  // without the dashes
    OptionValue value;
    const char* help;
    OptionGroup group = OptionGroup::kModel;   // of add_rows
    const char* fallback = nullptr;         // default as text; null: that of Config, the preset's, or derived
    const char* fallback_llama = nullptr;   // the llama family's default, if it differs
    // Computes a default from other options if the user did not set this one. Runs in table order.
    void (*derive)(Config&, const Given&) = nullptr;
    const char* derived = nullptr;          // the derived default in words, for --help
    // Returns why a value that other trainers accept is refused, null for any other value.
    const char* (*refused)(const Json&) = nullptr;
    OnResume on_resume = OnResume::kOfGroup;
    std::optional<MayChange> changes = {};    // empty: nothing if it is free on resume, else numerics
    const char* llmc = nullptr;             // llm.c's option with the same meaning, "-b"
    bool gpu_only = false;                  // has no effect on the CPU device; a note says so
    const char* refused_on_cpu = nullptr;   // what to do instead, if a run on the CPU device refuses the option
    bool ranks_only = false;                // has no effect with one rank; a note says so

    // Whether a resumed run has the checkpoint's value if it is not given.
    bool inherits() const { return on_resume == OnResume::kMustMatch || on_resume == OnResume::kInherited; }
    MayChange may_change() const {
        return changes.value_or(on_resume == OnResume::kSilent ? MayChange::kNothing : MayChange::kNumerics);
    }
};

// Each of `options` has no effect unless one of `deciders` has one of `values`. All are words separated by spaces;
// "unset" is the empty value, "!" before the values means none of them, and ">0" a number above zero.
struct Condition {
    const char *options, *deciders, *values;
    const char* reason;   // the text of the error that refuses the option
};
// The rules between options are in config_rules.cpp. The conditions of an option, in the order in which they are
// checked.
std::vector<Condition> conditions_of(const std::string& option);
// Why an option has no effect beside the others of a resolved configuration, null if it has one.
const char* why_no_effect(const OptionRow& row, const Config& config);
// The rules that a resolved configuration breaks, one line each.
std::vector<std::string> config_errors(const Config& config, int ranks);
// Warnings about allowed but questionable combinations.
std::vector<std::string> config_warnings(const Config& config);

// Accesses a field of a const or non-const Config, as the factories of config_value.h take it.
#define AT(field) [](auto& c) -> auto& { return c.field; }

const std::vector<OptionRow>& option_table();
void add_rows(std::vector<OptionRow>& rows, OptionGroup group, std::vector<OptionRow> more);
void add_model(std::vector<OptionRow>& rows);            // the group Model, in config_table_model.cpp
void add_fp8(std::vector<OptionRow>& rows);              // the group FP8, in config_table_fp8.cpp
void add_ranks(std::vector<OptionRow>& rows);            // the group Distributed, in config_table_ranks.cpp
const std::vector<std::string>& generate_options();      // names
const OptionRow* find_option(const std::string& name);   // null if unknown

// Raise the error of an unknown name (exit 2). If the name is another trainer's option, the error says what to write
// instead; otherwise it suggests the nearest of the `known` names. `option` is as the user wrote it; `name` has no
// leading dashes, and dashes instead of underscores; `value` is the word after it, or that of a JSON file. In
// config_foreign.cpp.
[[noreturn]] void fail_unknown_option(const std::string& option, const std::string& name, const std::string& value,
                                      const std::vector<std::string>& known);
[[noreturn]] void fail_unknown_key(const std::string& file, const std::string& key, const std::string& name,
                                   const Json& value, const std::vector<std::string>& known);
// An option of another trainer, from a file in llmc/config/foreign/.
struct ForeignRow {
    std::string trainer;
    std::string names;   // separated by spaces, without leading dashes except llm.c's; a star matches any text
    std::string values;  // separated by spaces: the row is for these values only; "" for all
    std::string text;    // of the error; {file} stands for the value
};
const std::vector<ForeignRow>& foreign_rows();

// Whether `word` is one of `words`, which are separated by spaces, ignoring case. This and the next three are in
// config_hints.cpp.
bool has_word(const std::string& words, const std::string& word);
// The error about a value that `set` refuses; it says what was probably meant.
std::string value_error(const OptionRow& row, const std::string& where, const Json& value);
// Raises the error of a word without an option (exit 2). before: the option that took the word before it, if any.
[[noreturn]] void fail_unexpected_word(const std::string& word, const OptionRow* before = nullptr);
// Suggests the nearest multiples of micro_batch_size x ranks: "4 or 6 would be one, or take --micro-batch-size 1".
std::string batch_hint(int64_t sequences, int64_t micro_batch_size, int ranks);

// Flags of Megatron-LM and others that correspond to one value of an option here. It is an error if the flag and the
// option are both given and contradict each other. A flag without an option is always on here: `when_true` says so.
struct Spelling {
    const char* name;                // "use-distributed-optimizer"
    const char* option;              // "zero"
    const char *when_true, *when_false;
};
const std::vector<Spelling>& spellings();               // in config_names.cpp
const Spelling* find_spelling(const std::string& name);  // null if unknown

// Options among `given` whose value differs from that in `plain`, as words of a command line; long lists are shortened.
std::vector<std::string> changed_options(const Config& config, const Config& plain, const std::set<std::string>& given);

// The output of --help (one screen), --help-all and --print-options; `defaults` is the configuration of a run without
// options. In config_help.cpp.
std::string help_all_text(const Config& defaults, const std::string& family);
std::string help_text(const Config& defaults, const std::string& family);
std::string options_json(const Config& defaults, const std::string& family);
std::string generate_help_text(const Config& defaults, const std::string& family);
