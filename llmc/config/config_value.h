// Reads, checks and writes the value of one option, for the command line, JSON files, --help and the checkpoint.
// Private to config*.cpp and their tests.
#pragma once
#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
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
    std::string metavar;                                    // "N", "FILE"; empty for a flag
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
// Parses "true", "on", "1", "yes" and their opposites; any other text becomes a JSON string.
Json parse_flag(const std::string& text);
// Reads an integer, which may be written as 3.0 or 1e6. Returns false for any other value.
bool json_integer(const Json& value, int64_t* out);
// Index of `value` in `names`, ignoring case; -1 if it is not there.
int json_choice(const Json& value, const std::vector<std::string>& names);
std::string choices_text(const std::vector<std::string>& names);   // "one of a, b, c", without empty names
// Reads "3:5" or [3, 5] as `count` integers. Returns false for any other value.
bool json_tuple(const Json& value, char separator, size_t count, std::vector<int64_t>* out);
// The name with dashes instead of underscores, as in the option table.
std::string dashes(std::string name);

// In the factories below `at` is a generic lambda from (const) Config& to (const) field&.

template <typename At> OptionValue integer(At at, int64_t low, int64_t high) {
    Range range{static_cast<double>(low), static_cast<double>(high)};
    OptionValue v;
    v.type = "integer";
    v.range = range;
    v.metavar = "N";
    v.expects = "an integer " + range.text();
    v.parse = parse_integer;
    v.set = [at, low, high](Config& c, const Json& json) {
        int64_t x;
        if (!json_integer(json, &x) || x < low || x > high) return false;
        at(c) = x;
        return true;
    };
    v.get = [at](const Config& c) { return Json(at(c)); };
    return v;
}

template <typename At> OptionValue number(At at, Range range) {
    OptionValue v;
    v.type = "number";
    v.range = range;
    v.metavar = "X";
    v.expects = "a number " + range.text() + (range.low_open || range.high_open ? ", also in FP32" : "");
    v.parse = parse_number;
    v.set = [at, range](Config& c, const Json& json) {
        if (!json.is_number() || !range.holds(json.get<double>())) return false;
        at(c) = json.get<double>();
        return true;
    };
    v.get = [at](const Config& c) { return Json(at(c)); };
    return v;
}

// The whole range of uint64_t, which JSON keeps exactly.
template <typename At> OptionValue whole_number(At at) {
    OptionValue v;
    v.type = "integer";
    v.metavar = "N";
    v.expects = "an integer in [0, 2^64)";
    v.parse = parse_integer;
    v.set = [at](Config& c, const Json& json) {
        if (!json.is_number_integer()) return false;
        if (!json.is_number_unsigned() && json.get<int64_t>() < 0) return false;
        at(c) = json.get<uint64_t>();
        return true;
    };
    v.get = [at](const Config& c) { return Json(at(c)); };
    return v;
}

// An option that alone means true; --option=false overrides a preset or a file. Sets the field to `when_true` or
// `when_false`.
template <typename At, typename T> OptionValue flag(At at, T when_true, T when_false) {
    OptionValue v;
    v.type = "flag";
    v.expects = "true or false";
    v.flag = true;
    v.parse = parse_flag;
    v.set = [at, when_true, when_false](Config& c, const Json& json) {
        if (!json.is_boolean()) return false;
        at(c) = json.get<bool>() ? when_true : when_false;
        return true;
    };
    v.get = [at, when_true](const Config& c) { return Json(at(c) == when_true); };
    return v;
}

// One of several words, each standing for a value of the field.
template <typename T, typename At>
OptionValue choice(At at, const std::vector<std::pair<std::string, T>>& words) {
    std::vector<std::string> names;
    std::vector<T> values;
    for (const auto& [name, value] : words) {
        names.push_back(name);
        values.push_back(value);
    }
    OptionValue v;
    v.type = "choice";
    for (const std::string& name : names)
        if (!name.empty()) v.words.push_back(name);
    v.metavar = "WORD";
    v.expects = choices_text(names);
    v.parse = [](const std::string& text) { return Json(text); };
    v.set = [at, names, values](Config& c, const Json& json) {
        int index = json_choice(json, names);
        if (index < 0) return false;
        at(c) = values[static_cast<size_t>(index)];
        return true;
    };
    v.get = [at, names, values](const Config& c) {
        for (size_t i = 0; i < values.size(); i++)
            if (values[i] == at(c)) return Json(names[i]);
        return Json();
    };
    return v;
}

template <typename At> OptionValue text(At at, const std::string& metavar, const std::string& expects) {
    OptionValue v;
    v.metavar = metavar;
    v.expects = expects;
    v.any_text = true;
    v.parse = [](const std::string& word) { return Json(word); };
    v.set = [at](Config& c, const Json& json) {
        if (!json.is_string()) return false;
        at(c) = json.get<std::string>();
        return true;
    };
    v.get = [at](const Config& c) { return Json(at(c)); };
    return v;
}

// Appends the elements of `text`, split at `separator` (0: one element). Returns false if one is empty.
bool append_words(const std::string& text, char separator, std::vector<std::string>* words);

template <typename At>
OptionValue text_list(At at, const std::string& metavar, const std::string& expects, char separator = 0) {
    OptionValue v;
    v.metavar = metavar;
    v.expects = expects;
    v.type = "list";
    v.list = true;
    v.any_text = true;
    v.parse = [](const std::string& word) { return Json(word); };
    v.set = [at, separator](Config& c, const Json& json) {
        std::vector<std::string> words;
        for (const Json& element : json.is_array() ? json : Json::array({json}))
            if (!element.is_string() || !append_words(element.get<std::string>(), separator, &words)) return false;
        at(c) = words;
        return true;
    };
    v.get = [at](const Config& c) { return Json(at(c)); };
    return v;
}

// Several integers in one option, none below `low`; the option is not set while a field is.
template <typename... At>
OptionValue tuple(char separator, int64_t low, const std::string& metavar, const std::string& expects,
                  At... at) {
    OptionValue v;
    v.type = "tuple";
    v.metavar = metavar;
    v.expects = expects;
    v.parse = [](const std::string& word) { return Json(word); };
    v.set = [separator, low, at...](Config& c, const Json& json) {
        std::vector<int64_t> numbers;
        if (!json_tuple(json, separator, sizeof...(at), &numbers)) return false;
        for (int64_t x : numbers)
            if (x < low) return false;
        size_t i = 0;
        ((at(c) = numbers[i++]), ...);
        return true;
    };
    v.get = [separator, low, at...](const Config& c) {
        std::string word;
        bool is_set = true;
        ((is_set = is_set && at(c) >= low,
          word += (word.empty() ? "" : std::string(1, separator)) + std::to_string(at(c))), ...);
        return is_set ? Json(word) : Json();
    };
    return v;
}
