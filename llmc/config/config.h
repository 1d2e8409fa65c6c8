// The options of a run. The command line, JSON files, --help, the banner and the record in the checkpoint are made from
// one table (config_table.h), which alone knows names, defaults and ranges.
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
    int64_t max_skips = 0;              // consecutive skipped steps that are allowed; one more: exit 4

    // precision
    Dtype dtype = Dtype::kBf16;         // activations and weights
    Dtype grad_dtype = Dtype::kFp32;
    Dtype moment_dtype = Dtype::kFp32;
    Recompute recompute = Recompute::kNone;
    bool attention_fast = false;        // accumulates dQ in any order
    bool gemm_search = true;
    bool fuse_gelu = false;             // gelu inside the matmul's epilogue
    uint64_t seed = 0;

    // fp8: kNone is off
    Fp8Recipe fp8_recipe = Fp8Recipe::kNone;
    Fp8Format fp8_format = Fp8Format::kHybrid;
    int64_t fp8_margin = 0;             // scales are divided by 2^margin; delayed only
    int64_t fp8_interval = 1;           // optimizer steps between new scales; delayed only
    int64_t fp8_amax_history_len = 1;   // optimizer steps; delayed with kMax only
    AmaxAlgo fp8_amax_compute_algo = AmaxAlgo::kMax;
    FastAccum fp8_fast_accum = FastAccum::kFprop;
    bool first_last_layers_bf16 = false;
    int64_t num_layers_at_start_in_bf16 = 0, num_layers_at_end_in_bf16 = 0;
    std::vector<std::string> bf16_linears;   // patterns "31.down", "0.*", "*.proj"
    bool fp8_lm_head = false;
    bool fp8_attention = false;         // the two matmuls of the forward, with any recipe or none
    double fp8_min_speedup = 0;         // keep a linear in BF16 whose predicted FP8 speedup is below; 0: no rule
    int64_t fp8_health_interval = 0;    // steps between statistics of every FP8 tensor; 0: none

    // distributed
    int64_t ranks = 0;                  // 0: as many as were started; a dry run plans for this many
    int64_t zero = 1;                   // 1: each rank owns a shard of master weights and moments; 0: all of them
    double bucket_mb = 256;             // fp32 gradients that are reduced together, 10^6 bytes
    bool overlap = true;                // overlap communication with compute
    Dtype grad_comm_dtype = Dtype::kFp32;   // kFp32, kBf16, kE4m3
    Dtype param_comm_dtype = Dtype::kBf16;  // of weights in FP8: kBf16, kE4m3
    int64_t fp8_check_interval = 0;     // steps between comparisons of FP8 scales over the ranks; 0: none

    // checkpoints
    std::string save, load, resume;     // resume: a directory or "auto"
    int64_t save_interval = 0;          // steps; 0: only at the end
    int64_t keep = 0;                   // newest checkpoints to keep; 0: all
    bool save_async = false;            // written while training continues
    std::string tokenizer;              // directory or file copied into every checkpoint, optional

    // output
    int64_t log_interval = 0;
    std::string log_file;
    int64_t sample_every = 0, sample_tokens = 0;
    double temperature = 0;             // 0: the most likely token
    int64_t top_k = 0;                  // draw among so many; 0: all
    std::string prompt_ids, prompt_bytes, prompts;   // see prompts.h
    TokenForm print = TokenForm::kAuto;

    // other
    bool dry_run = false;               // the same as the subcommand plan
    std::string gpu;                    // GPU to plan for, a row of kernel_rates.cpp; "": the one found, else H200
    bool json = false;                  // the plan as JSON
    bool check_comm = false;            // time the links between the ranks first
    int64_t profile_first = -1, profile_last = -1;   // --profile FIRST:LAST, steps counted from 1; -1: none
    bool overfit_one_batch = false;
    double comm_timeout = 0;            // seconds without progress of a rank, 0: no limit
    double exit_duration_in_mins = 0;   // 0: no limit
    std::vector<std::string> inject;    // see fault_injection.h

    bool operator==(const Config&) const = default;
};

// The machine of the run, as far as options depend on it.
struct Machine {
    bool gpu = true;
    int ranks = 1;
    // Reads the shape of the model in a --load directory. Without this function --load does not change the shape.
    std::function<ModelConfig(const std::string& directory)> read_shape = {};
};

struct ParsedConfig {
    Config config;
    bool help = false;               // --help or --print-options: print `text` and exit with 0
    std::string text;                // of the help, or the option table
    std::vector<std::string> idle;   // options that have no effect on this hardware
    bool fp8_given = false;          // the user set --fp8-recipe or --fp8-format, even to none
    std::vector<std::string> notes;  // other names that were used ("-b is --micro-batch-size"), and warnings
};

// Parses the command line of one executable ("gpt2" or "llama": its presets and defaults). --config FILE is read first,
// and the command line overrides it. An unknown option or key is an error that suggests the nearest name; an option
// that has no effect under the chosen model or the other options is an error with the reason (exit 2).
ParsedConfig parse_config(int argc, const char* const* argv, const std::string& family,
                          const Machine& machine = {});
// The same for `train_FAMILY generate`, which takes only the options about generated text.
ParsedConfig parse_generate_config(int argc, const char* const* argv, const std::string& family,
                                   const Machine& machine = {});

// Rules about the length of the run that a run with --epochs breaks, one line each, once train_iters is known from the
// data. For --train-iters parse_config has checked them.
std::vector<std::string> length_errors(const Config& config);

// The resolved configuration as JSON text, without options that have no effect; --config loads it back to the same run.
std::string config_to_json(const Config& config, const std::string& family);
// Lines "name = value" of every option that has an effect, grouped, for the banner.
std::string config_to_text(const Config& config, const std::string& family);
// The differences between a checkpoint's configuration (JSON text) and this one, as lines, for --resume. must_match:
// those that would make it another run (model shape, seed, global batch, sequence length, dtypes). Paths of the data
// may change, since DataLoader::check_fingerprint compares the data itself.
struct ConfigDiff {
    std::vector<std::string> must_match, changed;
};
ConfigDiff config_diff(const std::string& saved_json, const Config& config, const std::string& family);
