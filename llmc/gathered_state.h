// A checkpoint's way to the state of all ranks through the host memory of each: for small models.
#pragma once
#include "llmc/checkpoint.h"
#include "llmc/comm.h"

// Every rank calls it; what it returns reads everything, and writes nothing. `access` where that holds all by itself.
StateAccess gather_state(Comm& comm, const ParamTable& table, const StateAccess& access);
