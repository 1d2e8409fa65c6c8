// What is said of an option or a key that is none here: what to write instead of another trainer's, or the nearest
// name.
#include <algorithm>
#include <iterator>
#include <sstream>

#include "llmc/base/check.h"
#include "llmc/base/nearest.h"
#include "llmc/config/config_table.h"

namespace {

constexpr const char* kNoParallel = "leave it out: every rank holds the whole model and has its part of the batch";
constexpr const char* kLaunch = "leave it out: scripts/launch/launch_mpi.sh -np N starts N ranks";
constexpr const char* kFile = "scripts/import_config {file} --out run.json makes a file of it for --config";
constexpr const char* kLog =
    "leave it out: --log-file FILE has every step, scripts/export_log --to wandb or tensorboard reads it";
constexpr const char* kKernels = "leave it out: there is one kernel for each operation, and no choice among them";
constexpr const char* kShards = "--train-data 'shards/train*.bin'; data/prepare_text.py makes shards of text";

}  // namespace

// Names have no dashes before them, but for those with one, as llm.c's; a star stands for any text, and yields to an
// option of ours that is nearly the name; {file} becomes the value.
const std::vector<ForeignRow>& foreign_rows() {
    static const std::vector<ForeignRow> rows = {
        {"llm.c", "-o", "use --save DIR for checkpoints and --log-file FILE for the log"},
        {"llm.c", "-e", "use --model NAME for the shape and --load DIR for weights"},
        {"llm.c", "-d", "use --global-batch-size, which counts sequences instead of tokens"},
        {"llm.c", "-q", "use --min-lr, which is a rate instead of a fraction of --lr"},
        {"llm.c", "-k", "use --lr-decay-style (wsd decays linearly here)"},
        {"llm.c", "-y", "use --resume auto"},
        {"llm.c", "-a", "use --overfit-one-batch, without a value"},
        {"llm.c", "-r", "use --recompute none, norm-act or block"},
        {"llm.c", "-ge", "use --fuse-gelu, without a value"},
        {"llm.c", "-f", "use --dtype fp32 or bf16"},
        {"llm.c", "-w", "leave it out: an FP32 master copy always exists"},
        {"llm.c", "-z", "use --zero 1, which is the default, or 0"},
        {"llm.c", "-sl -sg", "use --max-skips N: a step is left out where loss or norm is not finite"},
        {"llm.c", "-pn -pr -pg -pm -ps -pi", kLaunch},
        {"mpirun, torchrun", "-np nproc-per-node nnodes node-rank master-addr master-port rdzv-* hostfile", kLaunch},
        {"DeepSpeed", "deepspeed deepspeed-config ds-config", kFile},
        {"DeepSpeed", "zero-stage",
         "use --zero 1, which is the default, or 0; gradients and weights (2, 3) are whole on every rank"},
        {"DeepSpeed", "zero-stage-* offload* cpu-offload*",
         "leave it out: ZeRO-1 is what there is, and nothing is kept in host memory; plan has the memory of a run"},
        {"DeepSpeed", "local-rank num-gpus include launcher", kLaunch},
        {"accelerate", "config-file accelerate-config", kFile},
        {"accelerate", "num-processes num-machines machine-rank main-process-* multi-gpu", kLaunch},
        {"accelerate", "mixed-precision", "BF16 is the default; FP8 is --fp8-recipe delayed, tensorwise or blockwise"},
        {"accelerate", "fp8-backend dynamo-* use-deepspeed use-fsdp fsdp*",
         "leave it out: --fp8-recipe and --zero say it here; scripts/import_config translates the configuration as a "
         "whole"},
        {"Megatron-LM", "tensor-model-parallel-size pipeline-model-parallel-size context-parallel-size "
                        "expert-model-parallel-size sequence-parallel tp-comm-* num-layers-per-virtual-pipeline-stage "
                        "use-megatron-fsdp use-torch-fsdp2",
         kNoParallel},
        {"other trainers", "tensor-parallel* pipeline-parallel* tp-size pp-size dp-size data-parallel*", kNoParallel},
        {"Megatron-LM", "bf16", "leave it out: --dtype bf16 is the default"},
        {"Megatron-LM", "fp16 loss-scale initial-loss-scale min-loss-scale loss-scale-window hysteresis",
         "there is no FP16: leave it out for --dtype bf16, which needs no loss scaling"},
        {"Megatron-LM", "fp8 fp8-hybrid fp8-e4m3 fp8-enabled", "use --fp8-recipe delayed, tensorwise or blockwise"},
        {"Megatron-LM", "use-flash-attn attention-backend flash-attn",
         "leave it out: attention never stores T x T; --fp8-attention runs its forward in FP8"},
        {"Megatron-LM", "fp8-dot-product-attention fp8-multi-head-attention",
         "use --fp8-attention, for the forward alone"},
        {"Megatron-LM", "use-mcore-models use-legacy-models transformer-impl no-*-fusion "
                        "no-gradient-accumulation-fusion cross-entropy-loss-fusion enable-cuda-graph",
         kKernels},
        {"Megatron-LM", "grad-reduce-in-bf16",
         "use --grad-comm-dtype bf16, or --grad-dtype bf16 to accumulate in it, too"},
        {"Megatron-LM", "accumulate-allreduce-grads-in-fp32", "leave it out: --grad-dtype fp32 is the default"},
        {"Megatron-LM", "group-query-attention", "leave it out: --num-query-groups N says it"},
        {"Megatron-LM", "use-rotary-position-embeddings", "use --position-embedding-type rope"},
        {"Megatron-LM", "use-rope-scaling", "use --rope-scaling-factor 8"},
        {"Megatron-LM", "recompute-granularity recompute-activations recompute-method recompute-*",
         "use --recompute norm-act or block"},
        {"Megatron-LM", "hidden-dropout attention-dropout", "leave it out: there is no dropout"},
        {"Megatron-LM", "optimizer use-precision-aware-optimizer",
         "leave it out: AdamW is the optimizer; --moment-dtype and --grad-dtype say what it keeps"},
        {"Megatron-LM", "data-path train-data-path",
         "use --train-data PREFIX.bin, or 0.7 A.bin 0.3 B.bin; shards and .bin with .idx are both read"},
        {"Megatron-LM", "valid-data-path split", "use --valid-data, with shards of their own"},
        {"Megatron-LM", "mock-data", "use --synthetic-data"},
        {"Megatron-LM", "tokenizer-* vocab-file merge-file",
         "leave it out: data/prepare_text.py makes ids of text; --tokenizer FILE is copied into checkpoints"},
        {"Megatron-LM", "async-save", "use --save-async"},
        {"Megatron-LM", "distributed-timeout-minutes", "use --comm-timeout, in seconds"},
        {"Megatron-LM", "distributed-backend use-mpi", "leave it out: NCCL on GPUs, MPI elsewhere"},
        {"Megatron-LM", "num-experts moe-*", "leave it out: there are no experts"},
        {"Megatron-LM", "wandb-* tensorboard-* log-*", kLog},
        {"transformers", "model-name-or-path model-name", "use --load DIR, a Hugging Face directory, or --model NAME"},
        {"transformers", "output-dir", "use --save DIR"},
        {"transformers", "overwrite-output-dir do-train do-eval",
         "leave it out: --resume says whether a run goes on, --valid-data that it is evaluated"},
        {"transformers", "per-device-train-batch-size train-micro-batch-size-per-gpu", "use --micro-batch-size"},
        {"transformers", "per-device-eval-batch-size",
         "leave it out: evaluation has --micro-batch-size and --eval-iters"},
        {"transformers", "batch-size train-batch-size",
         "use --micro-batch-size, of a rank, or --global-batch-size, of a step"},
        {"transformers", "gradient-accumulation-steps grad-accum-steps",
         "use --global-batch-size, which is --micro-batch-size x ranks x this"},
        {"transformers", "learning-rate", "use --lr"},
        {"transformers", "lr-scheduler lr-scheduler-type", "use --lr-decay-style cosine, linear, constant or wsd"},
        {"transformers", "warmup-steps num-warmup-steps warmup-ratio", "use --lr-warmup-iters, in steps"},
        {"transformers", "max-steps num-steps max-iters", "use --train-iters"},
        {"transformers", "num-train-epochs num-epochs", "use --epochs"},
        {"transformers", "max-grad-norm gradient-clipping grad-clip", "use --clip-grad"},
        {"transformers", "gradient-checkpointing activation-checkpointing", "use --recompute norm-act or block"},
        {"transformers", "save-steps", "use --save-interval"},
        {"transformers", "eval-steps", "use --eval-interval"},
        {"transformers", "logging-steps", "use --log-interval"},
        {"transformers", "save-total-limit", "use --keep"},
        {"transformers", "resume-from-checkpoint", "use --resume auto, or a checkpoint's folder"},
        {"transformers", "report-to logging-dir run-name", kLog},
        {"transformers", "max-new-tokens", "use --sample-tokens"},
        {"transformers", "prompt", "use --prompt-ids '1 2 3', or scripts/generate DIR \"text\""},
        {"transformers", "dataset dataset-name train-file data-dir data input-bin", kShards},
        {"transformers", "block-size max-seq-length max-seq-len context-length cutoff-len", "use --seq-length"},
        {"transformers", "torch-dtype precision", "use --dtype bf16 or fp32; FP8 is --fp8-recipe"},
        {"transformers", "optim", "leave it out: AdamW is the optimizer"},
        {"transformers", "adam-epsilon", "use --adam-eps"},
        {"PyTorch", "compile torch-compile", kKernels},
        {"PyTorch", "num-workers", "leave it out: shards are mapped into memory"},
        {"PyTorch", "device", "leave it out: make DEVICE=cuda or DEVICE=cpu decides"},
        {"other trainers", "use-fp8", "use --fp8-recipe delayed, tensorwise or blockwise"},
        {"nanoGPT", "n-layer n-layers", "use --num-layers"},
        {"nanoGPT", "n-head n-heads", "use --num-attention-heads"},
        {"nanoGPT", "n-embd", "use --hidden-size"},
    };
    return rows;
}

namespace {

bool is_star(const std::string& pattern) { return pattern.find('*') != std::string::npos; }

bool matches(const std::string& pattern, const std::string& name) {
    const size_t star = pattern.find('*');
    if (star == std::string::npos) return name == pattern;
    const std::string head = pattern.substr(0, star), tail = pattern.substr(star + 1);
    return name.size() >= head.size() + tail.size() && name.substr(0, star) == head
           && name.substr(name.size() - tail.size()) == tail;
}

const ForeignRow* find_foreign(const std::string& name, bool stars) {
    for (const ForeignRow& row : foreign_rows()) {
        std::istringstream patterns(row.names);
        for (std::string pattern; patterns >> pattern;)
            if (is_star(pattern) == stars && matches(pattern, name)) return &row;
    }
    return nullptr;
}

// Near enough to be a slip of the fingers; further away it only has letters in common.
std::string near_name(const std::string& name, const std::vector<std::string>& known) {
    const std::string near = nearest(name, known);
    const size_t distance = edit_distance(name, near);
    return distance < name.size() && distance <= std::max<size_t>(2, name.size() / 3) ? near : "";
}

std::string foreign_text(const ForeignRow& row, const std::string& value) {
    std::string text = row.text;
    const size_t place = text.find("{file}");
    if (place != std::string::npos) text.replace(place, 6, value.empty() ? "FILE" : value);
    return text;
}

// Keys that tell whose a file is.
struct ForeignFile {
    const char *trainer, *keys;
};
constexpr ForeignFile kForeignFiles[] = {
    {"DeepSpeed", "zero-optimization train-micro-batch-size-per-gpu train-batch-size gradient-accumulation-steps "
                  "zero-allow-untested-optimizer steps-per-print wall-clock-breakdown prescale-gradients"},
    {"LLaMA-Factory", "finetuning-type model-name-or-path dataset-dir per-device-train-batch-size"},
    {"accelerate", "compute-environment distributed-type mixed-precision"},
};

// Whose a file of these keys is: a trainer's that has more of them than there are of ours (`known`), or "".
std::string trainer_of(const Json& object, const std::vector<std::string>& known) {
    bool sections = false;   // ours has none
    int ours = 0, theirs[std::size(kForeignFiles)] = {};
    for (const auto& [key, value] : object.items()) {
        std::string name = key;
        std::replace(name.begin(), name.end(), '_', '-');
        ours += std::find(known.begin(), known.end(), name) != known.end();
        for (size_t i = 0; i < std::size(kForeignFiles); i++) {
            std::istringstream keys(kForeignFiles[i].keys);
            for (std::string word; keys >> word;) theirs[i] += word == name;
        }
        sections = sections || value.is_object();
    }
    const int* most = std::max_element(std::begin(theirs), std::end(theirs));
    if (*most > ours) return kForeignFiles[most - theirs].trainer;
    return sections ? "another trainer" : "";
}

}  // namespace

void fail_unknown_option(const std::string& option, const std::string& name, const std::string& value,
                         const std::vector<std::string>& known) {
    const ForeignRow* of_llmc = find_foreign(option, false);
    const ForeignRow* exact = of_llmc ? of_llmc : find_foreign(name, false);
    const std::string near = exact ? "" : near_name(name, known);
    const ForeignRow* row = exact ? exact : near.empty() ? find_foreign(name, true) : nullptr;
    if (row)
        FAIL(kExitBadInput, "unknown option %s (%s): %s", option.c_str(), row->trainer,
             foreign_text(*row, value).c_str());
    REQUIRE(near.empty(), "unknown option %s: did you mean --%s?", option.c_str(), near.c_str());
    FAIL(kExitBadInput, "unknown option %s: --help lists all; scripts/import_config translates scripts and files of "
         "other trainers", option.c_str());
}

void fail_unknown_key(const std::string& file, const std::string& key, const std::string& name, const Json& object,
                      const std::vector<std::string>& known) {
    const std::string trainer = trainer_of(object, known), near = near_name(name, known);
    REQUIRE(trainer.empty(), "%s: \"%s\" is of a configuration of %s: scripts/import_config %s --out run.json makes "
            "one for --config of it", file.c_str(), key.c_str(), trainer.c_str(), file.c_str());
    const ForeignRow* row = find_foreign(name, false);
    if (row)
        FAIL(kExitBadInput, "%s: unknown option \"%s\" (%s): %s", file.c_str(), key.c_str(), row->trainer,
             foreign_text(*row, "").c_str());
    REQUIRE(near.empty(), "%s: unknown option \"%s\": did you mean \"%s\"?", file.c_str(), key.c_str(), near.c_str());
    FAIL(kExitBadInput, "%s: unknown option \"%s\": --help lists all; scripts/import_config %s --out run.json "
         "translates the file of another trainer", file.c_str(), key.c_str(), file.c_str());
}
