// The ranks that mpirun or srun started, over MPI.
#pragma once
#include "llmc/parallel/comm/comm.h"

#ifndef LLMC_MPI
#error "a file that includes comm_mpi.h is one of MPI_USERS in the Makefile"
#endif
#if LLMC_MPI
// Initialises MPI. For the CPU device only, because device memory must be host memory.
std::unique_ptr<Comm> open_mpi();
// The MPI library that this executable runs with ("Open MPI v4.1.4"), "" if it was built without.
std::string mpi_library_text();
#else
inline std::string mpi_library_text() { return ""; }
#endif
