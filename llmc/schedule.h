// Learning rate and batch size as functions of the step.
#pragma once
#include <cstdint>

#include "llmc/config.h"

// Learning rate of step `step` (0-based) out of config.train_iters. Warm-up is linear from lr/warmup to lr; then
// cosine, linear or constant decay to min_lr at the last step; wsd holds lr and decays linearly to min_lr over the last
// lr_wsd_decay_iters steps (Hu et al., arXiv 2404.06395).
double learning_rate(const Config& config, int64_t step);

// Sequences in the global batch when `samples` samples were consumed: ramp-up from rampup_start in steps of
// rampup_increment, evenly over rampup_samples samples, then global_batch_size.
int64_t batch_size_at(const Config& config, int64_t samples);
