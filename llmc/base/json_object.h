// Reads JSON that comes from outside the process: --config files, config.json, checkpoints, sidecars, tokenizers, logs.
// Everything is read by these functions, so that no nesting, size or type of file can crash the process or fill its
// memory.
#pragma once
#include <cstdint>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

// The deepest nesting of lists and objects that is accepted; real files have fewer than 10 levels.
inline constexpr int kMaxJsonDepth = 64;

// The largest accepted file of each type, in bytes. In brackets is the size of the largest real ones.
inline constexpr int64_t kMaxConfigBytes = int64_t{16} << 20;       // config.json, --config (10 kB)
inline constexpr int64_t kMaxIndexBytes = int64_t{64} << 20;        // manifest.json, index of weights (200 B a tensor)
inline constexpr int64_t kMaxTokenizerBytes = int64_t{512} << 20;   // tokenizer.json (35 MB)
inline constexpr int64_t kMaxStateBytes = int64_t{1} << 30;         // state.json (12 B an amax of an FP8 history)
inline constexpr int64_t kMaxSidecarBytes = int64_t{2} << 30;       // .meta.json of a shard (12 B a document)

// Parses `text`, the content of `file`, which must be one JSON object. Comments and a byte order mark are allowed.
// Errors have exit code 2 and are one line: the file, the key or the place, and what was expected. A repeated key or
// nesting deeper than kMaxJsonDepth is an error, too, and ends parsing at once. With `only`, returns the value of this
// key of the first level, or null if there is none; the text after the value is not parsed.
nlohmann::json parse_json_object(const std::string& text, const std::string& file, const std::string& only = "");
// The same for a file. A path that is not a regular file, or a file of more than max_bytes, is refused unread.
nlohmann::json read_json_object(const std::string& path, int64_t max_bytes, const std::string& only = "");
// Parses a line of a log. Returns null unless the whole line is such an object without comments; never fails.
nlohmann::json parse_json_line(const std::string& line);
// The text of object[name]; "" if it has none, or is no object.
std::string text_of(const nlohmann::json& object, const char* name);

// Reads the fields of an object. Errors have exit code 2 and name the place, the field, its value and what is needed.
// null counts as absent, as in transformers. `object` must outlive the JsonFields.
struct JsonFields {
    const nlohmann::json& object;
    std::string where;   // "DIR/config.json", or "DIR/config.json: rope_scaling"
    std::set<std::string>* read = nullptr;   // collects the names that were asked for

    bool has(const char* name) const {
        if (read) read->insert(name);
        return object.contains(name) && !object[name].is_null();
    }
    [[noreturn]] void refuse(const char* name, const std::string& why) const;
    const nlohmann::json& at(const char* name) const;   // must be there
    int64_t integer(const char* name, int64_t low, int64_t high) const;
    double number(const char* name) const;              // finite and at least 0
    double positive(const char* name, double most) const;   // above 0
    bool boolean(const char* name) const;
    std::string text(const char* name) const;
    JsonFields child(const char* name) const;           // an object
    const nlohmann::json& list(const char* name) const;
    std::vector<int64_t> integers(const char* name, int64_t low, int64_t high) const;
    int64_t integer_or(const char* name, int64_t otherwise, int64_t low, int64_t high) const {
        return has(name) ? integer(name, low, high) : otherwise;
    }
    double number_or(const char* name, double otherwise) const { return has(name) ? number(name) : otherwise; }
    double positive_or(const char* name, double otherwise, double most) const {
        return has(name) ? positive(name, most) : otherwise;
    }
    bool boolean_or(const char* name, bool otherwise) const { return has(name) ? boolean(name) : otherwise; }
};
