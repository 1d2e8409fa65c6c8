// Numbers, commands and text from outside in messages. Includes nothing of llmc.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

// Returns "1 shard" or "2 shards". `plural` is needed if it is not the singular with an s.
inline std::string count_text(int64_t count, const std::string& singular, const std::string& plural = "") {
    return std::to_string(count) + " " + (count == 1 ? singular : plural.empty() ? singular + "s" : plural);
}

// Returns the words with the separator between them.
inline std::string list_text(const std::vector<std::string>& words, const std::string& separator) {
    std::string text;
    for (const std::string& word : words) text += (&word == &words.front() ? "" : separator) + word;
    return text;
}

// Returns a word as a shell reads it back: quoted if it has other characters than letters, digits and @%+=:,./_-
// (as Python's shlex.quote).
inline std::string shell_quoted(const std::string& word) {
    const char* plain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789@%+=:,./_-";
    if (!word.empty() && word.find_first_not_of(plain) == std::string::npos) return word;
    std::string quoted = "'";
    for (char c : word) quoted += c == '\'' ? "'\"'\"'" : std::string(1, c);
    return quoted + "'";
}

// Returns a command that can be pasted into a shell.
inline std::string shell_command(const std::vector<std::string>& words) {
    std::string line;
    for (const std::string& word : words) line += (line.empty() ? "" : " ") + shell_quoted(word);
    return line;
}

// ---- text from a file, option or environment, which may hold any bytes ----

// At most this many characters of a value, and of a whole message, are shown. "..." replaces the middle of longer ones,
// so that both ends of a long path remain. In a message, each word between spaces counts as a value.
inline constexpr size_t kShownOfValue = 200, kShownOfMessage = 2000;

// The number of bytes of the UTF-8 character at `byte`, 0 if there is none.
size_t utf8_bytes(const std::string& text, size_t byte);
// Escapes what a terminal would act on. Control characters except those in `kept`, and bytes that are not UTF-8, become
// \x1b and the like; line separators and characters that change the direction of text become \u202e and the like.
std::string escaped(const std::string& text, const std::string& kept = "");
// Replaces the middle of a text of more than `most` characters by "...".
std::string shortened(const std::string& text, size_t most = kShownOfValue);
// A value as it appears in quotes within a message: escaped, also its quotes and backslashes, and shortened.
std::string printable(const std::string& text);
// Makes a whole message safe to print as one line: escaped and shortened. Every Error and every line of the log on the
// screen passes through it; a second call changes nothing.
std::string message_line(const std::string& text);
