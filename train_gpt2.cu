// GPT-2 pretraining. Everything that is not a preset lives in llmc/; see README.md.
#include "llmc/commands/train_loop.h"

int main(int argc, char** argv) { return train_main(argc, argv, "gpt2"); }
