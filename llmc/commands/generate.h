// `train_llama generate`: text that goes on from prompts, with the weights of a directory. No training state: weights
// in the working type and the activations of one text.
#pragma once
#include <string>

// argv[0] is the executable, argv[1] "generate". Returns the exit code; errors are one line on standard error.
int generate_main(int argc, const char* const* argv, const std::string& family);
bool asks_for_generate(int argc, const char* const* argv);

// `path`, or where it is a folder of checkpoints and no model, the newest of them.
std::string model_directory(const std::string& path);
