// What Linux says of a process in /proc/PID/stat. Source: proc_pid_stat(5).
#pragma once
#include <string>
#include <vector>

// Its fields from the third, the state ("R", ...), on. pid: a number, or "self". Empty where it cannot be read: without
// /proc, or of a process that is gone, be it since the file was opened.
std::vector<std::string> process_stat(const std::string& pid);

// Places in what it returns. The start is in clock ticks since the machine's.
constexpr size_t kStatState = 0, kStatStart = 19;
