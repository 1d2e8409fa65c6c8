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

// Calls f(b, begin, length) for every document.
template <typename F> void for_each_document(const Lengths& lengths, F&& f) {
    for (size_t b = 0; b < lengths.size(); b++) {
        int64_t begin = 0;
        for (int64_t length : lengths[b]) f(static_cast<int64_t>(b), begin, length), begin += length;
    }
}

// Around tiles of 16, 32, 64, 128 and 192 rows: documents of one token, ending on and next to tile borders, many in
// one tile, one over many tiles, and sequences cut in different ways. All have T = 400.
inline const std::vector<Lengths> kBorders = {
    {{400}, {1, 399}}, {{399, 1}, {1, 1, 1, 61, 64, 64, 1, 15, 192}}, {{63, 1, 64, 65, 207}, {127, 1, 1, 127, 144}},
    {equal_parts(400, 1), equal_parts(400, 7)}, {equal_parts(400, 16), equal_parts(400, 128)},
    {{129, 271}, {191, 1, 1, 207}},
};

}  // namespace documents_test
