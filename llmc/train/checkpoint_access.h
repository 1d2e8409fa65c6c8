// Access of checkpoints to the training state of a run.
#pragma once
#include "llmc/checkpoint/state_access.h"
#include "llmc/parallel/zero/weight_gatherer.h"

// Blocking copies between host memory and the states of this rank's shard ranges. A write skips elements that other
// ranks own. After masters are written, WeightGatherer::from_masters computes the weights.
StateAccess checkpoint_access(Ctx& ctx, ShardedState& state, WeightGatherer& gatherer);
