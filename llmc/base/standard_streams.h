// Standard input, output and error of the process when they are closed, full or read by nobody: that must neither end a
// run nor change a file.
#pragma once
#include <string>
#include <vector>

// Called first. Opens /dev/null in place of each stream that is closed, since the next file that is opened would get
// its number and the lines that are printed; makes a pipe without a reader and the limit of file sizes (ulimit -f)
// errors of the calls that write, not signals. Returns a line for each output that was closed.
std::vector<std::string> prepare_standard_streams();

// Flushes standard output. Returns 0, or the errno of what it or an earlier call failed with; what is printed later is
// then dropped, so that one failure is returned once.
int flush_stdout();
