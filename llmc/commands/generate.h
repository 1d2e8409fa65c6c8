// `train_llama generate`: continues a prompt with the weights of a directory. Holds only weights in the working dtype
// and the activations of the text.
#pragma once
#include "llmc/commands/command.h"
#include "llmc/parallel/comm/comm.h"

Job parse_generate(const Invocation& call, Comm& comm);
