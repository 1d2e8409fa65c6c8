// `train_llama generate`: text that goes on from prompts, with the weights of a directory. No training state: weights
// in the working type and the activations of one text.
#pragma once
#include <string>

#include "llmc/commands/command.h"
#include "llmc/parallel/comm.h"

Job parse_generate(const Invocation& call, Comm& comm);

// `path`, or where it is a folder of checkpoints and no model, the newest of them.
std::string model_directory(const std::string& path);
