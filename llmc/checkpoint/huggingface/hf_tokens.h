// The special tokens that a model's directory names.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

// The ids at which a text ends: eos_token_id (an id or a list) of generation_config.json, which transformers' generate
// reads, else of config.json. In the order of the file, each once; empty if neither names one. Exit 2, naming the file,
// if the field is anything else; exit 5 if a checkpoint's file does not match its manifest.
std::vector<int32_t> eos_token_ids(const std::string& directory);
