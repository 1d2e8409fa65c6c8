// `train_llama bench`: builds the trainer of a run, times steps on synthetic tokens, then steps with events around
// every operation, and compares each operation with the least time that it could take on this device.
#pragma once
#include "llmc/commands/command.h"
#include "llmc/parallel/comm/comm.h"

Job parse_bench(const Invocation& call, Comm& comm);
