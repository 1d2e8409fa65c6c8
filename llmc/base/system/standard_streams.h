// Standard input, output and error of the process. If one of them is closed, full or has no reader, that must neither
// end a run nor change a file.
#pragma once
#include <string>
#include <vector>

// Must be called first. Opens /dev/null in place of each closed stream, since otherwise the next file that is opened
// would get the stream's number and the lines that are printed. Turns the signals for a pipe without a reader and for
// the limit of file sizes (ulimit -f) into errors of the calls that write. Returns a line for each closed output.
std::vector<std::string> prepare_standard_streams();

// Flushes standard output. Returns 0, or the errno with which this call or an earlier write failed. After a failure,
// later output is dropped, so that the failure is returned only once.
int flush_stdout();
