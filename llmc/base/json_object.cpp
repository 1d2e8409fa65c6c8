#include "llmc/base/json_object.h"

#include <cmath>

#include "llmc/base/check.h"
#include "llmc/base/system/files.h"

namespace {

using Json = nlohmann::json;

struct Found {};   // raised when the wanted value is complete

// Parses an object, or returns the value of its key `only`. Errors are those of the header, or the library's.
Json parse(const std::string& text, const std::string& file, const std::string& only, bool comments) {
    std::vector<std::set<std::string>> keys;   // of the open lists and objects; those of lists are empty
    std::string first;                         // the latest key of the outermost object
    Json wanted;
    // Returns whether the value is kept.
    const auto check = [&](int depth, Json::parse_event_t event, const Json& value) {
        using Event = Json::parse_event_t;
        const auto level = static_cast<size_t>(depth);
        if (event == Event::key) {
            const auto& key = value.get_ref<const std::string&>();
            if (depth == 1) first = key;
            REQUIRE(keys[level - 1].insert(key).second, "%s: \"%s\" is there twice", file.c_str(),
                    printable(key).c_str());
            return true;
        }
        if (event == Event::object_start || event == Event::array_start) {
            REQUIRE(depth < kMaxJsonDepth, "%s: \"%s\" is nested deeper than %d levels", file.c_str(),
                    printable(first).c_str(), kMaxJsonDepth);
            keys.resize(level);
            keys.emplace_back();
        } else if (depth == 1 && first == only && !only.empty()) {
            wanted = value;
            throw Found();
        }
        return depth != 1 || only.empty() || first == only;   // a million offsets, say, are not kept
    };
    try {
        Json root = Json::parse(text, check, true, comments);
        REQUIRE(root.is_object(), "%s: not a JSON object {\"name\": value, ...}", file.c_str());
        return only.empty() ? root : Json();
    } catch (const Found&) {
        return wanted;
    }
}

// Whether a value is an integer from low to high. An unsigned one may be beyond int64_t.
bool is_within(const Json& value, int64_t low, int64_t high) {
    if (!value.is_number_integer()) return false;
    if (value.is_number_unsigned() && value.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX)) return false;
    return value.get<int64_t>() >= low && value.get<int64_t>() <= high;
}

std::string range_text(int64_t low, int64_t high) {
    return high == INT64_MAX ? strf("of at least %lld", ll(low)) : strf("from %lld to %lld", ll(low), ll(high));
}

}  // namespace

Json parse_json_object(const std::string& text, const std::string& file, const std::string& only) {
    REQUIRE(text.find('\0') == std::string::npos, "%s: not JSON: a NUL byte", file.c_str());
    try {
        return parse(text, file, only, true);
    } catch (const Json::exception& error) {   // "[json.exception.parse_error.101] parse error at line 2, column 1: "
        std::string reason = error.what();
        reason = shortened(reason.substr(reason.find("] ") + 2), 200);
        FAIL(kExitBadInput, "%s: not JSON: %s", file.c_str(), reason.c_str());
    }
}

Json read_json_object(const std::string& path, int64_t max_bytes, const std::string& only) {
    return parse_json_object(read_text_file(path, max_bytes), path, only);
}

Json parse_json_line(const std::string& line) {
    try {
        return parse(line, "", "", false);
    } catch (const std::exception&) {
        return {};
    }
}

std::string text_of(const Json& object, const char* name) {
    const auto found = object.is_object() ? object.find(name) : object.end();
    return found != object.end() && found->is_string() ? found->get<std::string>() : "";
}

void JsonFields::refuse(const char* name, const std::string& why) const {
    const std::string value = object.contains(name) ? object[name].dump(-1, ' ', true) : "absent";
    FAIL(kExitBadInput, "%s: \"%s\" is %s: %s", where.c_str(), name, shortened(value, 120).c_str(), why.c_str());
}

const Json& JsonFields::at(const char* name) const {
    if (!has(name)) FAIL(kExitBadInput, "%s: \"%s\" is missing", where.c_str(), name);
    return object[name];
}

int64_t JsonFields::integer(const char* name, int64_t low, int64_t high) const {
    if (!is_within(at(name), low, high)) refuse(name, "a whole number " + range_text(low, high) + " is needed");
    return object[name].get<int64_t>();
}

double JsonFields::number(const char* name) const {
    const Json& value = at(name);
    if (!value.is_number() || !std::isfinite(value.get<double>()) || value.get<double>() < 0)
        refuse(name, "a number of at least 0 is needed");
    return value.get<double>();
}

double JsonFields::positive(const char* name, double most) const {
    const double value = number(name);
    if (value <= 0 || value > most) refuse(name, strf("a number above 0 and at most %g is needed", most));
    return value;
}

bool JsonFields::boolean(const char* name) const {
    if (!at(name).is_boolean()) refuse(name, "true or false is needed");
    return object[name].get<bool>();
}

std::string JsonFields::text(const char* name) const {
    if (!at(name).is_string()) refuse(name, "text is needed");
    return object[name].get<std::string>();
}

JsonFields JsonFields::child(const char* name) const {
    if (!at(name).is_object()) refuse(name, "an object is needed");
    return {object[name], where + ": " + name};
}

const Json& JsonFields::list(const char* name) const {
    if (!at(name).is_array()) refuse(name, "a list is needed");
    return object[name];
}

std::vector<int64_t> JsonFields::integers(const char* name, int64_t low, int64_t high) const {
    std::vector<int64_t> values;
    for (const Json& value : list(name)) {
        if (!is_within(value, low, high)) refuse(name, "whole numbers " + range_text(low, high) + " are needed");
        values.push_back(value.get<int64_t>());
    }
    return values;
}
