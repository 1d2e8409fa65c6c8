// Access of checkpoints to the training state of a run.
#pragma once
#include "llmc/checkpoint/state_access.h"
#include "llmc/parallel/weight_gatherer.h"

// Blocking copies between host memory and the flat buffers. A write skips elements that other ranks own. After writes,
// WeightGatherer::from_masters computes the FP8 weights.
StateAccess checkpoint_access(Ctx& ctx, ShardedState& state, WeightGatherer& gatherer);
