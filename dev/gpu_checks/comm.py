"""After a change of communication: every collective on 1 to 8 ranks, twice to compare the bits; NCCL's non-blocking
mode; a rank that does not join a collective and is aborted; refused GPU assignments; with --shards the rates of the
links before a few steps."""
import re

from check import show

RANKS = (1, 2, 3, 4, 8)
# On two GPUs or more: name, exit code, ranks (None: one more than GPUs, 0: all), options, environment, expected text.
CASES = (
    ("non-blocking", 0, 2, [], {"NCCL_COMM_BLOCKING": "0"}, "sum of one"),
    ("stall", 0, 0, ["--seconds", "20", "--stall", "1"], {}, "rank 0: cut off in"),
    ("one-too-many", 2, None, [], {}, "start at most one rank per GPU"),
    ("same-gpu", 2, 2, [], {"CUDA_VISIBLE_DEVICES": "0"}, "are on the same GPU"),
)


def run(check):
    program, gpus = check.build / "comm_check", check.options.gpus
    check.make(str(program), "train_llama")
    check.describe_gpus()
    check.run("topology", ["nvidia-smi", "topo", "-m"], expect=None)
    for count in (count for count in RANKS if count <= gpus):
        outputs = [check.ranks(f"check-{count}-{again}", count, [program, "--large"]) for again in "ab"]
        show(outputs[0], "NCCL", "sum of one", "comm_check")
        if len({tuple(re.findall("digest (.*)", output)) for output in outputs}) > 1:
            check.fail(f"check-{count} (two runs differ in bits)")
    if gpus > 1:
        for name, expect, count, options, environment, text in CASES:
            count = gpus + 1 if count is None else count or gpus
            show(check.ranks(name, count, [program, *options], expect=expect, **environment), text)
            check.must_say(name, text)
    if check.options.shards:
        check.train("train", gpus, "train_llama", "--model", "llama3-small", "--train-iters", "6", "--micro-batch-size",
                    "8")
        show((check.out / "train.txt").read_text(), "NCCL", "ranks of host", "step ", "WARNING")
