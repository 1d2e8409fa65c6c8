// Tokens as they come from people and go to them: ids or, where the vocabulary is bytes, text. Tokenizers are outside
// (scripts/generate).
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "llmc/config/config.h"

// Ids below 256 are bytes; one above separates documents.
bool vocabulary_is_bytes(int64_t vocab_size);

// --print, with auto resolved.
TokenForm token_form(const Config& config);

// The prompts of --prompt-ids, --prompt-bytes and --prompts, in this order; none where none of them is given. Exit 2,
// naming the option, or the file and its line: ids that are no numbers of the vocabulary, bytes where it is not bytes,
// an empty prompt, and one that with --sample-tokens is longer than max_tokens; `limit` is what that is called.
// standard_input: --prompts - may read it.
std::vector<std::vector<int32_t>> read_prompts(const Config& config, int64_t max_tokens, const std::string& limit,
                                               bool standard_input);

// Ids with spaces between them, or the bytes; what is no byte is a new line.
std::string tokens_text(const std::vector<int32_t>& tokens, TokenForm form);
