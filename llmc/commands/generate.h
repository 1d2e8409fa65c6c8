// `train_llama generate`: continues prompts with the weights of a directory. Holds only weights in the working dtype
// and the activations of one text.
#pragma once
#include <string>
#include <vector>

#include "llmc/commands/command.h"
#include "llmc/parallel/comm/comm.h"

Job parse_generate(const Invocation& call, Comm& comm);

// A model to load: `path` itself, or its newest undamaged checkpoint if it is a folder of checkpoints.
struct FoundModel {
    std::string path, directory;
    std::vector<std::string> skipped;   // newer checkpoints that are damaged, with the reason
};
// Exit 5 if all checkpoints in the folder are damaged.
FoundModel find_model(const std::string& path);
