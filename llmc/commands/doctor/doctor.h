// `train_llama doctor`: reports the hardware and libraries of this machine, what the trainer can use, and whether FP8
// matmuls, attention and collectives compute correct results. One line per finding, also for what cannot be checked.
#pragma once
#include "llmc/commands/command.h"
#include "llmc/parallel/comm/comm.h"

// The job's exit code is 0 if nothing failed, 1 if an item failed.
Job parse_doctor(const Invocation& call, Comm& comm);
