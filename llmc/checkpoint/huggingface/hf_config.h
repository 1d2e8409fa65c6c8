// config.json <-> ModelConfig. Reading fails with exit 2, naming the first field that is missing, not supported or not
// known: every field is read, or known to change nothing. A model that no class of transformers implements (hf_class
// kOwn) is written with model_type "llmfp8" and every field of ModelConfig.
#pragma once
#include <string>

#include "llmc/base/dtype.h"
#include "llmc/config/model_config.h"

// What config.json says besides the shape, in the directory from which a run starts.
struct HfOrigin {
    std::string model_type;       // kept where several classes have the same shape: Mistral, Llama
    std::string special_tokens;   // a JSON object with those of kSpecialTokens that are there; "": none are known
};
inline constexpr const char* kSpecialTokens[] = {"bos_token_id", "eos_token_id", "pad_token_id"};
// Exit 2, naming the field, if a special token is neither an id nor a list of ids nor null.
HfOrigin hf_origin(const std::string& directory);
// The dropout that config.json has, which training here has not: "DIR/config.json has resid_pdrop 0.1: ...", or "".
std::string dropout_note(const std::string& directory);

// Without an origin the special tokens are those of GPT-2 or Llama 3 if the vocabulary has the size of theirs, else
// null.
std::string hf_config_json(const ModelConfig& config, Dtype weight_dtype, int64_t seq_length = 0,
                           const HfOrigin& origin = {});
// Parses the file's text; `where` is its path, for messages.
ModelConfig model_config_from_json(const std::string& text, const std::string& where);
