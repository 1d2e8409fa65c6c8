// Suggestions for misspelt names in error messages. Includes nothing of llmc.
#pragma once
#include <algorithm>
#include <string>
#include <vector>

// Levenshtein distance: the number of insertions, deletions and substitutions that turn a into b. A word of more than
// 200 bytes is no misspelling: it gets the largest distance at once, because comparing it could take long.
inline size_t edit_distance(const std::string& a, const std::string& b) {
    if (std::max(a.size(), b.size()) > 200) return std::max(a.size(), b.size());
    std::vector<size_t> row(b.size() + 1);
    for (size_t j = 0; j <= b.size(); j++) row[j] = j;
    for (size_t i = 1; i <= a.size(); i++) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= b.size(); j++) {
            size_t up = row[j];
            row[j] = std::min({up + 1, row[j - 1] + 1, diagonal + (a[i - 1] == b[j - 1] ? 0 : 1)});
            diagonal = up;
        }
    }
    return row[b.size()];
}

// Returns the most similar of `names`, which must not be empty.
inline std::string nearest(const std::string& word, const std::vector<std::string>& names) {
    return *std::min_element(names.begin(), names.end(), [&](const std::string& a, const std::string& b) {
        return edit_distance(word, a) < edit_distance(word, b);
    });
}
