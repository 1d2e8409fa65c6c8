// config.json <-> ModelConfig. Reading fails with exit 2, naming the first field that is missing or not supported, and
// with exit 5 if a checkpoint's file does not match its manifest. A model that no class of transformers implements
// (hf_class kOwn) is written with model_type "llmfp8" and every field of ModelConfig.
#pragma once
#include <string>

#include "llmc/base/dtype.h"
#include "llmc/config/model_config.h"

std::string hf_config_json(const ModelConfig& config, Dtype weight_dtype, int64_t seq_length = 0);
ModelConfig model_config_from_hf(const std::string& directory);
// Parses the file's text; `where` is its path, for messages.
ModelConfig model_config_from_json(const std::string& text, const std::string& where);
