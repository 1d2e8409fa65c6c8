// `train_llama`, the life of a run: options, plan, data, resume, steps, evaluation, checkpoints, stop. And
// `train_llama plan`, which ends with the plan.
#pragma once
#include "llmc/commands/command.h"
#include "llmc/config/config.h"
#include "llmc/parallel/comm.h"

Job parse_train(const Invocation& call, Comm& comm);
Job parse_plan(const Invocation& call, Comm& comm);

// The training options among these words, in force for this process; parsed.help: nothing but their text.
ParsedConfig parse_training(const Invocation& call, const std::vector<const char*>& words, Comm& comm);
