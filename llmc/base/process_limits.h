// What the shell, the batch system or a container leave this process. Checked at the start: what too little of it leads
// to later has no words of its own (a segmentation fault in OpenMP, a checkpoint that cannot be opened after hours).
#pragma once
#include <exception>

#include "llmc/base/check.h"

// Call it before anything that starts threads or opens files. Exit 2, with the limit and the way out, if open files
// (ulimit -n) or the stack (ulimit -s) are too few for a run, or if OpenMP cannot start its threads: OMP_NUM_THREADS is
// too large, or processes (ulimit -u) or memory (ulimit -v) are limited.
void check_process_limits();

// Any exception with an exit code and words for the user: those of the C++ library for want of memory or threads name
// neither cause nor way out (exit 2); others that are no Error are bugs (exit 1).
Error as_error(const std::exception& exception);
