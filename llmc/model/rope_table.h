// Cosines and sines of rotary position embedding, with the scaling of a model for longer contexts.
#pragma once
#include <vector>

#include "llmc/config/model_config.h"

// cos_sin[t][i] = m {cos, sin}(t * f_i), where f_i = base^(-2i/HS) and m = 1 without scaling.
// llama3: frequencies whose wavelength exceeds original/low are divided by factor, those below original/high are kept,
// and those between are interpolated.
// linear: all frequencies are divided by factor.
// yarn: pairs that turn at least beta_fast times within the original length are kept, those that turn at most beta_slow
// times are divided by factor, and those between are interpolated in i; m is the attention factor, so that scores grow
// by its square. Source: Peng et al., arXiv 2309.00071, as transformers computes it (rope_type "yarn").
// longrope: the frequency of a pair is divided by its factor, in the list for sequences of T tokens; m is sqrt(1 +
// ln(factor) / ln(original)). Source: Ding et al., arXiv 2402.13753, as transformers computes it.
// local: of layers with a window, if their rope differs.
std::vector<double> rope_table(const ModelConfig& config, int64_t T, bool local = false);
