"""After a change of kernels: tests on the device, sanitizers, kernel benches, training speed of every recipe."""
import os
import re

from check import RECIPES, ROOT, show

# The executables and options of the runs that measure training speed.
MODELS = {
    "gpt2": ["train_gpt2", "--model", "gpt2-124M", "--micro-batch-size", "64", "--global-batch-size", "512"],
    "small": ["train_llama", "--model", "llama3-small", "--micro-batch-size", "8", "--global-batch-size", "64"],
    "8b": ["train_llama", "--model", "llama3-8B", "--micro-batch-size", "1", "--global-batch-size", "4", "--grad-dtype",
           "bf16", "--moment-dtype", "bf16", "--lr", "3e-5"],
}
SANITIZERS = ("memcheck", "racecheck", "initcheck")


def tests(check):
    for name in ("tests_gpu", "tests"):
        show(check.run(name, [check.build / name]), "test cases")
    output = check.run("test_train", ["python3", "tests/run.py", "--jobs", "4", "test_train"],
                       LLMC_BUILD=os.path.abspath(check.build))
    print(output.splitlines()[-1])


def sanitize(check):
    """Leaves out hazards in the library's kernels, which synchronise through barriers that racecheck does not know."""
    for tool in SANITIZERS:
        output = check.run(tool, ["compute-sanitizer", "--tool", tool, check.build / "tests_gpu", "-tce=*device*"],
                           GPU_TEST_SMALL="1")
        ours = [line for line in output.splitlines() if "nvjet" not in line
                and re.search(r"Race reported|^========= (Invalid|Uninitialized)", line)]
        show(output, "SUMMARY")
        print(f"{tool}: {len(ours)} in kernels of this repository")


def bench(check):
    for path in sorted((ROOT / check.build).glob("bench_*")):
        print(check.run(path.name, [path]))


def speed(check, model):
    """Runs scripts/compare for every recipe, into OUT/MODEL."""
    logs = []
    for recipe, options in RECIPES.items():
        log = check.train(f"{model}-{recipe}", 1, *MODELS[model], *options, "--train-iters", check.options.steps or 8)
        logs.append(f"{recipe}={log}")
    output = check.run(f"{model}-compare", ["scripts/compare", "--out", check.out / model, *logs])
    table = re.search(r"^\| configuration \| precision.*?\n(?=\n|\Z)", output, re.M | re.S)
    print(table[0] if table else "no table")


PARTS = {"tests": tests, "sanitize": sanitize, "bench": bench,
         **{model: lambda check, model=model: speed(check, model) for model in MODELS}}


def run(check):
    check.make("train_gpt2", "train_llama", "tests", "tests_gpu", "benches")
    check.describe_gpus()
    check.run_parts(PARTS)
