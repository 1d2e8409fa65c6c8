// Samples of whole documents: which documents of a shard share a sample, so that none is cut that fits into one.
#pragma once
#include <cstdint>
#include <vector>

#include "llmc/data/shards.h"

// Consecutive tokens of a shard.
struct TokenRange {
    int64_t first, count;
};

// What was packed, over all shards.
struct PackingCounts {
    int64_t shards = 0, tokens = 0, samples = 0, documents = 0;
    int64_t cut = 0;          // documents with more than seq_length + 1 tokens, or begun in the shard before
    int64_t cut_tokens = 0;   // that follow a cut
    int64_t padding = 0;      // inputs without a token
};

// Where documents begin in a shard whose find_documents has been called.
std::vector<int64_t> document_starts(const Shard& shard);

class DocumentPacking {
public:
    // Packs the documents of a shard of `tokens` tokens into samples of at most seq_length + 1 tokens. A sample gets
    // the first of a window of documents and then, as long as one fits, the longest that fits. So samples keep the
    // shard's order, except within the window. Adds to counts.
    DocumentPacking(std::vector<int64_t> starts, int64_t tokens, int64_t seq_length, PackingCounts& counts);

    int64_t samples() const { return static_cast<int64_t>(ends_.size()); }
    // Tokens of the documents of a sample, in the order in which they stand in it.
    std::vector<TokenRange> sample(int64_t index) const;

private:
    std::vector<TokenRange> ranges_;
    std::vector<size_t> ends_;   // (samples): of their ranges
};
