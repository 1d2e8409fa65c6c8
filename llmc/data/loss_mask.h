// Loss masks: which tokens of a shard count as targets. NAME.mask next to the shard NAME.bin has a header of 32 bytes
// {magic "LOSSMASK", uint64 version 1, uint64 tokens, uint64 tokens that count} and one bit per token, lowest bit
// first; 1 means that it counts. Errors have exit code 2.
#pragma once
#include <cstdint>
#include <optional>
#include <string>

#include "llmc/data/shards.h"

class LossMask {
public:
    // Returns the mask of a shard with `tokens` tokens, if it has one. If the file is missing although the sidecar
    // names a mask, that is an error: the run would train on tokens that were to be excluded.
    static std::optional<LossMask> of_shard(const std::string& shard, int64_t tokens);

    bool counts(int64_t token) const { return bits_[token / 8] >> (token % 8) & 1; }
    int64_t counted() const { return counted_; }
    uint64_t fingerprint() const;   // XXH3 of the file

private:
    LossMask(const std::string& path, int64_t tokens);

    MappedFile file_;
    const uint8_t* bits_ = nullptr;
    int64_t counted_ = 0;
};
