// Llama-3 pretraining. Everything that is not a preset lives in llmc/; see README.md.
#include "llmc/commands/main.h"

int main(int argc, char** argv) { return run_command(argc, argv, "llama"); }
