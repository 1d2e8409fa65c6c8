// The rules between options: which have no effect beside which values of others, and which contradict each other.
#include <algorithm>
#include <bit>
#include <cmath>
#include <sstream>

#include "llmc/base/check.h"
#include "llmc/base/text.h"
#include "llmc/config/config_table.h"
#include "llmc/config/schedule.h"
#include "llmc/data/blend.h"

namespace {

// ---- options without effect ----

// Values of --fp8-recipe or --fp8-attention with which there is FP8.
constexpr const char* kFp8OnInAny = "delayed tensorwise blockwise blockwise-bf16-wgrad int8-forward true";
constexpr const char *kFp8Off = "FP8 is off (--fp8-recipe none)", *kNoSamples = "no text is sampled (--sample-every 0)",
                     *kLearnedPositions = "positions are learned (--position-embedding-type learned_absolute)";

// In the order in which reasons are looked for. Of several deciding options one that has such a value is enough.
constexpr Condition kConditions[] = {
    {"rotary-base rope-scaling-factor rope-scaling-type", "position-embedding-type", "rope", kLearnedPositions},
    {"rope-scaling-type", "rope-scaling-factor", ">0", "rope is not scaled (--rope-scaling-factor 0)"},
    {"init-method-std load", "resume", "unset auto", "--resume restores the weights"},
    {"init-method-std", "load", "unset", "--load provides the weights"},

    {"moe-router-topk moe-shared-experts moe-aux-loss-coeff moe-z-loss-coeff expert-parallel",
     "num-experts", ">0",
     "the model has no experts (--num-experts 0)"},
    {"moe-aux-loss-coeff moe-z-loss-coeff", "moe-shared-experts", "0",
     "the router of a model with shared experts (--moe-shared-experts) balances by a bias, without losses"},
    {"moe-router-bias-update-rate", "moe-shared-experts", ">0",
     "only the router of a model with shared experts (--moe-shared-experts) has a bias"},
    {"moe-capacity", "expert-parallel", "!1", "each rank has all experts (--expert-parallel 1)"},

    {"train-iters", "epochs", "0", "--epochs sets the length of the run"},
    {"train-iters", "train-iters", ">0", "a run of 0 steps has no length"},
    {"epochs", "synthetic-data", "false", "--synthetic-data has no end: set --train-iters"},
    {"epochs", "epochs", ">0", "a run of 0 epochs has no length"},
    {"train-data valid-data token-dtype reset-attention-mask reset-position-ids align-documents hellaswag-data",
     "synthetic-data", "false", "--synthetic-data draws tokens from the seed and reads no shards"},
    {"eval-interval", "valid-data hellaswag-data", "!unset", "there is no --valid-data to evaluate on"},
    {"eval-iters", "valid-data", "!unset", "there is no --valid-data to evaluate on"},

    {"eval-bf16", "fp8-recipe fp8-attention", kFp8OnInAny, kFp8Off},
    {"eval-bf16", "valid-data hellaswag-data sample-every", "!unset 0", "there is no --valid-data to evaluate on"},

    {"muon-scale muon-momentum muon-beta2", "optimizer", "muon", "--optimizer adamw has none of it"},
    {"min-lr", "lr-decay-style", "!constant", "--lr-decay-style constant does not decay"},
    {"lr-wsd-decay-iters", "lr-decay-style", "wsd", "only --lr-decay-style wsd has a final decay"},

    {"fp8-margin fp8-interval fp8-amax-history-len fp8-amax-compute-algo fp8-fast-accum", "fp8-recipe",
     "!blockwise-bf16-wgrad",
     "--fp8-recipe blockwise-bf16-wgrad has scales of current blocks, and FP32 sums after every 128 products"},
    {"fp8-fast-accum", "fp8-recipe", "!blockwise",
     "--fp8-recipe blockwise accumulates in FP32 after every 128 products, in all its matmuls"},
    {"fp8-format fp8-margin fp8-interval fp8-amax-history-len fp8-amax-compute-algo fp8-fast-accum bf16-linears "
     "first-last-layers-bf16 num-layers-at-start-in-bf16 num-layers-at-end-in-bf16 fp8-lm-head fp8-min-speedup",
     "fp8-recipe", "!none", kFp8Off},
    {"fp8-first-bf16 fp8-final-bf16", "fp8-recipe fp8-attention", kFp8OnInAny, kFp8Off},
    {"fp8-margin fp8-interval fp8-amax-history-len fp8-amax-compute-algo", "fp8-recipe", "!tensorwise",
     "--fp8-recipe tensorwise computes every scale from the current tensor, only delayed scaling has a history"},
    {"fp8-margin fp8-interval fp8-amax-history-len fp8-amax-compute-algo", "fp8-recipe", "!blockwise",
     "--fp8-recipe blockwise computes every scale from the current block, only delayed scaling has a history"},
    // --fp8-amax-compute-algo does not depend on the history's length: at a length of 1 neither would have an effect.
    {"fp8-amax-history-len", "fp8-amax-compute-algo", "!most_recent",
     "--fp8-recipe delayed with --fp8-amax-compute-algo most_recent uses one step of the history only"},
    {"num-layers-at-start-in-bf16 num-layers-at-end-in-bf16", "first-last-layers-bf16", "true",
     "it has an effect only with --first-last-layers-bf16"},
    {"fp8-attention", "dtype", "bf16", "--dtype fp32: only BF16 tensors are quantized"},
    {"fp8-attention", "kv-channels", "64 128", "FP8 attention supports head dims of 64 and 128 (--kv-channels), others "
                                               "have plain kernels only"},

    {"ranks", "ranks", ">0", "0 means as many as were started, which is the default"},
    {"zero-group", "zero", "!0", "--zero 0 shards nothing"},
    {"grad-shard-dtype", "zero", "2 3", "only --zero 2 and 3 shard gradients"},

    {"save-interval keep save-async", "save", "!unset", "no checkpoint is written without --save"},
    {"sample-tokens prompt temperature top-k", "sample-every", ">0", kNoSamples},
    {"top-k", "temperature", ">0", "--temperature 0 takes the most likely token"},
    {"gpu json", "dry-run", "true", "only plan (--dry-run) reads it"},
};

// Rules that compare numbers.
constexpr struct {
    const char* option;
    bool (*has_effect)(const Config&);
    const char* reason;
} kComputedRules[] = {
    {"sliding-window", [](const Config& c) {
         return !c.shape.has_windows() || c.shape.local_rotary_base > 0 || c.shape.hides_keys(c.seq_length);
     }, "a window of --seq-length tokens or more hides nothing"},
    {"loss-chunk", [](const Config& c) { return c.loss_chunk < c.micro_batch_size * c.part_length(); },
     "a micro-batch (--micro-batch-size x --seq-length) has no more tokens than one chunk"},
    {"offload-fraction", offloads_state, "no optimizer state is offloaded (--offload moments,masters)"},
    {"tokenizer", [](const Config& c) { return !c.save.empty() || c.sample_every > 0; },
     "no checkpoint is written without --save, and no text is sampled (--sample-every 0)"},
    {"fp8-fast-accum",
     [](const Config& c) { return c.fp8_recipe != Fp8Recipe::kInt8Forward || c.fp8_fast_accum == FastAccum::kAll; },
     "--fp8-recipe int8-forward accumulates the forward pass in INT32, exactly; all is for the backward pass"},
    // Statistics need FP8 matmuls or FP8 gradient communication.
    {"fp8-stats-interval",
     [](const Config& c) { return c.fp8_recipe != Fp8Recipe::kNone || c.grad_comm_dtype == Dtype::kE4m3; }, kFp8Off},
};

bool has_value(const Config& config, const std::string& option, std::string values) {
    const OptionRow* row = find_option(option);
    CHECK(row, "a condition names the unknown option --%s", option.c_str());
    const Json value = row->value.get(config);
    if (values == ">0") return value.is_number() && value.get<double>() > 0;
    const bool negated = values[0] == '!';
    const std::string text = value.is_null() ? "" : json_text(value);
    return has_word(values.substr(negated), text.empty() ? "unset" : text) != negated;
}

bool is_met(const Condition& condition, const Config& config) {
    std::istringstream deciders(condition.deciders);
    for (std::string option; deciders >> option;)
        if (has_value(config, option, condition.values)) return true;
    return false;
}

// ---- options that contradict each other ----

// Collects the messages of all broken rules.
struct Rules {
    std::vector<std::string> broken;
    void require(bool holds, const std::string& text) {
        if (!holds) broken.push_back(text);
    }
};

void expert_rules(const Config& c, int ranks, Rules& rules) {
    const int64_t parts = c.expert_parallel;
    if (parts == 1) return;
    const std::string option = strf("--expert-parallel %lld", ll(parts));
    rules.require(std::has_single_bit(static_cast<uint64_t>(parts)) && c.shape.num_experts % parts == 0,
                  strf("%s must be 2, 4 or 8 and divide --num-experts %lld", option.c_str(), ll(c.shape.num_experts)));
    rules.require(ranks % parts == 0, strf("%s must divide the number of ranks, %d", option.c_str(), ranks));
    rules.require(c.zero_group % parts == 0,
                  strf("%s must divide --zero-group %lld", option.c_str(), ll(c.zero_group)));
    rules.require(c.moe_capacity == 0 || c.moe_capacity >= 1,
                  strf("--moe-capacity %s is below 1, the rows of a balanced load",
                       number_text(c.moe_capacity).c_str()));
    const int64_t tokens = c.micro_batch_size * c.part_length() * parts;
    rules.require(std::max(tokens * c.shape.experts_per_token, tokens / parts * c.expert_rows_of_token()) <= INT32_MAX,
                  strf("%s: the %lld tokens of a micro-batch of its ranks have more than %d rows: lower "
                       "--micro-batch-size", option.c_str(), ll(tokens), INT32_MAX));
    rules.require(c.optimizer == OptimizerKind::kAdamW || (c.muon_beta2 == 0 && c.zero_group == 0),
                  strf("%s with --optimizer muon: the matrices of a rank's experts are exchanged among all ranks that "
                       "have them, without second moments of rows: leave out --zero-group and --muon-beta2",
                       option.c_str()));
}

// Returns whether the sizes of groups make sense, so that other rules may use them.
bool context_rules(const Config& c, int ranks, Rules& rules) {
    const int64_t parts = c.context_parallel, NH = c.shape.num_attention_heads, NKV = c.shape.num_query_groups;
    const size_t broken = rules.broken.size();
    const std::string option = strf("--context-parallel %lld", ll(parts));
    rules.require(ranks % parts == 0, strf("%s must divide the number of ranks, %d", option.c_str(), ranks));
    rules.require(NH % parts == 0, strf("%s must divide --num-attention-heads %lld: each rank computes attention of "
                                        "equally many heads", option.c_str(), ll(NH)));
    rules.require(NKV % parts == 0 || parts % NKV == 0,
                  strf("%s must divide --num-query-groups %lld, or be a multiple of it", option.c_str(), ll(NKV)));
    rules.require(c.seq_length % parts == 0,
                  strf("%s must divide --seq-length %lld: each rank has equally many tokens of it", option.c_str(),
                       ll(c.seq_length)));
    return rules.broken.size() == broken;
}

void batch_rules(const Config& c, int ranks, Rules& rules) {
    const int data_ranks = c.data_ranks(ranks);
    int64_t unit = c.micro_batch_size * data_ranks;
    const std::string of_ranks = c.context_parallel == 1 ? count_text(ranks, "rank")
                                 : strf("%d (%d ranks / --context-parallel %lld)", data_ranks, ranks,
                                        ll(c.context_parallel));
    auto whole = [&](const char* what, int64_t sequences) {
        rules.require(sequences % unit == 0,
                      strf("%s %lld must be a multiple of --micro-batch-size %lld x %s: %s", what, ll(sequences),
                           ll(c.micro_batch_size), of_ranks.c_str(),
                           batch_hint(sequences, c.micro_batch_size, data_ranks).c_str()));
    };
    whole("--global-batch-size", c.global_batch_size);
    if (c.rampup_start == 0) return;
    whole("--rampup-batch-size START", c.rampup_start);
    whole("--rampup-batch-size INC", c.rampup_increment);
    int64_t growth = c.global_batch_size - c.rampup_start;
    rules.require(growth > 0 && growth % c.rampup_increment == 0,
                  strf("--rampup-batch-size: steps of %lld do not lead from %lld to --global-batch-size %lld",
                       ll(c.rampup_increment), ll(c.rampup_start), ll(c.global_batch_size)));
}

void model_rules(const Config& c, Rules& rules) {
    rules.require(c.seq_length <= c.shape.max_positions,
                  strf("--seq-length %lld exceeds --max-position-embeddings %lld", ll(c.seq_length),
                       ll(c.shape.max_positions)));
    const RopeScaling& scaling = c.shape.rope_scaling;
    rules.require(c.shape.position != PositionEmbedding::kRope || scaling.factor == 0 || scaling.factor >= 1,
                  strf("--rope-scaling-factor %s must be 0 (no scaling) or at least 1",
                       number_text(scaling.factor).c_str()));
    rules.require(!c.fp8_attention || c.shape.rotary_dim == 0,
                  strf("--fp8-attention rotates whole heads, and this model %lld of their %lld elements "
                       "(partial_rotary_factor): leave it out", ll(c.shape.rotary_dim), ll(c.shape.kv_channels)));
    rules.require(!c.fp8_attention || c.shape.attention_softcap == 0,
                  strf("--fp8-attention has no soft caps, and this model caps its attention scores at %s "
                       "(attn_logit_softcapping): leave it out", number_text(c.shape.attention_softcap).c_str()));
}

// Holds without a check while the length is unknown: with --epochs, until the data has been opened.
void length_rules(const Config& c, Rules& rules) {
    if (c.train_iters == 0) return;
    const std::string length = c.epochs > 0 ? strf("the %lld steps of --epochs %s", ll(c.train_iters),
                                                   number_text(c.epochs).c_str())
                                            : strf("--train-iters %lld", ll(c.train_iters));
    int64_t decay = c.lr_decay_style == LrDecay::kWsd ? c.lr_wsd_decay_iters : 0;
    rules.require(c.lr_warmup_iters + decay <= c.train_iters,
                  strf("--lr-warmup-iters %lld%s exceed%s %s", ll(c.lr_warmup_iters),
                       decay > 0 ? strf(" and --lr-wsd-decay-iters %lld", ll(decay)).c_str() : "",
                       decay > 0 ? "" : "s", length.c_str()));
    rules.require(c.profile_first <= c.train_iters,
                  strf("--profile starts at step %lld of %lld", ll(c.profile_first), ll(c.train_iters)));
    const Fp8Steps fp8 = fp8_steps(c);
    rules.require(fp8.begin < std::min(fp8.end, c.train_iters),
                  strf("--fp8-first-bf16 %s and --fp8-final-bf16 %s leave no step of %s in FP8: lower them, or give "
                       "--fp8-recipe none", number_text(c.fp8_first_bf16).c_str(),
                       number_text(c.fp8_final_bf16).c_str(), length.c_str()));
}

void schedule_rules(const Config& c, Rules& rules) {
    if (c.lr_decay_style != LrDecay::kConstant)
        rules.require(c.min_lr <= c.lr, strf("--min-lr %s exceeds --lr %s", number_text(c.min_lr).c_str(),
                                             number_text(c.lr).c_str()));
    rules.require(!c.shape.tied_head || c.lr_scale[static_cast<size_t>(LrGroup::kHead)] == 1,
                  "--lr-scale head: the output matrix is the embedding, whose rate embedding=X scales "
                  "(--untie-embeddings-and-output-weights)");
    rules.require(!c.shape.tied_head || c.mup_base_width == 0,
                  "--mup-base-width: the output matrix is the embedding, but needs its own rate and initial values "
                  "(--untie-embeddings-and-output-weights)");
    rules.require(c.qk_clip == 0 || !c.shape.qk_norm,
                  strf("--qk-clip %s: this model normalises queries and keys (--qk-layernorm), which bounds the logits "
                       "already: leave it out", number_text(c.qk_clip).c_str()));
    rules.require(c.qk_clip == 0 || c.shape.attention_softcap == 0,
                  strf("--qk-clip %s: this model caps its attention scores at %s (attn_logit_softcapping): leave it "
                       "out",
                       number_text(c.qk_clip).c_str(), number_text(c.shape.attention_softcap).c_str()));
    // Row numbers of experts are int32, also those with the padding of their FP8 operands.
    const int64_t rows = c.micro_batch_size * c.part_length() * c.shape.experts_per_token;
    rules.require(!c.shape.has_experts() || rows < int64_t{1} << 30,
                  strf("--micro-batch-size %lld: with --seq-length %lld and --moe-router-topk %lld the experts of a "
                       "micro-batch have %lld rows, at most 2^30 - 1 are supported: lower it",
                       ll(c.micro_batch_size), ll(c.seq_length), ll(c.shape.experts_per_token), ll(rows)));
    rules.require(c.skip_grad_norm == 0 || c.skip_grad_norm > 1,
                  strf("--skip-grad-norm %s must be above 1 (times the median norm), or 0 for never",
                       number_text(c.skip_grad_norm).c_str()));
    rules.require(c.stop_on_divergence == 0 || c.stop_on_divergence > 1,
                  strf("--stop-on-divergence %s must be above 1 (times the loss at the start), or 0 for never",
                       number_text(c.stop_on_divergence).c_str()));
    length_rules(c, rules);
}

void data_rules(const Config& c, Rules& rules) {
    const std::string train = parse_data_words(c.train_data).error, valid = parse_data_words(c.valid_data).error;
    rules.require(train.empty(), "--train-data: " + train);
    rules.require(valid.empty(), "--valid-data: " + valid);
}

void run_rules(const Config& c, int ranks, Rules& rules) {
    if (!c.dry_run) {
        rules.require(!c.train_data.empty() || c.synthetic_data,
                      "--train-data is missing (--dry-run works without it, --synthetic-data is for timing only)");
        rules.require(c.train_iters > 0 || c.epochs > 0,
                      "--train-iters or --epochs is missing: how long to train? (--dry-run works without it)");
    }
    rules.require(c.ranks == 0 || c.ranks == ranks,
                  strf("--ranks %lld, and %d %s started: scripts/launch/launch_mpi.sh -np %lld starts them",
                       ll(c.ranks), ranks, ranks == 1 ? "was" : "were", ll(c.ranks)));
    rules.require(c.zero_group != 1, "--zero-group 1 shards nothing: --zero 0 says so");
    rules.require(c.zero_group % c.context_parallel == 0,
                  strf("--zero-group %lld must be a multiple of --context-parallel %lld: ranks that share a sequence "
                       "are in one group", ll(c.zero_group), ll(c.context_parallel)));
    rules.require(ranks == 1 || c.zero_group == 0 || ranks % c.zero_group == 0,
                  strf("--zero-group %lld does not divide the %d ranks: each of its groups holds all shards",
                       ll(c.zero_group), ranks));
    rules.require(c.dtype == Dtype::kBf16 || c.grad_dtype != Dtype::kBf16,
                  "--grad-dtype bf16 needs --dtype bf16: no matmul takes FP32 operands to BF16 gradients");
    rules.require(c.resume != "auto" || !c.save.empty(),
                  "--resume auto looks under --save, which is missing");
    rules.require(c.profile_first <= c.profile_last,
                  strf("--profile %lld:%lld ends before it starts", ll(c.profile_first), ll(c.profile_last)));
}

void fp8_rules(const Config& c, Rules& rules) {
    for (const auto& [name, steps] : {std::pair("first", c.fp8_first_bf16), std::pair("final", c.fp8_final_bf16)})
        rules.require(steps < 1 || steps == std::floor(steps),
                      strf("--fp8-%s-bf16 %s must be a whole number of steps, or a fraction of the run below 1", name,
                           number_text(steps).c_str()));
    rules.require(!c.shape.has_experts() || c.fp8_recipe == Fp8Recipe::kNone
                      || (is_blockwise(c.fp8_recipe) && c.fp8_format == Fp8Format::kE4m3),
                  "--num-experts with FP8 needs --fp8-recipe blockwise and its --fp8-format e4m3: the codes of rows "
                  "are transposed for weight gradients, for which the scales of blocks must be powers of two");
    if (c.fp8_recipe == Fp8Recipe::kNone) return;
    rules.require(c.dtype == Dtype::kBf16, "FP8 (--fp8-recipe, --fp8-format) needs --dtype bf16: only BF16 tensors "
                  "are quantized");
    if (!c.first_last_layers_bf16) return;
    rules.require(c.num_layers_at_start_in_bf16 + c.num_layers_at_end_in_bf16 > 0,
                  "--first-last-layers-bf16 with 0 layers at the start and 0 at the end keeps nothing in BF16");
    for (const auto& [where, layers] : {std::pair("start", c.num_layers_at_start_in_bf16),
                                        std::pair("end", c.num_layers_at_end_in_bf16)})
        rules.require(layers <= c.shape.num_layers, strf("--num-layers-at-%s-in-bf16 %lld exceeds --num-layers %lld",
                                                         where, ll(layers), ll(c.shape.num_layers)));
}

}  // namespace

std::vector<Condition> conditions_of(const std::string& option) {
    std::vector<Condition> found;
    for (const Condition& condition : kConditions)
        if (has_word(condition.options, option)) found.push_back(condition);
    return found;
}

const char* why_no_effect(const OptionRow& row, const Config& config) {
    for (const Condition& condition : conditions_of(row.name))
        if (!is_met(condition, config)) return condition.reason;
    for (const auto& rule : kComputedRules)
        if (std::string(rule.option) == row.name && !rule.has_effect(config)) return rule.reason;
    return nullptr;
}

std::vector<std::string> config_errors(const Config& config, int ranks) {
    CHECK(ranks >= 1, "%d ranks", ranks);
    Rules rules;
    model_rules(config, rules);
    if (context_rules(config, ranks, rules)) batch_rules(config, ranks, rules);
    expert_rules(config, ranks, rules);
    schedule_rules(config, rules);
    data_rules(config, rules);
    run_rules(config, ranks, rules);
    fp8_rules(config, rules);
    rules.require(!offloads(config, "activations") || config.shape.num_layers > kResidentLayers,
                  strf("--offload activations: those of %d layers stay on the GPU, and the model has %lld",
                       kResidentLayers, ll(config.shape.num_layers)));
    return rules.broken;
}

std::vector<std::string> length_errors(const Config& config) {
    Rules rules;
    length_rules(config, rules);
    return rules.broken;
}

std::vector<std::string> config_warnings(const Config& config) {
    std::vector<std::string> lines;
    if (config.synthetic_data)
        lines.push_back(strf("SYNTHETIC DATA (--synthetic-data): for timing only, the losses mean nothing%s",
                             config.shape.has_experts() ? ", and experts are chosen evenly" : ""));
    if (is_blockwise(config.fp8_recipe) && config.fp8_format == Fp8Format::kHybrid)
        lines.push_back("--fp8-recipe blockwise with --fp8-format hybrid: gradients in E5M2 have 2 mantissa bits, and "
                        "scales per block make its larger range useless; the recipe is meant for e4m3");
    if (config.fp8_recipe != Fp8Recipe::kNone && config.fp8_fast_accum == FastAccum::kAll)
        lines.push_back("--fp8-fast-accum all: accumulating gradients with fewer bits makes the loss worse (by 6 to 8 "
                        "% for GPT-2 124M after 100M tokens)");
    if (config.grad_dtype == Dtype::kBf16 && config.grad_comm_dtype == Dtype::kFp32)
        lines.push_back("--grad-comm-dtype fp32: gradients are bf16 (--grad-dtype) and are sent as bf16, since fp32 "
                        "would not make them more precise; they are added in fp32");
    return lines;
}
