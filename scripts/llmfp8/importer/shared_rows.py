"""Facts that hold for every kind of input: the seven configuration errors, environment variables, launchers, commands
of the shell, and when an option of ours acts."""
from .rows import none, other, take

# number: (what it is, what holds, correction)
SEVEN = {
    1: ("FP8 asked for in a DeepSpeed file",
        "DeepSpeed has no FP8: it reads the section and does nothing with it. Its loss_scale keys belong to FP16.",
        "fp8-recipe switches FP8 on; the section is left out."),
    2: ("FP32 accumulation of gradients",
        "Said to cost two casts a step. It does not: the matmul that makes a weight gradient writes FP32 or BF16 "
        "directly and never FP8, and sums of many micro-batches need FP32.",
        "none needed: grad-dtype fp32 is our default and accumulates inside the matmul. bf16 saves 2 bytes a "
        "parameter and rounds each sum."),
    3: ("FP32 on the wire",
        "It doubles the bytes of BF16. No FP8 all-reduce was switched off by it: there is none to switch off.",
        "grad-comm-dtype bf16: contributions travel in BF16 and are added in FP32. fp8 (E4M3, a factor for each 128 "
        "values) halves the bytes once more; log its error with fp8-stats-interval."),
    4: ("FP8 backend left to choose itself",
        "auto takes torchao, which reads no NVTE_* variable and no recipe key; versions before LLaMA-Factory's pull "
        "request 9705 then ran in BF16 without a word.",
        "there is one backend here, and fp8-recipe says what it does. After the first step the trainer compares the "
        "FP8 matmuls that ran with its plan, and leaves with 3 if they differ."),
    5: ("CUDA_DEVICE_MAX_CONNECTIONS and overlap",
        "1 is no cure: with one queue streams wait for each other. Megatron wants it for tensor and context "
        "parallelism before Blackwell, and refuses it with sharded data parallelism.",
        "leave it unset: overlap on (the default) orders streams by events."),
    6: ("NVTE_FP8_ALLREDUCE",
        "The name occurs nowhere in Transformer Engine or Megatron-LM, so setting it changes nothing, and neither does "
        "leaving it out.",
        "leave it out. grad-comm-dtype fp8 is what sends gradients in FP8 here."),
    7: ("Settings spread over several layers",
        "One run is described in more than one place, each of which can ignore or overrule the others.",
        "the JSON written here is the only place. Name all files of the run in one call of import_config; the log "
        "opens with what is in effect, per layer."),
}

SECOND_FILE = "a second file about the same run"

# (environment variable, error, what is true of a script without it)
ABSENT = [
    ("CUDA_DEVICE_MAX_CONNECTIONS", 5, "said to be an error, and is none: see below"),
    ("NVTE_FP8_ALLREDUCE", 6, "said to be an error, and is none: see below"),
]

_OVERLAP = "one of the seven errors, see below; the trainer's first lines warn of it"

ENVIRONMENT = [
    other("CUDA_DEVICE_MAX_CONNECTIONS", _OVERLAP, when="1", error=5),
    other("CUDA_DEVICE_MAX_CONNECTIONS", "hardware queues for streams; CUDA reads it here too"),
    none("NVTE_FP8_ALLREDUCE", "no version of Transformer Engine or Megatron-LM knows it", error=6),
    none("NVTE_APPLY_QK_LAYER_SCALING", "only unfused attention in FP16 reads it, so it does nothing in BF16 or FP8"),
    none("NVTE_FP8_DPA_BWD", "1 is its default, and it acts only with FP8 attention"),
    other("NVTE_FLASH_ATTN NVTE_FUSED_ATTN NVTE_UNFUSED_ATTN", "Transformer Engine's choice of attention; there is one "
          "attention kernel here"),
    other("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "block factors are powers of two here"),
    other("NVTE_*", "Transformer Engine's, which has no part here; FP8 is set by fp8-* options"),
    other("NCCL_*", "NCCL reads it here too: set it where the run is started"),
    other("CUDA_VISIBLE_DEVICES", "CUDA reads it here too: set it where the run is started"),
    other("OMP_NUM_THREADS MKL_NUM_THREADS", "threads of the host; the training path needs few"),
    other("PYTORCH_* TORCH_* TORCHINDUCTOR_* TORCHDYNAMO_*", "PyTorch's, which has no part here; memory is planned "
          "once at the start, see --dry-run"),
    other("TRITON_CACHE_DIR TRITON_*", "there is no JIT compiler and so no cache here"),
    other("WANDB_*", "there is no logger of a service: every step is a record of log-file"),
    other("TQDM_* TOKENIZERS_PARALLELISM HF_* TRANSFORMERS_* HUGGINGFACE_* DISABLE_VERSION_CHECK PYTHON* "
          "LLAMAFACTORY_* FORCE_TORCHRUN", "for Python programs, of which none runs during training"),
    other("ACCELERATE_*", "accelerate's, which has no part here"),
    other("LD_LIBRARY_PATH PATH CUDA_HOME", "of the shell: keep what your system needs"),
    other("MASTER_ADDR MASTER_PORT RANK WORLD_SIZE LOCAL_RANK NODE_RANK", "ranks find each other through MPI: "
          "scripts/launch/launch_mpi.sh or Slurm"),
]

LAUNCHER = [
    other("nproc_per_node nproc-per-node", "one rank a GPU: scripts/launch/launch_mpi.sh -np N", when="auto gpu cpu"),
    take("nproc_per_node nproc-per-node num_gpus", "", "integer", keep="per_node",
         fact="ranks of a host: scripts/launch/launch_mpi.sh -np N"),
    take("nnodes num_nodes", "", "integer", keep="nodes", fact="hosts: --hostfile of scripts/launch/launch_mpi.sh"),
    take("np n num_processes", "", "integer", keep="ranks", fact="ranks: scripts/launch/launch_mpi.sh -np N"),
    other("node_rank node-rank master_addr master-addr master_port master-port rdzv* max_restarts local-ranks-filter "
          "tee redirects log-dir log_dir main_process_ip main_process_port machine_rank include hostfile oversubscribe",
          "ranks find each other through MPI: scripts/launch/launch_mpi.sh --hostfile, or Slurm"),
    none("standalone", "one host is what a launch without --hostfile means"),
    other("config_file", SECOND_FILE + ": name it in the same call of import_config", error=7),
    other("mixed_precision use_deepspeed use_fsdp multi_gpu", "the launcher's choice; precision is fp8-recipe and "
          "dtype, sharding is zero"),
    take("num_machines", "", "integer", keep="nodes", fact="hosts"),
    other("m", "the program that is launched; here it is train_gpt2 or train_llama"),
]

# First words of lines in scripts that are no part of the training.
COMMANDS = "mkdir cd echo set source . module pip pip3 nvidia-smi sleep exit wait ulimit printf ls rm cp date trap " \
           "unset conda export true shift umask hostname pwd ray fi done esac } : mv touch env tee chmod apt apt-get"

# (option, option that decides, values of that one with which it acts ("*": any, "": only if set), fact)
ACTS = [
    ("fp8-margin", "fp8-recipe", "delayed", "only delayed scaling has a margin; others take factors from the tensor "
     "as it is, and leave it unread"),
    ("fp8-interval", "fp8-recipe", "delayed", "only delayed scaling has factors from earlier steps"),
    ("fp8-amax-history-len", "fp8-recipe", "delayed", "only delayed scaling has a history; Megatron hands it to no "
     "other recipe, and says nothing"),
    ("fp8-amax-compute-algo", "fp8-recipe", "delayed", "only delayed scaling has a history; Megatron hands it to no "
     "other recipe, and says nothing"),
    ("fp8-amax-history-len", "fp8-amax-compute-algo", "max *", "most_recent looks at one entry, so the length of the "
     "history does not matter"),
    ("fp8-format", "fp8-recipe", "delayed tensorwise blockwise", "FP8 is off"),
    ("first-last-layers-bf16", "fp8-recipe", "delayed tensorwise blockwise", "FP8 is off, all layers are in BF16"),
    ("num-layers-at-start-in-bf16", "first-last-layers-bf16", "true", "it counts only with first-last-layers-bf16"),
    ("num-layers-at-end-in-bf16", "first-last-layers-bf16", "true", "it counts only with first-last-layers-bf16"),
    ("param-comm-dtype", "fp8-recipe", "delayed tensorwise blockwise", "FP8 is off, so there are no weights in FP8"),
    ("param-comm-dtype", "zero", "1 *", "with zero 0 every rank makes all weights itself and gathers none"),
    ("eval-interval", "valid-data", "", "there is no validation data: give --valid-data, then --eval-interval too"),
    ("eval-iters", "valid-data", "", "there is no validation data: give --valid-data, then --eval-iters too"),
    ("save-interval", "save", "", "nothing is saved without a folder: give --save"),
    ("keep", "save", "", "nothing is saved without a folder: give --save"),
    ("tokenizer", "save", "", "it is copied into checkpoints, and none is written: give --save"),
    ("rotary-base", "position-embedding-type", "rope *", "positions are learned"),
    ("rope-scaling-factor", "position-embedding-type", "rope *", "positions are learned"),
    ("min-lr", "lr-decay-style", "cosine linear wsd *", "a constant rate does not decay"),
    ("lr-wsd-decay-iters", "lr-decay-style", "wsd", "only wsd has a final decay"),
    ("train-iters", "epochs", "*none", "epochs set the length of the run"),
    ("init-method-std", "load", "*none", "loaded weights have no initial values"),
]
