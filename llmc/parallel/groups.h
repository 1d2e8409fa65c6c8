// The process groups of a run. Every collective names the group that it is of.
#pragma once
#include <memory>

#include "llmc/parallel/comm.h"

struct Groups {
    explicit Groups(Comm& all) : world(all), data(all) {}

    Comm& world;   // all ranks; not owned
    Comm& data;    // ranks that train on different samples: they cut the optimizer's state among them
    const std::unique_ptr<Comm> context = open_single();   // ranks that share a sequence: one each until there are more
};
