// The options of FP8 training: Megatron's names where it has them.
#include "llmc/config/config_table.h"

namespace {

// ---- why an option has no effect: each reason names the recipe ----

const char* fp8_off(const Config& c) {
    return c.fp8_recipe == Fp8Recipe::kNone ? "FP8 is off (--fp8-recipe none)" : nullptr;
}

const char* nothing_to_watch(const Config& c) {
    return c.grad_comm_dtype == Dtype::kE4m3 ? nullptr : fp8_off(c);
}

const char* only_delayed(const Config& c) {
    switch (c.fp8_recipe) {
        case Fp8Recipe::kTensorwise:
            return "--fp8-recipe tensorwise takes every factor from the tensor as it is now, only delayed looks back";
        case Fp8Recipe::kBlockwise:
            return "--fp8-recipe blockwise takes every factor from the block as it is now, only delayed looks back";
        default: return fp8_off(c);
    }
}

// Not the other way round as well: a history of 1 makes both algorithms equal, and one of the two must count.
const char* no_history(const Config& c) {
    if (const char* reason = only_delayed(c)) return reason;
    return c.fp8_amax_compute_algo == AmaxAlgo::kMostRecent
               ? "--fp8-recipe delayed with --fp8-amax-compute-algo most_recent looks at one step only" : nullptr;
}

const char* no_fast_accumulation(const Config& c) {
    return c.fp8_recipe == Fp8Recipe::kBlockwise
               ? "--fp8-recipe blockwise adds up in FP32 after every 128 products, in all its matmuls" : fp8_off(c);
}

const char* no_layers_in_bf16(const Config& c) {
    if (const char* reason = fp8_off(c)) return reason;
    return c.first_last_layers_bf16 ? nullptr : "it counts only with --first-last-layers-bf16";
}

const char* no_fp8_attention(const Config& c) {
    if (c.dtype != Dtype::kBf16) return "--dtype fp32: FP8 copies are made from BF16 values";
    const int64_t channels = c.shape.kv_channels;
    return channels == 64 || channels == 128 ? nullptr : "FP8 attention is for 64 and 128 channels a head "
                                                         "(--kv-channels), other sizes have plain kernels only";
}

// ---- defaults that follow from other options ----

void derive_recipe(Config& c, const Given& given) {
    if (given.has("fp8-format")) c.fp8_recipe = Fp8Recipe::kDelayed;
}

void derive_format(Config& c, const Given&) {
    c.fp8_format = c.fp8_recipe == Fp8Recipe::kBlockwise ? Fp8Format::kE4m3 : Fp8Format::kHybrid;
}

const char* refused_format(const Json& value) {
    if (json_choice(value, {"e5m2"}) < 0) return nullptr;
    return "no training runs in E5M2 alone: the hardware has no matmul of E5M2 by E5M2, and 2 mantissa bits are too "
           "few for weights and activations; hybrid uses E5M2 for gradients";
}

// ---- rows ----

constexpr OptionGroup kGroup = OptionGroup::kFp8;

void add_recipe(std::vector<OptionRow>& rows) {
    rows.insert(rows.end(), {
        {.name = "fp8-recipe", .group = kGroup,
         .value = choice<Fp8Recipe>(AT(fp8_recipe), {{"none", Fp8Recipe::kNone},
                                                     {"delayed", Fp8Recipe::kDelayed},
                                                     {"tensorwise", Fp8Recipe::kTensorwise},
                                                     {"blockwise", Fp8Recipe::kBlockwise}}),
         .help = "matmuls of the linear layers in FP8; factors from earlier steps, from the tensor now, or per block "
                 "of 128 now",
         .fallback = "none", .derive = derive_recipe, .derived = "delayed with --fp8-format"},
        {.name = "fp8-format", .group = kGroup,
         .value = choice<Fp8Format>(AT(fp8_format), {{"hybrid", Fp8Format::kHybrid}, {"e4m3", Fp8Format::kE4m3}}),
         .help = "of gradients: E5M2 (hybrid) or E4M3; activations and weights are E4M3",
         .derive = derive_format, .derived = "e4m3 with blockwise", .inert = fp8_off, .refused = refused_format},
        {.name = "fp8-margin", .group = kGroup, .value = integer(AT(fp8_margin), 0, 16),
         .help = "headroom of factors in powers of two (delayed): more of it saturates less and flushes more to zero",
         .fallback = "0", .inert = only_delayed},
        {.name = "fp8-interval", .group = kGroup, .value = integer(AT(fp8_interval), 1, kMany),
         .help = "optimizer steps between new factors (delayed); amaxes are recorded in every step",
         .fallback = "1", .inert = only_delayed},
        // Transformer Engine's 1024 counts micro-batches: with 16 of them a step, 64 steps. Megatron's 1 forgets an
        // outlier at once. 16 steps are past the noise between steps, and one outlier lowers factors no longer.
        {.name = "fp8-amax-history-len", .group = kGroup, .value = integer(AT(fp8_amax_history_len), 1, 1 << 16),
         .help = "optimizer steps whose largest amax makes the factor (delayed); elsewhere micro-batches are counted",
         .fallback = "16", .inert = no_history},
        {.name = "fp8-amax-compute-algo", .group = kGroup,
         .value = choice<AmaxAlgo>(AT(fp8_amax_compute_algo),
                                   {{"max", AmaxAlgo::kMax}, {"most_recent", AmaxAlgo::kMostRecent}}),
         .help = "amax of the whole history or of the latest step (delayed)", .fallback = "max",
         .inert = only_delayed},
        {.name = "fp8-fast-accum", .group = kGroup,
         .value = choice<FastAccum>(AT(fp8_fast_accum), {{"fprop", FastAccum::kFprop},
                                                         {"all", FastAccum::kAll},
                                                         {"none", FastAccum::kNone}}),
         .help = "matmuls that add in the tensor cores' shorter format: faster by a tenth, a few bits less",
         .fallback = "fprop", .inert = no_fast_accumulation},
    });
}

void add_choice_of_linears(std::vector<OptionRow>& rows) {
    rows.insert(rows.end(), {
        {.name = "first-last-layers-bf16", .group = kGroup, .value = flag(AT(first_last_layers_bf16), true, false),
         .help = "keep the first and the last blocks in BF16", .fallback = "false", .inert = fp8_off},
        {.name = "num-layers-at-start-in-bf16", .group = kGroup,
         .value = integer(AT(num_layers_at_start_in_bf16), 0, 1024), .help = "how many first blocks",
         .fallback = "1", .inert = no_layers_in_bf16},
        {.name = "num-layers-at-end-in-bf16", .group = kGroup,
         .value = integer(AT(num_layers_at_end_in_bf16), 0, 1024), .help = "how many last blocks",
         .fallback = "1", .inert = no_layers_in_bf16},
        {.name = "bf16-linears", .group = kGroup,
         .value = text_list(AT(bf16_linears), "PATTERN,...", "patterns like 31.down, 0.* or *.proj", ','),
         .help = "linears to keep in BF16: LAYER.qkv, .proj, .up, .down, or head; * stands for any text",
         .inert = fp8_off},
        {.name = "fp8-lm-head", .group = kGroup, .value = flag(AT(fp8_lm_head), true, false),
         .help = "the output matrix in FP8 too: it acts on the loss at once, so compare losses", .fallback = "false",
         .inert = fp8_off},
        {.name = "fp8-attention", .group = kGroup, .value = flag(AT(fp8_attention), true, false),
         .help = "attention's forward products in E4M3, with any recipe or none: queries, keys and values are rounded, "
                 "and backward is that of the rounded ones in BF16",
         .fallback = "false", .inert = no_fp8_attention},
        {.name = "fp8-min-gain", .group = kGroup, .value = number(AT(fp8_min_speedup), {.low = 0, .high = 10}),
         .help = "keep a linear in BF16 if the predicted BF16 / FP8 time is below this; 1: where FP8 would lose; "
                 "0: no rule",
         .fallback = "0", .inert = fp8_off},
        {.name = "fp8-health-interval", .group = kGroup, .value = integer(AT(fp8_health_interval), 0, kMany),
         .help = "steps between records of every FP8 tensor in the log file: amax, factor, shares saturated and "
                 "flushed; and of the error of --grad-comm-dtype fp8; 0: none",
         .fallback = "100", .inert = nothing_to_watch, .on_resume = OnResume::kSilent},
    });
}

}  // namespace

void add_fp8(std::vector<OptionRow>& rows) {
    add_recipe(rows);
    add_choice_of_linears(rows);
}
