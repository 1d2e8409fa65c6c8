// Loss masks: which tokens of a shard count as targets. Beside shard NAME.bin, NAME.mask has 32 bytes of header {magic
// "LOSSMASK", uint64 version 1, uint64 tokens, uint64 tokens that count} and then a bit a token, the first in the
// lowest bit of the first byte; 1 counts. Every error is an Error with exit code 2.
#pragma once
#include <cstdint>
#include <optional>
#include <string>

#include "llmc/data/shards.h"

class LossMask {
public:
    // The mask of a shard with this many tokens; none if there is no such file. A sidecar that speaks of a mask and a
    // file that is not there are an error: the run would learn from what was meant to be left out.
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
