// The process groups of a run.
#pragma once
#include <memory>

#include "llmc/parallel/comm.h"

struct Groups {
    explicit Groups(Comm& all) : world(all), data(all) {}

    Comm& world;   // all ranks; not owned
    Comm& data;    // data parallel ranks, which train on different samples and shard the optimizer's state
    const std::unique_ptr<Comm> context = open_single();   // context parallel ranks, which share a sequence: only one
};
