#include <algorithm>
#include <sstream>

#include "llmc/base/check.h"
#include "llmc/base/text.h"
#include "llmc/config/config_table.h"

namespace {

constexpr size_t kIndent = 33;   // column where the description starts
constexpr size_t kWidth = 100;
constexpr size_t kShownWords = 4;    // of a list

// "  --option N" and its description, wrapped at words.
std::string entry(const std::string& option, const std::string& description) {
    const std::string indent(kIndent, ' ');
    std::string text = "  " + option;
    text += text.size() < kIndent ? indent.substr(text.size()) : "\n" + indent;
    size_t column = kIndent;
    std::istringstream words(description);
    for (std::string word; words >> word;) {
        if (column > kIndent && column + 1 + word.size() > kWidth) {
            text += "\n" + indent;
            column = kIndent;
        }
        text += (column > kIndent ? " " : "") + word;
        column += word.size() + (column > kIndent);
    }
    return text + "\n";
}

// The options of --help, in its order, with what their rows say up to the first semicolon.
constexpr const char* kUsualOptions[] = {
    "model", "train-data", "valid-data", "eval-interval", "seq-length", "micro-batch-size", "global-batch-size",
    "train-iters", "epochs", "lr", "lr-warmup-iters", "lr-decay-style", "weight-decay", "clip-grad", "seed",
    "fp8-recipe", "first-last-layers-bf16", "recompute", "grad-dtype", "moment-dtype", "save", "save-interval",
    "resume", "load", "sample-every"};
// The default of a run without options would mislead.
constexpr const char* kNoDefault = "global-batch-size train-iters epochs lr-warmup-iters first-last-layers-bf16";

std::string default_text(const OptionRow& row, const Config& defaults) {
    Json value = row.value.get(defaults);
    std::string word = value.is_null() ? "" : json_text(value);
    if (word.empty()) return row.derived ? row.derived : "none";
    return row.derived ? word + "; " + row.derived : word;
}

std::string row_text(const OptionRow& row, const Config& defaults) {
    std::string option = std::string("--") + row.name;
    if (!row.value.metavar.empty()) option += " " + row.value.metavar;
    std::string text = row.help;
    if (!row.value.flag && !row.value.any_text) text += "; " + row.value.expects;
    if (row.gpu_only) text += "; GPU only";
    if (row.llmc) text += std::string("; llm.c: ") + row.llmc;
    return entry(option, text + " (default: " + default_text(row, defaults) + ")");
}

std::string presets_text(const std::string& family) {
    std::string text = "Presets of --model:\n";
    for (const ModelPreset& preset : model_presets())
        if (preset.family == family)
            text += strf("  %-16s %lld layers, hidden size %lld, %lld/%lld heads, vocabulary %lld, "
                         "sequences of %lld\n", preset.name, ll(preset.config.num_layers),
                         ll(preset.config.hidden_size), ll(preset.config.num_attention_heads),
                         ll(preset.config.num_query_groups), ll(preset.config.vocab_size), ll(preset.seq_length));
    return text;
}

}  // namespace

std::vector<std::string> changed_options(const Config& config, const Config& plain,
                                         const std::set<std::string>& given) {
    std::vector<std::string> changed;
    for (const OptionRow& row : option_table()) {
        const Json value = row.value.get(config);
        if (!given.count(row.name) || value == row.value.get(plain) || std::string(row.name) == "dry-run") continue;
        std::string option = std::string("--") + row.name;
        if (row.value.flag) {
            changed.push_back(option + (value == Json(true) ? "" : "=false"));
            continue;
        }
        const Json words = value.is_array() && !value.empty() && value[0].is_string() ? value : Json::array({value});
        for (size_t i = 0; i < std::min(words.size(), kShownWords); i++)
            option += " " + shell_quoted(json_text(words[i]));
        if (words.size() > kShownWords) option += strf(" and %zu more", words.size() - kShownWords);
        changed.push_back(option);
    }
    return changed;
}

std::string help_text(const Config& defaults, const std::string& family) {
    const std::string name = "train_" + family;
    std::string text = "Usage: " + name + " --train-data GLOB --train-iters N [options]\n"
                       "       " + name + " plan [options]  whether it fits, how long it takes; without GPU or data\n"
                       "       " + name + " doctor | bench | generate  (--help)  the machine | a step | text\n"
                       "The options used most; --help-all has all " + std::to_string(option_table().size())
                       + ", with ranges, presets, and names of other trainers.\n\n";
    for (const char* usual : kUsualOptions) {
        const OptionRow& row = *find_option(usual);
        const Json value = row.value.get(defaults);
        const std::string word = value.is_null() || has_word(kNoDefault, usual) ? "" : json_text(value);
        std::string help = std::string(row.help).substr(0, std::string(row.help).find(';'));
        if (!row.value.words.empty()) help += ": " + list_text(row.value.words, ", ");
        text += entry(std::string("--") + usual + (row.value.flag ? "" : " " + row.value.metavar),
                      help + (word.empty() ? "" : " (" + word + ")"));
    }
    text += entry("--config FILE", "read options from a JSON file; --print-config writes one and exits");
    return text + entry("--version", "commit, compiler, device built for, libraries");
}

std::string help_all_text(const Config& defaults, const std::string& family) {
    std::string text = "Usage: train_" + family + " --train-data GLOB --train-iters N [options]\n";
    text += "       train_" + family + " doctor [--save DIR] [--json]   checks this machine; doctor --help\n";
    text += "       train_" + family + " plan [--gpu NAME] [--ranks N] [--json] [options]   memory, time, traffic\n";
    text += "       train_" + family + " bench [--json FILE] [options]  where the time of a step goes; bench --help\n";
    text += "       train_" + family + " generate --load DIR [options]  continues a prompt; generate --help\n\n";
    text += "Defaults are those of --model " + defaults.model + ". An option that has no effect under the others\n"
            "is an error. A true-or-false option without a value means true; --option=false turns it off.\n\n";
    text += presets_text(family);
    for (size_t group = 0; group < std::size(kOptionGroupTitles); group++) {
        text += std::string("\n") + kOptionGroupTitles[group] + "\n";
        for (const OptionRow& row : option_table())
            if (row.group == static_cast<OptionGroup>(group)) text += row_text(row, defaults);
    }
    text += entry("--config FILE", "read options from a JSON file first, whose keys are the names above (with - or _)");
    text += entry("--print-config", "print the resolved configuration as JSON, which --config reads, and exit");
    text += entry("--print-options", "print the options and presets as JSON, for programs");
    text += entry("--version", "print the commit, the compiler, the device that this was built for, and libraries");
    text += entry("--help", "print the options used most");
    return text + entry("--help-all", "print this (with --model: its defaults)");
}

std::string options_json(const Config& defaults, const std::string& family) {
    using Ordered = nlohmann::ordered_json;
    Ordered rows = Ordered::array();
    for (const OptionRow& row : option_table()) {
        const OptionValue& v = row.value;
        Ordered option = {{"name", row.name}, {"group", kOptionGroupTitles[static_cast<size_t>(row.group)]},
                          {"type", v.type}, {"expects", v.expects}, {"default", v.get(defaults)}, {"help", row.help}};
        option["changes"] = kChangesWords[static_cast<size_t>(row.may_change())];
        if (row.derived) option["default_rule"] = row.derived;
        if (v.range)
            option["range"] = {{"low", v.range->low},
                               {"high", v.range->high < static_cast<double>(kMany) ? Json(v.range->high) : Json()},
                               {"low_open", v.range->low_open},
                               {"high_open", v.range->high_open}};
        if (!v.words.empty()) option["words"] = v.words;
        if (row.gpu_only) option["gpu_only"] = true;
        if (row.ranks_only) option["ranks_only"] = true;
        if (row.llmc) option["llmc"] = row.llmc;
        for (const Spelling& s : spellings())
            if (s.option && std::string(s.option) == row.name)
                option["megatron_flags"].push_back({{"name", s.name}, {"true", s.when_true}, {"false", s.when_false}});
        rows.push_back(std::move(option));
    }
    Ordered presets = Ordered::array();
    for (const ModelPreset& preset : model_presets())
        if (preset.family == family)
            presets.push_back({{"name", preset.name}, {"num-layers", preset.config.num_layers},
                               {"hidden-size", preset.config.hidden_size},
                               {"num-attention-heads", preset.config.num_attention_heads},
                               {"num-query-groups", preset.config.num_query_groups}});
    return Ordered{{"executable", "train_" + family}, {"presets", presets}, {"options", rows}}.dump(1) + "\n";
}

std::string generate_help_text(const Config& defaults, const std::string& family) {
    std::string text = "Usage: train_" + family + " generate --load DIR --prompt '1 2 3' [options]\n\n"
        "Continues a prompt with the weights of a checkpoint or of any Hugging Face GPT-2 or Llama directory. If the\n"
        "directory holds the checkpoints of a run (--save), the newest is used. The prompt and its continuation, with\n"
        "the model's eos token if it ends the text, go to standard output, and everything else to standard error.\n"
        "scripts/generate does the same with a tokenizer.\n\n"
        "Every token takes a forward pass over the whole text, in --dtype also if the model was trained in FP8; vLLM\n"
        "and transformers, which load the same directory, are faster. Equal options give equal text.\n\n";
    for (const std::string& name : generate_options()) text += row_text(*find_option(name), defaults);
    return text + entry("--help", "print this");
}
