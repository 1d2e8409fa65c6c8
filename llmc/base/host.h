// The machine that this process runs on.
#pragma once
#include <string>

// Tests set this environment variable to simulate several hosts on one machine.
inline constexpr const char* kHostVariable = "LLMFP8_HOST";

// Returns LLMFP8_HOST if it is set, else the name of the machine.
std::string host_name();
