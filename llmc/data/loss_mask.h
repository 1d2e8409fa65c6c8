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
    // Returns the mask of a shard with `tokens` tokens, if it has one. It is an error if the sidecar names a mask and
    // the file is missing, because the run would train on tokens that were to be excluded.
    static std::optional<LossMask> of_shard(const std::string& shard, int64_t tokens);

    // Sets the targets (count), which are the tokens from `first` on, to kIgnoreIndex where the mask is 0. Exit 2 if
    // the file was truncated.
    void apply(int64_t first, int64_t count, int32_t* targets) const;
    int64_t counted() const { return counted_; }
    uint64_t fingerprint() const { return fingerprint_; }   // XXH3 of the file

private:
    LossMask(const std::string& path, int64_t tokens);

    InputFile file_;
    int64_t counted_ = 0;
    uint64_t fingerprint_ = 0;
};
