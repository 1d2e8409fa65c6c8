// The machine that this process runs on, and the processes there.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

// Tests set this environment variable to simulate several hosts on one machine.
inline constexpr const char* kHostVariable = "LLMFP8_HOST";

// Returns LLMFP8_HOST if it is set, else the name of the machine.
std::string host_name();

// Returns the bytes of a line "MemAvailable:   123 kB" of /proc/meminfo; -1 if there is no such line.
int64_t meminfo_bytes(const std::string& key);

// Bytes that a cgroup (v2) and those around it allow, from memory.max in its folder and in those above; -1: no limit.
int64_t cgroup_memory_limit(const std::string& folder);
// The folder of this process's cgroup; "" if that is not known.
std::string own_cgroup();

// Returns the fields of /proc/PID/stat, as in proc_pid_stat(5), from the third one, the state ("R", ...), to the last.
// pid: a number or "self". Empty if there is no /proc or the process is gone.
std::vector<std::string> process_stat(const std::string& pid);

// Indices of fields in the result. The start time is in clock ticks since boot.
constexpr size_t kStatState = 0, kStatStart = 19;
