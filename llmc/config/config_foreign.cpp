// The error of an unknown option or key: what to write instead of another trainer's, or the nearest name.
#include <fnmatch.h>

#include <algorithm>
#include <sstream>

#include "llmc/base/check.h"
#include "llmc/base/nearest.h"
#include "llmc/config/config_table.h"

namespace {

// The tables of foreign/, whose README.md explains a row.
constexpr struct {
    const char *trainer, *rows;
} kTables[] = {
    {"",
#include "llmc/config/foreign/command_line.inl"
    },
    {"Megatron-LM",
#include "llmc/config/foreign/megatron.inl"
    },
    {"other trainers",
#include "llmc/config/foreign/shared.inl"
    },
    {"transformers",
#include "llmc/config/foreign/llamafactory.inl"
    },
    {"accelerate",
#include "llmc/config/foreign/accelerate.inl"
    },
    {"DeepSpeed",
#include "llmc/config/foreign/deepspeed.inl"
    },
    {"llm.c",
#include "llmc/config/foreign/llmc.inl"
    },
    {"torchtitan",
#include "llmc/config/foreign/torchtitan.inl"
    },
    {"nanoGPT",
#include "llmc/config/foreign/nanogpt.inl"
    },
    {"other trainers",
#include "llmc/config/foreign/guide.inl"
    },
    {"torchrun",
#include "llmc/config/foreign/launchers.inl"
    },
};

// A field of a row as text, "" if it is missing; an array of strings is joined.
std::string field(const Json& row, const char* name) {
    const auto found = row.find(name);
    if (found == row.end()) return "";
    if (!found->is_array()) return json_text(*found);
    std::string text;
    for (const Json& part : *found) text += part.get<std::string>();
    return text;
}

// The error's text for a row.
std::string advice(const Json& row) {
    if (row.contains("say")) return field(row, "say");
    if (row.contains("other")) return "leave it out: " + field(row, "other");
    if (row.contains("none")) return "leave it out: " + field(row, "none");
    if (row.contains("cannot")) return "not supported: " + field(row, "cannot");
    const std::string option = field(row, "take"), value = field(row, "value"), fact = field(row, "fact");
    if (option.empty()) return fact.empty() ? "scripts/import_config translates it" : "see " + fact;
    return "use --" + option + (value.empty() || value == "true" ? "" : " " + value)
           + (fact.empty() ? "" : ": " + fact);
}

// The rows that one row of a table stands for: one each for `same` values, and for the entries of an object.
std::vector<Json> expanded(Json row) {
    std::vector<Json> rows;
    if (row.contains("same"))
        rows.push_back({{"keys", row["keys"]}, {"when", row["same"]}, {"other", "that is so here, too"}});
    const bool takes = row.value("take", Json()).is_object();
    if (!takes && !row.value("value", Json()).is_object()) {
        rows.push_back(row);
        return rows;
    }
    const char* const field = takes ? "take" : "value";
    const Json entries = row[field];
    for (const auto& [theirs, ours] : entries.items()) {
        row[takes ? "keys" : "when"] = theirs;
        row[field] = ours;
        rows.push_back(row);
    }
    return rows;
}

std::vector<ForeignRow> read_tables() {
    std::vector<ForeignRow> rows;
    for (const auto& table : kTables)
        for (const Json& whole : Json::parse(table.rows))
            for (const Json& row : expanded(whole))
                rows.push_back({.trainer = *table.trainer ? table.trainer : field(row, "trainer"),
                                .names = dashes(field(row, "keys")), .values = field(row, "when"),
                                .text = advice(row)});
    return rows;
}

// Whether the row names the option, with a star or (stars false) in full. A star alone is for the importer.
bool names_option(const ForeignRow& row, const std::string& name, bool stars) {
    std::istringstream patterns(row.names);
    for (std::string pattern; patterns >> pattern;)
        if (pattern != "*" && (pattern.find('*') != std::string::npos) == stars
            && fnmatch(pattern.c_str(), name.c_str(), 0) == 0)
            return true;
    return false;
}

bool is_for_value(const ForeignRow& row, const std::string& value) {
    return row.values.empty() || has_word(row.values, value);
}

// The first row that names the option and is for its value; if there is none, the first row that names it.
const ForeignRow* find_foreign(const std::string& name, const std::string& value, bool stars) {
    const ForeignRow* named = nullptr;
    for (const ForeignRow& row : foreign_rows()) {
        if (!names_option(row, name, stars)) continue;
        if (is_for_value(row, value)) return &row;
        if (!named) named = &row;
    }
    return named;
}

// The known name of which `name` is probably a typing error, "" if none is close enough.
std::string near_name(const std::string& name, const std::vector<std::string>& known) {
    const std::string near = nearest(name, known);
    const size_t distance = edit_distance(name, near);
    return distance < name.size() && distance <= std::max<size_t>(2, name.size() / 3) ? near : "";
}

std::string foreign_text(const ForeignRow& row, const std::string& value) {
    std::string text = (is_for_value(row, value) ? "" : "for " + row.values + ": ") + row.text;
    const size_t place = text.find("{file}");
    if (place != std::string::npos) text.replace(place, 6, value.empty() ? "FILE" : value);
    return text;
}

}  // namespace

const std::vector<ForeignRow>& foreign_rows() {
    static const std::vector<ForeignRow> rows = read_tables();
    return rows;
}

void fail_unknown_option(const std::string& option, const std::string& name, const std::string& value,
                         const std::vector<std::string>& known) {
    REQUIRE(option.find(' ') == std::string::npos, "unknown option \"%s\": an option and its value are two words, or "
            "joined by =: leave the quotes around both out", printable(option).c_str());
    // An option without a value is a flag that is on.
    const std::string wanted = value.empty() ? "true" : value;
    const bool ours = std::find(known.begin(), known.end(), name) != known.end();
    const ForeignRow* of_llmc = find_foreign(option, wanted, false);
    const ForeignRow* exact = of_llmc || ours ? of_llmc : find_foreign(name, wanted, false);
    const std::string near = exact ? "" : near_name(name, known);
    const ForeignRow* row = exact ? exact : near.empty() ? find_foreign(name, wanted, true) : nullptr;
    if (row)
        FAIL(kExitBadInput, "unknown option %s (%s): %s", option.c_str(), row->trainer.c_str(),
             foreign_text(*row, value.empty() && !row->values.empty() ? wanted : value).c_str());
    const OptionRow* negated = name.starts_with("no-") ? find_option(name.substr(3)) : nullptr;
    REQUIRE(!negated || !negated->value.flag, "unknown option %s: write --%s=false", option.c_str(),
            name.substr(3).c_str());
    REQUIRE(near.empty(), "unknown option %s: did you mean --%s?", option.c_str(), near.c_str());
    FAIL(kExitBadInput, "unknown option %s: --help-all lists all; scripts/import_config translates scripts and files of"
         " other trainers", option.c_str());
}

void fail_unknown_key(const std::string& file, const std::string& given, const std::string& name, const Json& value,
                      const std::vector<std::string>& known) {
    const std::string key = printable(given), near = near_name(name, known), word = shortened(json_text(value));
    const std::string translate = "scripts/import_config " + file + " --out run.json translates the file of another "
                                  "trainer";
    const ForeignRow* row = value.is_object() ? nullptr : find_foreign(name, word, false);
    if (row)
        FAIL(kExitBadInput, "%s: unknown option \"%s\" (%s): %s; %s", file.c_str(), key.c_str(), row->trainer.c_str(),
             foreign_text(*row, word).c_str(), translate.c_str());
    REQUIRE(!value.is_object() || !find_option(name), "%s: \"%s\" has a plain value here, not an object; %s",
            file.c_str(), key.c_str(), translate.c_str());
    REQUIRE(near.empty() || value.is_object(), "%s: unknown option \"%s\": did you mean \"%s\"?", file.c_str(),
            key.c_str(), near.c_str());
    FAIL(kExitBadInput, "%s: unknown option \"%s\": --help-all lists all; %s", file.c_str(), key.c_str(),
         translate.c_str());
}
