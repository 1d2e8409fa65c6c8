"""After a change of --fp8-stats, on one GPU. bits: short runs in BF16 and of every recipe give equal bits with and
without histograms of exponents. speed: what the steps that collect them cost the 8B (needs an H200), with 1 and with
16 micro-batches, and the bandwidth of the kernel."""
import statistics

from check import show
from logs import SKIP, Log, differences

SMALL = ["train_llama", "--model", "llama3-small", "--num-layers", "6", "--seq-length", "1024", "--micro-batch-size",
         "2", "--global-batch-size", "8", "--train-iters", "6", "--gemm-search", "off"]
EVERY = ["--fp8-stats-interval", "2"]
EQUAL = (("bf16", [], ["--fp8-stats", "shadow", *EVERY]),
         *((name, ["--fp8-recipe", name, *EVERY, *options], ["--fp8-stats", "histograms"]) for name, options in (
             ("delayed", ["--fp8-lm-head", "--recompute", "block"]), ("tensorwise", ["--recompute", "norm-act"]),
             ("blockwise", []))))
LARGE = ["train_llama", "--model", "llama3-8B", "--moment-dtype", "bf16", "--recompute", "block", *EVERY]
SPEED = (("bf16", "shadow", []), ("delayed", "histograms", ["--fp8-recipe", "delayed"]),
         ("tensorwise", "histograms", ["--fp8-recipe", "tensorwise"]),
         ("blockwise", "histograms", ["--fp8-recipe", "blockwise"]))
MOST = 1.05   # time of a step that collects relative to one that does not


def bits(check):
    for name, options, stats in EQUAL:
        first, other = (Log(check.train(f"{name}-{way}", 1, *SMALL, *options, *more))
                        for way, more in (("plain", []), ("histograms", stats)))
        text = differences(first, other)
        print(text or f"{name}: equal to the bit", flush=True)
        if text:
            check.fail(f"{name}: not equal to the bit")


def speed(check):
    for micro_batches in (1, 16):
        for name, stats, options in SPEED:
            log = Log(check.train(f"8B-{name}-{micro_batches}", 1, *LARGE, *options, "--fp8-stats", stats,
                                  "--global-batch-size", str(micro_batches), "--train-iters",
                                  str(check.options.steps or 14)))
            collecting, others = (statistics.median(r["step_seconds"] for step, r in log.steps.items()
                                                    if step > SKIP and (step % 2 == 0) == collects)
                                  for collects in (True, False))
            ratio = collecting / others
            print(f"8B {name:10} {micro_batches:2} micro-batches: {1e3 * others:8.1f} ms/step, {1e3 * collecting:8.1f} "
                  f"with histograms, {ratio - 1:+.2%}; {(ratio - 1) / 100:.3%} over an interval of 100", flush=True)
            if ratio > MOST:
                check.fail(f"8B {name}, {micro_batches} micro-batches: a step that collects takes {ratio:.3f} times")
    show(check.run("bench_quantize", [check.build / "bench_quantize", "count_exponents"]), "kernel", "count_exponents")


PARTS = {"bits": bits, "speed": speed}


def run(check):
    check.make("train_llama", "benches")
    check.describe_gpus()
    for part in check.options.parts or PARTS:
        print(f"=== {part}", flush=True)
        PARTS[part](check)
