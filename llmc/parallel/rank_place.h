// Assigns a GPU to every rank: on each host in the order of its ranks.
#pragma once
#include <string>
#include <vector>

#include "llmc/parallel/comm/comm.h"

// A rank's GPU, gathered from all ranks.
struct RankPlace {
    std::string host;
    int local_rank = 0, local_ranks = 1;
    int visible = 0;              // number of visible GPUs
    std::string visible_devices;  // CUDA_VISIBLE_DEVICES, "" if it is not set
    int index = -1;               // of its GPU among the visible ones, -1: none is left
    std::string name = {}, id = {}, bus = {};   // of that GPU
};

// The index of the GPU for local_rank, -1 if none is left. If only one GPU is visible, the launcher has assigned it to
// this rank.
int device_of_rank(int local_rank, int visible);

// What is wrong with `places`, which are those of all ranks in order: one line, or "" if nothing is wrong.
std::string placement_error(const std::vector<RankPlace>& places);
// Lines for the log: where each rank runs, and a warning about different GPU models.
std::vector<std::string> placement_notes(const std::vector<RankPlace>& places);

// Returns the device of this rank. Exit 2 on all ranks if two share a GPU or one has none.
int place_rank(Comm& comm, std::vector<std::string>& notes);
