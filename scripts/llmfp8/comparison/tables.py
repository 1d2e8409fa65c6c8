"""The named tables: those of the reference guides, and llama3-small as a quick start."""
import os
from collections import namedtuple
from pathlib import Path

RECIPES = Path(__file__).resolve().parents[2] / "recipes"

# rows: {name: recipe script and options}. allowed: keys that may differ besides precision. gpus: of each row, unless
# RANKS is set (scripts/recipes/recipes.sh). corpus: (name, tokens) of a training whose hours the table has.
Table = namedtuple("Table", "about rows baseline allowed gpus corpus", defaults=(None, (), 1, None))


def recipes(script, fp8_script, *options):
    """The five recipes of a model on one GPU; linears that FP8 would slow down stay in BF16."""
    def fp8(recipe, *more):
        return [script, "--fp8-recipe", recipe, "--fp8-min-speedup", "1", *more, *options]
    return {"bf16": [script, *options], "delayed": [fp8_script, *options], "tensorwise": fp8("tensorwise"),
            "tensorwise-1F1L": fp8("tensorwise", "--first-last-layers-bf16"), "blockwise": fp8("blockwise")}


def modern(script, suffix):
    """GPT-2 with each of the changes that later models made, singly and together."""
    changes = {"rmsnorm": ["--normalization", "RMSNorm"], "rope": ["--position-embedding-type", "rope"],
               "gqa": ["--num-query-groups", "4"], "qk-norm": ["--qk-layernorm"],
               "swiglu": ["--activation", "swiglu", "--ffn-hidden-size", "2048"]}   # as many parameters as gelu's 3072
    changes["all"] = [word for words in changes.values() for word in words]
    return {f"{name}-{suffix}": [script, *words] for name, words in changes.items()}


SMALL, SMALL_FP8 = "train_llama_1gpu_bf16_slimpajama.sh", "train_llama_1gpu_fp8_slimpajama.sh"
GPT2, GPT2_FP8 = "train_gpt2_124M_bf16.sh", "train_gpt2_124M_fp8.sh"
LLAMA_8B, FINETUNE = "train_llama3_8b_h200_", "finetune_llama31_8b_"

TABLES = {
    "llama3-8b": Table(
        "Llama-3-8B, T 8192, {gpus}: s/it of each recipe",
        {"bf16": [LLAMA_8B + "bf16.sh"], "delayed": [LLAMA_8B + "fp8.sh"], "tensorwise": [LLAMA_8B + "fp8_cs.sh"],
         "tensorwise-1F1L": [LLAMA_8B + "fp8_cs_1F1L.sh"], "blockwise": [LLAMA_8B + "fp8_blockwise.sh"]}, gpus=8),
    "llama3-small": Table("llama3-small, T 2048, {gpus}: s/it of each recipe", recipes(SMALL, SMALL_FP8)),
    "gpt2": Table(
        "GPT-2 124M, T 1024, {gpus}: time per step, samples/s and memory by micro-batch",
        {"bf16-32": [GPT2, "--micro-batch-size", "32"], "bf16-64": [GPT2], "fp8-64": [GPT2_FP8],
         "fp8-128": [GPT2_FP8, "--micro-batch-size", "128"]},
        baseline="bf16-64", allowed=("micro-batch-size",), corpus=("2 epochs of OpenWebText", 2 * 9.04e9)),
    "gpt2-recipes": Table("GPT-2 124M, T 1024, {gpus}: s/it of each recipe", recipes(GPT2, GPT2_FP8)),
    "formats": Table(
        "GPT-2 124M, T 1024, {gpus}: number formats",
        {"fp32": [GPT2, "--dtype", "fp32"], "bf16": [GPT2], "fp8-e4m3": [GPT2_FP8, "--fp8-format", "e4m3"],
         "fp8-hybrid": [GPT2_FP8, "--fp8-format", "hybrid"]}, baseline="bf16"),
    "modern-gpt2": Table(
        "GPT-2 124M, T 1024, {gpus}: changes of later models, in BF16 and with delayed scaling",
        {"gpt2-bf16": [GPT2], "gpt2-fp8": [GPT2_FP8], **modern(GPT2, "bf16"), **modern(GPT2_FP8, "fp8")},
        allowed=("normalization", "position-embedding-type", "num-query-groups", "qk-layernorm", "activation",
                 "ffn-hidden-size", "disable-bias-linear")),
    "margins": Table(
        "GPT-2 124M, T 1024, {gpus}: delayed scaling with margins of 0 to 4",
        {"bf16": [GPT2], **{f"margin-{bits}": [GPT2_FP8, "--fp8-margin", str(bits)] for bits in range(5)}}),
    "finetune": Table(
        "Llama-3.1-8B fine-tuned, T 4096, {gpus}: BF16, FP8, and FP8 with gradients reduced in FP8",
        {"bf16": [FINETUNE + "bf16.sh"], "fp8": [FINETUNE + "fp8.sh"],
         "fp8-gradients": [FINETUNE + "fp8.sh", "--grad-comm-dtype", "fp8"]}, gpus=8),
}


def title(table):
    gpus = os.environ.get("RANKS") or str(TABLES[table].gpus)
    return TABLES[table].about.format(gpus=f"{gpus} GPU" + ("" if gpus == "1" else "s"))


def commands(table, only=None):
    """{name: words of the command} of a table's rows."""
    return {name: [str(RECIPES / words[0]), *words[1:]] for name, words in TABLES[table].rows.items()
            if only is None or name in only}
