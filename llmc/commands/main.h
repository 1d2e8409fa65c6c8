#pragma once
#include <string>

// The main function of an executable; `family`, "gpt2" or "llama", decides presets and defaults. Returns the exit code
// and prints every Error as one line on standard error.
int run_command(int argc, const char* const* argv, const std::string& family);
