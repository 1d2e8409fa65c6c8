// Checks before the first step that all ranks run the same program with the same environment.
#pragma once
#include <string>
#include <vector>

#include "llmc/parallel/comm/comm.h"

// Exit 2 if ranks run different builds or executables, naming the first that differs and its host.
void require_same_program(Comm& comm);
// A warning for every NCCL_* environment variable that differs between ranks.
std::vector<std::string> environment_differences(Comm& comm);
// The same for given environments ("NAME=value" lines) and hosts of the ranks.
std::vector<std::string> environment_differences(const std::vector<std::string>& environments,
                                                 const std::vector<std::string>& hosts);
