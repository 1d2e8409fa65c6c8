// The options of runs on several ranks, and Megatron's names for some of their values.
#include "llmc/config/config_table.h"

namespace {

const char* no_fp8_weights(const Config& c) {
    if (c.fp8_recipe == Fp8Recipe::kNone) return "FP8 is off (--fp8-recipe none), so there are no weights in FP8";
    return c.zero == 0 ? "with --zero 0 every rank makes all weights itself, and gathers none" : nullptr;
}

const char* no_lasting_factors(const Config& c) {
    if (c.fp8_recipe == Fp8Recipe::kNone) return "FP8 is off (--fp8-recipe none)";
    return c.fp8_recipe == Fp8Recipe::kBlockwise ? "--fp8-recipe blockwise has no factor of a whole tensor" : nullptr;
}

const char* refused_zero(const Json& value) {
    return json_choice(value, {"2", "3"}) < 0 && value != Json(2) && value != Json(3)
               ? nullptr : "gradients and weights are whole on every rank: there is 1, or 0; plan has the memory";
}

void derive_grad_comm(Config& c, const Given&) { c.grad_comm_dtype = c.grad_dtype; }

constexpr OptionGroup kGroup = OptionGroup::kRanks;
constexpr OnResume kSilent = OnResume::kSilent;

}  // namespace

void add_ranks(std::vector<OptionRow>& rows) {
    rows.insert(rows.end(), {
        {.name = "ranks", .group = kGroup, .value = integer(AT(ranks), 0, 1 << 16),
         .help = "how many --dry-run plans for; a run of another number is refused; 0: as many as were started",
         .fallback = "0",
         .inert = [](const Config& c) { return c.ranks == 0 ? "0 is as many as were started, the default" : nullptr; },
         .on_resume = kSilent},
        {.name = "zero", .group = kGroup, .value = integer(AT(zero), 0, 1),
         .help = "1: each rank owns a part of the master weights and moments; 0: every rank has all of them",
         .fallback = "1", .refused = refused_zero, .on_resume = kSilent, .ranks_only = true},
        {.name = "bucket-mb", .group = kGroup,
         .value = number(AT(bucket_mb), {.low = 0, .high = 1e6, .low_open = true}),
         .help = "gradients that travel as one message, in 10^6 bytes of FP32; a parameter is never cut",
         .fallback = "256", .ranks_only = true},
        {.name = "overlap", .group = kGroup, .value = choice<bool>(AT(overlap), {{"on", true}, {"off", false}}),
         .help = "reduce gradients under the backward pass and gather weights under the forward pass; equal bits",
         .fallback = "on", .on_resume = kSilent, .ranks_only = true},
        {.name = "grad-comm-dtype", .group = kGroup,
         .value = choice<Dtype>(AT(grad_comm_dtype),
                                {{"fp32", Dtype::kFp32}, {"bf16", Dtype::kBf16}, {"fp8", Dtype::kE4m3}}),
         .help = "of gradients between ranks, which are added in FP32; fp8: E4M3 with a factor for each 128 values, "
                 "those of linear layers only",
         .derive = derive_grad_comm, .derived = "that of --grad-dtype", .ranks_only = true},
        {.name = "param-comm-dtype", .group = kGroup,
         .value = choice<Dtype>(AT(param_comm_dtype), {{"bf16", Dtype::kBf16}, {"fp8", Dtype::kE4m3}}),
         .help = "of weights in FP8 between ranks; equal bits", .fallback = "bf16", .inert = no_fp8_weights,
         .on_resume = kSilent, .ranks_only = true},
        {.name = "fp8-check-interval", .group = kGroup, .value = integer(AT(fp8_check_interval), 0, kMany),
         .help = "steps between comparisons of the FP8 factors of all ranks, to find a fault; 0: none",
         .fallback = "0", .inert = no_lasting_factors, .on_resume = kSilent, .ranks_only = true},
        {.name = "comm-timeout", .group = kGroup, .value = number(AT(comm_timeout), {.low = 0, .high = 1e9}),
         .help = "seconds that a rank may go without progress before all end with 6 and say who waits for whom; ten "
                 "times that until the first step is done and while reading or writing files; 0: no limit",
         .fallback = "60", .on_resume = kSilent, .ranks_only = true},
    });
}

const std::vector<Spelling>& spellings() {
    static const std::vector<Spelling> all = {
        {"use-distributed-optimizer", "zero", "1", "0"},
        {"overlap-grad-reduce", "overlap", "on", "off"},
        {"overlap-param-gather", "overlap", "on", "off"},
        {"fp8-param-gather", "param-comm-dtype", "fp8", "bf16"},
        {"swiglu", "activation", "swiglu", "gelu"},
        {"squared-relu", "activation", "relu2", "gelu"},
    };
    return all;
}

const Spelling* find_spelling(const std::string& name) {
    for (const Spelling& spelling : spellings())
        if (name == spelling.name) return &spelling;
    return nullptr;
}
