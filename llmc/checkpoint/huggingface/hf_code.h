// The Python files with which transformers computes models of model_type llmfp8. The build takes them from hf_code/
// into the executable.
#pragma once
#include <vector>

#include "llmc/checkpoint/huggingface/model_extras.h"

// The files that a checkpoint of this model needs: none if a class of transformers has its shape.
std::vector<ModelFile> hf_code(const ModelConfig& config);
