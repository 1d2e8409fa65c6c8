// The rope settings of a config.json. Errors name the field (exit 2).
#pragma once
#include <nlohmann/json.hpp>

#include "llmc/checkpoint/huggingface/hf_fields.h"
#include "llmc/config/model_config.h"

// The limit of --rotary-base.
inline constexpr double kMostBase = 1e12;

// Family::local_base of OLMo-3: the base of the other layers.
inline constexpr double kBaseOfOthers = -1;

// The scaling of rope by transformers' names. An absent attention_factor follows from the factor.
nlohmann::ordered_json scaling_json(const RopeScaling& scaling);
// Writes both forms: transformers 4 reads rope_theta and rope_scaling, transformers 5 prefers rope_parameters, in which
// classes whose rope depends on the layer (local_base: see Family) have a dictionary for each type of layers.
void put_rope(nlohmann::ordered_json& out, const ModelConfig& config, double local_base);

// Reads the scaling, and the base if it is there, from one dictionary and what stands beside it.
void read_rope_dictionary(const HfFields& fields, const char* name, ModelConfig& config);
// Reads what transformers 4 (rope_theta and rope_scaling) and 5 (rope_parameters) write, each of them alone, or several
// if they agree. Both versions read the base and the original positions inside and outside of these dictionaries.
// If local_base (see Family) is not 0, rope_parameters may have a dictionary for each type of layers; that of layers
// with a window has no scaling.
void read_rope(const HfFields& fields, ModelConfig& config, double local_base);
