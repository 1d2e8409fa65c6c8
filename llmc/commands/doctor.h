// `train_llama doctor`: what this machine has, what of it the trainer can use, and whether FP8 matmuls, attention and
// collectives give here what they must. One line an item; what cannot be checked here says so.
#pragma once
#include <string>
#include <vector>

// argv[0] is the executable, argv[1] "doctor". Returns 0 where nothing failed, 1 where an item did, 2 for bad options.
int doctor_main(int argc, const char* const* argv);
bool asks_for_doctor(int argc, const char* const* argv);
