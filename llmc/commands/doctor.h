// `train_llama doctor`: what this machine has, what of it the trainer can use, and whether FP8 matmuls, attention and
// collectives give here what they must. One line an item; what cannot be checked here says so.
#pragma once
#include "llmc/commands/command.h"
#include "llmc/parallel/comm.h"

// The exit code is 0 where nothing failed, 1 where an item did.
Job parse_doctor(const Invocation& call, Comm& comm);
