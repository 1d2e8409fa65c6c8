#include "llmc/base/json_object.h"

#include <algorithm>
#include <cctype>
#include <cmath>

#include "llmc/base/check.h"
#include "llmc/base/system/files.h"

namespace {

using Json = nlohmann::json;

struct FileType {
    std::string first_bytes;
    const char* name;
};
const FileType kFileTypes[] = {
    {"%PDF-", "a PDF"},
    {"\x1f\x8b", "a gzip file"},
    {"\x28\xb5\x2f\xfd", "a zstd file"},
    {"BZh", "a bzip2 file"},
    {{"\xfd""7zXZ\0", 6}, "an xz file"},
    {"PK\x03\x04", "a zip archive"},
    {"PAR1", "a parquet file"},
    {"\x89PNG", "a PNG picture"},
    {"\xff\xfe", "text in UTF-16"},
    {"\xfe\xff", "text in UTF-16"},
};

// "line 3, column 7" of a byte; columns are bytes.
std::string place_of(const std::string& text, size_t byte) {
    const auto end = text.begin() + static_cast<std::ptrdiff_t>(std::min(byte, text.size()));
    const auto line = std::count(text.begin(), end, '\n') + 1;
    const size_t before = text.rfind('\n', byte == 0 ? 0 : byte - 1);
    const size_t begin = before == std::string::npos || before >= byte ? 0 : before + 1;
    return strf("line %lld, column %zu", ll(line), byte - begin + 1);
}

bool word_at(const std::string& text, size_t place, const std::string& word) {
    return text.compare(place, word.size(), word) == 0;
}

// What is wrong at a byte where the parser stopped, and what to write instead. `reason` is the library's message.
std::string cause(const std::string& text, size_t byte, const std::string& reason) {
    if (reason.find("surrogate") != std::string::npos)
        return "half of a surrogate pair (\\ud800 to \\udfff), which is no character: write both halves, or the "
               "character";
    if (reason.find("control character") != std::string::npos)
        return "a control character in a text: a line break is written \\n, a tab \\t";
    if (reason.find("unexpected end of input") != std::string::npos || byte >= text.size())
        return "it ends too early: a quote or bracket is not closed";
    const char c = text[byte];
    size_t before = byte;
    while (before > 0 && std::isspace(static_cast<unsigned char>(text[before - 1]))) before--;
    if ((c == '}' || c == ']') && before > 0 && text[before - 1] == ',')
        return strf("a comma before %c: JSON allows none after the last entry", c);
    if (c == '\'') return "a single quote: names and texts need double quotes";
    if (word_at(text, byte, "True") || word_at(text, byte, "False") || word_at(text, byte, "None"))
        return "a word of Python: write true, false or null";
    if (std::isalpha(static_cast<unsigned char>(c)))
        return "a word without quotes: names and texts need double quotes";
    if (reason.find("expected ',' or") != std::string::npos || c == '"') return strf("%c where a comma is missing", c);
    if (std::isprint(static_cast<unsigned char>(c))) return strf("an unexpected %c", c);
    return strf("an unexpected byte 0x%02x", static_cast<unsigned char>(c));
}

// The type of a file from its first bytes, "" if it is unknown.
std::string known_file_type(const std::string& first_bytes) {
    for (const FileType& type : kFileTypes)
        if (first_bytes.starts_with(type.first_bytes)) return type.name;
    return "";
}

// The place of the first byte that is not UTF-8, the size of the text if there is none.
size_t first_not_utf8(const std::string& text) {
    size_t i = 0;
    for (size_t bytes = 1; i < text.size() && bytes > 0; i += bytes)
        bytes = static_cast<unsigned char>(text[i]) < 0x80 ? 1 : utf8_bytes(text, i);   // ASCII goes fast
    return i;
}

// Requires that the file can be text.
void require_text(const std::string& text, const std::string& file) {
    const std::string type = known_file_type(text);
    REQUIRE(type.empty(), "%s: byte 0: this is %s, not JSON%s", file.c_str(), type.c_str(),
            type == "text in UTF-16" ? ": save it as UTF-8" : ": name a JSON file");
    const bool empty = text.find_first_not_of(" \t\r\n") == std::string::npos;
    REQUIRE(!empty, "%s: not JSON: the file is empty; {} would be one without entries", file.c_str());
    const size_t zero = text.find('\0'), strange = first_not_utf8(text);
    REQUIRE(zero == std::string::npos || zero > strange, "%s: byte %zu: not JSON: a NUL byte; name a JSON file in "
            "UTF-8", file.c_str(), zero);
    REQUIRE(strange == text.size(), "%s: byte %zu: not JSON: 0x%02x is not UTF-8; save the file as UTF-8", file.c_str(),
            strange, static_cast<unsigned char>(text[strange]));
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

// Builds the tree from the parser's events and stops at the first that is not wanted.
class TreeBuilder : public nlohmann::json_sax<Json> {
public:
    explicit TreeBuilder(const std::string& only) : only_(only) {}

    Json root;
    // One of these after parsing failed: the byte where it stopped and the library's reason, or what is wrong.
    size_t byte = 0;
    std::string reason, wrong;
    bool done = false;   // the value of `only` is complete

    bool start_object(std::size_t) override { return open(Json::object()); }
    bool start_array(std::size_t) override { return open(Json::array()); }
    bool end_object() override { return close(); }
    bool end_array() override { return close(); }
    bool key(string_t& name) override {
        if (open_.size() == 1) first_key_ = name;
        const auto [slot, is_new] = open_.back()->emplace(name, nullptr);
        slot_ = &*slot;
        return is_new || fail("\"" + printable(name) + "\" is there twice");
    }
    bool null() override { return put(Json()); }
    bool boolean(bool value) override { return put(value); }
    bool number_integer(number_integer_t value) override { return put(value); }
    bool number_unsigned(number_unsigned_t value) override { return put(value); }
    bool number_float(number_float_t value, const string_t&) override { return put(value); }
    bool string(string_t& value) override { return put(std::move(value)); }
    bool binary(binary_t&) override { return fail("binary data"); }
    bool parse_error(std::size_t place, const std::string&, const nlohmann::detail::exception& error) override {
        constexpr int kOutOfRange = 406;   // a number that no double holds
        if (error.id == kOutOfRange) return fail("not JSON: a number is too large");
        byte = place > 0 ? place - 1 : 0;
        reason = error.what();
        return false;
    }

private:
    bool fail(const std::string& text) {
        wrong = text;
        return false;
    }
    // Stores the next value and returns its address. The values of a list or object move only while none of its
    // children is open, so the addresses in open_ stay valid.
    Json& place(Json value) {
        if (open_.empty()) return root = std::move(value);
        if (open_.back()->is_object()) return *slot_ = std::move(value);
        auto& list = open_.back()->get_ref<Json::array_t&>();
        return list.emplace_back(std::move(value));
    }
    bool open(Json value) {
        if (open_.size() >= kMaxJsonDepth)
            return fail(strf("\"%s\" is nested deeper than %d levels", printable(first_key_).c_str(), kMaxJsonDepth));
        if (open_.empty() && value.is_array()) return not_an_object("a list");
        open_.push_back(&place(std::move(value)));
        return true;
    }
    bool close() {
        open_.pop_back();
        return keep_going();
    }
    bool put(Json value) {
        if (open_.empty()) return not_an_object(value.is_number() ? "a number" : "a text or word");
        if (open_.size() > 1 && !only_.empty() && first_key_ != only_) return true;   // a million offsets, say
        place(std::move(value));
        return keep_going();
    }
    // Called after each value. Returns false, which ends the parsing, if it was the value of `only`; drops the other
    // values of the first level.
    bool keep_going() {
        if (only_.empty() || open_.size() != 1) return true;
        done = first_key_ == only_;
        if (!done) root.erase(first_key_);
        return !done;
    }
    bool not_an_object(const char* kind) {
        return fail(strf("not a JSON object {\"name\": value, ...}, but %s", kind));
    }

    const std::string& only_;
    std::vector<Json*> open_;   // from the root to the innermost
    Json* slot_ = nullptr;      // where the value of the latest key goes
    std::string first_key_;     // the latest key of the first level
};

}  // namespace

Json parse_json_object(const std::string& text, const std::string& file, const std::string& only) {
    require_text(text, file);
    TreeBuilder tree(only);
    const bool whole = Json::sax_parse(text, &tree, nlohmann::detail::input_format_t::json, true, true) || tree.done;
    REQUIRE(tree.wrong.empty(), "%s: %s", file.c_str(), tree.wrong.c_str());
    REQUIRE(whole, "%s: %s: not JSON: %s", file.c_str(), place_of(text, tree.byte).c_str(),
            cause(text, tree.byte, tree.reason).c_str());
    return only.empty() ? std::move(tree.root) : tree.root.value(only, Json());
}

Json read_json_object(const std::string& path, int64_t max_bytes, const std::string& only) {
    return parse_json_object(read_text_file(path, max_bytes), path, only);
}

Json parse_json_line(const std::string& line) {
    const std::string all;
    TreeBuilder tree(all);
    return Json::sax_parse(line, &tree) ? std::move(tree.root) : Json();
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
