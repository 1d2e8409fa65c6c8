// Token shards and the order in which samples are read from them.
// A sample is seq_length + 1 consecutive tokens of one shard; sample number s of a run is a pure function of
// (shards, weights, seq_length, seed, s): it depends on no rank, micro-batch or earlier read. One global cursor, the
// number of samples consumed, is the whole state.
// A blend of sources (blend.h) gives each the share of samples that its weight says. A source that runs out begins its
// next epoch, in another order, while the others go on in theirs.
// Synthetic tokens take the place of shards for timing alone: tokens of sample s are a function of (vocab_size,
// seed, s), frequent and rare ones as in text (Zipf's law), without end and without epochs.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "llmc/data/shards.h"

struct DataConfig {
    std::vector<std::string> globs;  // each must match at least one file; or weights and globs, as blend.h has them
    std::string token_dtype;         // for headerless shards: "uint16" or "uint32"
    int64_t seq_length = 0;
    int64_t vocab_size = 0;  // an id at or above it is refused, naming shard and offset
    uint64_t seed = 0;
    bool shuffle = true;    // false: shard order, for evaluation
    bool check_ids = true;  // scan every token id at start
    bool documents = false;  // every shard must name the token that separates documents, the same one
    bool synthetic = false;  // no shards; globs are empty
};

// The shards of one weight; all of them without weights.
struct SourceInfo {
    std::string name;        // its globs
    std::string weight;      // as it was written; empty without weights
    double share = 1;        // of the samples of a run
    int64_t parts = 1;       // the same as a whole number of parts (blend.h)
    int64_t shards = 0, samples = 0;
};

class DataLoader {
public:
    // Opens, maps and checks every shard. Errors (exit 2) name file and offset.
    explicit DataLoader(const DataConfig& config);
    ~DataLoader();

    int64_t samples_per_epoch() const;   // of all sources; synthetic: the largest int64
    int64_t total_tokens() const;
    int64_t seq_length() const;
    int32_t separator() const;   // of documents; -1 unless it was asked for
    const std::vector<ShardInfo>& shards() const;
    const std::vector<SourceInfo>& sources() const;   // synthetic: none
    // Samples of a source among the first n of a run.
    int64_t samples_of(int64_t source, int64_t n) const;

    // Sample number `sample` (any int64 >= 0; each epoch of a source has its own order):
    // writes seq_length inputs and the seq_length targets that follow them, kIgnoreIndex where a loss mask says so.
    // Returns the number of counted targets (those that are not kIgnoreIndex).
    int64_t read(int64_t sample, int32_t* inputs, int32_t* targets) const;

    // Ask the operating system to page in samples [first, first + count) in the background. Like read,
    // callable from any thread.
    void prefetch(int64_t first, int64_t count) const;

    // JSON text with name (without its folder), size and fingerprint of each shard, and the weights, for the
    // checkpoint; check_fingerprint returns "" or one line naming the first shard that is missing, new, reordered or
    // changed, or the weights if they did.
    std::string fingerprint_json() const;
    std::string check_fingerprint(const std::string& json) const;

private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

// One line a source of a blend: its share, and how often a run of `samples` samples reads it; and one about loss masks.
// Nothing without weights and masks.
std::vector<std::string> describe_data(const DataLoader& loader, int64_t samples);

// Error (exit 2) unless `needed` samples can be had without reading one of them twice; `what` says for what, e.g.
// "one step of 512 sequences".
void require_samples(const DataLoader& loader, int64_t needed, const char* what);

// Documents of B sequences of T tokens. out (2, B, T): the first position of each token's document within its
// sequence, and the position after its last. The separator is the first token of a document, as in our shards' sidecars
// and llm.c's shards.
void mark_documents(const int32_t* tokens, int64_t B, int64_t T, int32_t separator, int32_t* out);

// Position `index` of epoch `epoch` in [0, n): for a fixed (n, seed, epoch) a permutation of [0, n) as index
// runs over it, computed without storing it. n >= 1.
int64_t permuted_index(int64_t index, int64_t n, uint64_t seed, int64_t epoch);

// order[i] = row numbers 0..n-1 sorted by tokens[row], ties by row number (for embedding_backward). Ids
// outside [0, vocab_size) sort as if they were vocab_size. scratch is resized as needed.
void sort_rows_by_token(const int32_t* tokens, int64_t n, int64_t vocab_size, int32_t* order,
                        std::vector<int64_t>& scratch);
