// Numbers in messages. Includes nothing of llmc.
#pragma once
#include <cstdint>
#include <string>

// "1 shard", "2 shards"; `plural` where it is not the singular with an s.
inline std::string count_text(int64_t count, const std::string& singular, const std::string& plural = "") {
    return std::to_string(count) + " " + (count == 1 ? singular : plural.empty() ? singular + "s" : plural);
}
