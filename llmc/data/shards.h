// Token shards on disk: which files a pattern names, how each format is recognised and checked, and a
// read-only mapping of the tokens. The order of samples is dataloader.h's business. Every error is an Error
// with exit code 2 whose line names the file and, where there is one, the byte offset.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

enum class ShardFormat { kLlmcV1, kLlmcV7, kMegatron, kRaw };

struct ShardInfo {
    std::string path;  // the .bin file
    ShardFormat format;
    int token_bytes = 0;  // 2 or 4
    int64_t tokens = 0;
    int64_t samples = 0;       // floor((tokens - 1) / seq_length); filled by the loader
    uint64_t fingerprint = 0;  // XXH3 of size, header and sampled blocks: a changed shard is noticed
    // Filled by the loader, which adds a loss mask's to the fingerprint too.
    bool masked = false;
    int64_t counted = 0;       // tokens that count as targets
};

// Read-only mapping of a whole file. Truncating the file while it is mapped ends the process with SIGBUS, as
// for every mapped file; a shard must not be rewritten in place during a run.
class MappedFile {
public:
    explicit MappedFile(const std::string& path);
    ~MappedFile();
    MappedFile(MappedFile&& other) noexcept;
    MappedFile& operator=(MappedFile&&) = delete;

    const uint8_t* data() const { return data_; }
    int64_t bytes() const { return bytes_; }
    // madvise (MADV_WILLNEED, ...) on the pages that hold [first, first + count) bytes. Only advice: no
    // error.
    void advise(int64_t first, int64_t count, int advice) const;

private:
    const uint8_t* data_ = nullptr;  // null for an empty file
    int64_t bytes_ = 0;
};

// One opened and checked shard: its header says how many tokens it has and the file really has them.
class Shard {
public:
    // A magic number in the file wins. token_dtype ("", "uint16" or "uint32") is only for a file without one.
    // A .bin next to a .idx of the same name is Megatron's: its documents are read as one stream.
    Shard(const std::string& path, const std::string& token_dtype);

    ShardInfo info;

    int64_t byte_offset(int64_t token) const { return data_offset_ + token * info.token_bytes; }
    // out[i] = token first + i, for count tokens; ids above 2^31 - 1 come out negative.
    void copy(int64_t first, int64_t count, int32_t* out) const;
    // Index of the first token in [first, first + count) whose id is not below vocab_size, or -1.
    int64_t find_bad_id(int64_t first, int64_t count, int64_t vocab_size) const;
    uint32_t token(int64_t index) const;
    // madvise on the pages of tokens [first, first + count).
    void advise(int64_t first, int64_t count, int advice) const;

private:
    MappedFile file_;
    int64_t data_offset_ = 0;

    void parse_llmc_header();
    void parse_megatron_index(const std::string& index_path);
    void parse_raw(const std::string& token_dtype);
    uint64_t compute_fingerprint() const;
};

// Expands patterns in the given order, the matches of one sorted by name. The files *.idx, *.mask and *.meta.json of a
// shard are ignored. A pattern without a match, or a file that two patterns match, is an error. If `matches` is given,
// it receives the number of files of each pattern.
std::vector<std::string> expand_globs(const std::vector<std::string>& globs, std::vector<size_t>* matches = nullptr);

// Checks every token id of every shard against vocab_size, with several threads; the error names the first
// bad one (lowest shard, then lowest offset).
void check_token_ids(const std::vector<Shard>& shards, int64_t vocab_size);
