#include "llmc/base/text.h"

#include <algorithm>
#include <cstdio>

namespace {

// The code point of a character that utf8_bytes has found.
uint32_t code_point(const std::string& text, size_t byte, size_t bytes) {
    const auto at = [&](size_t k) { return static_cast<uint32_t>(static_cast<unsigned char>(text[byte + k])); };
    if (bytes == 1) return at(0);
    uint32_t code = at(0) & (0x7fu >> bytes);
    for (size_t k = 1; k < bytes; k++) code = code << 6 | (at(k) & 0x3fu);
    return code;
}

bool is_control(uint32_t code) { return code < 0x20 || (code >= 0x7f && code < 0xa0); }

// Whether a character is a direction mark, embedding, override or isolate, a line or paragraph separator, or the byte
// order mark.
bool changes_layout(uint32_t code) {
    return code == 0x61c || (code >= 0x200e && code <= 0x200f) || (code >= 0x2028 && code <= 0x202e)
           || (code >= 0x2066 && code <= 0x2069) || code == 0xfeff;
}

std::string numbered(const char* format, uint32_t value) {
    char text[16];
    std::snprintf(text, sizeof text, format, value);
    return text;
}

// Returns the offset behind `characters` characters from `byte` on. A byte that is not UTF-8 counts as a character.
size_t after(const std::string& text, size_t byte, size_t characters) {
    while (characters-- > 0 && byte < text.size()) byte += std::max<size_t>(1, utf8_bytes(text, byte));
    return byte;
}

}  // namespace

size_t utf8_bytes(const std::string& text, size_t byte) {
    const auto at = [&](size_t k) { return k < text.size() ? static_cast<unsigned char>(text[k]) : 0u; };
    const unsigned c = at(byte), next = at(byte + 1);
    if (byte >= text.size()) return 0;
    if (c < 0x80) return 1;
    if (c < 0xc2 || c > 0xf4) return 0;
    const size_t bytes = c < 0xe0 ? 2 : c < 0xf0 ? 3 : 4;
    for (size_t k = 1; k < bytes; k++)
        if ((at(byte + k) & 0xc0) != 0x80) return 0;
    // Overlong encodings, surrogates, and code points above U+10FFFF.
    const bool wrong = (c == 0xe0 && next < 0xa0) || (c == 0xed && next > 0x9f) || (c == 0xf0 && next < 0x90)
                       || (c == 0xf4 && next > 0x8f);
    return wrong ? 0 : bytes;
}

std::string escaped(const std::string& text, const std::string& kept) {
    std::string out;
    out.reserve(text.size());
    for (size_t i = 0; i < text.size();) {
        const size_t bytes = utf8_bytes(text, i);
        const uint32_t code = bytes > 0 ? code_point(text, i, bytes) : static_cast<unsigned char>(text[i]);
        const bool stays = bytes == 1 && kept.find(text[i]) != std::string::npos;
        if (!stays && (bytes == 0 || is_control(code))) out += numbered("\\x%02x", code);
        else if (!stays && changes_layout(code)) out += numbered("\\u%04x", code);
        else out.append(text, i, bytes);
        i += std::max<size_t>(1, bytes);
    }
    return out;
}

std::string shortened(const std::string& text, size_t most) {
    if (after(text, 0, most) == text.size()) return text;
    size_t characters = 0;
    for (size_t i = 0; i < text.size(); i = after(text, i, 1)) characters++;
    const size_t begin = (most - 2) / 2, end = most - 3 - begin;
    return text.substr(0, after(text, 0, begin)) + "..." + text.substr(after(text, 0, characters - end));
}

std::string printable(const std::string& text) {
    std::string out;
    for (char c : shortened(escaped(text))) out += c == '"' ? std::string("\\x22") : std::string(1, c);
    return out;
}

std::string message_line(const std::string& text) {
    const std::string whole = escaped(text);
    std::string out;
    for (size_t begin = 0; begin <= whole.size();) {
        const size_t end = std::min(whole.find(' ', begin), whole.size());
        out += shortened(whole.substr(begin, end - begin));
        if (end < whole.size()) out += ' ';
        begin = end + 1;
    }
    return shortened(out, kShownOfMessage);
}
