// Limits that the shell, the batch system or a container set for this process.
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
