// Which GPU a rank runs on: as many as there are ranks of a host, in the order of its ranks.
#pragma once
#include <string>
#include <vector>

#include "llmc/parallel/comm.h"

// One rank as the others see it.
struct RankPlace {
    std::string host;
    int local_rank = 0, local_ranks = 1;
    int visible = 0;              // GPUs that it sees
    std::string visible_devices;  // CUDA_VISIBLE_DEVICES, "" if it is not set
    int index = -1;               // of its GPU among those, -1: none is left
    std::string name, id, bus;    // of that GPU
};

// -1 where more ranks of a host run than GPUs are visible. A launcher may also show every rank one GPU of its own.
int device_of_rank(int local_rank, int visible);

// What is wrong with the places of all ranks, by rank: one line, "" if nothing.
std::string placement_error(const std::vector<RankPlace>& places);
// What is worth a line: where each rank runs, GPUs of different kinds.
std::vector<std::string> placement_notes(const std::vector<RankPlace>& places);

// The device of this rank. Exit 2 on all ranks where one has no GPU of its own.
int place_rank(Comm& comm, std::vector<std::string>& notes);
