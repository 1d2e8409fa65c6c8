"""After a change of context parallelism, on --ranks (2) ranks. losses: runs whose ranks share each sequence have the
losses of one rank, and equal bits when repeated, without overlap, with --zero 0 and with recomputation. speed: tokens
per second and GPU of one rank and of all at the same sequence length, of 8 layers of Llama-3-8B at 65536 tokens: all
share each sequence."""
from logs import Log, differences, rank_table

LLAMA = ["train_llama", "--model", "llama3-small", "--num-layers", "4", "--seq-length", "4096",
         "--max-position-embeddings", "4096"]
# Name and options. `near`: the allowed difference from the loss of one rank, due to the order of sums in BF16 and to
# the scales of a rank's own tokens.
EQUAL = (
    ("bf16", [], 2e-3),
    ("delayed", ["--fp8-recipe", "delayed", "--fp8-stats-interval", "1"], 5e-3),
    ("attention8", ["--fp8-recipe", "delayed", "--fp8-attention"], 5e-3),
    ("tensorwise", ["--fp8-recipe", "tensorwise", "--reset-attention-mask"], 5e-3),
    ("blockwise", ["--fp8-recipe", "blockwise"], 5e-3),
)
# Options that must not change the results.
WAYS = (("again", []), ("no-overlap", ["--overlap", "off"]), ("zero0", ["--zero", "0"]),
        ("block", ["--recompute", "block"]), ("keep", ["--recompute", "block-keep-attention"]))
LONG = ["train_llama", "--model", "llama3-8B", "--num-layers", "8", "--seq-length", "65536",
        "--max-position-embeddings", "131072", "--micro-batch-size", "1", "--global-batch-size", "1",
        "--fp8-recipe", "delayed", "--recompute", "block-keep-attention", "--grad-dtype", "bf16", "--moment-dtype",
        "bf16", "--fp8-stats-interval", "0", "--synthetic-data"]


def losses(check):
    count = check.options.ranks
    common = ["--train-iters", "6", "--micro-batch-size", "1", "--global-batch-size", "4", "--gemm-search", "off"]
    share = ["--context-parallel", str(count)]
    for name, options, near in EQUAL:
        one = Log(check.train(f"{name}-one", 1, *LLAMA, *common, *options))
        first = Log(check.train(name, count, *LLAMA, *common, *options, *share))
        far = max(first.far_from(one).values())
        others = [Log(check.train(f"{name}-{way}", count, *LLAMA, *common, *options, *share, *change))
                  for way, change in WAYS]
        differ = [text for text in (differences(first, other) for other in others) if text]
        print(*differ, f"{name}: losses within {far:.2g} of one rank; {len(others) - len(differ)} of {len(others)} "
                       "runs equal to the bit", sep="\n", flush=True)
        if differ or far > near:
            check.fail(f"{name}: " + ("not equal to the bit" if differ else f"losses {far:.2g} from one rank"))


def speed(check):
    options = check.options
    logs = []
    for name, count in (("long-one", 1), ("long-shared", options.ranks)):
        log = check.out / f"{name}.jsonl"
        log.unlink(missing_ok=True)
        binary, *model = LONG
        check.ranks(name, count, [check.build / binary, *model, "--train-iters", str(options.steps or 10),
                                  "--context-parallel", str(count), "--log-file", log])
        if log.exists():
            logs.append(Log(log))
    print("\n".join(rank_table(logs)))


PARTS = {"losses": losses, "speed": speed}


def run(check):
    check.make("train_llama")
    check.describe_gpus()
    check.run_parts(PARTS)
