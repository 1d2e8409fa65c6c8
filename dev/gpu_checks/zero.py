"""After a change of ZeRO, on --ranks (2) ranks. bits: short runs of every recipe and communication dtype give equal
bits when repeated, without overlap and with --zero 0 (instead of 1). speed: times steps on one and on all ranks, with
and without overlap and with each communication dtype, and compares planned with used memory."""
from logs import Log, differences, rank_table

GPT2 = ["train_gpt2", "--model", "gpt2-124M"]
LLAMA = ["train_llama", "--model", "llama3-small", "--num-layers", "4", "--seq-length", "1024"]
BETWEEN = ["--eval-interval", "1", "--eval-iters", "1", "--sample-every", "2", "--sample-tokens", "8"]
SAVE = ["--save-interval", "2", "--keep", "1"]
# Name, model, options, extras; "valid": evaluation and sampling also use the gathered weights, "save": checkpoints too.
EQUAL = (
    ("gpt2-bf16", GPT2, ["--grad-comm-dtype", "fp8"], "valid save"),
    ("gpt2-delayed", GPT2, ["--fp8-recipe", "delayed", "--fp8-stats-interval", "1"], ""),
    ("llama-delayed", LLAMA, ["--fp8-recipe", "delayed", "--grad-comm-dtype", "bf16", "--fp8-stats-interval", "1"], ""),
    ("llama-delayed-comm8", LLAMA, ["--fp8-recipe", "delayed", "--grad-comm-dtype", "fp8", "--grad-dtype", "bf16"], ""),
    ("llama-1F1L", LLAMA, ["--fp8-recipe", "tensorwise", "--first-last-layers-bf16", "--fp8-stats-interval", "1"], ""),
    ("llama-int8", LLAMA, ["--fp8-recipe", "int8-forward", "--fp8-stats-interval", "1"], "valid"),
    ("llama-blockwise", LLAMA, ["--fp8-recipe", "blockwise", "--grad-dtype", "bf16"], "valid"),
    ("gpt2-zero2", GPT2, ["--zero", "2", "--fp8-recipe", "delayed", "--fp8-stats-interval", "1"], "valid save"),
    ("llama-zero2-comm8", LLAMA, ["--zero", "2", "--fp8-recipe", "delayed", "--grad-comm-dtype", "fp8"], ""),
    ("llama-zero2-bf16", LLAMA, ["--zero", "2", "--fp8-recipe", "blockwise", "--grad-dtype", "bf16"], ""),
)
# Options that must not change the results.
WAYS = (("again", []), ("no-overlap", ["--overlap", "off"]), ("zero0", ["--zero", "0"]))
# Name, whether on all ranks, micro-batches per rank and step, options.
SPEED = (
    ("speed-one", False, 16, []),
    ("speed-16", True, 16, []),
    ("speed-16-bf16", True, 16, ["--grad-comm-dtype", "bf16"]),
    ("speed-16-zero2", True, 16, ["--zero", "2"]),
    ("speed-16-zero2-bf16", True, 16, ["--zero", "2", "--grad-comm-dtype", "bf16"]),
    ("speed-1", True, 1, ["--grad-comm-dtype", "bf16"]),
    ("speed-1-no-overlap", True, 1, ["--grad-comm-dtype", "bf16", "--overlap", "off"]),
    ("speed-1-zero0", True, 1, ["--grad-comm-dtype", "bf16", "--zero", "0"]),
    ("speed-1-comm8", True, 1, ["--grad-comm-dtype", "fp8"]),
    ("speed-1-comm32", True, 1, ["--grad-comm-dtype", "fp32"]),
)


def bits(check):
    count = check.options.ranks
    # Autotuning may choose other matmul algorithms, so it is off.
    common = ["--train-iters", "6", "--micro-batch-size", "2", "--global-batch-size", str(4 * count), "--bucket-mb",
              "40", "--fp8-stats-interval", "3", "--gemm-search", "off"]
    for name, model, options, more in EQUAL:
        extra = ["--valid-data", check.shards(), *BETWEEN] if "valid" in more else []
        logs = []
        for way, change in (("", []), *WAYS):
            if way == "zero0" and "--zero" in options:
                continue
            run = f"{name}-{way}".rstrip("-")
            saves = ["--save", check.out / "save" / run, *SAVE] if "save" in more else []
            logs.append(check.train(run, count, *model, *common, *options, *extra, *saves, *change))
        first, *others = map(Log, logs)
        differ = [text for text in (differences(first, other) for other in others) if text]
        print(*differ, f"{name}: {len(others) - len(differ)} of {len(others)} runs equal to the bit, "
                       f"{len(first.figures())} figures each", sep="\n", flush=True)
        if differ:
            check.fail(f"{name}: not equal to the bit")


def speed(check):
    options = check.options
    model = ["train_llama", "--model", options.model or "llama3-small", "--fp8-recipe", "delayed", "--micro-batch-size",
             str(options.micro), "--train-iters", str(options.steps or 10), "--fp8-stats-interval", "0"]
    logs = []
    for name, all_ranks, micro_batches, more in SPEED:
        count = options.ranks if all_ranks else 1
        logs.append(check.train(name, count, *model, "--global-batch-size", str(count * micro_batches * options.micro),
                                *more))
    print("\n".join(rank_table([Log(log) for log in logs if log.exists()])))


PARTS = {"bits": bits, "speed": speed}


def run(check):
    check.make("train_gpt2", "train_llama")
    check.describe_gpus()
    check.run_parts(PARTS)
