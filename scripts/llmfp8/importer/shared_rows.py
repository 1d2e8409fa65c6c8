"""Facts that hold for every kind of input: the seven configuration errors, environment variables, launchers and
commands of the shell."""
from .rows import none, other, read_rows

# number: (what it is, what holds, correction)
SEVEN = {
    1: ("FP8 asked for in a DeepSpeed file",
        "DeepSpeed has no FP8: it reads the section and does nothing with it. Its loss_scale keys belong to FP16.",
        "fp8-recipe switches FP8 on here; of the section only \"enabled\" is carried over."),
    2: ("FP32 accumulation of gradients",
        "Said to cost two casts a step. It does not: the matmul that makes a weight gradient writes FP32 or BF16 "
        "directly and never FP8, and sums of many micro-batches need FP32.",
        "none needed: grad-dtype fp32 is our default and accumulates inside the matmul. bf16 saves 2 bytes a "
        "parameter and rounds each sum."),
    3: ("Gradients communicated in FP32",
        "It doubles the bytes of BF16. It does not switch off an FP8 all-reduce, since there is none.",
        "grad-comm-dtype bf16: gradients are sent in BF16 and added in FP32. fp8 (E4M3, a scale for each 128 "
        "values) halves the bytes once more; log its error with fp8-stats-interval."),
    4: ("FP8 backend left to choose itself",
        "auto takes torchao, which reads no NVTE_* variable and no recipe key; versions before LLaMA-Factory's pull "
        "request 9705 then ran in BF16 without a word.",
        "there is one backend here, and fp8-recipe says what it does. After the first step the trainer compares the "
        "FP8 matmuls that ran with its plan, and exits with code 3 if they differ."),
    5: ("CUDA_DEVICE_MAX_CONNECTIONS and overlap",
        "1 does not help: with one queue streams wait for each other. Megatron wants it for tensor and context "
        "parallelism before Blackwell, and refuses it with sharded data parallelism.",
        "leave it unset: overlap on (the default) orders streams by events."),
    6: ("NVTE_FP8_ALLREDUCE",
        "The name occurs nowhere in Transformer Engine or Megatron-LM, so setting it changes nothing, and neither does "
        "leaving it out.",
        "leave it out. grad-comm-dtype fp8 is what sends gradients in FP8 here."),
    7: ("Settings spread over several layers",
        "One run is described in more than one place, each of which can ignore or overrule the others.",
        "the JSON written here is the only place. Name all files of the run in one call of import_config, which stops "
        "where they contradict each other; the log opens with what is in effect, per layer."),
}

SECOND_FILE = "a second file about the same run"

# (environment variable, error, what is true of a script without it)
ABSENT = [
    ("CUDA_DEVICE_MAX_CONNECTIONS", 5, "some guides call this an error, but it is none: see below"),
    ("NVTE_FP8_ALLREDUCE", 6, "some guides call this an error, but it is none: see below"),
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
    other("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "scales of blocks are powers of two here"),
    other("NVTE_*", "Transformer Engine's, which this trainer does not use; FP8 is set by fp8-* options"),
    other("NCCL_*", "NCCL reads it here too: set it where the run is started"),
    other("CUDA_VISIBLE_DEVICES", "CUDA reads it here too: set it where the run is started"),
    other("OMP_NUM_THREADS MKL_NUM_THREADS", "threads of the host; the training path needs few"),
    other("PYTORCH_* TORCH_* TORCHINDUCTOR_* TORCHDYNAMO_*", "PyTorch's, which this trainer does not use; memory is "
          "planned once at the start, see --dry-run"),
    other("TRITON_CACHE_DIR TRITON_*", "there is no JIT compiler and so no cache here"),
    other("WANDB_*", "there is no built-in logging service: every step is a record of log-file"),
    other("TQDM_* TOKENIZERS_PARALLELISM HF_* TRANSFORMERS_* HUGGINGFACE_* DISABLE_VERSION_CHECK PYTHON* "
          "LLAMAFACTORY_* FORCE_TORCHRUN", "for Python programs, of which none runs during training"),
    other("ACCELERATE_*", "accelerate's, which this trainer does not use"),
    other("LD_LIBRARY_PATH PATH CUDA_HOME", "of the shell: keep what your system needs"),
    other("MASTER_ADDR MASTER_PORT RANK WORLD_SIZE LOCAL_RANK NODE_RANK", "ranks find each other through MPI: "
          "scripts/launch/launch_mpi.sh or Slurm"),
]

LAUNCHER = read_rows("launchers")

# First words of lines in scripts that are no part of the training.
COMMANDS = "mkdir cd echo set source . module pip pip3 nvidia-smi sleep exit wait ulimit printf ls rm cp date trap " \
           "unset conda export true shift umask hostname pwd ray fi done esac break continue make } : mv " \
           "touch env tee chmod apt apt-get"
