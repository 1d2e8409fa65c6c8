#include "llmc/config/config_table.h"

#include <algorithm>
#include <limits>

#include "llmc/base/check.h"

namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr Range kNotNegative{.low = 0, .high = kInf};
constexpr Range kScale{.low = 0, .high = 1000, .low_open = true};
constexpr Range kBeta{.low = 0, .high = 1, .low_open = false, .high_open = true};

// Megatron's "selective" is the opposite of block-keep-attention.
const char* selective_recompute(const Json& word) {
    if (json_choice(word, {"selective"}) < 0) return nullptr;
    return "Megatron's selective recomputes attention alone, which stores no matrix of scores here; --recompute "
           "block-keep-attention is the opposite, a layer is recomputed except attention";
}

// Some of kOffloadWords, in that order, each once.
template <typename At> OptionValue offload_words(At at) {
    OptionValue v = text_list(at, "WHAT,...", "moments, masters and activations, separated by commas", ',');
    v.any_text = false;
    v.set = [at, set = v.set](Config& c, const Json& json) {
        Config given;
        if (!set(given, json)) return false;
        std::vector<std::string> known;
        for (const char* word : kOffloadWords)
            if (offloads(given, word)) known.push_back(word);
        for (const std::string& word : given.offload)
            if (std::find(known.begin(), known.end(), word) == known.end()) return false;
        at(c) = known;
        return true;
    };
    return v;
}

// GROUP=X with words of kLrGroupWords, each at most once.
OptionValue group_scales() {
    OptionValue v{.type = "list", .metavar = "GROUP=X,...",
                  .expects = "numbers above 0 as embedding=X, head=X, matrix=X and vector=X", .parse = parse_text,
                  .set = {}, .get = {}, .list = true};
    v.set = [](Config& c, const Json& json) {
        std::vector<std::string> words;
        for (const Json& element : json.is_array() ? json : Json::array({json}))
            if (!element.is_string() || !append_words(element.get<std::string>(), ',', &words)) return false;
        decltype(c.lr_scale) scales{};   // 0: not given
        for (const std::string& word : words) {
            const size_t equals = std::min(word.find('='), word.size());
            const auto* group = std::find(std::begin(kLrGroupWords), std::end(kLrGroupWords), word.substr(0, equals));
            const Json number = parse_number(word.substr(std::min(equals + 1, word.size())));
            if (group == std::end(kLrGroupWords) || !number.is_number()) return false;
            double& scale = scales[static_cast<size_t>(group - std::begin(kLrGroupWords))];
            if (scale != 0 || !kScale.holds(number.get<double>())) return false;
            scale = number.get<double>();
        }
        std::replace(scales.begin(), scales.end(), 0.0, 1.0);
        c.lr_scale = scales;
        return true;
    };
    v.get = [](const Config& c) {
        Json words = Json::array();
        for (size_t i = 0; i < c.lr_scale.size(); i++)
            if (c.lr_scale[i] != 1) words.push_back(kLrGroupWords[i] + ("=" + number_text(c.lr_scale[i])));
        return words;
    };
    return v;
}

// ---- rows ----

using Rows = std::vector<OptionRow>;

void add_batch(Rows& rows) {
    add_rows(rows, OptionGroup::kBatch, {
        {.name = "micro-batch-size", .value = integer(AT(micro_batch_size), 1, 1 << 16),
         .help = "sequences per forward pass and rank (GPU)", .fallback = "8", .fallback_llama = "1",
         .changes = MayChange::kRounding, .llmc = "-b"},
        {.name = "global-batch-size", .value = integer(AT(global_batch_size), 1, 1 << 24),
         .help = "sequences per step of all ranks (gradient accumulation); a multiple of micro-batch size x ranks / "
                 "context-parallel",
         .derive = [](Config& c, const Given& given) {
             c.global_batch_size = c.micro_batch_size * std::max(1, c.data_ranks(given.ranks));
         },
         .derived = "micro-batch size x ranks / context-parallel", .on_resume = kMust},
        {.name = "rampup-batch-size",
         .value = tuple(' ', 1, "\"START INC SAMPLES\"", "three positive integers \"START INC SAMPLES\"",
                        AT(rampup_start), AT(rampup_increment), AT(rampup_samples)),
         .help = "increase the global batch from START in steps of INC over the first SAMPLES samples",
         .on_resume = kMust},
        {.name = "train-iters", .value = integer(AT(train_iters), 0, kMany),
         .help = "optimizer steps of the whole run; set this or --epochs", .llmc = "-x"},
        {.name = "epochs", .value = number(AT(epochs), {.low = 0, .high = 1e6}),
         .help = "passes over --train-data, also fractions; a pass over a blend has as many samples as its shards "
                 "have; set this or --train-iters"},
    });
}

// Weights and globs (blend.h). A weight in JSON may be a number.
template <typename At>
OptionValue data_words(At at) {
    OptionValue v = text_list(at, "[WEIGHT] GLOB ...", "shard files as globs, each source optionally after its weight");
    v.set = [set = v.set](Config& c, const Json& json) {
        Json words = Json::array();
        for (const Json& word : json.is_array() ? json : Json::array({json}))
            words.push_back(word.is_number() ? Json(word.dump()) : word);
        return set(c, words);
    };
    return v;
}

void add_data(Rows& rows) {
    // A data set may move: --resume compares the shards' fingerprints instead of their paths.
    add_rows(rows, OptionGroup::kData, {
        {.name = "train-data", .value = data_words(AT(train_data)),
         .help = "token shards to train on (data/prepare_text.py makes them); weights such as 0.7 a/train*.bin "
                 "0.3 b/train*.bin blend them", .llmc = "-i"},
        {.name = "valid-data", .value = data_words(AT(valid_data)), .help = "token shards for validation",
         .changes = MayChange::kNothing, .llmc = "-j"},
        {.name = "token-dtype",
         .value = choice<std::string>(AT(token_dtype), {{"", ""}, {"uint16", "uint16"}, {"uint32", "uint32"}}),
         .help = "element type of shards without a header (nanoGPT)"},
        {.name = "reset-attention-mask", .value = flag(AT(reset_attention_mask)),
         .help = "attention stays within a document; they begin at the separator of the .meta.json, or as a .idx says",
         .on_resume = kMust},
        {.name = "reset-position-ids", .value = flag(AT(reset_position_ids)),
         .help = "positions restart at 0 with each document, also in evaluations; documents are those of "
                 "--reset-attention-mask", .on_resume = kMust},
        {.name = "align-documents",
         .value = choice<std::optional<bool>>(AT(align_documents), {{"auto", {}}, {"on", true}, {"off", false}}),
         .help = "samples are whole documents and padding; auto: only of shards with loss masks whose documents are "
                 "known", .on_resume = kMust},
        {.name = "synthetic-data", .value = flag(AT(synthetic_data)),
         .help = "draw tokens from the seed instead of reading shards: for timing only, the model learns nothing",
         .on_resume = kMust},
        {.name = "eval-interval", .value = integer(AT(eval_interval), 0, kMany),
         .help = "steps between evaluations; 0: only at the end", .fallback = "250", .changes = MayChange::kNothing,
         .llmc = "-v"},
        {.name = "eval-iters", .value = integer(AT(eval_iters), 1, kMany), .help = "micro-batches per evaluation",
         .fallback = "20", .changes = MayChange::kNothing, .llmc = "-m"},
        {.name = "hellaswag-data", .value = text(AT(hellaswag_data), "FILE", "a file"),
         .help = "HellaSwag file of data/prepare_hellaswag.py, or llm.c's evaluation file; evaluated before the first "
                 "step, every --eval-interval steps and at the end", .on_resume = kSilent},
        {.name = "eval-bf16",
         .value = choice<EvalBf16>(AT(eval_bf16), {{"last", EvalBf16::kLast}, {"on", EvalBf16::kOn},
                                   {"off", EvalBf16::kOff}}),
         .help = "evaluate an FP8 run also with the weights that it exports, rounded to BF16, in BF16: at the end of "
                 "the run (last), in every evaluation (on), or never (off)", .on_resume = kSilent},
    });
}

void add_optimizer(Rows& rows) {
    add_rows(rows, OptionGroup::kOptimizer, {
        {.name = "optimizer", .value = choice<OptimizerKind>(AT(optimizer), {{"adamw", OptimizerKind::kAdamW},
                                        {"muon", OptimizerKind::kMuon}}),
         .help = "optimizer of the matrices of layers; embeddings, head, norms and biases have AdamW with either",
         .on_resume = OnResume::kInherited},
        {.name = "muon-scale", .value = choice<MuonScale>(AT(muon_scale), {{"match-rms", MuonScale::kMatchRms},
                                    {"spectral", MuonScale::kSpectral}}),
         .help = "size of Muon's update of an m x n matrix; match-rms: 0.2 sqrt(max(m, n)), that of AdamW, so that its "
                 "--lr suits; spectral: sqrt(max(1, m / n)), whose --lr is about 0.02",
         .on_resume = OnResume::kInherited},
        {.name = "muon-momentum", .value = number(AT(muon_momentum), kBeta),
         .help = "decay of Muon's momentum (Nesterov)", .on_resume = OnResume::kInherited},
        {.name = "muon-beta2", .value = number(AT(muon_beta2), kBeta),
         .help = "decay of the second moment of each row of Muon's orthogonalised update, by whose root the row is "
                 "divided (NorMuon, which uses 0.95); 0: there is none", .on_resume = OnResume::kInherited},
        {.name = "lr", .value = number(AT(lr), {.low = 0, .high = 10, .low_open = true}), .help = "peak learning rate",
         .fallback = "6e-4", .fallback_llama = "3e-4", .llmc = "-l"},
        {.name = "min-lr", .value = number(AT(min_lr), {.low = 0, .high = 10}),
         .help = "learning rate of the last step",
         // Rounded to 12 decimal digits, so that a tenth of 6e-4 is printed as 6e-05.
         .derive = [](Config& c, const Given&) { c.min_lr = std::stod(strf("%.12g", c.lr / 10)); },
         .derived = "a tenth of --lr"},
        {.name = "lr-decay-style",
         .value = choice<LrDecay>(AT(lr_decay_style), {{"cosine", LrDecay::kCosine}, {"linear", LrDecay::kLinear},
                                  {"constant", LrDecay::kConstant}, {"wsd", LrDecay::kWsd}}),
         .help = "learning rate schedule from --lr to --min-lr; wsd (warmup-stable-decay) holds --lr until the final "
                 "decay"},
        {.name = "lr-warmup-iters", .value = integer(AT(lr_warmup_iters), 0, kMany), .help = "steps of linear warm-up",
         .derive = [](Config& c, const Given&) {
             c.lr_warmup_iters = c.epochs > 0 ? 0 : std::min<int64_t>(c.train_iters / 100, 2000);
         },
         .derived = "1% of --train-iters, at most 2000; 0 with --epochs", .llmc = "-u"},
        {.name = "lr-wsd-decay-iters", .value = integer(AT(lr_wsd_decay_iters), 0, kMany),
         .help = "steps of the final linear decay of wsd; 0: a tenth of the run"},
        {.name = "lr-scale", .value = group_scales(),
         .help = "multiply the learning rate of groups of parameters, and with it their weight decay: the embeddings, "
                 "the output matrix (head), the matrices of the layers, norms and biases (vector)"},
        {.name = "mup-base-width", .value = integer(AT(mup_base_width), 0, 131072),
         .help = "muP: --lr and --init-method-std are those of a model of this hidden size, and the rates and initial "
                 "values of matrices follow from the ratio of widths, so that the best --lr stays; 0: no scaling by "
                 "width"},
        {.name = "weight-decay", .value = number(AT(weight_decay), {.low = 0, .high = 100}),
         .help = "decoupled weight decay of matrices; not of norms and biases", .fallback = "0.1", .llmc = "-c"},
        {.name = "adam-beta1", .value = number(AT(adam_beta1), kBeta), .help = "decay of the first moment",
         .fallback = "0.9"},
        {.name = "adam-beta2", .value = number(AT(adam_beta2), kBeta), .help = "decay of the second moment",
         .fallback = "0.95"},
        {.name = "adam-eps", .value = number(AT(adam_eps), kInsideUnit),
         .help = "added to the square root of the second moment", .fallback = "1e-8"},
        {.name = "clip-grad", .value = number(AT(clip_grad), kNotNegative),
         .help = "gradient clipping, the largest global norm; 0: none", .fallback = "1"},
        {.name = "z-loss", .value = number(AT(z_loss), {.low = 0, .high = 1}),
         .help = "add this times the mean squared log-sum-exp of the logits to the loss that is trained (PaLM: 1e-4); "
                 "logged losses and evaluations are without it; 0: none"},
        {.name = "moe-aux-loss-coeff", .value = number(AT(moe_aux_loss_coeff), {.low = 0, .high = 1}),
         .help = "with --num-experts: weight of the auxiliary loss of each layer, E sum(share of the rows x mean "
                 "probability) over its E experts, which is 1 if all have the same load; shares are those of the step "
                 "before", .fallback = "0.01"},
        {.name = "moe-capacity", .value = number(AT(moe_capacity), {.low = 0, .high = 8}),
         .help = "with --expert-parallel: memory for this times the rows that a rank's experts have if all have the "
                 "same load, rounded up to whole rows of a token; a step with more rows is an error, none is dropped; "
                 "0: for the most that there can be", .on_resume = kSilent},
        {.name = "moe-z-loss-coeff", .value = number(AT(moe_z_loss_coeff), {.low = 0, .high = 1}),
         .help = "with --num-experts: add this times the mean squared log-sum-exp of the router logits of each layer "
                 "(ST-MoE: 1e-3); 0: none"},
        {.name = "moe-router-bias-update-rate", .value = number(AT(moe_router_bias_update_rate), {.low = 0, .high = 1}),
         .help = "with --moe-shared-experts: what each step adds to the bias of experts with less than the mean load, "
                 "and subtracts from that of others (DeepSeek-V3: 1e-3, at last 0)", .fallback = "0.001"},
        {.name = "qk-clip", .value = number(AT(qk_clip), kNotNegative),
         .help = "after each step, scale W_q and W_k of heads whose largest attention logit exceeded this, by the root "
                 "of what makes it equal (MuonClip, Kimi K2: 100); 0: none"},
        {.name = "skip-grad-norm", .value = number(AT(skip_grad_norm), kNotNegative),
         .help = "skip the update of a step whose gradient norm, before clipping, exceeds this many times the median "
                 "of the last 128 norms (of at least 16); 0: never"},
        {.name = "ema", .value = number(AT(ema), kBeta),
         .help = "keep an exponential moving average of the FP32 master weights with this decay (0.999): evaluations "
                 "are also of these weights, and checkpoints have them as a model in ema/; 0: none"},
        {.name = "stop-on-divergence", .value = number(AT(stop_on_divergence), kNotNegative),
         .help = "end with exit code 4 when the loss (median of 3 steps) exceeds this many times its start, which is "
                 "the lower of the first loss and the median of the first 5; the state is not saved, earlier "
                 "checkpoints are kept; 0: never. Above 1.5 times there is a warning", .on_resume = kSilent},
    });
}

void add_precision(Rows& rows) {
    const std::vector<std::pair<std::string, Dtype>> floats = {{"bf16", Dtype::kBf16}, {"fp32", Dtype::kFp32}};
    add_rows(rows, OptionGroup::kPrecision, {
        {.name = "dtype", .value = choice<Dtype>(AT(dtype), floats),
         .help = "dtype of activations and weights; FP32 master weights always exist", .on_resume = kMust},
        {.name = "grad-dtype", .value = choice<Dtype>(AT(grad_dtype), floats),
         .help = "dtype of gradient accumulation"},
        {.name = "moment-dtype",
         .value = choice<Dtype>(AT(moment_dtype), {{"bf16", Dtype::kBf16}, {"fp32", Dtype::kFp32},
                                                   {"fp8", Dtype::kE4m3}}),
         .help = "dtype of the optimizer state (Adam's moments, Muon's momentum), rounded stochastically unless fp32; "
                 "fp8: m and momentum in E4M3 and v in UE5M3, with a scale for every 128 elements", .on_resume = kMust},
        {.name = "recompute",
         .value = choice<Recompute>(AT(recompute), {{"none", Recompute::kNone}, {"norm-act", Recompute::kNormAct},
                                    {"block", Recompute::kBlock},
                                    {"block-keep-attention", Recompute::kBlockKeepAttention}}),
         .help = "activation checkpointing, what the backward pass recomputes; norm-act: results of norms and "
                 "activation functions; block: whole layers; block-keep-attention: layers except attention itself, "
                 "whose output and log-sum-exp are saved", .refused = selective_recompute,
         .changes = MayChange::kNothing},
        {.name = "offload", .value = offload_words(AT(offload)),
         .help = "keep Adam's moments, the FP32 master weights or the saved activations in pinned host memory and copy "
                 "them while the GPU computes; results are equal to the bit", .on_resume = kSilent},
        {.name = "offload-fraction", .value = number(AT(offload_fraction), {.low = 0, .high = 1, .low_open = true}),
         .help = "fraction of the offloaded moments and master weights that is in host memory; the rest stays on the "
                 "GPU, which makes the step faster", .on_resume = kSilent},
        {.name = "gemm-search", .value = choice<bool>(AT(gemm_search), {{"on", true}, {"off", false}}),
         .help = "autotune: time the matmul algorithms for every shape at the start", .changes = MayChange::kRounding,
         .gpu_only = true},
        {.name = "loss-chunk", .value = integer(AT(loss_chunk), 0, kMany),
         .help = "compute logits, loss and gradients of the LM head for N tokens at a time, so that only their logits "
                 "are in memory; if the head runs in FP8: a multiple of 16, or of 128 with --fp8-recipe blockwise; 0: "
                 "all tokens of a micro-batch at once", .changes = MayChange::kRounding},
        {.name = "seed", .value = integer(AT(seed), 0, INT64_MAX),
         .help = "random seed of weights, data order, stochastic rounding and samples", .fallback = "1234",
         .on_resume = kMust},
    });
}

void add_checkpoints(Rows& rows) {
    add_rows(rows, OptionGroup::kCheckpoint, {
        {.name = "save", .value = text(AT(save), "DIR", "a directory"),
         .help = "write checkpoints under this directory; each one is a Hugging Face model"},
        {.name = "save-interval", .value = integer(AT(save_interval), 0, kMany),
         .help = "steps between checkpoints; 0: only at the end", .fallback = "1000", .llmc = "-n"},
        {.name = "keep", .value = integer(AT(keep), 0, kMany), .help = "newest checkpoints to keep; 0: all",
         .llmc = "-nk"},
        {.name = "save-async", .value = flag(AT(save_async)),
         .help = "copy the state to pinned host memory and write it while training continues; --dry-run shows the "
                 "memory"},
        {.name = "load", .value = text(AT(load), "DIR", "a directory"),
         .help = "start from the weights of a Hugging Face model (fine-tuning)", .changes = MayChange::kNumerics},
        {.name = "resume", .value = text(AT(resume), "DIR|auto", "a checkpoint or auto"),
         .help = "continue a run from a checkpoint; auto: from the newest complete one under --save, if there is one",
         .changes = MayChange::kNumerics},
        {.name = "tokenizer", .value = text(AT(tokenizer), "PATH", "a file or directory, or \"bytes\""),
         .help = "tokenizer of the data, to copy into every checkpoint instead of that of --load or --resume; samples "
                 "are printed as text if it is the tokenizer.json of a byte-level BPE (GPT-2, Llama-3)"},
    });
}

void add_output(Rows& rows) {
    add_rows(rows, OptionGroup::kOutput, {
        {.name = "log-interval", .value = integer(AT(log_interval), 1, kMany),
         .help = "steps between lines on the screen; the log file has every step", .fallback = "1"},
        {.name = "log-file", .value = text(AT(log_file), "FILE", "a file"),
         .help = "log in JSON lines at full precision; \"\": no log; missing folders are made in the working folder "
                 "and in --save only",
         .derive = [](Config& c, const Given&) { c.log_file = c.save.empty() ? "" : c.save + "/log.jsonl"; },
         .derived = "log.jsonl in the directory of --save"},
    });
}

// Options for generated text, used by samples during training and by `generate`.
void add_samples(Rows& rows) {
    add_rows(rows, OptionGroup::kOutput, {
        {.name = "sample-every", .value = integer(AT(sample_every), 0, kMany),
         .help = "steps between samples of generated text; 0: none", .llmc = "-s"},
        {.name = "sample-tokens", .value = integer(AT(sample_tokens), 1, 1 << 20), .help = "tokens per sample",
         .fallback = "64", .llmc = "-g"},
        {.name = "prompt", .value = text(AT(prompt), "'ID ...'|TEXT", "token ids, or text"),
         .help = "prompt that samples continue, as token ids, or as text if the vocabulary is bytes"},
        {.name = "temperature", .value = number(AT(temperature), {.low = 0, .high = 1000}),
         .help = "divide logits by it before a token is drawn; 0: take the most likely token", .fallback = "0.8"},
        {.name = "top-k", .value = integer(AT(top_k), 0, 1 << 24),
         .help = "draw from the N most likely tokens; 0: from all"},
    });
}

void add_other(Rows& rows) {
    add_rows(rows, OptionGroup::kOther, {
        {.name = "dry-run", .value = flag(AT(dry_run)),
         .help = "print memory, FLOPs, communication and the predicted time of a step, then exit; the same as the "
                 "subcommand plan; needs no data and no GPU"},
        {.name = "gpu", .value = text(AT(gpu), "NAME", "the name of a GPU"),
         .help = "GPU to plan for (H200, H100 SXM, ...); default: the one found, else H200"},
        {.name = "json", .value = flag(AT(json)), .help = "print the plan as JSON"},
        {.name = "profile",
         .value = tuple(':', 1, "FIRST:LAST", "two steps FIRST:LAST, counted from 1", AT(profile_first),
                        AT(profile_last)),
         .help = "emit NVTX ranges and open the profiler's capture window around these steps", .gpu_only = true,
         .refused_on_cpu = "leave it out; the command bench times the parts of a step"},
        {.name = "exit-duration-in-mins", .value = number(AT(exit_duration_in_mins), kNotNegative),
         .help = "after this many minutes finish the step, save and exit with 0; 0: no limit"},
    });
}

}  // namespace

void add_rows(std::vector<OptionRow>& rows, OptionGroup group, std::vector<OptionRow> more) {
    const bool beside = group >= OptionGroup::kCheckpoint;
    const OnResume usual = group == OptionGroup::kModel ? kMust : beside ? kSilent : OnResume::kReport;
    for (OptionRow& row : more) {
        row.group = group;
        if (row.on_resume == OnResume::kOfGroup) row.on_resume = usual;
        rows.push_back(std::move(row));
    }
}

const std::vector<OptionRow>& option_table() {
    static const Rows table = [] {
        Rows rows;
        add_model(rows);
        add_batch(rows);
        add_data(rows);
        add_optimizer(rows);
        add_precision(rows);
        add_fp8(rows);
        add_ranks(rows);
        add_checkpoints(rows);
        add_output(rows);
        add_samples(rows);
        add_other(rows);
        return rows;
    }();
    return table;
}

const std::vector<std::string>& generate_options() {
    static const std::vector<std::string> names = {
        "load", "dtype", "seed", "sample-tokens", "prompt", "temperature", "top-k"};
    return names;
}

const OptionRow* find_option(const std::string& name) {
    for (const OptionRow& row : option_table())
        if (name == row.name) return &row;
    return nullptr;
}

bool offloads(const Config& config, const std::string& word) {
    return std::find(config.offload.begin(), config.offload.end(), word) != config.offload.end();
}
