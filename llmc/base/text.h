// Numbers in messages. Includes nothing of llmc.
#pragma once
#include <cstdint>
#include <string>

// Returns "1 shard" or "2 shards". `plural` is needed if it is not the singular with an s.
inline std::string count_text(int64_t count, const std::string& singular, const std::string& plural = "") {
    return std::to_string(count) + " " + (count == 1 ? singular : plural.empty() ? singular + "s" : plural);
}
