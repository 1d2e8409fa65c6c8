"""Megatron-LM's arguments. Our options have its names where both have the thing, so most rows take values as they are;
the defaults are those of megatron/training/arguments.py."""
from .finish import finish_megatron
from .rows import Default, Source, cannot, none, other, same, take

_PARALLEL = "there is data parallelism with ZeRO-1 only: each GPU holds a whole model"
_ONE = "1 is what is done here"
_LOG = "every step is a record of log-file at full precision; there is no other logger"
_KERNELS = "a choice among Megatron's implementations; there is one here"
_ATTENTION = "there is one attention kernel (BF16, FP32 sums, no matrix of scores)"
_MEMORY = "memory is planned once at the start, nothing is allocated later"
_MOE = "there are no experts"

MODEL = [
    take("num-layers hidden-size ffn-hidden-size num-attention-heads kv-channels max-position-embeddings seq-length "
         "vocab-size", "*", "integer"),
    take("encoder-seq-length", "seq-length", "integer"),
    take("group-query-attention", "", "flag", "num-query-groups says how many", keep="grouped"),
    take("num-query-groups", "num-query-groups", "integer", keep="groups"),
    same("swiglu", "true", "activation", "swiglu"),
    same("swiglu", "false", "activation", "gelu"),
    same("squared-relu", "true", "activation", "relu2"),
    take("qk-layernorm untie-embeddings-and-output-weights disable-bias-linear", "*", "flag"),
    take("normalization", "normalization", "text", when="layernorm rmsnorm"),
    cannot("normalization", "there are LayerNorm and RMSNorm"),
    take("norm-epsilon layernorm-epsilon", "norm-epsilon", "number"),
    take("position-embedding-type", "position-embedding-type", "lower", when="rope learned_absolute"),
    cannot("position-embedding-type", "there are rope and learned_absolute"),
    same("use-rotary-position-embeddings", "true", "position-embedding-type", "rope"),
    take("rotary-base", "rotary-base", "number"),
    same("use-rope-scaling", "true", "rope-scaling-factor", 8, "the llama3 rule with factor 8, Megatron's default"),
    take("rope-scaling-factor", "rope-scaling-factor", "number"),
    other("rotary-percent", "rope turns whole heads", when="1 1.0"),
    cannot("rotary-percent", "rope turns whole heads"),
    take("init-method-std", "init-method-std", "number"),
    other("hidden-dropout attention-dropout", "no dropout here either", when="0 0.0"),
    cannot("hidden-dropout attention-dropout", "there is no dropout; models are trained on more tokens than they "
           "can learn by heart"),
    other("make-vocab-size-divisible-by", "stored rows are padded to a multiple of 128, which suits FP8 (16) and every "
          "rank count; exports have the true size"),
    cannot("openai-gelu quick-geglu geglu add-qkv-bias apply-layernorm-1p window-size attention-sink "
           "multi-latent-attention mtp-num-layers hybrid-* spec", "the layers are LayerNorm or RMSNorm, gelu, "
           "swiglu or relu2, attention over all earlier positions"),
    cannot("num-experts moe-* expert-*", _MOE),
    other("no-position-embedding add-position-embedding", "position-embedding-type says it"),
]

PARALLEL = [
    other("tensor-model-parallel-size pipeline-model-parallel-size context-parallel-size expert-model-parallel-size "
          "expert-tensor-parallel-size model-parallel-size", _ONE, when="1"),
    cannot("tensor-model-parallel-size pipeline-model-parallel-size context-parallel-size model-parallel-size "
           "num-layers-per-virtual-pipeline-stage num-virtual-stages-per-pipeline-rank pipeline-model-parallel-* "
           "decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers tp-comm-overlap*", _PARALLEL),
    none("sequence-parallel", "it acts with tensor parallelism above 1"),
    same("use-distributed-optimizer", "true", "zero", 1),
    same("overlap-grad-reduce overlap-param-gather", "true", "overlap", "on"),
    other("overlap-param-gather-with-optimizer-step align-grad-reduce no-delay-grad-reduce delay-grad-reduce "
          "align-param-gather", "gathered under the next forward pass, in buckets of bucket-mb"),
    other("ddp-bucket-size ddp-num-buckets", "bucket-mb counts 10^6 bytes of FP32 instead of elements or buckets"),
    other("ddp-average-in-collective ddp-pad-buckets-for-high-nccl-busbw average-in-collective",
          "sums are divided once, after they are complete"),
    cannot("use-torch-fsdp2 use-megatron-fsdp use-custom-fsdp data-parallel-sharding-strategy", _PARALLEL),
    other("distributed-backend use-mpi", "NCCL, started by MPI"),
    other("distributed-timeout-minutes", "comm-timeout counts seconds without progress of a rank (60), and says who "
          "waits for whom"),
    other("nccl-* use-nccl-ub high-priority-stream-groups disable-symmetric-registration", "NCCL is set by its own "
          "NCCL_* variables"),
    other("use-cpu-initialization no-initialization perform-initialization", "initial values come from a counter-based "
          "generator: any rank makes its own part with equal bits"),
]

BATCH = [
    take("micro-batch-size", "micro-batch-size", "integer"),
    take("global-batch-size", "global-batch-size", "integer"),
    take("rampup-batch-size", "rampup-batch-size", "joined"),
    take("train-iters", "train-iters", "integer"),
    take("train-samples", "", "integer", "train-iters = samples / global-batch-size", keep="train_samples"),
    take("lr min-lr weight-decay adam-beta1 adam-beta2 adam-eps clip-grad", "*", "number"),
    same("lr-decay-style", "wsd", "lr-decay-style", "wsd"),
    take("lr-decay-style", "lr-decay-style", "lower", when="cosine linear constant"),
    cannot("lr-decay-style", "there are cosine, linear, constant and wsd"),
    take("lr-decay-iters", "", "integer", "the rate decays until the last step of the run", keep="decay_iters"),
    take("lr-decay-samples", "", "integer", "the rate decays until the last step of the run", keep="decay_samples"),
    take("lr-warmup-iters", "lr-warmup-iters", "integer"),
    take("lr-warmup-fraction", "", "number", "lr-warmup-iters = that share of the decay", keep="warmup_fraction"),
    take("lr-warmup-samples", "", "integer", "lr-warmup-iters = samples / global-batch-size", keep="warmup_samples"),
    take("lr-wsd-decay-iters", "lr-wsd-decay-iters", "integer"),
    other("lr-wsd-decay-style", "linear here too", when="linear"),
    cannot("lr-wsd-decay-style", "the final decay of wsd is linear"),
    other("lr-warmup-init", "the warm-up starts from 0", when="0 0.0"),
    cannot("lr-warmup-init start-weight-decay end-weight-decay weight-decay-incr-style decoupled-lr "
           "decoupled-min-lr", "one weight decay and one rate for all parameters, from 0 up"),
    other("optimizer", "AdamW is the optimizer", when="adam"),
    cannot("optimizer", "AdamW is the only optimizer"),
    other("override-opt_param-scheduler use-checkpoint-opt_param-scheduler override-opt-param-scheduler "
          "use-checkpoint-opt-param-scheduler", "on a resume the command line and its file win, and what differs from "
          "the checkpoint is told"),
    take("seed", "seed", "integer"),
]

NUMBERS = [
    same("bf16", "true", "dtype", "bf16"),
    cannot("fp16 loss-scale initial-loss-scale min-loss-scale loss-scale-window hysteresis", "there is no FP16: dtype "
           "bf16 has FP32's range and needs no loss scaling", weak={"dtype": "bf16"}),
    same("accumulate-allreduce-grads-in-fp32", "true", "grad-dtype", "fp32", "accumulated and sent in FP32; with "
         "grad-comm-dtype bf16 half the bytes, and the sums stay FP32"),
    same("grad-reduce-in-bf16", "true", "grad-dtype", "bf16", "Megatron accumulates in BF16 then, too; grad-dtype fp32 "
         "with grad-comm-dtype bf16 would keep the sums exact"),
    take("main-grads-dtype", "grad-dtype", "lower", when="fp32 bf16"),
    take("exp-avg-dtype exp-avg-sq-dtype", "moment-dtype", "lower", when="fp32 bf16"),
    cannot("exp-avg-dtype exp-avg-sq-dtype main-params-dtype", "moments are FP32 or BF16, masters are FP32"),
    other("use-precision-aware-optimizer", "grad-dtype and moment-dtype need no switch"),
    same("recompute-granularity", "full", "recompute", "block"),
    other("recompute-granularity", "attention keeps no matrix of scores, which is what Megatron's selective recomputes",
          when="selective"),
    other("recompute-activations", "attention keeps no matrix of scores; recompute norm-act saves more"),
    other("recompute-method recompute-num-layers recompute-modules distribute-saved-activations",
          "recompute is for all blocks alike"),
    cannot("cpu-offloading* optimizer-cpu-offload optimizer-offload-fraction", "nothing is kept in host memory"),
    other("attention-softmax-in-fp32 no-query-key-layer-scaling", "softmax runs in FP32"),
    none("apply-query-key-layer-scaling", "only unfused attention in FP16 needs it"),
    other("use-flash-attn attention-backend use-mcore-models transformer-impl use-legacy-models flash-decode",
          _ATTENTION),
    other("no-masked-softmax-fusion no-bias-gelu-fusion no-bias-swiglu-fusion no-bias-dropout-fusion no-rope-fusion "
          "no-gradient-accumulation-fusion gradient-accumulation-fusion cross-entropy-loss-fusion "
          "cross-entropy-fusion-impl no-persist-layer-norm no-persist-layernorm use-fused-weighted-squared-relu "
          "calculate-per-token-loss", _KERNELS),
    other("deterministic-mode", "a run repeats itself to the bit on the same number of ranks, with gemm-search off "
          "also across searches of matmul algorithms"),
    other("enable-cuda-graph cuda-graph-* external-cuda-graph te-rng-tracker", "kernels are started one by one"),
    other("empty-unused-memory-level manual-gc manual-gc-*", _MEMORY),
    other("num-workers no-create-attention-mask-in-dataloader no-mmap-bin-files dataloader-type", "the loader reads "
          "shards directly, in an order that depends on the seed alone"),
    take("reset-attention-mask", "reset-attention-mask", "flag", "documents do not see each other; the sidecars of the "
         "shards name the separator"),
    cannot("reset-position-ids eod-mask-loss", "positions go on counting over documents, and every token counts"),
]

FP8 = [
    take("fp8-format", "fp8-format", "lower", when="e4m3 hybrid", weak={"fp8-recipe": "delayed"}, keep="fp8"),
    cannot("fp8-format", "there are e4m3 and hybrid: no hardware multiplies E5M2 by E5M2"),
    take("fp8-recipe", "fp8-recipe", "lower", when="delayed tensorwise blockwise", keep="recipe"),
    cannot("fp8-recipe", "Hopper has delayed, tensorwise and blockwise (mxfp8 is Blackwell's)"),
    take("fp8-margin", "fp8-margin", "integer", "more of it saturates less and flushes more to zero; no value of it "
         "makes NaN"),
    none("fp8-interval", "Megatron and Transformer Engine have ignored it since 1.8: factors are new every step; ours "
         "would act on it, so it is left out"),
    take("fp8-amax-history-len", "fp8-amax-history-len", "integer", "counts optimizer steps here, micro-batches there: "
         "divide by the accumulation for the same span (16 is our default)"),
    take("fp8-amax-compute-algo", "fp8-amax-compute-algo", "lower", when="max most_recent"),
    same("fp8-param-gather fp8-param", "true", "param-comm-dtype", "fp8"),
    take("first-last-layers-bf16", "first-last-layers-bf16", "flag"),
    take("num-layers-at-start-in-bf16 num-layers-at-end-in-bf16", "*", "integer"),
    cannot("no-fp8-wgrad", "weight gradients run in FP8 with the rest; bf16-linears takes single linears out"),
    other("tp-only-amax-red", "amaxes are reduced over all ranks, so that factors do not depend on the layout"),
    cannot("fp8-dot-product-attention fp8-multi-head-attention", "here --fp8-attention, for the forward alone"),
    cannot("fp4-*", "Hopper has no FP4"),
    none("te-precision-config-file", "read by newer versions only, with per-module recipes; bf16-linears names "
         "linears"),
]

FILES = [
    take("data-path train-data-path", "", "words", keep="data", fact="prefixes of .bin/.idx become globs"),
    take("valid-data-path", "", "words", keep="valid", fact="prefixes of .bin/.idx become globs"),
    cannot("split", "nothing is split off at run time: prepare two sets of shards and name the second with "
           "--valid-data"),
    same("mock-data", "true", "synthetic-data", True, "tokens from the seed, for timing alone"),
    cannot("per-split-data-args-path data-args-path", "a file with a blend: name the shards with --train-data"),
    none("test-data-path", "only an evaluation after training reads it; use the checkpoint with any tool for Hugging "
         "Face models"),
    other("data-cache-path num-dataset-builder-threads", "the order of samples is computed from the seed, nothing is "
          "cached"),
    other("tokenizer-type vocab-file merge-file tiktoken-pattern tokenizer-hf-*", "text becomes ids before training: "
          "data/prepare_text.py; vocab-size says how many there are"),
    take("tokenizer-model", "tokenizer", "text", "copied into every checkpoint"),
    take("eval-interval eval-iters", "*", "integer"),
    take("save", "save", "text"),
    take("load", "", "text", keep="load"),
    take("save-interval", "save-interval", "integer"),
    same("async-save", "true", "save-async", True),
    take("log-interval", "log-interval", "integer", "of lines on the screen; the log file has every step"),
    take("exit-duration-in-mins", "exit-duration-in-mins", "number"),
    other("exit-signal-handler exit-signal-handler-for-training", "SIGTERM and SIGINT finish the step, save and leave "
          "with 0; mpirun needs scripts/launch/launch_mpi.sh for that"),
    cannot("exit-interval", "give train-iters, or exit-duration-in-mins; a resume goes on from the checkpoint"),
    other("ckpt-format ckpt-fully-parallel-save ckpt-fully-parallel-load ckpt-assume-constant-structure "
          "auto-detect-ckpt-format dist-ckpt-* use-dist-ckpt ckpt-*", "every checkpoint is a Hugging Face model with "
          "checksums, written by all ranks"),
    other("no-save-optim no-save-rng", "a checkpoint is complete, so that a resume repeats the run"),
    other("no-load-optim no-load-rng finetune", "load takes weights alone, resume the whole state"),
    other("pretrained-checkpoint", "load takes a Hugging Face directory"),
    other("tensorboard-* log-* wandb-* timing-* one-logger* no-one-logger enable-one-logger logging-level", _LOG),
    other("no-check-for-nan-in-loss-and-grad check-for-nan-in-loss-and-grad check-for-spiky-loss rerun-mode "
          "check-for-large-grads", "a step whose loss or norm is not finite is not applied; max-skips says how many in "
          "a row to bear"),
    take("profile", "", "flag", "profile FIRST:LAST", keep="profile"),
    take("profile-step-start", "", "integer", "first step of profile", keep="profile_first"),
    take("profile-step-end", "", "integer", "last step of profile", keep="profile_last"),
    other("profile-ranks use-pytorch-profiler record-memory-history memory-snapshot-path", "profile opens the capture "
          "window on every rank"),
]

DEFAULTS = [
    Default("normalization", "LayerNorm"), Default("position-embedding-type", "learned_absolute"),
    Default("activation", "gelu"), Default("disable-bias-linear", False),
    Default("untie-embeddings-and-output-weights", False), Default("rotary-base", 10000),
    Default("dtype", "fp32", "neither --bf16 nor --fp16"),
    Default("lr-decay-style", "linear"), Default("min-lr", 0), Default("lr-warmup-iters", 0),
    Default("weight-decay", 0.01), Default("adam-beta2", 0.999),
    Default("eval-interval", 1000), Default("eval-iters", 100),
    Default("fp8-amax-history-len", 1), Default("fp8-amax-compute-algo", "most_recent"),
]

MEGATRON = Source("a Megatron-LM argument script", MODEL + PARALLEL + BATCH + NUMBERS + FP8 + FILES,
                  "num-layers num-attention-heads hidden-size tensor-model-parallel-size micro-batch-size train-iters "
                  "use-mcore-models swiglu use-distributed-optimizer fp8-recipe fp8-format data-path", DEFAULTS,
                  finish_megatron)
