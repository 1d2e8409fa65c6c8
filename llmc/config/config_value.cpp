#include "llmc/config/config_value.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>

#include "llmc/base/check.h"

namespace {

std::string lower_case(std::string word) {
    for (char& c : word) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    return word;
}

// Reads the whole text as a number of type T; false if it is not one.
template <typename T> bool read_all(const std::string& text, T* out) {
    const char* end = text.data() + text.size();
    auto [stop, error] = std::from_chars(text.data(), end, *out);
    return error == std::errc() && stop == end;
}

}  // namespace

std::string dashes(std::string name) {
    std::replace(name.begin(), name.end(), '_', '-');
    return name;
}

std::string number_text(double x) {
    if (x == std::floor(x) && std::fabs(x) < 1e9) return strf("%.0f", x);   // 500000, not 5e+05
    char buffer[64];
    auto [end, error] = std::to_chars(buffer, buffer + sizeof(buffer), x, std::chars_format::general);
    return std::string(buffer, error == std::errc() ? end : buffer);
}

std::string Range::text() const {
    if (high >= static_cast<double>(kMany)) return (low_open ? "> " : ">= ") + number_text(low);
    return std::string("in ") + (low_open ? "(" : "[") + number_text(low) + ", " + number_text(high)
           + (high_open ? ")" : "]");
}

std::string json_text(const Json& value) {
    if (value.is_string()) return value.get<std::string>();
    if (value.is_number_float()) return number_text(value.get<double>());
    if (!value.is_array()) return value.dump(-1, ' ', false, Json::error_handler_t::replace);
    std::string words;
    for (const Json& element : value) words += (words.empty() ? "" : " ") + json_text(element);
    return words;
}

Json parse_integer(const std::string& text) {
    int64_t x;
    if (read_all(text, &x)) return Json(x);
    double whole;   // 1e6, but not 2.0
    const bool exponent = text.find_first_of("eE") != std::string::npos && read_all(text, &whole);
    if (exponent && json_integer(Json(whole), &x)) return Json(x);
    return Json(text);
}

Json parse_number(const std::string& text) {
    double x;
    return read_all(text, &x) ? Json(x) : Json(text);
}

Json parse_flag(const std::string& text) {
    std::string word = lower_case(text);
    if (word == "true" || word == "on" || word == "yes" || word == "1") return Json(true);
    if (word == "false" || word == "off" || word == "no" || word == "0") return Json(false);
    return Json(text);
}

bool json_integer(const Json& value, int64_t* out) {
    if (value.is_number_unsigned()) {
        uint64_t x = value.get<uint64_t>();
        *out = static_cast<int64_t>(x);
        return x <= static_cast<uint64_t>(INT64_MAX);
    }
    if (value.is_number_integer()) {
        *out = value.get<int64_t>();
        return true;
    }
    if (!value.is_number_float()) return false;
    double x = value.get<double>();
    if (x != std::floor(x) || std::fabs(x) > 0x1p53) return false;   // above 2^53 doubles skip integers
    *out = static_cast<int64_t>(x);
    return true;
}

int json_choice(const Json& value, const std::vector<std::string>& names) {
    if (!value.is_string()) return -1;
    std::string word = lower_case(value.get<std::string>());
    for (size_t i = 0; i < names.size(); i++)
        if (word == lower_case(names[i])) return static_cast<int>(i);
    return -1;
}

std::string choices_text(const std::vector<std::string>& names) {
    std::string words;
    for (const std::string& name : names)
        if (!name.empty()) words += (words.empty() ? "" : ", ") + name;
    return "one of " + words;
}

bool append_words(const std::string& text, char separator, std::vector<std::string>* words) {
    for (size_t begin = 0; begin <= text.size();) {
        const size_t end = separator ? std::min(text.find(separator, begin), text.size()) : text.size();
        if (end == begin) return false;
        words->push_back(text.substr(begin, end - begin));
        begin = end + 1;
    }
    return true;
}

bool json_tuple(const Json& value, char separator, std::optional<size_t> count, std::vector<int64_t>* out) {
    out->clear();
    if (value.is_array()) {
        for (const Json& element : value) {
            int64_t x;
            if (!json_integer(element, &x)) return false;
            out->push_back(x);
        }
        return out->size() == count.value_or(out->size());
    }
    if (!value.is_string()) return false;
    std::string all = value.get<std::string>();
    for (size_t begin = 0; begin <= all.size();) {
        size_t end = std::min(all.find(separator, begin), all.size());
        // Repeated spaces count as one, as in a shell.
        if (!(separator == ' ' && end == begin)) {
            int64_t x;
            if (!read_all(all.substr(begin, end - begin), &x)) return false;
            out->push_back(x);
        }
        begin = end + 1;
    }
    return out->size() == count.value_or(out->size());
}
