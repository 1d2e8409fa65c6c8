// Merges the reports of several ranks into one.
#pragma once
#include <cstdint>
#include <cstring>

// Merges values of two reports in unaligned memory. join(mine, theirs) updates each of the `bytes` / sizeof(T) values
// at `to` by the corresponding one at `from`. Both pointers are moved behind these values.
template <typename T, typename Join> void merge_values(char*& to, const char*& from, int64_t bytes, const Join& join) {
    for (const char* const end = from + bytes; from != end; to += sizeof(T), from += sizeof(T)) {
        T mine, theirs;
        std::memcpy(&mine, to, sizeof(T));
        std::memcpy(&theirs, from, sizeof(T));
        join(mine, theirs);
        std::memcpy(to, &mine, sizeof(T));
    }
}
