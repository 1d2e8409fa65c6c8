// The micro-batches that a rank reads. With context parallelism the ranks of a group read the same sequences and take a
// part of each.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "llmc/data/dataloader.h"
#include "llmc/parallel/comm/comm.h"
#include "llmc/train/host_inputs.h"

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
    // context: the World of the context group. Owns none of its arguments.
    SequenceReader(const Config& config, const World& context);

    struct Counted {
        int64_t part = 0;    // targets of this rank's part that are not ignored
        int64_t whole = 0;   // of the whole sequences
    };
    // Reads the samples of a micro-batch, from `first` on, and sets its inputs.
    Counted read(const DataLoader& loader, int64_t first, const HostInputs& to);
    // Sets those inputs of a micro-batch that are not null, from tokens and targets (B, T) of its whole sequences.
    // starts (B, T): see DataLoader::read.
    Counted set(const int32_t* tokens, const int32_t* targets, const uint8_t* starts, const HostInputs& to);
    // The same without a counted target. Its tokens are real ones: all going to the same experts, those of a made-up
    // text might be more than --moe-capacity has memory for.
    void read_ignored(const DataLoader& loader, int64_t first, const HostInputs& to);

private:
    const int64_t B_, T_, vocab_size_;
    const World context_;
    std::vector<int32_t> tokens_, targets_, positions_;   // (B, T) of whole sequences
    std::vector<uint8_t> starts_;                         // (B, T), see DataLoader::read
    std::vector<int64_t> scratch_;                        // of sort_rows_by_token
};
