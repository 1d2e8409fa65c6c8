// Options for generated text, used by samples during training and by `generate`.
#include "llmc/config/config_table.h"

void add_samples(std::vector<OptionRow>& rows) {
    add_rows(rows, OptionGroup::kOutput, {
        {.name = "sample-every", .value = integer(AT(sample_every), 0, kMany),
         .help = "steps between samples of generated text; 0: none", .fallback = "0", .on_resume = kSilent,
         .llmc = "-s"},
        {.name = "sample-tokens", .value = integer(AT(sample_tokens), 1, 1 << 20), .help = "tokens per sample",
         .fallback = "64", .on_resume = kSilent, .llmc = "-g"},
        {.name = "prompt", .value = text(AT(prompt), "'ID ...'|TEXT", "token ids, or text"),
         .help = "prompt that samples continue, as token ids, or as text if the vocabulary is bytes", .fallback = "",
         .on_resume = kSilent},
        {.name = "temperature", .value = number(AT(temperature), {.low = 0, .high = 1000}),
         .help = "divide logits by it before a token is drawn; 0: take the most likely token", .fallback = "0.8",
         .on_resume = kSilent},
        {.name = "top-k", .value = integer(AT(top_k), 0, 1 << 24),
         .help = "draw from the N most likely tokens; 0: from all", .fallback = "0", .on_resume = kSilent},
    });
}

const std::vector<std::string>& generate_options() {
    static const std::vector<std::string> names = {
        "load", "dtype", "seed", "sample-tokens", "prompt", "temperature", "top-k"};
    return names;
}
