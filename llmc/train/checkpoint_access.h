// The training state of a run as checkpoints reach it.
#pragma once
#include "llmc/checkpoint/state_access.h"
#include "llmc/parallel/weight_gatherer.h"

// Blocking copies between host memory and the flat buffers. What a write brings of slots that other ranks own is left
// out; weights in FP8 alone are made from the masters once those are there (WeightGatherer::from_masters).
StateAccess checkpoint_access(Ctx& ctx, ShardedState& state, WeightGatherer& gatherer);
