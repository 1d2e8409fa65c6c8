#include "llmc/base/check.h"
#include "llmc/config/config_table.h"

namespace {

constexpr size_t kIndent = 33;   // column where the description starts
constexpr size_t kWidth = 100;

// "  --option N" and its description, wrapped at words.
std::string entry(const std::string& option, const std::string& description) {
    std::string text = "  " + option;
    size_t column = text.size();
    if (column + 1 > kIndent) {
        text += "\n";
        column = 0;
    }
    text.append(kIndent - column, ' ');
    column = kIndent;
    for (size_t begin = 0; begin < description.size();) {
        size_t end = std::min(description.find(' ', begin), description.size());
        if (column > kIndent && column + 1 + end - begin > kWidth) {
            text += "\n" + std::string(kIndent, ' ');
            column = kIndent;
        }
        if (column > kIndent) {
            text += ' ';
            column++;
        }
        text += description.substr(begin, end - begin);
        column += end - begin;
        begin = end + 1;
    }
    return text + "\n";
}

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

std::string help_text(const Config& defaults, const std::string& family) {
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
    text += entry("--print-options", "print the table of options as JSON, for programs");
    text += entry("--help", "print this (with --model: its defaults)");
    return text;
}

std::string options_json(const Config& defaults, const std::string& family) {
    using Ordered = nlohmann::ordered_json;
    Ordered rows = Ordered::array();
    for (const OptionRow& row : option_table()) {
        const OptionValue& v = row.value;
        Ordered option = {{"name", row.name},
                          {"group", kOptionGroupTitles[static_cast<size_t>(row.group)]},
                          {"type", v.type},
                          {"expects", v.expects},
                          {"default", v.get(defaults)},
                          {"help", row.help}};
        if (row.derived) option["default_rule"] = row.derived;
        if (v.range)
            option["range"] = {{"low", v.range->low},
                               {"high", v.range->high < static_cast<double>(kMany) ? Json(v.range->high) : Json()},
                               {"low_open", v.range->low_open},
                               {"high_open", v.range->high_open}};
        if (!v.words.empty()) option["words"] = v.words;
        for (const Condition& c : row.acts_if)
            option["acts_if"].push_back({{"option", c.option}, {"values", c.values}, {"reason", c.reason}});
        if (row.gpu_only) option["gpu_only"] = true;
        if (row.ranks_only) option["ranks_only"] = true;
        if (row.llmc) option["llmc"] = row.llmc;
        for (const RenamedOption& renamed : renamed_options())
            if (std::string(renamed.name) == row.name) option["old_names"].push_back(renamed.old_name);
        for (const Spelling& s : spellings())
            if (std::string(s.option) == row.name)
                option["megatron_flags"].push_back({{"name", s.name}, {"true", s.when_true}, {"false", s.when_false}});
        rows.push_back(std::move(option));
    }
    return Ordered{{"executable", "train_" + family}, {"options", rows}}.dump(1) + "\n";
}

std::string generate_help_text(const Config& defaults, const std::string& family) {
    std::string text = "Usage: train_" + family + " generate --load DIR --prompt-ids '1 2 3' [options]\n\n"
        "Continues each prompt with the weights of a checkpoint or of any Hugging Face GPT-2 or Llama directory. If\n"
        "the directory holds the checkpoints of a run (--save), the newest is used. The prompt and its continuation\n"
        "go to standard output, one line per prompt, and everything else to standard error. Equal options give equal\n"
        "text. scripts/generate does the same with a tokenizer.\n\n";
    for (const std::string& name : generate_options()) text += row_text(*find_option(name), defaults);
    return text + entry("--help", "print this");
}
