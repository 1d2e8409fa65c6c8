"""After a change of --offload, on one GPU. bits: short runs of every recipe give equal bits with the state, or the
activations, in host memory. speed: the 8B with 16 micro-batches, resident (needs an H200) and offloaded in several
fractions. long: 8 layers of it at 65,536 tokens with activations resident and
offloaded, and all 32 layers."""
from check import show
from logs import Log, differences

SMALL = ["train_llama", "--model", "llama3-small", "--num-layers", "6", "--seq-length", "1024", "--micro-batch-size",
         "2", "--global-batch-size", "8", "--train-iters", "6", "--gemm-search", "off"]
EQUAL = (("bf16", ["--moment-dtype", "bf16"]),
         ("delayed", ["--fp8-recipe", "delayed", "--grad-dtype", "bf16", "--fp8-lm-head"]),
         ("tensorwise", ["--fp8-recipe", "tensorwise", "--recompute", "norm-act"]),
         ("blockwise", ["--fp8-recipe", "blockwise", "--recompute", "block-keep-attention"]))
WAYS = (("state", ["--offload", "moments,masters"]),
        ("part", ["--offload", "masters", "--offload-fraction", "0.4"]),
        ("activations", ["--offload", "activations"]))
LARGE = ["train_llama", "--model", "llama3-8B", "--fp8-recipe", "delayed", "--moment-dtype", "bf16", "--recompute",
         "block", "--global-batch-size", "16", "--fp8-stats-interval", "0"]
AWAY = ["--offload", "moments,masters"]
SPEED = (("resident", []), ("offloaded", AWAY), ("offloaded-0.75", [*AWAY, "--offload-fraction", "0.75"]),
         ("offloaded-bf16-0.5", [*AWAY, "--offload-fraction", "0.5", "--grad-dtype", "bf16"]))
LONG = ["train_llama", "--model", "llama3-8B", "--fp8-recipe", "delayed", "--moment-dtype", "bf16", "--grad-dtype",
        "bf16", "--recompute", "block-keep-attention", "--seq-length", "65536", "--max-position-embeddings", "65536",
        "--fp8-stats-interval", "0", "--gemm-search", "off"]


def bits(check):
    for name, options in EQUAL:
        first, *others = [Log(check.train(f"{name}-{way}".rstrip("-"), 1, *SMALL, *options, *change))
                          for way, change in (("", []), *WAYS)]
        differ = [text for text in (differences(first, other) for other in others) if text]
        print(*differ, f"{name}: {len(others) - len(differ)} of {len(others)} runs equal to the bit", sep="\n",
              flush=True)
        if differ:
            check.fail(f"{name}: not equal to the bit")


def timed(check, name, *options):
    log = Log(check.train(name, 1, *options, "--train-iters", str(check.options.steps or 8)))
    print(f"{name:24} {log.median('step_seconds'):8.3f} s/step {log.median('tokens_per_second'):8.0f} tokens/s",
          flush=True)
    show((check.out / f"{name}.txt").read_text(errors="replace"), "GPU memory", "speed  ", "memory  ")
    return log


def speed(check):
    times = {name: timed(check, name, *LARGE, *options).median("step_seconds") for name, options in SPEED}
    for name, seconds in times.items():
        print(f"{name:24} {seconds / times['resident']:.3f} of the resident step")


def long(check):
    eight = [*LONG, "--num-layers", "8"]
    here, away = timed(check, "long-8", *eight), timed(check, "long-8-offloaded", *eight, "--offload", "activations")
    if text := differences(here, away):
        check.fail(text)
    timed(check, "long-32-offloaded", *LONG, "--offload", "moments,masters,activations")


PARTS = {"bits": bits, "speed": speed, "long": long}


def run(check):
    check.make("train_llama")
    check.describe_gpus()
    check.run_parts(PARTS)
