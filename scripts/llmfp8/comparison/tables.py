"""The named tables: those of docs/measured.md and docs/guides.md, and llama3-small as a quick start."""
import os
from collections import namedtuple
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[2] / "recipes"
RECIPES = {"bf16": [], "delayed": ["--fp8-recipe", "delayed"], "tensorwise": ["--fp8-recipe", "tensorwise"],
           "tensorwise-1F1L": ["--fp8-recipe", "tensorwise", "--first-last-layers-bf16"],
           "blockwise": ["--fp8-recipe", "blockwise"]}

# rows: {name: recipe script and options, where {gpus} is their number}. allowed: keys that may differ besides
# precision. gpus: of each row, unless RANKS is set. batch: sequences of a step per GPU, if not the recipe's. steps: of
# a start, (warm-up, timed).
Table = namedtuple("Table", "about rows baseline allowed gpus batch steps", defaults=(None, (), 1, None, (5, 20)))
ONE_GPU = ("--grad-dtype", "bf16", "--moment-dtype", "bf16")   # with these, a row for several GPUs fits on one
LENGTH = ("seq-length", "max-position-embeddings", "global-batch-size")
PARALLEL = ("--context-parallel", "{gpus}", "--recompute", "block-keep-attention")
EIGHT_LAYERS = ("--num-layers", "8", "--recompute", "block")
FOUR_OF_80_GB = ("--zero", "2", "--grad-shard-dtype", "bf16", *ONE_GPU)

SMALL, SMALL_FP8 = "train_llama_1gpu_bf16_slimpajama.sh", "train_llama_1gpu_fp8_slimpajama.sh"
GPT2, GPT2_FP8 = "train_gpt2_124M_bf16.sh", "train_gpt2_124M_fp8.sh"
GPT2_1558M = ("--model", "gpt2-1558M", "--micro-batch-size", "32", "--global-batch-size", "256")
LLAMA_8B, FINETUNE, LLAMA_70B = "train_llama3_8b_h200_", "finetune_llama31_8b_", "train_llama31_70b_h200x4_fp8.sh"
QWEN3_MOE, CAPACITY = "train_qwen3_30b_a3b_h200x4_fp8.sh", ("--recompute", "norm-act", "--moe-capacity", "1.25")
LLAMA_8B_INT8 = LLAMA_8B + "int8_forward.sh"
RECIPES_8B = {"bf16": [LLAMA_8B + "bf16.sh"], "delayed": [LLAMA_8B + "fp8.sh"], "tensorwise": [LLAMA_8B + "fp8_cs.sh"],
              "tensorwise-1F1L": [LLAMA_8B + "fp8_cs_1F1L.sh"], "blockwise": [LLAMA_8B + "fp8_blockwise.sh"],
              "delayed-head-attention": [LLAMA_8B + "fp8.sh", "--fp8-lm-head", "--fp8-attention"]}


def recipes(script, fp8_script):
    """The recipes of a model on one GPU; linears that FP8 would slow down stay in BF16."""
    rows = {name: [script, *options, "--fp8-min-speedup", "1"] for name, options in RECIPES.items()}
    return {**rows, "bf16": [script], "delayed": [fp8_script], "delayed-head": [fp8_script, "--fp8-lm-head"]}


def modern(script, suffix):
    """GPT-2 with each of the changes that later models made, singly and together."""
    changes = {"rmsnorm": ["--normalization", "RMSNorm"], "rope": ["--position-embedding-type", "rope"],
               "gqa": ["--num-query-groups", "4"], "qk-norm": ["--qk-layernorm"],
               "swiglu": ["--activation", "swiglu", "--ffn-hidden-size", "2048"]}   # as many parameters as gelu's 3072
    changes["all"] = [word for words in changes.values() for word in words]
    return {f"{name}-{suffix}": [script, *words] for name, words in changes.items()}


def long(length, sequences, *options):
    """Sequences of this length, so many in a step, with attention in BF16 and in FP8."""
    row = [LLAMA_8B + "fp8.sh", "--seq-length", str(length), "--global-batch-size", str(sequences), *options]
    return {str(length): row, f"{length}-fp8-attention": [*row, "--fp8-attention"]}


TABLES = {
    "llama3-8b": Table("Llama-3-8B, T 8192, {gpus}: s/it of each recipe", RECIPES_8B, gpus=8, batch=16, steps=(2, 5)),
    "int8-forward": Table(
        "Llama-3-8B, T 8192, {gpus}: s/it with the forward pass in INT8",
        {"bf16": [LLAMA_8B + "bf16.sh"], "delayed": [LLAMA_8B + "fp8.sh"], "int8-forward": [LLAMA_8B_INT8],
         "int8-forward-head-attention": [LLAMA_8B_INT8, "--fp8-lm-head", "--fp8-attention"]},
        gpus=4, batch=16, steps=(2, 5)),
    "8b-h100": Table(
        "Llama-3-8B on 80 GB each, {gpus}: s/it of each recipe at T 8192, and T 131072",
        {name: [*words, *FOUR_OF_80_GB] for name, words in {**RECIPES_8B, **long(131072, 2, *PARALLEL)}.items()},
        gpus=4, batch=16, steps=(2, 5)),
    # At a rate at which neither optimizer moves the weights, so that both compute with the same values at one clock.
    "muon": Table("Llama-3-8B, T 8192, delayed scaling, {gpus}: AdamW and Muon",
                  {name: [LLAMA_8B + "fp8.sh", *FOUR_OF_80_GB, "--lr", "1e-8", "--optimizer", name]
                   for name in ("adamw", "muon")},
                  allowed=("optimizer",), gpus=4, batch=16, steps=(2, 5)),
    "zero": Table("Llama-3-8B, T 8192, delayed scaling, {gpus}: ZeRO 1, 2 and 3",
                  {f"zero-{stage}": [LLAMA_8B + "fp8.sh", "--zero", str(stage)] for stage in (1, 2, 3)},
                  allowed=("zero",), gpus=4, batch=16, steps=(2, 5)),
    "context": Table("Llama-3-8B, delayed scaling, {gpus}: long sequences, context parallelism",
                     {**long(131072, 2, *PARALLEL), **long(262144, 1, *PARALLEL)}, allowed=LENGTH, gpus=4,
                     steps=(2, 3)),
    "long": Table("8 layers of Llama-3-8B, delayed scaling, {gpus}: long sequences",
                  {**long(32768, 4, *EIGHT_LAYERS), **long(65536, 2, *EIGHT_LAYERS)}, allowed=LENGTH, steps=(2, 5)),
    "70b": Table("Llama-3.1-70B, T 8192, {gpus}: delayed scaling, offload to host memory",
                 {"delayed": [LLAMA_70B], "delayed-head-attention": [LLAMA_70B, "--offload-fraction", "1",
                                                                     "--fp8-lm-head", "--fp8-attention"]},
                 allowed=("offload-fraction",), gpus=4, steps=(2, 3)),
    "70b-resident": Table("Llama-3.1-70B, T 8192, {gpus}: delayed scaling, nothing offloaded",
                          {"delayed": [LLAMA_8B + "fp8.sh", "--model", "llama3.1-70B", "--zero", "3", "--recompute",
                                       "block-keep-attention", "--grad-shard-dtype", "bf16", *ONE_GPU]},
                          gpus=8, batch=4, steps=(2, 3)),
    "experts": Table("Qwen3-30B-A3B, T 4096, expert parallelism, {gpus}: equal loads of all experts",
                     {"bf16": [QWEN3_MOE, "--fp8-recipe", "none"], "blockwise": [QWEN3_MOE],
                      "bf16-capacity": [QWEN3_MOE, *CAPACITY, "--fp8-recipe", "none"],
                      "blockwise-capacity": [QWEN3_MOE, *CAPACITY]},
                     allowed=("recompute", "moe-capacity"), gpus=4, batch=8, steps=(2, 5)),
    "llama3-small": Table("llama3-small, T 2048, {gpus}: s/it of each recipe", recipes(SMALL, SMALL_FP8)),
    "gpt2": Table(
        "GPT-2 124M, T 1024, {gpus}: time per step, samples/s and memory by micro-batch",
        {"bf16-32": [GPT2, "--micro-batch-size", "32"], "bf16-64": [GPT2], "fp8-64": [GPT2_FP8],
         "fp8-128": [GPT2_FP8, "--micro-batch-size", "128"]},
        baseline="bf16-64", allowed=("micro-batch-size",)),
    "gpt2-recipes": Table("GPT-2 124M, T 1024, {gpus}: s/it of each recipe", recipes(GPT2, GPT2_FP8)),
    "gpt2-1558M": Table("GPT-2 1558M, T 1024, {gpus}: BF16 and delayed scaling",
                        {"bf16": [GPT2, *GPT2_1558M], "delayed": [GPT2_FP8, *GPT2_1558M]}, steps=(3, 8)),
    "formats": Table(
        "GPT-2 124M, T 1024, {gpus}: number formats",
        {"fp32": [GPT2, "--dtype", "fp32"], "bf16": [GPT2], "fp8-e4m3": [GPT2_FP8, "--fp8-format", "e4m3"],
         "fp8-hybrid": [GPT2_FP8, "--fp8-format", "hybrid"]}, baseline="bf16"),
    "modern-gpt2": Table(
        "GPT-2 124M, T 1024, {gpus}: changes of later models, in BF16 and with delayed scaling",
        {"gpt2-bf16": [GPT2], "gpt2-fp8": [GPT2_FP8], **modern(GPT2, "bf16"), **modern(GPT2_FP8, "fp8")},
        allowed=("normalization", "position-embedding-type", "num-query-groups", "qk-layernorm", "activation",
                 "ffn-hidden-size")),
    "margins": Table(
        "GPT-2 124M, T 1024, {gpus}: delayed scaling with margins of 0 to 4",
        {"bf16": [GPT2], **{f"margin-{bits}": [GPT2_FP8, "--fp8-margin", str(bits)] for bits in range(5)}}),
    "finetune": Table(
        "Llama-3.1-8B fine-tuned, T 4096, {gpus}: BF16, FP8, and FP8 with gradients reduced in FP8",
        {"bf16": [FINETUNE + "bf16.sh"], "fp8": [FINETUNE + "fp8.sh"],
         "fp8-gradients": [FINETUNE + "fp8.sh", "--grad-comm-dtype", "fp8"]}, gpus=8, steps=(2, 5)),
}


def ranks(table):
    """The number of GPUs; what is not a number is refused by the recipes."""
    return os.environ.get("RANKS") or str(TABLES[table].gpus)


def title(table):
    gpus = ranks(table)
    return TABLES[table].about.format(gpus=f"{gpus} GPU" + ("" if gpus == "1" else "s"))


def commands(table, only=None):
    """{name: words of the command} of a table's rows. Their environment needs RANKS."""
    about, gpus = TABLES[table], ranks(table)
    more = [*(ONE_GPU if gpus == "1" and about.gpus > 1 else ())]
    if about.batch and gpus.isdecimal():
        more += ["--global-batch-size", str(about.batch * int(gpus))]
    return {name: [str(SCRIPTS / words[0]), *more, *(word.format(gpus=gpus) for word in words[1:])]
            for name, words in about.rows.items() if only is None or name in only}
