// The options of a run. One table (config_table.h) has their names, defaults and ranges; the command line, JSON files,
// --help and the checkpoint's record all use it.
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <iterator>
#include <optional>
#include <string>
#include <vector>

#include "llmc/base/dtype.h"
#include "llmc/config/model_config.h"

enum class Recompute { kNone, kNormAct, kBlock, kBlockKeepAttention };
enum class LrDecay { kCosine, kLinear, kConstant, kWsd };
enum class Fp8Recipe { kNone, kDelayed, kTensorwise, kBlockwise, kBlockwiseBf16Wgrad, kInt8Forward };
constexpr bool is_blockwise(Fp8Recipe recipe) {
    return recipe == Fp8Recipe::kBlockwise || recipe == Fp8Recipe::kBlockwiseBf16Wgrad;
}
enum class Fp8Format { kHybrid, kE4m3 };   // dy in E5M2 or in E4M3
enum class AmaxAlgo { kMax, kMostRecent };
enum class FastAccum { kNone, kFprop, kAll };
enum class OptimizerKind : uint8_t { kAdamW, kMuon, kRouterBias };
enum class MuonScale { kMatchRms, kSpectral };
enum class EvalBf16 { kOff, kLast, kOn };

// Groups of parameters for --lr-scale: the token and position embeddings, the output matrix unless it is the token
// embedding, the matrices of the layers, norms and biases.
enum class LrGroup : uint8_t { kEmbedding, kHead, kMatrix, kVector };
inline constexpr const char* kLrGroupWords[] = {"embedding", "head", "matrix", "vector"};

// Fields are named after their option: --micro-batch-size is micro_batch_size.
struct Config {
    // model: --model names a preset, whose fields the shape options override
    std::string model;
    ModelConfig shape;
    int64_t seq_length = 0;

    // batch and length
    int64_t micro_batch_size = 0;       // sequences per forward pass and rank
    int64_t global_batch_size = 0;      // sequences per optimizer step
    int64_t rampup_start = 0, rampup_increment = 0, rampup_samples = 0;   // --rampup-batch-size "START INC SAMPLES"
    int64_t train_iters = 0;            // 0: computed from --epochs and the data
    double epochs = 0;                  // 0: --train-iters sets the length

    // data
    std::vector<std::string> train_data, valid_data;   // globs
    std::string token_dtype;            // "", "uint16", "uint32": of shards without a header
    bool reset_attention_mask = false;  // attention stays within a document
    bool reset_position_ids = false;    // positions restart at each document
    std::optional<bool> align_documents;   // samples begin at documents; empty: those of shards with loss masks
    bool synthetic_data = false;        // random tokens instead of shards, for timing only
    int64_t eval_interval = 0;          // steps; 0: only at the end
    int64_t eval_iters = 0;             // micro-batches per evaluation
    std::string hellaswag_data;         // a file, see hellaswag.h
    EvalBf16 eval_bf16 = EvalBf16::kLast;   // evaluations of an FP8 run with the weights it exports, too

    // optimizer
    OptimizerKind optimizer = OptimizerKind::kAdamW;   // of the matrices of layers; AdamW updates the rest
    MuonScale muon_scale = MuonScale::kMatchRms;
    double muon_momentum = 0.95;
    double muon_beta2 = 0;              // of second moments of rows; 0: there are none
    double lr = 0, min_lr = 0;
    LrDecay lr_decay_style = LrDecay::kCosine;
    int64_t lr_warmup_iters = 0;
    int64_t lr_wsd_decay_iters = 0;     // wsd: length of the final decay; 0: a tenth of the run
    std::array<double, std::size(kLrGroupWords)> lr_scale = {1, 1, 1, 1};   // by LrGroup
    int64_t mup_base_width = 0;         // hidden size to which --lr and --init-method-std refer; 0: to the model's own
    double weight_decay = 0, adam_beta1 = 0, adam_beta2 = 0, adam_eps = 0, clip_grad = 0;
    double z_loss = 0;                  // weight of the squared log-sum-exp in the loss
    double moe_aux_loss_coeff = 0;      // weights of the losses of routers, see RouterBackwardArgs
    double moe_z_loss_coeff = 0;
    double moe_router_bias_update_rate = 0;   // of ModelConfig::sigmoid_router()
    double moe_capacity = 0;            // rows of a rank's experts, by those of a balanced load; 0: the most
    double qk_clip = 0;                 // largest attention logit; 0: any
    double skip_grad_norm = 0;          // multiple of the median norm of the last 128 steps; 0: never
    double ema = 0;                     // decay of the average of the master weights; 0: there is none
    double stop_on_divergence = 0;      // multiple of the loss at the start; 0: never

    // precision
    Dtype dtype = Dtype::kBf16;         // activations and weights
    Dtype grad_dtype = Dtype::kFp32;
    Dtype moment_dtype = Dtype::kFp32;   // kFp32, kBf16; kE4m3: fp8
    Recompute recompute = Recompute::kNone;
    std::vector<std::string> offload;   // of kOffloadWords: what is kept in pinned host memory; see offloads()
    double offload_fraction = 1;        // of the moments and masters that `offload` names
    bool gemm_search = true;
    int64_t loss_chunk = 0;             // rows that head and loss compute at once; 0: all
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
    bool fp8_attention = false;         // the two matmuls of the forward pass, with any recipe or none
    double fp8_min_speedup = 0;         // linears with a lower predicted FP8 speedup stay in BF16; 0: no rule
    double fp8_first_bf16 = 0, fp8_final_bf16 = 0;   // fraction of the run, or steps from 1 on; see fp8_steps
    int64_t fp8_stats_interval = 0;    // --fp8-stats-interval: steps between statistics; 0: none

    // distributed
    int64_t ranks = 0;                  // 0: as many as were started
    int64_t context_parallel = 1;       // ranks that share each sequence
    int64_t expert_parallel = 1;        // ranks that share the experts of each layer
    // What is sharded over the ranks. 0: nothing; 1: master weights and moments; 2: gradients, too; 3: weights, too
    int64_t zero = 1;
    int64_t zero_group = 0;             // number of neighbouring ranks that shard one copy of these; 0: all
    double bucket_mb = 0;               // size of a gradient bucket, 10^6 bytes of FP32; see bucket_bytes
    bool overlap = true;                // overlap communication with compute
    Dtype grad_shard_dtype = Dtype::kFp32;  // of the sums of gradients with --zero 2 and 3
    Dtype grad_comm_dtype = Dtype::kFp32;   // kFp32, kBf16, kE4m3

    // checkpoints
    std::string save, load, resume;     // resume: a directory or "auto"
    int64_t save_interval = 0;          // steps; 0: only at the end
    int64_t keep = 0;                   // newest checkpoints to keep; 0: all
    bool save_async = false;            // write while training continues
    std::string tokenizer;              // file or directory copied into every checkpoint; "": none

    // output
    int64_t log_interval = 0;
    std::string log_file;
    int64_t sample_every = 0, sample_tokens = 0;
    double temperature = 0;             // 0: take the most likely token
    int64_t top_k = 0;                  // draw among the most likely N tokens; 0: all
    std::string prompt;                 // token ids, or text of bytes; see prompt.h

    // other
    bool dry_run = false;               // same as the subcommand plan
    std::string gpu;                    // GPU to plan for, a row of base/gpu.cpp; "": the one found, else H200
    bool json = false;                  // print the plan as JSON
    int64_t profile_first = -1, profile_last = -1;   // --profile FIRST:LAST, steps counted from 1; -1: none
    double comm_timeout = 0;            // seconds that a rank may make no progress; 0: no limit
    double exit_duration_in_mins = 0;   // 0: no limit

    bool operator==(const Config&) const = default;

    // Tokens of each sequence that one rank has.
    int64_t part_length() const { return seq_length / context_parallel; }
    // Rows of a rank's experts that there is memory for, by token of its micro-batch.
    int64_t expert_rows_of_token() const {
        const int64_t K = shape.experts_per_token, most = std::min(K, shape.num_experts / expert_parallel);
        const int64_t all = most * expert_parallel;
        return moe_capacity == 0 ? all : std::min(all, static_cast<int64_t>(std::ceil(moe_capacity * double(K))));
    }
    // Number of ranks that train on different samples. A group of ranks that share their sequences counts as one.
    int data_ranks(int of_ranks) const { return of_ranks / static_cast<int>(context_parallel); }
};

inline constexpr const char* kOffloadWords[] = {"moments", "masters", "activations"};
// Layers whose activations stay on the device with --offload activations.
inline constexpr int kResidentLayers = 3;
// Whether --offload names `word`, one of kOffloadWords; whether it names a part of the optimizer state.
bool offloads(const Config& config, const std::string& word);
inline const char* moment_dtype_name(const Config& config) {
    return config.moment_dtype == Dtype::kE4m3 ? "fp8" : dtype_name(config.moment_dtype);
}
inline bool offloads_state(const Config& config) { return offloads(config, "moments") || offloads(config, "masters"); }

// Whether a run has FP8 to evaluate without, and evaluations that do.
inline bool evaluates_in_bf16(const Config& config) {
    return config.eval_bf16 != EvalBf16::kOff && (config.fp8_recipe != Fp8Recipe::kNone || config.fp8_attention)
           && (!config.valid_data.empty() || !config.hellaswag_data.empty() || config.sample_every > 0);
}

// The number of chunks in which head and loss compute a micro-batch.
inline int64_t loss_chunks(const Config& config) {
    const int64_t rows = config.micro_batch_size * config.part_length();
    return config.loss_chunk > 0 ? ceil_div(rows, config.loss_chunk) : 1;
}

// A checkpoint's folder, and its configuration as JSON text. Both are empty if there is none.
struct SavedOptions {
    std::string directory, json;
};

// What options depend on besides each other.
struct Machine {
    bool gpu = true;
    int ranks = 1;
    // Reads the shape of the model in a --load directory. If empty, --load does not change the shape.
    std::function<ModelConfig(const std::string& directory)> read_shape = {};
    // Reads the options of the checkpoint that --resume and --save lead to. If empty, --resume does not change options.
    std::function<SavedOptions(const std::string& resume, const std::string& save)> read_saved = {};
};

struct ParsedConfig {
    Config config;
    bool help = false;               // --help, --print-options or --print-config: print `text` and exit with 0
    std::string text;
    std::vector<std::string> changed;   // options that the user set to another value than the default, "--lr 0.001"
    std::vector<std::string> no_effect;   // notes about options without effect on this hardware
    bool fp8_given = false;          // the user set --fp8-recipe or --fp8-format, even to none
    std::vector<std::string> notes;  // aliases that were used ("-b is --micro-batch-size"), and warnings
};

// Parses the command line of one executable ("gpt2" or "llama": its presets and defaults). --config FILE is read first,
// and the command line overrides it. Exit 2, with a suggestion, for an unknown option or key; exit 2, with the reason,
// for an option that has no effect under the other options. With --resume, options that must be the checkpoint's and
// are not given have its values, and a note names them.
ParsedConfig parse_config(int argc, const char* const* argv, const std::string& family,
                          const Machine& machine = {});
// The same for `train_FAMILY generate`, which accepts only generate_options().
ParsedConfig parse_generate_config(int argc, const char* const* argv, const std::string& family,
                                   const Machine& machine = {});

// The rules about the length of the run that `config` breaks, one line each. Call it once train_iters has been computed
// from --epochs; parse_config checks --train-iters itself.
std::vector<std::string> length_errors(const Config& config);

// The resolved configuration as JSON text, without options that have no effect. Read with --config, it gives the same
// run.
std::string config_to_json(const Config& config);
// The differences between a checkpoint's configuration (JSON text) and this one, one line each, for --resume.
// must_match: differences that would make it another run (model shape, seed, global batch, sequence length, dtypes).
// Data paths may change, since DataLoader::check_fingerprint compares the data itself.
struct ConfigDiff {
    std::vector<std::string> must_match, changed;
};
ConfigDiff config_diff(const std::string& saved_json, const Config& config);
// Sets the options of a checkpoint's configuration (JSON text of an object) that a resumed run must repeat. Returns "",
// or the error of the first option whose value is not valid.
std::string read_saved_options(const std::string& saved_json, Config& config);
