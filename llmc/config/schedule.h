// Learning rate and batch size as functions of the step.
#pragma once
#include <cstdint>

#include "llmc/config/config.h"

// Learning rate of step `step` (0-based) of config.train_iters, which must be > 0. Warm-up is linear, from lr/warmup at
// the first step to lr at its last step. The next step has lr, and the last step of the run has min_lr, with a cosine
// or a line between them; constant keeps lr. wsd holds lr and decays linearly to min_lr over the last
// lr_wsd_decay_iters steps (0: a tenth of the run; Hu et al., arXiv 2404.06395). Later steps have the last rate.
double learning_rate(const Config& config, int64_t step);

// Sequences in the global batch after `samples` samples. The number rises from rampup_start in steps of
// rampup_increment, evenly over rampup_samples samples, and then stays global_batch_size.
int64_t batch_size_at(const Config& config, int64_t samples);

// Samples that the first `steps` steps take, and the number of whole steps in `samples` samples, with batch ramp-up.
int64_t samples_after(const Config& config, int64_t steps);
int64_t steps_for_samples(const Config& config, int64_t samples);

// Whether what happens every `interval` steps, never for 0, is due after `step` steps.
inline bool is_due(int64_t step, int64_t interval) { return interval > 0 && step % interval == 0; }
