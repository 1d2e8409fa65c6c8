"""Megatron-LM's arguments, with the defaults of megatron/training/arguments.py."""
from .finish import finish_megatron
from .rows import Default, Source, read_rows

DEFAULTS = [
    Default("normalization", "LayerNorm"), Default("position-embedding-type", "learned_absolute"),
    Default("activation", "gelu"), Default("linear-bias", "all"),
    Default("untie-embeddings-and-output-weights", False), Default("rotary-base", 10000),
    Default("dtype", "fp32", "neither --bf16 nor --fp16"),
    Default("lr-decay-style", "linear"), Default("min-lr", 0), Default("lr-warmup-iters", 0),
    Default("weight-decay", 0.01), Default("adam-beta2", 0.999),
    Default("eval-interval", 1000), Default("eval-iters", 100),
    Default("fp8-amax-history-len", 1), Default("fp8-amax-compute-algo", "most_recent"),
]

MEGATRON = Source("a Megatron-LM argument script", read_rows("megatron"),
                  "num-layers num-attention-heads hidden-size tensor-model-parallel-size micro-batch-size train-iters "
                  "use-mcore-models swiglu use-distributed-optimizer fp8-recipe fp8-format data-path", DEFAULTS,
                  finish_megatron, "--fp8-format")
