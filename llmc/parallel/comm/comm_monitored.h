// A communicator that records its collectives in the heartbeat table and runs a watchdog.
#pragma once
#include "llmc/parallel/comm/comm.h"

// Wraps `comm`; returns it unchanged if there is only one rank.
std::unique_ptr<Comm> monitored(std::unique_ptr<Comm> comm);
