// Reads prompts and prints generated tokens, as ids or, if the vocabulary is bytes, as text. Tokenizers are in Python
// (scripts/generate).
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "llmc/config/config.h"

// Whether ids below 256 are bytes; an id of 256, if there is one, separates documents.
bool vocabulary_is_bytes(int64_t vocab_size);

// --print with "auto" resolved; exit 2 for bytes if the vocabulary is not bytes.
TokenForm token_form(const Config& config);

// The prompts of --prompt-ids, --prompt-bytes and --prompts, in this order. Exit 2, naming the option or the file's
// line, for ids outside the vocabulary, bytes if the vocabulary is not bytes, an empty prompt, and a prompt that
// exceeds max_tokens together with --sample-tokens. `limit` is the error's name for max_tokens. standard_input:
// --prompts - is allowed.
std::vector<std::vector<int32_t>> read_prompts(const Config& config, int64_t max_tokens, const std::string& limit,
                                               bool standard_input);

// The ids of --stop-ids; exit 2 for one that is not in the vocabulary.
std::vector<int32_t> read_stop_ids(const Config& config);

// Ids separated by spaces, or the bytes, with a newline for ids from 256 on.
std::string tokens_text(const std::vector<int32_t>& tokens, TokenForm form);
