// Token shards and the order in which samples are read from them.
// A sample is seq_length + 1 consecutive tokens of one shard or, with DataConfig::align, whole documents and padding
// whose targets are ignored (document_packing.h). Sample s of a run is a pure function of
// (shards, weights, seq_length, seed, s), independent of rank, micro-batch and earlier reads. The number of samples
// consumed is the only state.
// In a blend (blend.h) each source has the share of samples that its weight defines. A source that is used up starts
// its next epoch in another order, independent of the other sources.
// Synthetic tokens replace shards for timing only: the tokens of sample s are a function of (vocab_size, seed, s), with
// frequencies as in text (Zipf's law). They never end and have no epochs.
#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "llmc/data/blend.h"
#include "llmc/data/document_packing.h"
#include "llmc/data/loss_mask.h"
#include "llmc/data/shards.h"

struct DataConfig {
    std::vector<std::string> globs;  // globs, or weights and globs (blend.h); each glob must match a file
    std::string token_dtype;         // of headerless shards: "uint16" or "uint32"
    int64_t seq_length = 0;
    int64_t vocab_size = 0;  // ids >= vocab_size are an error
    uint64_t seed = 0;
    bool shuffle = true;    // false: shard order, for evaluation
    bool check_ids = true;   // check every token id at start
    bool documents = false;  // find where documents begin: read() says it, and a shard that does not is an error
    std::optional<bool> align;   // samples are whole documents; empty: of shards with loss masks and known documents
    bool synthetic = false;  // no shards; globs is empty
};

// The shards of one weight; all of them without weights.
struct SourceInfo {
    std::string name;        // its globs
    std::string weight;      // as written by the user; empty without weights
    double share = 1;        // of the samples of a run
    int64_t parts = 1;       // share as an integer (blend.h)
    int64_t shards = 0, samples = 0;
};

class DataLoader {
public:
    // Opens and checks every shard. Errors (exit 2) name file and offset.
    explicit DataLoader(const DataConfig& config);

    int64_t samples_per_epoch() const { return first_sample_.back(); }   // of all sources; synthetic: the largest int64
    int64_t total_tokens() const { return total_tokens_; }
    int64_t seq_length() const { return config_.seq_length; }
    const std::vector<ShardInfo>& shards() const { return infos_; }
    const std::vector<SourceInfo>& sources() const { return sources_; }   // synthetic: none
    const PackingCounts& packed() const { return packed_; }
    bool may_align() const { return config_.align.value_or(true); }
    // Returns the number of samples of a source among the first n of a run.
    int64_t samples_of(int64_t source, int64_t n) const { return order_.count(source, n); }

    // Reads sample `sample` (any int64 >= 0): writes seq_length inputs, and as many targets, which are the tokens one
    // place later or kIgnoreIndex where the loss mask is 0. Returns the number of targets that are not kIgnoreIndex.
    // With DataConfig::documents, starts (seq_length, unless null) = whether a document begins with each input.
    // Exit 2 if the shard was truncated since it was opened.
    int64_t read(int64_t sample, int32_t* inputs, int32_t* targets, uint8_t* starts = nullptr) const;

    // Asks the operating system to load samples [first, first + count) in the background. Thread-safe, like read.
    void prefetch(int64_t first, int64_t count) const;

    // Returns JSON for the checkpoint: name (without directory), size and fingerprint of each shard, the weights and
    // the vocabulary.
    // check_fingerprint compares such JSON with this data. It returns "", or one line about the first shard that is
    // missing, new, reordered or changed, or about changed weights.
    std::string fingerprint_json() const;
    std::string check_fingerprint(const std::string& json) const;

    // Returns JSON for the log, by which runs are compared: one fingerprint of all samples in their order, the number
    // of tokens, and the tokenizer's name and hash if they are known. It has no names of files.
    std::string identity_json() const;

private:
    // The tokens of a sample. Samples of a shard without packing start at multiples of seq_length: the last target of
    // one is the first input of the next. So every token is a target once per epoch, except the first of a shard and
    // those after its last whole sample.
    struct Location {
        const Shard* shard;
        const std::optional<LossMask>* mask;
        std::vector<TokenRange> ranges;   // together seq_length + 1 tokens, or fewer if the sample is padded
    };
    Location locate(int64_t sample) const;
    void read_mask(ShardInfo& info);
    void divide(Shard& shard);   // into samples
    uint64_t seed_of(int64_t source) const;
    std::vector<std::string> find_shards();

    DataConfig config_;
    std::vector<SourceInfo> sources_;
    std::vector<int64_t> first_of_source_{0};   // (sources + 1): prefix sums of samples
    BlendOrder order_{std::vector<int64_t>{1}};
    std::vector<Shard> shards_;
    std::vector<std::optional<LossMask>> masks_;            // of the shards
    std::vector<std::optional<DocumentPacking>> packings_;   // of the shards
    std::vector<ShardInfo> infos_;
    std::vector<int64_t> first_sample_{0};   // (shards + 1): prefix sums of samples
    int64_t total_tokens_ = 0;
    PackingCounts packed_;
};

// Returns one line per source of a blend, with its share and how often a run of `samples` samples reads it, and lines
// on loss masks and documents. Returns no lines if there are neither weights nor masks.
std::vector<std::string> describe_data(const DataLoader& loader, int64_t samples);

// Calls `read`, which reads samples. Returns "", or the error if data cannot be read any more, so that the caller can
// end together with the other ranks. Other errors are thrown.
std::string reading_error(const std::function<void()>& read);

// Fails (exit 2) if there are fewer than `needed` different samples. `what` says in the error what needs them, e.g.
// "one step of 512 sequences".
void require_samples(const DataLoader& loader, int64_t needed, const char* what);

// Finds the documents in B sequences of T tokens. out (2, B, T): start and end (exclusive) of each token's document
// within its sequence. starts (B, T): whether a document begins with the token.
void mark_documents(const uint8_t* starts, int64_t B, int64_t T, int32_t* out);

// out (B, T) = the position of each token within its document; documents as in mark_documents.
void restart_positions(const uint8_t* starts, int64_t B, int64_t T, int32_t* out);

// Returns element `index` of a pseudo-random permutation of [0, n) that (n, seed, epoch) define; n >= 1. The
// permutation is not stored.
int64_t permuted_index(int64_t index, int64_t n, uint64_t seed, int64_t epoch);

// order = rows 0..n-1 sorted by tokens[row], then by row, for embedding_backward. Ids outside [0, vocab_size) come
// last. scratch is resized as needed.
void sort_rows_by_token(const int32_t* tokens, int64_t n, int64_t vocab_size, int32_t* order,
                        std::vector<int64_t>& scratch);
