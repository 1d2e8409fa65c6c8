#include "llmc/checkpoint/huggingface/hf_code.h"

#include "llmc/model/parameters/params.h"

// Written by the build, from the files of these names.
extern const char* const kConfigurationLlmfp8;
extern const char* const kModelingLlmfp8;

std::vector<ModelFile> hf_code(const ModelConfig& config) {
    if (hf_class(config) != HfClass::kOwn) return {};
    return {{"configuration_llmfp8.py", kConfigurationLlmfp8}, {"modeling_llmfp8.py", kModelingLlmfp8}};
}
