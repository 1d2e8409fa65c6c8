// What an executable does at its start about the limits and the environment that the shell, the batch system or a
// container set.
#pragma once
#include <exception>

#include "llmc/base/check.h"

// Call it before anything opens files. Raises the soft limit of open files to the hard one, because a run may have
// thousands of shards. Exit 2, with the way out, if fewer files may be open than a run needs: otherwise a checkpoint
// could not be opened after hours.
void check_process_limits();

// Converts any exception to an Error. The C++ library's exceptions for lack of memory or threads name neither cause nor
// remedy, so they get a message that does (exit 2). All others that are not an Error are bugs (exit 1).
Error as_error(const std::exception& exception);

// Lets waiting threads of OpenMP sleep instead of spin: a spinning thread takes its core from whatever else runs there,
// and one other busy process on two cores makes a step 29 times as long. OpenMP reads its environment before main, so
// this sets OMP_WAIT_POLICY=passive and starts the program again in the same process. A variable that the user set
// (OMP_WAIT_POLICY or GOMP_SPINCOUNT) is left as it is. Must be called first in main. If the program cannot be started
// again, it goes on with spinning threads: only its speed depends on it.
void start_with_passive_threads(const char* const* argv);
