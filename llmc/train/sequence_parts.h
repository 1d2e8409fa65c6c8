// The micro-batches that a rank reads. With context parallelism the ranks of a group read the same sequences and take a
// part of each.
#pragma once
#include <cstdint>
#include <vector>

#include "llmc/config/config.h"
#include "llmc/data/dataloader.h"
#include "llmc/parallel/comm/comm.h"

// part (B, T / ranks) = the part of whole sequences (B, T) that rank `rank` of `ranks` has.
template <typename V> void take_part(const V* whole, int64_t B, int64_t T, const World& context, V* part) {
    const int64_t length = T / context.ranks;
    for (int64_t b = 0; b < B; b++) {
        const V* from = whole + b * T + context.rank * length;
        std::copy(from, from + length, part + b * length);
    }
}

class SequenceReader {
public:
    // context: the World of the context group.
    SequenceReader(const Config& config, const World& context);

    // Where a micro-batch goes.
    struct Target {
        int32_t *tokens, *targets;   // (B, part_length)
        int32_t* documents;          // (2, B, T), see mark_documents; may be null
    };
    struct Counted {
        int64_t part = 0;    // targets of this rank's part that are not ignored
        int64_t whole = 0;   // of the whole sequences
    };
    // Reads the samples of a micro-batch, from `first` on.
    Counted read(const DataLoader& loader, int64_t first, const Target& to);
    // (B, T) whole sequences of the latest read().
    const int32_t* tokens() const { return tokens_.data(); }

private:
    const int64_t B_, T_;
    const World context_;
    std::vector<int32_t> tokens_, targets_;   // (B, T) whole sequences
};
