// The options of FP8 training, under Megatron's names where it has them.
#include "llmc/config/config_table.h"

namespace {

const char* refused_format(const Json& value) {
    if (json_choice(value, {"e5m2"}) < 0) return nullptr;
    return "no training runs in E5M2 alone: the hardware has no matmul of E5M2 by E5M2, and 2 mantissa bits are too "
           "few for weights and activations; hybrid uses E5M2 for gradients";
}

void add_recipe(std::vector<OptionRow>& rows) {
    add_rows(rows, OptionGroup::kFp8, {
        {.name = "fp8-recipe",
         .value = choice<Fp8Recipe>(AT(fp8_recipe), {{"none", Fp8Recipe::kNone}, {"delayed", Fp8Recipe::kDelayed},
                                    {"tensorwise", Fp8Recipe::kTensorwise}, {"blockwise", Fp8Recipe::kBlockwise},
                                    {"blockwise-bf16-wgrad", Fp8Recipe::kBlockwiseBf16Wgrad},
                                    {"int8-forward", Fp8Recipe::kInt8Forward}}),
         .help = "run the matmuls of the linear layers in FP8, with scaling factors from the amax history (delayed), "
                 "from the current tensor (tensorwise), or per block of 128 values (blockwise, "
                 "blockwise-bf16-wgrad: weight gradients in BF16); int8-forward: as delayed, but those of the forward "
                 "pass in INT8",
         .derive = [](Config& c, const Given& g) { if (g.has("fp8-format")) c.fp8_recipe = Fp8Recipe::kDelayed; },
         .derived = "delayed with --fp8-format"},
        {.name = "fp8-format",
         .value = choice<Fp8Format>(AT(fp8_format), {{"hybrid", Fp8Format::kHybrid}, {"e4m3", Fp8Format::kE4m3}}),
         .help = "format of gradients: E5M2 (hybrid) or E4M3; activations and weights are E4M3",
         .derive = [](Config& c, const Given&) {
             c.fp8_format = is_blockwise(c.fp8_recipe) ? Fp8Format::kE4m3 : Fp8Format::kHybrid;
         },
         .derived = "e4m3 with blockwise", .refused = refused_format},
        {.name = "fp8-margin", .value = integer(AT(fp8_margin), 0, 16),
         .help = "divide scales by 2^N (delayed): a larger margin saturates fewer values and flushes more to zero"},
        {.name = "fp8-interval", .value = integer(AT(fp8_interval), 1, kMany),
         .help = "optimizer steps between updates of the scales (delayed); amaxes are recorded in every step"},
        // Transformer Engine's 1024 counts micro-batches: 64 steps of 16 micro-batches. Megatron's 1 forgets an outlier
        // at once. 16 steps smooth the noise between steps, and an outlier lowers the scale for at most 16 steps.
        {.name = "fp8-amax-history-len", .value = integer(AT(fp8_amax_history_len), 1, 1 << 16),
         .help = "length of the amax history in optimizer steps (delayed); other trainers count micro-batches",
         .fallback = "16"},
        {.name = "fp8-amax-compute-algo", .value = choice<AmaxAlgo>(AT(fp8_amax_compute_algo), {{"max", AmaxAlgo::kMax},
                                   {"most_recent", AmaxAlgo::kMostRecent}}),
         .help = "compute scales from the largest amax of the history or from the latest one (delayed)"},
        {.name = "fp8-fast-accum",
         .value = choice<FastAccum>(AT(fp8_fast_accum), {{"fprop", FastAccum::kFprop}, {"all", FastAccum::kAll},
                                    {"none", FastAccum::kNone}}),
         .help = "matmuls with fast accumulation in the tensor cores, which is about a tenth faster and a few bits "
                 "less precise: those of the forward pass (fprop), all or none"},
    });
}

void add_choice_of_linears(std::vector<OptionRow>& rows) {
    add_rows(rows, OptionGroup::kFp8, {
        {.name = "first-last-layers-bf16", .value = flag(AT(first_last_layers_bf16)),
         .help = "keep the first and the last layers in BF16 (mixed precision)"},
        {.name = "num-layers-at-start-in-bf16", .value = integer(AT(num_layers_at_start_in_bf16), 0, 1024),
         .help = "how many of the first layers to keep in BF16", .fallback = "1"},
        {.name = "num-layers-at-end-in-bf16", .value = integer(AT(num_layers_at_end_in_bf16), 0, 1024),
         .help = "how many of the last layers to keep in BF16", .fallback = "1"},
        {.name = "bf16-linears",
         .value = text_list(AT(bf16_linears), "PATTERN,...", "patterns like 31.down, 0.* or *.proj", ','),
         .help = "linear layers to keep in BF16: LAYER.qkv, .proj, .up, .down, or head; * matches any text"},
        {.name = "fp8-lm-head", .value = flag(AT(fp8_lm_head)),
         .help = "also run the two backward matmuls of the output matrix (LM head) in FP8; logits stay in BF16"},
        {.name = "fp8-attention", .value = flag(AT(fp8_attention)),
         .help = "run the two matmuls of the attention forward in 8 bits, QK^T in INT8 and PV in E4M3, with any recipe "
                 "or none; those of the backward run in BF16 on the rounded Q, K and V"},
        {.name = "fp8-min-speedup", .value = number(AT(fp8_min_speedup), {.low = 0, .high = 10}),
         .help = "keep a linear layer in BF16 if its predicted speedup in FP8 is below this; 1: if FP8 would be "
                 "slower; 0: never"},
        {.name = "fp8-first-bf16", .value = number(AT(fp8_first_bf16), {.low = 0, .high = kMany}),
         .help = "run the first steps in BF16, without FP8 anywhere: a number of steps, or below 1 a fraction of the "
                 "run"},
        {.name = "fp8-final-bf16", .value = number(AT(fp8_final_bf16), {.low = 0, .high = kMany}),
         .help = "run the last steps in BF16, without FP8 anywhere: a number of steps, or below 1 a fraction of the "
                 "run"},
        {.name = "fp8-stats-interval", .value = integer(AT(fp8_stats_interval), 0, kMany),
         .help = "steps between statistics of every FP8 tensor in the log file: amax, scales, fractions saturated and "
                 "flushed to zero, and the error of --grad-comm-dtype fp8; 0: none", .fallback = "100",
         .on_resume = OnResume::kSilent},
    });
}

}  // namespace

void add_fp8(std::vector<OptionRow>& rows) {
    add_recipe(rows);
    add_choice_of_linears(rows);
}
