// The rope settings of a config.json. Errors name the field (exit 2).
#pragma once
#include "llmc/checkpoint/huggingface/hf_fields.h"
#include "llmc/config/model_config.h"

// The limit of --rotary-base.
inline constexpr double kMostBase = 1e12;

// Reads the scaling, and the base if it is there, from one dictionary and what stands beside it.
void read_rope_dictionary(const HfFields& fields, const char* name, ModelConfig& config);
// Reads what transformers 4 (rope_theta and rope_scaling) and 5 (rope_parameters) write, each of them alone, or several
// if they agree. Both versions read the base and the original positions inside and outside of these dictionaries.
void read_rope(const HfFields& fields, ModelConfig& config);
