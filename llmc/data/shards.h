// Token shards on disk: file patterns, formats, their checks, and reading tokens. The order of samples is defined in
// dataloader.h. Errors have exit code 2 and name the file and, if possible, the byte offset. Reading a file that was
// truncated since it was opened is such an error.
#pragma once
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "llmc/base/system/files.h"

enum class ShardFormat { kLlmcV1, kLlmcV7, kMegatron, kRaw };

// What the .meta.json of a shard says of its tokenizer; empty or -1 where it says nothing.
struct TokenizerFacts {
    std::string name, sha256;
    std::string vocabulary;      // "bytes", or vocabulary_of a tokenizer.json (token_text.h)
    std::string chat_template;   // Jinja, of conversations
    int64_t vocab_size = -1;
    int32_t separator = -1;      // starts a document
    int32_t end_of_turn = -1;    // ends an answer of a conversation
};

struct ShardInfo {
    std::string path;  // the .bin file
    ShardFormat format;
    int token_bytes = 0;  // 2 or 4
    int64_t tokens = 0;
    int64_t samples = 0;       // floor((tokens - 1) / seq_length); filled by the loader
    uint64_t fingerprint = 0;  // XXH3 of size, header and sampled blocks, to detect a changed shard
    // Filled by the loader, which also adds the loss mask to the fingerprint.
    bool masked = false;
    int64_t counted = 0;       // tokens that count as targets
    TokenizerFacts tokenizer;
};

// Reads a value at any alignment.
template <typename T> T load(const uint8_t* bytes) {
    T value;
    std::memcpy(&value, bytes, sizeof(T));
    return value;
}

// Returns the path without a .bin suffix, to which .idx, .mask and .meta.json are appended.
inline std::string shard_stem(const std::string& path) {
    return path.ends_with(".bin") ? path.substr(0, path.size() - 4) : path;
}

// An open shard whose size has been checked against its header.
class Shard {
public:
    // A .bin with a .idx of the same name is Megatron's: its documents are read as one stream. Otherwise the magic
    // number decides; token_dtype ("", "uint16" or "uint32") applies only to a file without a magic number, and is
    // refused if the ids show another width.
    Shard(const std::string& path, const std::string& token_dtype);

    ShardInfo info;

    int64_t byte_offset(int64_t token) const { return data_offset_ + token * info.token_bytes; }
    // out[i] = token first + i, for count tokens; ids above 2^31 - 1 become negative.
    void copy(int64_t first, int64_t count, int32_t* out) const;
    // Returns the index of the first token in [first, first + count) whose id is >= vocab_size, or -1.
    int64_t find_bad_id(int64_t first, int64_t count, int64_t vocab_size) const;
    uint32_t token(int64_t index) const;
    // Prepares mark_starts: reads the documents of a Megatron index; in other formats a document begins at each
    // `separator`.
    void find_documents(int32_t separator);
    // starts[i] = whether a document begins at token first + i, for the count tokens there, `ids`.
    void mark_starts(int64_t first, int64_t count, const int32_t* ids, uint8_t* starts) const;
    // Calls posix_fadvise for tokens [first, first + count).
    void advise(int64_t first, int64_t count, int advice) const;

private:
    InputFile file_;
    int64_t data_offset_ = 0;
    int32_t separator_ = -1;
    std::vector<int64_t> starts_;   // Megatron: the first tokens of documents, ascending

    // head: the first bytes of the file, at most 4096.
    void parse_llmc_header(const std::vector<uint8_t>& head);
    void parse_megatron_index(const std::string& index_path);
    void parse_raw(const std::vector<uint8_t>& head, const std::string& token_dtype);
    void require_tokens(int64_t first, int64_t count) const;
    uint64_t compute_fingerprint() const;
};

// Expands patterns in order, and sorts the matches of each by name. Ignores *.idx, *.mask and *.meta.json. A pattern
// without a match is an error, and so is a file that two patterns match. If `matches` is given, it receives the number
// of files of each pattern.
std::vector<std::string> expand_globs(const std::vector<std::string>& globs, std::vector<size_t>* matches = nullptr);

// Checks with several threads that every token id of every shard is below vocab_size. The error names the first bad id
// (lowest shard, then lowest offset).
void check_token_ids(const std::vector<Shard>& shards, int64_t vocab_size);
