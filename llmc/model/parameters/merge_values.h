// Reports of several ranks become one.
#pragma once
#include <cstdint>
#include <cstring>

// Of two reports in unaligned memory: join(mine, theirs) changes each of the `bytes` / sizeof(T) values at `to`, given
// the one at `from`. Both pointers move behind these values.
template <typename T, typename Join> void merge_values(char*& to, const char*& from, int64_t bytes, const Join& join) {
    for (const char* const end = from + bytes; from != end; to += sizeof(T), from += sizeof(T)) {
        T mine, theirs;
        std::memcpy(&mine, to, sizeof(T));
        std::memcpy(&theirs, from, sizeof(T));
        join(mine, theirs);
        std::memcpy(to, &mine, sizeof(T));
    }
}
