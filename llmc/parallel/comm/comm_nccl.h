// Collectives on GPUs over NCCL.
#pragma once
#include "llmc/parallel/comm/comm.h"

// Returns a communicator of the ranks of `host`: device memory is communicated over NCCL, host memory through `host`.
std::unique_ptr<Comm> open_nccl(std::unique_ptr<Comm> host);
