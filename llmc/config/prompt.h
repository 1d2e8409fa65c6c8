// Reads the prompt of samples and of `generate`, and prints tokens: as text if the vocabulary is bytes, else as ids.
// Tokenizers are in Python (scripts/generate).
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "llmc/config/config.h"

// Whether ids below 256 are bytes; an id of 256, if there is one, separates documents. vocabulary: "bytes" or another
// one; "" if it is not known, so that its size must tell.
bool is_bytes(const std::string& vocabulary, int64_t vocab_size);

// The tokens of --prompt, empty without it: ids if it has only whole numbers, else bytes. Exit 2 for ids outside the
// vocabulary, text if the vocabulary is not bytes, an empty prompt, and a prompt that exceeds max_tokens together with
// --sample-tokens. `limit` is the error's name for max_tokens.
std::vector<int32_t> read_prompt(const Config& config, bool bytes, int64_t max_tokens, const std::string& limit);

// Whether texts are printed as bytes: if the vocabulary is bytes and the prompt is not given as ids.
bool prints_bytes(const Config& config, bool bytes);

// The bytes, with a newline for ids from 256 on, or ids separated by spaces.
std::string tokens_text(const std::vector<int32_t>& tokens, bool bytes);
