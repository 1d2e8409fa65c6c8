// `train_llama generate`: continues prompts with the weights of a directory. Holds only weights in the working dtype
// and the activations of one text.
#pragma once
#include <string>

#include "llmc/commands/command.h"
#include "llmc/parallel/comm.h"

Job parse_generate(const Invocation& call, Comm& comm);

// `path` itself, or its newest checkpoint if it is a folder of checkpoints.
std::string model_directory(const std::string& path);
