// Numbers and commands in messages. Includes nothing of llmc.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

// Returns "1 shard" or "2 shards". `plural` is needed if it is not the singular with an s.
inline std::string count_text(int64_t count, const std::string& singular, const std::string& plural = "") {
    return std::to_string(count) + " " + (count == 1 ? singular : plural.empty() ? singular + "s" : plural);
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
