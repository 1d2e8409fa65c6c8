#pragma once
#include <string>

// The whole main of one executable: "gpt2" or "llama" decides presets and defaults. Returns the exit code; every Error
// ends here as one line on standard error.
int run_command(int argc, const char* const* argv, const std::string& family);
