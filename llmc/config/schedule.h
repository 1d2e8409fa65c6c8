// Learning rate and batch size as functions of the step.
#pragma once
#include <cstdint>

#include "llmc/config/config.h"

// Learning rate of step `step` (0-based) out of config.train_iters, which must be known (> 0). Warm-up is linear,
// from lr/warmup at the first step to lr at the last one of the warm-up. The step after it still has lr and the
// last step of the run min_lr, along a cosine or a line; constant keeps lr. wsd holds lr and goes linearly to
// min_lr over the last lr_wsd_decay_iters steps (0: a tenth of the run), the last one having min_lr (Hu et al.,
// arXiv 2404.06395). Steps beyond the run keep the last rate; a run that ends with its warm-up never decays.
double learning_rate(const Config& config, int64_t step);

// Sequences in the global batch when `samples` samples were consumed: ramp-up from rampup_start in steps of
// rampup_increment, evenly over rampup_samples samples, then global_batch_size.
int64_t batch_size_at(const Config& config, int64_t samples);

// Samples of the first `steps` steps, and the whole steps that `samples` samples allow; batch ramp-up included.
int64_t samples_after(const Config& config, int64_t steps);
int64_t steps_for_samples(const Config& config, int64_t samples);
