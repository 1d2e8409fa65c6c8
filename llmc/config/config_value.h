// Reads, checks and writes the value of one option, for the command line, JSON files, --help and the checkpoint.
// Private to config*.cpp and their tests.
#pragma once
#include <cstdint>
#include <functional>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "llmc/config/config.h"

using Json = nlohmann::json;

// Interval of allowed numbers; includes its ends unless they are open.
struct Range {
    double low, high;
    bool low_open = false, high_open = false;
    // Kernels get the value in FP32, so the value must not round to an open end: a beta of 0.999999999 would become 1,
    // and an eps of 1e-50 would become 0 and make the first update divide zero by zero.
    bool holds(double x) const {
        const double rounded = static_cast<double>(static_cast<float>(x));
        return (low_open ? x > low && rounded > low : x >= low)
               && (high_open ? x < high && rounded < high : x <= high);   // false for NaN
    }
    std::string text() const;   // "in [0, 1)", or ">= 0" if the upper end is kMany or more
};
inline constexpr Range kInsideUnit{.low = 0, .high = 1, .low_open = true, .high_open = true};

struct OptionValue {
    const char* type = "text";                              // integer, number, flag, choice, text, list or tuple
    std::string metavar = {};                               // "N", "FILE"; empty for a flag
    std::string expects;                                    // "an integer in [1, 64]": for --help and errors
    std::function<Json(const std::string&)> parse;          // command-line text to JSON, unchecked
    std::function<bool(Config&, const Json&)> set;          // returns false and sets nothing if the value is not valid
    std::function<Json(const Config&)> get;                 // null: not set, nothing to write
    bool flag = false;                                      // the option alone means true
    bool list = false;                                      // collects several values
    bool any_text = false;                                  // `expects` adds nothing to `metavar`
    std::optional<Range> range = {};                        // of an integer or a number
    std::vector<std::string> words = {};                    // of a choice
};

// An upper end of at least this means "no limit": no run counts so far, and a double represents it exactly.
inline constexpr int64_t kMany = int64_t{1} << 50;

// Shortest text that reads back to the same double; whole numbers below 1e9 without exponent.
std::string number_text(double x);
// The value for people: text without quotes, list elements separated by spaces.
std::string json_text(const Json& value);

// Parse a number; any other text becomes a JSON string, which `set` then refuses.
Json parse_integer(const std::string& text);
Json parse_number(const std::string& text);
inline Json parse_text(const std::string& text) { return Json(text); }
// Parses "true", "on", "1", "yes" and their opposites; any other text becomes a JSON string.
Json parse_flag(const std::string& text);
// Reads an integer, which may be written as 3.0 or 1e6. Returns false for any other value.
bool json_integer(const Json& value, int64_t* out);
// Index of `value` in `names`, ignoring case; -1 if it is not there.
int json_choice(const Json& value, const std::vector<std::string>& names);
std::string choices_text(const std::vector<std::string>& names);   // "one of a, b, c", without empty names
// Reads "3:5" or [3, 5] as `count` integers, or any number of them. Returns false for any other value.
bool json_tuple(const Json& value, char separator, std::optional<size_t> count, std::vector<int64_t>* out);
// The name with dashes instead of underscores, as in the option table.
std::string dashes(std::string name);

// The words of a table whose rows have a name and a kind, for choice().
template <typename Table> auto words_of(const Table& table) {
    std::vector<std::pair<std::string, std::remove_cvref_t<decltype(std::begin(table)->kind)>>> words;
    for (const auto& row : table) words.emplace_back(row.name, row.kind);
    return words;
}

// In the factories below `at` is a generic lambda from (const) Config& to (const) field&.

template <typename At> auto getter(At at) {
    return [at](const Config& c) { return Json(at(c)); };
}

template <typename At> OptionValue integer(At at, int64_t low, int64_t high) {
    const Range range{static_cast<double>(low), static_cast<double>(high)};
    return {.type = "integer", .metavar = "N", .expects = "an integer " + range.text(), .parse = parse_integer,
            .set = [at, low, high](Config& c, const Json& json) {
                int64_t x;
                if (!json_integer(json, &x) || x < low || x > high) return false;
                at(c) = static_cast<std::remove_cvref_t<decltype(at(c))>>(x);
                return true;
            },
            .get = getter(at), .range = range};
}

template <typename At> OptionValue number(At at, Range range) {
    return {.type = "number", .metavar = "X",
            .expects = "a number " + range.text() + (range.low_open || range.high_open ? ", also in FP32" : ""),
            .parse = parse_number,
            .set = [at, range](Config& c, const Json& json) {
                if (!json.is_number() || !range.holds(json.get<double>())) return false;
                at(c) = json.get<double>();
                return true;
            },
            .get = getter(at), .range = range};
}

// An option that alone means true; --option=false overrides a preset or a file. `when_true`: what the field is then.
template <typename At> OptionValue flag(At at, bool when_true = true) {
    return {.type = "flag", .expects = "true or false", .parse = parse_flag,
            .set = [at, when_true](Config& c, const Json& json) {
                if (!json.is_boolean()) return false;
                at(c) = json.get<bool>() == when_true;
                return true;
            },
            .get = [at, when_true](const Config& c) { return Json(at(c) == when_true); }, .flag = true};
}

// One of several words, each standing for a value of the field.
template <typename T, typename At>
OptionValue choice(At at, const std::vector<std::pair<std::string, T>>& words) {
    std::vector<std::string> names, shown;
    for (const auto& [name, value] : words) {
        names.push_back(name);
        if (!name.empty()) shown.push_back(name);
    }
    return {.type = "choice", .metavar = "WORD", .expects = choices_text(names), .parse = parse_text,
            .set = [at, names, words](Config& c, const Json& json) {
                const int index = json_choice(json, names);
                if (index < 0) return false;
                at(c) = words[static_cast<size_t>(index)].second;
                return true;
            },
            .get = [at, words](const Config& c) {
                for (const auto& [name, value] : words)
                    if (value == at(c)) return Json(name);
                return Json();
            },
            .words = shown};
}

template <typename At> OptionValue text(At at, const std::string& metavar, const std::string& expects) {
    return {.metavar = metavar, .expects = expects, .parse = parse_text,
            .set = [at](Config& c, const Json& json) {
                if (!json.is_string()) return false;
                at(c) = json.get<std::string>();
                return true;
            },
            .get = getter(at), .any_text = true};
}

// Appends the elements of `text`, split at `separator` (0: one element). Returns false if one is empty.
bool append_words(const std::string& text, char separator, std::vector<std::string>* words);

template <typename At>
OptionValue text_list(At at, const std::string& metavar, const std::string& expects, char separator = 0) {
    return {.type = "list", .metavar = metavar, .expects = expects, .parse = parse_text,
            .set = [at, separator](Config& c, const Json& json) {
                std::vector<std::string> words;
                for (const Json& element : json.is_array() ? json : Json::array({json})) {
                    if (!element.is_string()) return false;
                    if (!append_words(element.get<std::string>(), separator, &words)) return false;
                }
                at(c) = words;
                return true;
            },
            .get = getter(at), .list = true, .any_text = true};
}

// Several integers in one option, none below `low`. A field below `low` means that the option is not set.
template <typename... At>
OptionValue tuple(char separator, int64_t low, const std::string& metavar, const std::string& expects, At... at) {
    return {.type = "tuple", .metavar = metavar, .expects = expects, .parse = parse_text,
            .set = [separator, low, at...](Config& c, const Json& json) {
                std::vector<int64_t> numbers;
                if (!json_tuple(json, separator, sizeof...(at), &numbers)) return false;
                for (int64_t x : numbers)
                    if (x < low) return false;
                size_t i = 0;
                ((at(c) = numbers[i++]), ...);
                return true;
            },
            .get = [separator, low, at...](const Config& c) {
                std::string word;
                bool is_set = true;
                ((is_set = is_set && at(c) >= low,
                  word += (word.empty() ? "" : std::string(1, separator)) + std::to_string(at(c))), ...);
                return is_set ? Json(word) : Json();
            }};
}
