// `train_llama`: a whole run, from options, plan and data to steps, evaluations and checkpoints; and
// `train_llama plan`, which ends with the plan.
#pragma once
#include "llmc/commands/command.h"
#include "llmc/config/config.h"
#include "llmc/parallel/comm/comm.h"

Job parse_train(const Invocation& call, Comm& comm);
Job parse_plan(const Invocation& call, Comm& comm);

// Parses training options and applies --comm-timeout and --exit-duration-in-mins to this process. If the result's
// `help` is set, it has only the help text.
ParsedConfig parse_training(const Invocation& call, const std::vector<const char*>& words, Comm& comm);
