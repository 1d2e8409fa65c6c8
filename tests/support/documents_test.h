// Shared by the attention tests of both devices: documents of given lengths in a batch.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace documents_test {

// Lengths of the documents of each sequence; those of a sequence add up to T.
using Lengths = std::vector<std::vector<int64_t>>;

// (2, B, T): AttentionForwardArgs::documents.
inline std::vector<int32_t> documents_of(const Lengths& lengths, int64_t T) {
    const size_t plane = lengths.size() * static_cast<size_t>(T);
    std::vector<int32_t> documents(2 * plane);
    size_t row = 0;
    for (const std::vector<int64_t>& sequence : lengths) {
        int64_t start = 0;
        for (int64_t length : sequence) {
            for (int64_t t = 0; t < length; t++, row++) {
                documents[row] = static_cast<int32_t>(start);
                documents[plane + row] = static_cast<int32_t>(start + length);
            }
            start += length;
        }
    }
    return documents;
}

// Documents of `length` tokens; the last one may be shorter.
inline std::vector<int64_t> equal_parts(int64_t T, int64_t length) {
    std::vector<int64_t> parts;
    for (int64_t at = 0; at < T; at += length) parts.push_back(length < T - at ? length : T - at);
    return parts;
}

inline std::string text_of(const Lengths& lengths) {
    std::string text = "documents";
    for (const std::vector<int64_t>& sequence : lengths) {
        for (int64_t length : sequence) text += " " + std::to_string(length);
        text += ";";
    }
    return text;
}

}  // namespace documents_test
