#include "llmc/config/config.h"

#include <algorithm>
#include <cctype>
#include <iterator>
#include <map>
#include <optional>

#include "llmc/base/check.h"
#include "llmc/base/json_object.h"
#include "llmc/base/nearest.h"
#include "llmc/base/system/files.h"
#include "llmc/config/config_table.h"

namespace {

// A value that the user set.
struct Setting {
    Json value;
    std::string where;       // how an error names its place: "--lr" or "run.json: lr"
    std::string flag = {};   // "--swiglu is --activation swiglu", if a flag of another trainer set it
};
using Settings = std::map<std::string, Setting>;   // by option name
using Notes = std::vector<std::string>;

// ---- names ----

// Options that only the command line has; they are not fields of Config.
constexpr const char* kCommands[] = {"config", "help", "help-all", "print-config", "print-options", "version"};
bool is_command(const std::string& name) {
    return std::find(std::begin(kCommands), std::end(kCommands), name) != std::end(kCommands);
}

std::vector<std::string> option_names() {
    std::vector<std::string> names(std::begin(kCommands), std::end(kCommands));
    for (const OptionRow& row : option_table()) names.push_back(row.name);
    for (const Spelling& spelling : spellings()) names.push_back(spelling.name);
    return names;
}

// The table's name for a one-dash option of llm.c, or `option` itself if there is none.
std::string llmc_option(const std::string& option) {
    for (const OptionRow& row : option_table())
        if (row.llmc && option == row.llmc) return row.name;
    return option == "-h" ? "help" : option;
}

// The setting that a flag of another trainer stands for; nothing if the flag is always on here.
std::optional<Setting> respelled(const Spelling& spelling, const Json& on, const std::string& where, Notes* notes) {
    REQUIRE(on.is_boolean(), "%s %s: must be true or false", where.c_str(), json_text(on).c_str());
    if (!spelling.option) {
        REQUIRE(on == true, "%s false: %s; leave it out", where.c_str(), spelling.when_true);
        notes->push_back(where + ": " + spelling.when_true);
        return {};
    }
    const std::string value = on.get<bool>() ? spelling.when_true : spelling.when_false;
    notes->push_back(strf("%s%s is --%s %s", where.c_str(), on.get<bool>() ? "" : " false", spelling.option,
                          value.c_str()));
    return Setting{find_option(spelling.option)->value.parse(value), where, notes->back()};
}

// Adds a setting to others of the same source, the command line or a file. The words of a list are collected; of other
// values the last counts, but a flag of another trainer must agree with the option that it stands for.
void add_setting(Settings& source, const OptionRow& row, const Setting& next, Notes* notes) {
    const auto [at, is_new] = source.emplace(row.name, next);
    Setting& before = at->second;
    if (is_new) return;
    if (row.value.list) {
        if (!before.value.is_array()) before.value = Json::array({before.value});
        before.value.push_back(next.value);
        return;
    }
    Config one, other;
    const bool valid = row.value.set(one, before.value) && row.value.set(other, next.value);
    if (valid && row.value.get(one) != row.value.get(other)) {
        const Setting &flag = next.flag.empty() ? before : next, &option = next.flag.empty() ? next : before;
        REQUIRE(flag.flag.empty(), "%s, and %s says %s: leave one of the two out", flag.flag.c_str(),
                option.where.c_str(), json_text(option.value).c_str());
        notes->push_back(strf("--%s is there twice: %s counts, %s does not", row.name, json_text(next.value).c_str(),
                              json_text(before.value).c_str()));
    }
    before = next;
}

// ---- command line ----

struct CommandLine {
    Settings settings;
    std::vector<std::string> files;   // of --config
    std::set<std::string> commands;   // of those without a value: "help"
    bool has(const char* command) const { return commands.count(command) > 0; }
};

bool is_long(const std::string& word) { return word.size() > 2 && word[0] == '-' && word[1] == '-'; }
// "-b", but not the number "-1".
bool is_short(const std::string& word) {
    return word.size() > 1 && word[0] == '-' && std::isalpha(static_cast<unsigned char>(word[1]));
}

// An empty text is rarely meant, and would be taken for an option that is not set.
void require_text(const OptionRow& row, const std::string& word) {
    const std::string name = row.name;
    if (!row.value.any_text || !word.empty() || name == "log-file") return;
    REQUIRE(name != "prompt", "--%s '': an empty prompt; give one, or (in a run) leave the option out", row.name);
    FAIL(kExitBadInput, "--%s '' is empty: leave it out, or set the shell variable that should be there", row.name);
}

// Reads the command line word by word. A word that is not an option is the value of the option before it. A list takes
// all such words, so that a glob expanded by the shell works.
class CommandLineReader {
public:
    CommandLineReader(Notes* notes) : notes_(notes) {}

    CommandLine read(int argc, const char* const* argv) {
        for (int i = 1; i < argc; i++) {
            const std::string word = argv[i];
            if (is_long(word) || is_short(word)) {
                require_value();
                take_option(word, i + 1 < argc && argv[i + 1][0] != '-' ? argv[i + 1] : "");
            } else {
                if (current_.empty()) fail_unexpected_word(word, before_);
                REQUIRE(word != "=", "--%s =: write --%s VALUE or --%s=VALUE", current_.c_str(), current_.c_str(),
                        current_.c_str());
                take_value(word);
            }
        }
        require_value();
        return std::move(line_);
    }

private:
    void require_value() const { REQUIRE(!needs_value_, "--%s needs a value", current_.c_str()); }

    // Replaces an alias by the table's name; an unknown name is an error, for which `next` is the word after it.
    void take_option(const std::string& word, const std::string& next) {
        const std::string option = word.substr(0, word.find('='));
        std::optional<std::string> value;
        if (option.size() < word.size()) value = word.substr(option.size() + 1);
        current_ = is_long(word) ? dashes(option.substr(2)) : llmc_option(option);
        needs_value_ = false;
        // llm.c's -h has a value, unlike the -h that asks for help.
        if (option == "-h" && !value.value_or(next).empty()) fail_unknown_option(option, "h", value.value_or(next), {});
        if (const Spelling* spelling = find_spelling(current_)) {
            const Json flag = value ? parse_flag(*value) : Json(true);
            if (const auto setting = respelled(*spelling, flag, option, notes_))
                add_setting(line_.settings, *find_option(spelling->option), *setting, notes_);
            current_.clear();
            return;
        }
        const OptionRow* row = find_option(current_);
        if (!is_command(current_) && !row)
            fail_unknown_option(option, dashes(option.substr(is_long(word) ? 2 : 1)), value.value_or(next),
                                option_names());
        if (is_short(word)) notes_->push_back(option + " is --" + current_);
        const bool alone = row ? row->value.flag : current_ != "config";
        if (value || alone) take_value(value.value_or("true"));
        else needs_value_ = true;
    }

    void take_value(const std::string& value) {
        const OptionRow* row = before_ = find_option(current_);
        needs_value_ = false;
        if (row) {
            require_text(*row, value);
            add_setting(line_.settings, *row, {row->value.parse(value), "--" + current_}, notes_);
            if (row->value.list) return;
        } else {
            if (current_ == "config") line_.files.push_back(value);
            else line_.commands.insert(current_);
        }
        current_.clear();
    }

    Notes* notes_;
    CommandLine line_;
    std::string current_;                 // the option that takes the next word; "" if none does
    bool needs_value_ = false;            // it has no value yet
    const OptionRow* before_ = nullptr;   // that took the last word
};

// ---- JSON file ----

Json read_config_file(const std::string& path) {
    const std::string text = read_text_file(path, kMaxConfigBytes);
    try {
        return parse_json_object(text, path);
    } catch (const Error& error) {
        if (path.ends_with(".json")) throw;
        FAIL(kExitBadInput, "%s; scripts/import_config makes JSON of another trainer's YAML or script", error.what());
    }
}

Settings read_file_settings(const std::string& path, Notes* notes) {
    Settings settings;
    std::set<std::string> keys;
    const Json object = read_config_file(path);
    for (const auto& [key, value] : object.items()) {
        const std::string name = dashes(key), where = path + ": " + name;
        REQUIRE(keys.insert(name).second, "%s: \"%s\" is there twice", path.c_str(), printable(key).c_str());
        REQUIRE(!is_command(name), "%s: \"%s\" belongs on the command line", path.c_str(), key.c_str());
        const Spelling* spelling = find_spelling(name);
        const bool nested = value.is_object() && !value.empty();   // as in other trainers' files: {"optimizer": {..}}
        const OptionRow* row = spelling || nested ? nullptr : find_option(name);
        if (!spelling && !row) fail_unknown_key(path, key, name, value, option_names());
        const auto setting = spelling ? respelled(*spelling, value, where, notes) : Setting{value, where};
        if (setting) add_setting(settings, row ? *row : *find_option(spelling->option), *setting, notes);
    }
    return settings;
}

// ---- from settings to a configuration ----

std::string text_setting(const Settings& settings, const char* option) {
    const auto found = settings.find(option);
    return found == settings.end() ? "" : json_text(found->second.value);
}

const ModelPreset& chosen_preset(const Settings& settings, const std::string& family) {
    const OptionRow& row = *find_option("model");
    std::string fallback = family == "llama" && row.fallback_llama ? row.fallback_llama : row.fallback;
    const std::string name = settings.count("model") ? text_setting(settings, "model") : fallback;
    const ModelPreset* preset = find_model_preset(name);
    std::vector<std::string> names;
    for (const ModelPreset& p : model_presets())
        if (p.family == family) names.push_back(p.name);
    CHECK(!names.empty(), "no preset of family %s", family.c_str());
    REQUIRE(preset || name.find('/') == std::string::npos, "--model %s: not a preset; for a Hugging Face model, "
            "download it and name its folder with --load", name.c_str());
    REQUIRE(preset, "--model %s: unknown; did you mean %s? (%s)", name.c_str(), nearest(name, names).c_str(),
            choices_text(names).c_str());
    REQUIRE(preset->family == family, "--model %s is for train_%s; here: %s", name.c_str(), preset->family,
            choices_text(names).c_str());
    return *preset;
}

Config defaults_of(const ModelPreset& preset) {
    Config config;
    config.shape = preset.config;
    bool llama = std::string(preset.family) == "llama";
    for (const OptionRow& row : option_table()) {
        const char* word = llama && row.fallback_llama ? row.fallback_llama : row.fallback;
        if (!word) continue;
        CHECK(row.value.set(config, row.value.parse(word)), "default %s of --%s is not %s", word, row.name,
              row.value.expects.c_str());
    }
    config.model = preset.name;
    return config;
}

// plan may be for more ranks than were started.
int ranks_of(const Config& config, const Machine& machine) {
    return config.dry_run && config.ranks > 0 ? static_cast<int>(config.ranks) : machine.ranks;
}

// Adds to the user's settings the checkpoint's values of options that must be the same and were not given, so that it
// is resumed without them, and on other numbers of ranks. Returns their names. --load or another --model gives the
// shape itself, and a contradiction is found when the checkpoint is resumed.
std::set<std::string> add_saved(const SavedOptions& saved, Settings& settings) {
    std::set<std::string> added;
    if (saved.json.empty()) return added;
    const Json options = Json::parse(saved.json);
    const std::string model = text_setting(settings, "model");
    const bool other_model = !model.empty() && options.value("model", Json()) != model,
               other_shape = other_model || !text_setting(settings, "load").empty();
    for (const OptionRow& row : option_table()) {
        const bool model_row = std::string(row.name) == "model";
        if ((!row.inherits() && !model_row) || settings.count(row.name)) continue;
        if (!options.contains(row.name) || (other_shape && row.group == OptionGroup::kModel)) continue;
        settings[row.name] = {options[row.name], "--" + std::string(row.name) + " of " + saved.directory};
        added.insert(row.name);
    }
    return added;
}

// Without --model the shape comes from the directory of --load, or from the checkpoint that is resumed, since some of
// its fields have no option. Scaling of rope, the base in layers with a window and the deviation of the initial weights
// always come from there.
void take_shape(const Settings& settings, const Machine& machine, const std::string& checkpoint, bool other_model,
                Config& config) {
    if (!machine.read_shape) return;
    const auto take = [&](const ModelConfig& shape, bool whole) {
        if (whole) config.shape = shape;
        config.shape.rope_scaling = shape.rope_scaling;
        config.shape.local_rotary_base = shape.local_rotary_base;
        config.shape.init_std = shape.init_std;
    };
    if (const std::string load = text_setting(settings, "load"); !load.empty()) {
        take(machine.read_shape(load), !settings.count("model"));
    } else if (!checkpoint.empty()) {
        try {
            take(machine.read_shape(checkpoint), !other_model);
        } catch (const Error&) {   // the search for the checkpoint says what is wrong with it
        }
    }
}

// Merges values over the defaults, without checking rules between options. other_model: the user gives --model.
Config resolve(const Settings& settings, const ModelPreset& preset, const Machine& machine,
               const std::string& checkpoint = "", bool other_model = false) {
    Config config = defaults_of(preset);
    Given given;
    take_shape(settings, machine, checkpoint, other_model, config);
    const ModelConfig before = config.shape;
    for (const OptionRow& row : option_table()) {
        auto found = settings.find(row.name);
        if (found == settings.end()) continue;
        given.names.insert(row.name);
        const Setting& setting = found->second;
        const char* reason = row.refused ? row.refused(setting.value) : nullptr;
        REQUIRE(!reason, "%s %s: %s", setting.where.c_str(), shortened(json_text(setting.value)).c_str(), reason);
        REQUIRE(row.value.set(config, setting.value), "%s", value_error(row, setting.where, setting.value).c_str());
    }
    RopeScaling& scaling = config.shape.rope_scaling;
    if (scaling.type == RopeScalingType::kYarn && before.rope_scaling.factor == 0)
        scaling.original_max_positions = before.max_positions;
    given.ranks = ranks_of(config, machine);
    for (const OptionRow& row : option_table())
        if (row.derive && !given.has(row.name)) row.derive(config, given);
    const auto windows = static_cast<int64_t>(config.shape.sliding_window.size());
    REQUIRE(!given.has("sliding-window") || windows <= config.shape.num_layers, "--sliding-window %s: %lld windows for "
            "--num-layers %lld: leave out those of layers that the model does not have",
            config.shape.window_text().c_str(), ll(windows), ll(config.shape.num_layers));
    shorten_pattern(config.shape);
    return config;
}

// Makes the ranks share the checkpoint's global batch: lowers a micro-batch size that the user did not give.
void fit_micro_batch(Config& config, bool given, int ranks) {
    const int data_ranks = std::max(1, config.data_ranks(ranks));
    const int64_t batch = config.global_batch_size, share = batch / data_ranks, before = config.micro_batch_size;
    REQUIRE(batch % data_ranks == 0, "%d ranks cannot share the checkpoint's --global-batch-size %lld: start "
            "a number that divides it", ranks, ll(batch));
    while (share % config.micro_batch_size != 0) config.micro_batch_size--;
    REQUIRE(!given || config.micro_batch_size == before, "--micro-batch-size %lld on %d ranks does not divide the "
            "checkpoint's --global-batch-size %lld: take --micro-batch-size %lld, or leave it out", ll(before), ranks,
            ll(batch), ll(config.micro_batch_size));
}

// `saved`: the names of the options that come from the checkpoint.
void check_rules(const Settings& settings, const std::set<std::string>& saved, const Config& config, int ranks) {
    for (const OptionRow& row : option_table()) {
        auto found = settings.find(row.name);
        if (found == settings.end() || saved.count(row.name)) continue;
        if (const char* reason = why_no_effect(row, config))
            FAIL(kExitBadInput, "%s has no effect: %s", found->second.where.c_str(), reason);
    }
    std::vector<std::string> errors = model_config_errors(config.shape);
    if (errors.empty()) errors = config_errors(config, ranks);
    REQUIRE(errors.empty(), "%s%s", list_text(errors, "; ").c_str(),
            saved.empty() ? "" : "; with --resume, options that are not given are the checkpoint's");
}

// Requires that --model and --load agree, before anything is allocated.
void require_loaded_shape(const Config& config, const Machine& machine) {
    if (config.load.empty() || !machine.read_shape) return;
    Config loaded = config;
    loaded.shape = machine.read_shape(config.load);
    if (config.shape.position == PositionEmbedding::kRope)   // a rope model has no weights for positions
        loaded.shape.max_positions = std::max(loaded.shape.max_positions, config.shape.max_positions);
    for (const OptionRow& row : option_table()) {
        const Json asked = row.value.get(config), found = row.value.get(loaded);
        REQUIRE(asked == found, "--%s is %s, and the model in %s has %s: leave out --model and the shape "
                "options to take over its shape", row.name, json_text(asked).c_str(), config.load.c_str(),
                json_text(found).c_str());
    }
}

}  // namespace

ParsedConfig parse_config(int argc, const char* const* argv, const std::string& family, const Machine& machine) {
    ParsedConfig parsed;
    const CommandLine line = CommandLineReader(&parsed.notes).read(argc, argv);
    Settings settings = line.settings;   // win over those of files, and later files over earlier ones
    for (auto file = line.files.rbegin(); file != line.files.rend(); ++file)
        settings.merge(read_file_settings(*file, &parsed.notes));

    SavedOptions saved;
    const std::string resume = text_setting(settings, "resume");
    if (machine.read_saved && !resume.empty()) saved = machine.read_saved(resume, text_setting(settings, "save"));
    const Settings own = settings;
    const std::set<std::string> added = add_saved(saved, settings);
    const ModelPreset& preset = chosen_preset(settings, family);
    const Config defaults = resolve({}, preset, machine);
    parsed.help = line.has("help") || line.has("help-all") || line.has("print-options");
    if (parsed.help) {
        parsed.text = line.has("help-all") ? help_all_text(defaults, family)
                      : line.has("help")   ? help_text(defaults, family)
                                           : options_json(defaults, family);
        return parsed;
    }
    parsed.help = line.has("print-config");
    if (parsed.help) settings["dry-run"] = {Json(true), "--print-config"};   // data and other ranks may be missing
    parsed.config = resolve(settings, preset, machine, saved.directory, own.count("model") > 0);
    parsed.fp8_given = settings.count("fp8-recipe") || settings.count("fp8-format");
    const int ranks = ranks_of(parsed.config, machine);
    if (added.count("global-batch-size"))
        fit_micro_batch(parsed.config, settings.count("micro-batch-size") > 0, ranks);
    check_rules(settings, added, parsed.config, ranks);
    require_loaded_shape(parsed.config, machine);
    for (const std::string& line : config_warnings(parsed.config)) parsed.notes.push_back(line);
    std::set<std::string> given;
    for (const OptionRow& row : option_table()) {
        if (!settings.count(row.name) || added.count(row.name)) continue;
        const std::string name = "--" + std::string(row.name);
        REQUIRE(!row.refused_on_cpu || machine.gpu || parsed.config.dry_run, "%s has no effect without a GPU: %s",
                name.c_str(), row.refused_on_cpu);
        if (row.gpu_only && !machine.gpu) parsed.no_effect.push_back(name + " has no effect without a GPU");
        if (row.ranks_only && ranks == 1) parsed.no_effect.push_back(name + " has no effect with one rank");
        given.insert(row.name);
    }
    parsed.changed = changed_options(parsed.config, defaults, given);
    Config without = defaults;
    try {
        without = resolve(own, chosen_preset(own, family), machine);
    } catch (const Error&) {   // not all is given
    }
    const std::vector<std::string> taken = changed_options(parsed.config, without, added);
    if (!taken.empty()) parsed.notes.push_back("not given, so as in " + saved.directory + ": " + list_text(taken, " "));
    if (parsed.help) {
        parsed.config.dry_run = false;
        parsed.text = config_to_json(parsed.config) + "\n";
    }
    return parsed;
}

ParsedConfig parse_generate_config(int argc, const char* const* argv, const std::string& family,
                                   const Machine& machine) {
    ParsedConfig parsed;
    const CommandLine line = CommandLineReader(&parsed.notes).read(argc, argv);
    const Settings& settings = line.settings;
    const std::vector<std::string>& known = generate_options();
    REQUIRE(line.files.empty(), "generate has no option --config");
    for (const auto& [name, setting] : settings)
        REQUIRE(std::find(known.begin(), known.end(), name) != known.end(),
                "generate has no option --%s, it is for training: generate --help", name.c_str());
    const ModelPreset preset = chosen_preset({}, family);
    parsed.help = line.has("help") || line.has("help-all");
    if (parsed.help) {
        parsed.text = generate_help_text(resolve({}, preset, machine), family);
        return parsed;
    }
    REQUIRE(settings.count("load"), "generate needs --load DIR, a checkpoint or a Hugging Face model");
    parsed.config = resolve(settings, preset, machine);
    if (machine.read_shape) parsed.config.shape = machine.read_shape(parsed.config.load);
    parsed.config.sample_every = 1;   // so that the sampling options have an effect
    for (const std::string& name : known)
        if (const char* reason = settings.count(name) ? why_no_effect(*find_option(name), parsed.config) : nullptr)
            FAIL(kExitBadInput, "--%s has no effect: %s", name.c_str(), reason);
    const std::vector<std::string> errors = model_config_errors(parsed.config.shape);
    REQUIRE(errors.empty(), "%s", list_text(errors, "; ").c_str());
    return parsed;
}

std::string config_to_json(const Config& config) {
    nlohmann::ordered_json object = nlohmann::ordered_json::object();
    for (const OptionRow& row : option_table())
        if (const Json value = row.value.get(config); !value.is_null() && !why_no_effect(row, config))
            object[row.name] = value;
    return object.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

std::string read_saved_options(const std::string& saved_json, Config& config) {
    const Json saved = Json::parse(saved_json);
    for (const OptionRow& row : option_table()) {
        if (!row.inherits() || !saved.contains(row.name)) continue;
        const Json& value = saved[row.name];
        if (!row.value.set(config, value)) return value_error(row, std::string("\"") + row.name + "\"", value);
    }
    return "";
}

ConfigDiff config_diff(const std::string& saved_json, const Config& config) {
    const Json saved = Json::parse(saved_json, nullptr, false);
    REQUIRE(saved.is_object(), "the checkpoint's options are not a JSON object");
    const ModelPreset* preset = find_model_preset(config.model);
    CHECK(preset, "a configuration has the unknown model %s", config.model.c_str());
    Config plain = resolve({}, *preset, {});
    ConfigDiff diff;
    auto add = [&](const OptionRow& row, const std::string& before, const std::string& now) {
        auto& lines = row.on_resume == OnResume::kMustMatch ? diff.must_match : diff.changed;
        const auto shown = [](const std::string& value) { return value.empty() ? "empty" : value.c_str(); };
        lines.push_back(strf("--%s: %s in the checkpoint, %s now", row.name, shown(before), shown(now)));
    };
    for (const OptionRow& row : option_table()) {
        if (row.on_resume == OnResume::kSilent) continue;
        Json now = why_no_effect(row, config) ? Json() : row.value.get(config);
        const Json before = saved.value(row.name, Json()), usual = row.value.get(plain);
        const bool was_acting = saved.contains(row.name);
        if (was_acting && !now.is_null() && before != now) add(row, json_text(before), json_text(now));
        // An option that is missing on one side had no effect there or did not exist yet: its default changes nothing.
        if (!was_acting && !now.is_null() && now != usual) add(row, "not set", json_text(now));
        if (was_acting && now.is_null() && row.on_resume == OnResume::kMustMatch && before != usual)
            add(row, json_text(before), "not set");
    }
    for (const auto& [name, value] : saved.items())
        if (!find_option(name))
            diff.changed.push_back(strf("%s: %s in the checkpoint, unknown to this version", name.c_str(),
                                        json_text(value).c_str()));
    return diff;
}
