// Options for generated text, used by samples during training and by `generate`.
#include "llmc/config/config_table.h"

void add_samples(std::vector<OptionRow>& rows) {
    constexpr OptionGroup group = OptionGroup::kOutput;
    rows.insert(rows.end(), {
        {.name = "sample-every", .group = group, .value = integer(AT(sample_every), 0, kMany),
         .help = "steps between samples of generated text; 0: none", .fallback = "0", .on_resume = kSilent,
         .llmc = "-s"},
        {.name = "sample-tokens", .group = group, .value = integer(AT(sample_tokens), 1, 1 << 20),
         .help = "tokens per sample", .fallback = "64", .on_resume = kSilent,
         .llmc = "-g"},
        {.name = "prompt-ids", .group = group, .value = text(AT(prompt_ids), "'ID ...'", "token ids"),
         .help = "prompt that samples continue, as token ids", .fallback = "",
         .on_resume = kSilent},
        {.name = "prompt-bytes", .group = group, .value = text(AT(prompt_bytes), "TEXT", "text"),
         .help = "prompt as text, for models whose vocabulary is bytes", .fallback = "",
         .on_resume = kSilent},
        {.name = "prompts", .group = group, .value = text(AT(prompts), "FILE", "a file, or - for standard input"),
         .help = "file with one prompt per line, in the form of --print; -: standard input (generate only)",
         .fallback = "", .on_resume = kSilent},
        {.name = "temperature", .group = group, .value = number(AT(temperature), {.low = 0, .high = 1000}),
         .help = "divide logits by it before a token is drawn; 0: take the most likely token", .fallback = "0.8",
         .on_resume = kSilent},
        {.name = "top-k", .group = group, .value = integer(AT(top_k), 0, 1 << 24),
         .help = "draw from the N most likely tokens; 0: from all", .fallback = "0",
         .on_resume = kSilent},
        {.name = "top-p", .group = group, .value = number(AT(top_p), {.low = 0, .high = 1, .low_open = true}),
         .help = "nucleus sampling: draw from the smallest set of most likely tokens whose probabilities, after "
                 "--temperature and --top-k, add up to P; 1: from all",
         .fallback = "1", .on_resume = kSilent},
        {.name = "ignore-eos", .group = group, .value = flag(AT(ignore_eos), true, false),
         .help = "do not end a text at an eos token, one of eos_token_id in the model's generation_config.json or else "
                 "config.json", .fallback = "false", .on_resume = kSilent, .generate_only = true},
        {.name = "stop-ids", .group = group, .value = text(AT(stop_ids), "'ID ...'", "token ids"),
         .help = "tokens that end a text, besides the eos tokens", .fallback = "", .on_resume = kSilent,
         .generate_only = true},
        {.name = "inference-max-requests", .group = group, .value = integer(AT(inference_max_requests), 1, 1 << 16),
         .help = "texts that are decoded together; each takes memory for its keys and values", .fallback = "16",
         .on_resume = kSilent, .generate_only = true},
        {.name = "print", .group = group,
         .value = choice<TokenForm>(AT(print), {{"auto", TokenForm::kAuto},
                                                {"ids", TokenForm::kIds},
                                                {"bytes", TokenForm::kBytes}}),
         .help = "how tokens are printed; auto: as bytes if the vocabulary is bytes (at most 257 tokens); in training "
                 "as text of --tokenizer or of the loaded checkpoint's tokenizer.json; else as ids",
         .fallback = "auto", .on_resume = kSilent},
    });
}

const std::vector<std::string>& generate_options() {
    static const std::vector<std::string> names = {
        "load", "dtype", "seed", "sample-tokens", "ignore-eos", "stop-ids", "prompt-ids", "prompt-bytes", "prompts",
        "inference-max-requests", "temperature", "top-k", "top-p", "print"};
    return names;
}
