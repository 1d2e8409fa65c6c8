// Options of generated text, for samples during training and for `generate`.
#include "llmc/base/check.h"
#include "llmc/config/config_table.h"

namespace {

const char* no_sampling(const Config& c) {
    return c.sample_every > 0 ? nullptr : "no text is sampled (--sample-every 0)";
}
const char* no_top_k(const Config& c) {
    if (c.sample_every == 0) return no_sampling(c);
    return c.temperature > 0 ? nullptr : "--temperature 0 takes the likeliest token";
}

}  // namespace

void add_samples(std::vector<OptionRow>& rows) {
    constexpr OptionGroup group = OptionGroup::kOutput;
    constexpr OnResume kSilent = OnResume::kSilent;
    rows.insert(rows.end(), {
        {.name = "sample-every", .group = group, .value = integer(AT(sample_every), 0, kMany),
         .help = "steps between samples of generated text; 0: none", .fallback = "0", .on_resume = kSilent,
         .llmc = "-s"},
        {.name = "sample-tokens", .group = group, .value = integer(AT(sample_tokens), 1, 1 << 20),
         .help = "tokens per sample", .fallback = "64", .inert = no_sampling, .on_resume = kSilent,
         .llmc = "-g"},
        {.name = "prompt-ids", .group = group, .value = text(AT(prompt_ids), "'ID ...'", "token ids"),
         .help = "what a sample goes on from, as token ids", .fallback = "", .inert = no_sampling,
         .on_resume = kSilent},
        {.name = "prompt-bytes", .group = group, .value = text(AT(prompt_bytes), "TEXT", "text"),
         .help = "the same as text, where the vocabulary is bytes", .fallback = "", .inert = no_sampling,
         .on_resume = kSilent},
        {.name = "prompts", .group = group, .value = text(AT(prompts), "FILE", "a file, or - for standard input"),
         .help = "a prompt a line, in the form of --print; -: standard input, in generate", .fallback = "",
         .inert = no_sampling, .on_resume = kSilent},
        {.name = "temperature", .group = group, .value = number(AT(temperature), {.low = 0, .high = 1000}),
         .help = "logits are divided by it before a token is drawn; 0: the likeliest token", .fallback = "0.8",
         .inert = no_sampling, .on_resume = kSilent},
        {.name = "top-k", .group = group, .value = integer(AT(top_k), 0, 1 << 24),
         .help = "draw among the K likeliest tokens; 0: among all", .fallback = "0", .inert = no_top_k,
         .on_resume = kSilent},
        {.name = "print", .group = group,
         .value = choice<TokenForm>(AT(print), {{"auto", TokenForm::kAuto},
                                                {"ids", TokenForm::kIds},
                                                {"bytes", TokenForm::kBytes}}),
         .help = "how tokens are shown; auto: bytes where the vocabulary is bytes (at most 257), else ids",
         .fallback = "auto", .inert = no_sampling, .on_resume = kSilent},
    });
}

// Options that `generate` takes. Everything else is about training.
const std::vector<std::string>& generate_options() {
    static const std::vector<std::string> names = {"load", "dtype", "seed", "sample-tokens", "prompt-ids",
                                                   "prompt-bytes", "prompts", "temperature", "top-k", "print"};
    return names;
}
