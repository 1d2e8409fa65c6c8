// The limits that the shell, the batch system or a container set for this process. They are checked at the start, since
// later they would cause failures that do not name them (a segmentation fault in OpenMP, or a checkpoint that cannot be
// opened after hours).
#pragma once
#include <exception>

#include "llmc/base/check.h"

// Call it before anything that starts threads or opens files. Exit 2, with the limit and the way out, if open files
// (ulimit -n) or the stack (ulimit -s) are too few for a run, or if OpenMP cannot start its threads: OMP_NUM_THREADS is
// too large, or processes (ulimit -u) or memory (ulimit -v) are limited.
void check_process_limits();

// Call it before MPI is initialised. Exit 2 if memory is limited (ulimit -v) to less than OpenMPI needs.
void check_address_space();

// Converts any exception to an Error. Exceptions of the C++ library for lack of memory or threads get a message with
// cause and remedy (exit 2), which they do not have themselves; all others that are not an Error are bugs (exit 1).
Error as_error(const std::exception& exception);
