// Checks before the first step that all ranks run the same program with the same environment.
#pragma once
#include <string>
#include <vector>

#include "llmc/parallel/comm/comm.h"

// Exit 2 if ranks run different builds or executables, naming the first that differs and its host.
void require_same_program(Comm& comm);
// A warning if the NCCL_* variables among `variables` ("NAME=value", those of this process) differ between ranks.
std::string environment_difference(Comm& comm, std::vector<std::string> variables);
