// The state of a process from /proc/PID/stat. Source: proc_pid_stat(5).
#pragma once
#include <string>
#include <vector>

// Returns the fields from the third one, the state ("R", ...), to the last. pid: a number or "self". Empty if there is
// no /proc or the process is gone.
std::vector<std::string> process_stat(const std::string& pid);

// Indices of fields in the result. The start time is in clock ticks since boot.
constexpr size_t kStatState = 0, kStatStart = 19;
