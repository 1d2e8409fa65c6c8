// What the sidecar of a shard (.meta.json, written by data/prepare_text.py) says about its tokenizer, and whether
// shards belong together.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "llmc/data/shards.h"

// The token that separates documents (exit 2 without a sidecar that names it).
int32_t read_separator(const std::string& shard, int64_t vocab_size);

// What the sidecar says of the tokenizer; nothing without one. Exit 2 if it is not JSON.
TokenizerFacts read_tokenizer(const std::string& shard);

// What is known of the tokenizer of these shards, which agree.
TokenizerFacts facts_of(const std::vector<ShardInfo>& shards);

// Exit 2, naming two files, if one of `more` was made with another tokenizer, separator or chat template than `shards`.
// What a shard does not say matches everything. `what` begins the error.
void require_same_tokenizer(const std::string& what, const std::vector<ShardInfo>& shards,
                            const std::vector<ShardInfo>& more);

// Exit 2 if validation and training shards have different tokenizers, or if they are the same shards and `same` is
// false. Returns a note if some validation shards are also trained on, else "".
std::string check_validation_shards(const std::vector<ShardInfo>& train, const std::vector<ShardInfo>& valid,
                                    bool same);
