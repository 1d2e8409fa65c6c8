// What all ranks of a run must have in common before the first step, beyond their options and data.
#pragma once
#include <string>
#include <vector>

#include "llmc/parallel/comm.h"

// Exit 2 where ranks run different builds or executables, naming the first one and its host.
void require_same_program(Comm& comm);
// NCCL takes its settings from each rank's own environment: a line for every NCCL_* variable that differs.
std::vector<std::string> environment_differences(Comm& comm);
// The same of given environments, by rank: "NAME=value" lines, and the ranks' hosts.
std::vector<std::string> environment_differences(const std::vector<std::string>& environments,
                                                 const std::vector<std::string>& hosts);
