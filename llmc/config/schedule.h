// Learning rate, batch size and precision as functions of the step.
#pragma once
#include <cstdint>
#include <string>

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

// The steps [begin, end) that a run with FP8 has in FP8. Those before and after them are in BF16, as in a run with
// --fp8-recipe none and without --fp8-attention (--fp8-first-bf16, --fp8-final-bf16).
struct Fp8Steps {
    int64_t begin = 0, end = INT64_MAX;   // 0-based
    bool has(int64_t step) const { return begin <= step && step < end; }
    // Whether a run that has done `step` steps comes to steps of the other precision than that of the last one.
    bool switches_after(int64_t step) const { return (begin > 0 && step <= begin) || (end < INT64_MAX && step <= end); }
};
// Fractions of a run of unknown length (train_iters 0) are no steps.
Fp8Steps fp8_steps(const Config& config);
// Whether a run with FP8 has steps in BF16, too, and the options of these steps.
inline bool switches_precision(const Config& config) { return config.fp8_first_bf16 + config.fp8_final_bf16 > 0; }
Config in_bf16(Config config);
// "BF16 in steps 1-20 and 901-1000"; "" in a run that does not switch.
std::string bf16_steps_text(const Config& config);
// The time of all train_iters steps, from that of a step in FP8 and of one in BF16.
double all_steps_ms(const Config& config, double ms, double bf16_ms);

// Whether what happens every `interval` steps, never for 0, is due after `step` steps.
inline bool is_due(int64_t step, int64_t interval) { return interval > 0 && step % interval == 0; }
