// The machine that this process runs on.
#pragma once
#include <string>

// Set by tests: the host that a rank claims to run on, so that one machine can stand for several.
inline constexpr const char* kHostVariable = "LLMFP8_HOST";

// The value of LLMFP8_HOST if it is set, else the machine's own name.
std::string host_name();
