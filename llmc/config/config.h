// Options of a run: one table (config.cpp) from which the command line, the JSON file, --help, the banner and the
// record in the checkpoint are made. Only the table knows names, defaults and ranges.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "llmc/base/dtype.h"
#include "llmc/config/model_config.h"

enum class Recompute { kNone, kNormAct, kBlock, kBlockKeepAttention };
enum class LrDecay { kCosine, kLinear, kConstant, kWsd };
enum class Fp8Recipe { kNone, kDelayed, kTensorwise, kBlockwise };
enum class Fp8Format { kHybrid, kE4m3 };   // of dy: E5M2 or E4M3
enum class AmaxAlgo { kMax, kMostRecent };
enum class FastAccum { kNone, kFprop, kAll };
enum class TokenForm { kAuto, kIds, kBytes };   // kAuto: bytes where the vocabulary is bytes, else ids

// Fields are named after their option: --micro-batch-size is micro_batch_size.
struct Config {
    // model: --model names a preset, the shape options override single fields of it
    std::string model;
    ModelConfig shape;
    int64_t seq_length = 0;             // 0 on the command line: the preset's

    // batch and length
    int64_t micro_batch_size = 0;       // sequences per forward and rank
    int64_t global_batch_size = 0;      // sequences per optimizer step
    int64_t rampup_start = 0, rampup_increment = 0, rampup_samples = 0;   // --rampup-batch-size "START INC SAMPLES"
    int64_t train_iters = 0;            // 0: from --epochs
    double epochs = 0;                  // 0: --train-iters decides; else train_iters follows from the data

    // data
    std::vector<std::string> train_data, valid_data;   // globs
    std::string token_dtype;            // "", "uint16", "uint32": for headerless shards
    bool reset_attention_mask = false;  // attention stays within a document
    bool synthetic_data = false;        // tokens from the seed in place of shards, for timing alone
    int64_t eval_interval = 0;          // steps; 0: only at the end
    int64_t eval_iters = 0;             // micro-batches per evaluation
    std::string hellaswag_data;         // a file of hellaswag.h
    int64_t hellaswag_interval = 0;     // steps; 0: only at the end
    int64_t hellaswag_examples = 0;     // the first ones; 0: all

    // optimizer
    double lr = 0, min_lr = 0;
    LrDecay lr_decay_style = LrDecay::kCosine;
    int64_t lr_warmup_iters = 0;
    int64_t lr_wsd_decay_iters = 0;     // wsd: length of the final decay; 0: a tenth of the run
    double weight_decay = 0, adam_beta1 = 0, adam_beta2 = 0, adam_eps = 0, clip_grad = 0;
    int64_t max_skips = 0;              // consecutive skipped steps to bear; one more: exit 4

    // numbers
    Dtype dtype = Dtype::kBf16;         // activations and weights
    Dtype grad_dtype = Dtype::kFp32;
    Dtype moment_dtype = Dtype::kFp32;
    Recompute recompute = Recompute::kNone;
    bool attention_fast = false;        // dq is added up in any order
    bool gemm_search = true;
    bool fuse_gelu = false;             // gelu inside the matmul's epilogue
    uint64_t seed = 0;

    // fp8: kNone is off
    Fp8Recipe fp8_recipe = Fp8Recipe::kNone;
    Fp8Format fp8_format = Fp8Format::kHybrid;
    int64_t fp8_margin = 0;             // factors are divided by 2^margin; delayed only
    int64_t fp8_interval = 1;           // updates between new factors; delayed only
    int64_t fp8_amax_history_len = 1;   // optimizer steps; delayed with kMax only
    AmaxAlgo fp8_amax_compute_algo = AmaxAlgo::kMax;
    FastAccum fp8_fast_accum = FastAccum::kFprop;
    bool first_last_layers_bf16 = false;
    int64_t num_layers_at_start_in_bf16 = 0, num_layers_at_end_in_bf16 = 0;
    std::vector<std::string> bf16_linears;   // patterns "31.down", "0.*", "*.proj"
    bool fp8_lm_head = false;
    bool fp8_attention = false;         // the forward's two products; of any recipe, none too
    double fp8_min_speedup = 0;            // keep a linear in BF16 whose predicted FP8 gain is below; 0: no rule
    int64_t fp8_health_interval = 0;    // steps between reports of every FP8 tensor; 0: none

    // several ranks
    int64_t ranks = 0;                  // 0: as many as were started; a dry run plans for this many
    int64_t zero = 1;                   // 1: each rank owns a part of masters and moments; 0: all of them
    double bucket_mb = 256;             // of fp32 gradients that travel together, 10^6 bytes
    bool overlap = true;                // communication runs beside compute
    Dtype grad_comm_dtype = Dtype::kFp32;   // kFp32, kBf16, kE4m3
    Dtype param_comm_dtype = Dtype::kBf16;  // of weights in FP8: kBf16, kE4m3
    int64_t fp8_check_interval = 0;     // steps between comparisons of FP8 factors over the ranks; 0: none

    // checkpoints
    std::string save, load, resume;     // resume: a directory or "auto"
    int64_t save_interval = 0;          // steps; 0: only at the end
    int64_t keep = 0;                   // newest checkpoints to keep; 0: all
    bool save_async = false;            // written behind training
    std::string tokenizer;              // directory or file copied into every checkpoint, optional

    // output
    int64_t log_interval = 0;
    std::string log_file;
    int64_t sample_every = 0, sample_tokens = 0;
    double temperature = 0;             // 0: the likeliest token
    int64_t top_k = 0;                  // draw among so many; 0: all
    std::string prompt_ids, prompt_bytes, prompts;   // see prompts.h
    TokenForm print = TokenForm::kAuto;

    // other
    bool dry_run = false;               // as the subcommand plan
    std::string gpu;                    // that is planned for, a row of gpu_rates.cpp; "": the one found, else an H200
    bool json = false;                  // the plan as JSON
    bool check_comm = false;            // time the links between the ranks first
    int64_t profile_first = -1, profile_last = -1;   // --profile FIRST:LAST, steps counted from 1; -1: none
    bool overfit_one_batch = false;
    double comm_timeout = 0;            // seconds without progress of a rank, 0: wait for ever
    double exit_duration_in_mins = 0;   // 0: no limit
    std::vector<std::string> inject;    // see inject.h

    bool operator==(const Config&) const = default;
};

// What the run has to work with, as far as options depend on it.
struct Machine {
    bool gpu = true;
    int ranks = 1;
    // Shape of the model in a --load directory. Without it, --load leaves the shape to the other options.
    std::function<ModelConfig(const std::string& directory)> read_shape = {};
};

struct ParsedConfig {
    Config config;
    bool help = false;               // --help was asked: print `text` and leave with 0
    std::string text;                // help text
    std::vector<std::string> idle;   // options that were set and have nothing to do for lack of hardware
    bool fp8_given = false;          // the user said --fp8-recipe or --fp8-format, be it none
    std::vector<std::string> notes;  // spellings of others that were used: "-b is --micro-batch-size"; warnings
};

// Parse a command line for one executable ("gpt2" or "llama": its presets and defaults). Reads --config FILE first,
// then the command line wins. An unknown option or key is an error with the nearest name; an option that was set and
// has no effect under the chosen model or the other options is an error with the reason (Error, exit 2).
ParsedConfig parse_config(int argc, const char* const* argv, const std::string& family,
                          const Machine& machine = {});
// The same for `train_FAMILY generate`, which takes only the options that say something about generated text.
ParsedConfig parse_generate_config(int argc, const char* const* argv, const std::string& family,
                                   const Machine& machine = {});

// What does not fit the length of a run with --epochs, once its data has said train_iters. One line each; for
// --train-iters parse_config has looked at it.
std::vector<std::string> length_errors(const Config& config);

// The resolved configuration as JSON text that loads back (through --config) to the same run: inert fields left out.
std::string config_to_json(const Config& config, const std::string& family);
// Lines "name = value" of every option that acts, grouped, for the banner.
std::string config_to_text(const Config& config, const std::string& family);
// What differs between a checkpoint's configuration (JSON text) and this one, as lines; for --resume.
// must_match: the ones that would make it another run (model shape, seed, global batch, sequence length, dtypes).
// Paths of the data may change: what counts is DataLoader::check_fingerprint.
struct ConfigDiff {
    std::vector<std::string> must_match, changed;
};
ConfigDiff config_diff(const std::string& saved_json, const Config& config, const std::string& family);
