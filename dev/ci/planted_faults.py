#!/usr/bin/env python3
"""Plants faults in a copy of the sources, one at a time, and checks that tests/composition finds each of them.

    dev/ci/planted_faults.py [--sets N] [NAME...]

The copy takes the objects of build/ with it, so that only what a fault changes is compiled. Standard library only.
"""
import argparse
import os
import shutil
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
TESTS = "build/cpu/tests"
# Name, file, its text, and the text that takes its place.
FAULTS = (
    ("a head quantized behind its event", "llmc/parallel/zero/layer_gatherer.cpp",
     "        record(ctx, layer_at(home(num_layers_)));\n", ""),
    ("a stale gathered layer", "llmc/parallel/zero/layer_gatherer.cpp",
     "for (Buffer& buffer : rowwise_) buffer.layer = kNone;",
     "for (size_t b = 1; b < rowwise_.size(); b++) rowwise_[b].layer = kNone;"),
    ("a norm counted twice under context parallelism", "llmc/train/trainer.cpp",
     "for (const Tensor& shard : grads_.norm_shards())\n",
     "for (int64_t twice = 0; twice < config_.context_parallel; twice++) "
     "for (const Tensor& shard : grads_.norm_shards())\n"),
    ("a scale taken before the all-reduce", "llmc/train/trainer.cpp",
     "    gatherer_.all_reduce_amaxes(ctx);\n    fp8_.update(ctx, state_);\n",
     "    fp8_.update(ctx, state_);\n    gatherer_.all_reduce_amaxes(ctx);\n"),
    ("a loss divided by all targets", "llmc/train/staging.cpp",
     "1.0 / static_cast<double>(counted)", "1.0 / static_cast<double>(buffer.samples * config_.seq_length)"),
    ("a resumed sample skipped", "llmc/train/run/run_checkpoints.cpp",
     "    progress.loss_watch.restore(", "    progress.samples++;\n    progress.loss_watch.restore("),
)


def copy_of_sources(folder):
    listed = subprocess.run(["git", "ls-files", "-z", "Makefile", "*.cu", "llmc", "tests", "dev"], cwd=ROOT,
                            capture_output=True, check=True).stdout.decode().split("\0")
    for name in filter(os.path.isfile, listed):
        os.makedirs(os.path.join(folder, os.path.dirname(name)), exist_ok=True)
        shutil.copy2(name, os.path.join(folder, name))
    for name in ("build/cpu", "build/host"):
        shutil.copytree(name, os.path.join(folder, name), symlinks=True)


def write(path, text):
    with open(path, "w") as file:
        file.write(text)


def build(folder):
    subprocess.run(["make", "DEVICE=cpu", "TABLE=0", "tests"], cwd=folder, check=True)


def found(folder, sets):
    """What the test prints about the first set that shows the fault, "" if none does."""
    done = subprocess.run([TESTS, "--test-case=composition: random*", "--abort-after=1"], cwd=folder, text=True,
                          capture_output=True, env={**os.environ, "LLMC_SETS": str(sets)})
    lines = [line for line in done.stdout.splitlines() if "LLMC_SET=" in line or line.startswith("the smallest")]
    return "\n  ".join(lines or ["the tests ended without a set"]) if done.returncode else ""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", type=int, default=2000, help="sets to try (default %(default)s)")
    parser.add_argument("names", nargs="*", metavar="NAME", help="a part of a fault's name")
    options = parser.parse_args()
    os.chdir(ROOT)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    missed = []
    with tempfile.TemporaryDirectory(prefix="llmc-planted-") as folder:
        copy_of_sources(folder)
        for name, path, text, fault in FAULTS:
            if options.names and not any(part in name for part in options.names):
                continue
            path = os.path.join(folder, path)
            with open(path) as file:
                source = file.read()
            if source.count(text) != 1:
                sys.exit(f"planted_faults: {path} has no longer exactly one {text!r}: plant {name} elsewhere")
            write(path, source.replace(text, fault))
            build(folder)
            shown = found(folder, options.sets)
            print(f"{name}: " + (f"found\n  {shown}" if shown else "NOT FOUND"), flush=True)
            missed += [] if shown else [name]
            write(path, source)
    if missed:
        sys.exit("planted_faults: not found: " + ", ".join(missed))


if __name__ == "__main__":
    main()
