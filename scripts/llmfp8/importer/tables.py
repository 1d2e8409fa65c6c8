"""The kinds of input, and facts about all of them: the seven configuration errors, environment variables, launchers."""
from .finish import finish_deepspeed, finish_guide, finish_llamafactory, finish_megatron, finish_torchtitan
from .rows import NONE, OTHER, Row, plain, read_rows


SHARED = read_rows("shared")
SHARED_NAMES = {plain(key) for row in SHARED for key in row.keys.split()}


class Source:
    """A kind of input: its name, the table of its options in llmc/config/foreign, the formats that it comes in, the
    function for what follows from several settings together, what switches FP8 on there, and the defaults of its
    trainer that differ from ours (of "option unless other", the default is not written if the other is set)."""

    def __init__(self, name, table, forms, finish, fp8_switch="", defaults=None):
        self.name, self.rows, self.forms, self.finish = name, read_rows(table), forms.split(), finish
        self.names = {plain(key) for row in self.rows for key in row.keys.split()}   # that tell it from others
        self.rows = self.rows + SHARED
        self.fp8_switch, self.defaults = fp8_switch, defaults or {}


MEGATRON = Source("a Megatron-LM argument script", "megatron", "shell", finish_megatron, "--fp8-format", {
    "normalization": "LayerNorm", "position-embedding-type": "learned_absolute", "activation": "gelu",
    "linear-bias": "all", "untie-embeddings-and-output-weights": False, "rotary-base": 10000, "dtype": "fp32",
    "lr-decay-style": "linear", "min-lr": 0, "lr-warmup-iters": 0, "weight-decay": 0.01, "adam-beta2": 0.999,
    "eval-interval": 1000, "eval-iters": 100, "fp8-amax-history-len": 1, "fp8-amax-compute-algo": "most_recent"})
# Of one key that several of them know, the first is meant. LLaMA-Factory's are those of transformers' Trainer, too.
SOURCES = [
    MEGATRON,
    Source("a DeepSpeed configuration", "deepspeed", "json", finish_deepspeed),
    Source("a configuration of a GPT-2 guide", "guide", "yaml json shell", finish_guide, "use_fp8: true"),
    Source("a LLaMA-Factory configuration", "llamafactory", "shell yaml json", finish_llamafactory, "fp8: true", {
        "lr": 5e-5, "lr-decay-style": "linear", "min-lr": 0, "lr-warmup-iters": 0, "weight-decay": 0,
        "adam-beta2": 0.999, "seed": 42, "micro-batch-size": 8, "epochs unless train-iters": 3, "save-interval": 500}),
    Source("an accelerate configuration", "accelerate", "yaml json", finish_llamafactory, "mixed_precision: fp8", {
        "fp8-amax-history-len": 1024, "fp8-amax-compute-algo": "most_recent"}),
    Source("a torchtitan configuration", "torchtitan", "toml shell", finish_torchtitan, 'converters = ["float8"]', {
        "lr": 8e-4, "lr-warmup-iters": 200, "lr-decay-style": "linear", "micro-batch-size": 8, "seq-length": 2048,
        "train-iters": 10000, "save-interval": 500, "log-interval": 10}),
]

# What guides to FP8 call errors; the rows that have their numbers say what is true of them.
SEVEN = {1: "FP8 asked for in a DeepSpeed file", 2: "FP32 accumulation of gradients",
         3: "gradients communicated in FP32", 4: "an FP8 backend left to choose itself",
         5: "CUDA_DEVICE_MAX_CONNECTIONS", 6: "NVTE_FP8_ALLREDUCE", 7: "settings spread over several layers"}

ENVIRONMENT = [
    Row("CUDA_DEVICE_MAX_CONNECTIONS", OTHER, "with one queue streams wait for each other: leave it unset, "
        "overlap on (the default) orders streams by events", when="1", error=5),
    Row("NVTE_FP8_ALLREDUCE", NONE, "no version of Transformer Engine or Megatron-LM knows it; here "
        "grad-comm-dtype fp8 sends gradients in FP8", error=6),
    Row("NVTE_APPLY_QK_LAYER_SCALING", NONE, "only unfused attention in FP16 reads it"),
    Row("NVTE_FP8_DPA_BWD", NONE, "1 is its default, and it acts only with FP8 attention"),
    Row("NVTE_*", OTHER, "Transformer Engine's, which is not used here: FP8 is set by fp8-* options, and there is one "
        "attention kernel"),
    Row("TRITON_* WANDB_* PYTORCH_* TORCH_* ACCELERATE_* TQDM_* HF_* TRANSFORMERS_* PYTHON* LLAMAFACTORY_*", OTHER,
        "for Python programs, of which none runs during training"),
    Row("[A-Za-z_]*", OTHER, "of the shell: set it where the run is started, if MPI, NCCL or CUDA read it"),
]

LAUNCHER = read_rows("launchers")
