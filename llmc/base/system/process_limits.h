// The limits that the shell, the batch system or a container set for this process. They are checked at the start,
// because a limit that is reached later causes a failure that does not name it (a segmentation fault in OpenMP, or a
// checkpoint that cannot be opened after hours).
#pragma once
#include <exception>

#include "llmc/base/check.h"

// Call it before anything that starts threads or opens files. Exit 2, with the limit and the way out, if the limit of
// open files (ulimit -n) or of the stack (ulimit -s) is too low for a run, or if OpenMP cannot start its threads:
// OMP_NUM_THREADS is too large, or processes (ulimit -u) or memory (ulimit -v) are limited.
void check_process_limits();

// Call it before MPI is initialised. Exit 2 if memory is limited (ulimit -v) to less than OpenMPI needs.
void check_address_space();

// Converts any exception to an Error. The C++ library's exceptions for lack of memory or threads name neither cause nor
// remedy, so they get a message that does (exit 2). All others that are not an Error are bugs (exit 1).
Error as_error(const std::exception& exception);
