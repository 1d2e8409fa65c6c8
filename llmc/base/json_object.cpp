#include "llmc/base/json_object.h"

#include <algorithm>
#include <cctype>

#include "llmc/base/check.h"

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
    if (c == '\'') return "a single quote: names and texts stand in double quotes";
    if (word_at(text, byte, "True") || word_at(text, byte, "False") || word_at(text, byte, "None"))
        return "a word of Python: write true, false or null";
    if (std::isalpha(static_cast<unsigned char>(c)))
        return "a word without quotes: names and texts stand in double quotes";
    if (reason.find("expected ',' or") != std::string::npos || c == '"') return strf("%c where a comma is missing", c);
    if (std::isprint(static_cast<unsigned char>(c))) return strf("an unexpected %c", c);
    return strf("an unexpected byte 0x%02x", static_cast<unsigned char>(c));
}

// What a file is by its first bytes, "" if they are unknown.
std::string known_file_type(const std::string& first_bytes) {
    for (const FileType& type : kFileTypes)
        if (first_bytes.starts_with(type.first_bytes)) return type.name;
    return "";
}

// The place of the first byte that is not UTF-8, the size of the text if there is none.
size_t first_not_utf8(const std::string& text) {
    for (size_t i = 0; i < text.size();) {
        const auto at = [&](size_t k) { return k < text.size() ? static_cast<unsigned char>(text[k]) : 0u; };
        const unsigned c = at(i), next = at(i + 1);
        const size_t more = c < 0x80 ? 0 : c >= 0xc2 && c < 0xe0 ? 1 : c >= 0xe0 && c < 0xf0 ? 2 : 3;
        if (c >= 0x80 && (c < 0xc2 || c > 0xf4)) return i;
        for (size_t k = 1; k <= more; k++)
            if ((at(i + k) & 0xc0) != 0x80) return i;
        // Forms that are too long, surrogates, and what lies beyond U+10FFFF.
        if ((c == 0xe0 && next < 0xa0) || (c == 0xed && next > 0x9f) || (c == 0xf0 && next < 0x90)
            || (c == 0xf4 && next > 0x8f))
            return i;
        i += more + 1;
    }
    return text.size();
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

}  // namespace

Json parse_json_object(const std::string& text, const std::string& file, const Json::parser_callback_t& filter) {
    require_text(text, file);
    try {
        Json object = Json::parse(text, filter, true, true);
        const char* kind = object.is_array() ? "a list" : object.is_number() ? "a number" : "a text or word";
        REQUIRE(object.is_object(), "%s: not a JSON object {\"name\": value, ...}, but %s", file.c_str(), kind);
        return object;
    } catch (const Json::parse_error& error) {
        const size_t byte = error.byte > 0 ? error.byte - 1 : 0;
        FAIL(kExitBadInput, "%s: %s: not JSON: %s", file.c_str(), place_of(text, byte).c_str(),
             cause(text, byte, error.what()).c_str());
    } catch (const Json::exception&) {   // a number that no double holds
        FAIL(kExitBadInput, "%s: not JSON: a number is too large", file.c_str());
    }
}
