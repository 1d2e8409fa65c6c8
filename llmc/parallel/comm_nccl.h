// Collectives on GPUs over NCCL.
#pragma once
#include "llmc/parallel/comm.h"

// The same ranks with device memory communicated over NCCL, host memory still through `host`.
std::unique_ptr<Comm> open_nccl(std::unique_ptr<Comm> host);
