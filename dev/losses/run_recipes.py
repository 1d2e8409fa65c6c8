#!/usr/bin/env python3
"""The same training run in several recipes and seeds, spread over the GPUs of a machine; then compare_losses.py.

    python3 dev/losses/run_recipes.py --gpus 0,1,2,3 --seeds 1,2 --out DIR [--only bf16] -- ./train_gpt2 ...
    ... --set 'muon=--optimizer muon --lr 1e-3'     another set of options, which come after those of the command

Each run writes DIR/RECIPE.SEED.jsonl and .txt. A run is not repeated if its log shows that the same command has
finished, so an interrupted call is continued by repeating it. Standard library only.
"""
import argparse
import json
import os
import queue
import shlex
import subprocess
import sys
import threading
import time
from pathlib import Path

sys.path[:0] = [str(p / "scripts") for p in Path(__file__).resolve().parents if (p / "scripts/llmfp8").is_dir()]
from llmfp8.comparison.launch import error_of  # noqa: E402
from llmfp8.comparison.tables import RECIPES  # noqa: E402
from llmfp8.support import InputError, run_main  # noqa: E402

DELAYED = RECIPES["delayed"]
CONFIGURATIONS = {
    **RECIPES,
    "int8-forward": ["--fp8-recipe", "int8-forward"],
    "e4m3": [*DELAYED, "--fp8-format", "e4m3"],
    "delayed-fast-all": [*DELAYED, "--fp8-fast-accum", "all"],
    "delayed-fast-none": [*DELAYED, "--fp8-fast-accum", "none"],
    "delayed-attention": [*DELAYED, "--fp8-attention"],
    "delayed-head": [*DELAYED, "--fp8-lm-head"],
    "delayed-head-attention": [*DELAYED, "--fp8-lm-head", "--fp8-attention"],
    **{f"delayed-{name}-bf16": [*DELAYED, "--bf16-linears", f"*.{name}"] for name in ("qkv", "proj", "up", "down")},
    **{f"delayed-final{percent}": [*DELAYED, "--fp8-final-bf16", f"0.{percent}"] for percent in (10, 20, 50)},
    **{f"delayed-margin{m}": [*DELAYED, "--fp8-margin", str(m)] for m in (1, 2, 3, 4)},
}
DEFAULT = ",".join(RECIPES)


def named_sets(texts):
    """{name: options} of --set NAME=OPTIONS."""
    sets = {}
    for text in texts:
        name, equals, words = text.partition("=")
        if not equals or not name or set(name) & set("./ "):
            raise InputError(f"--set {text}: not NAME=OPTIONS with a name without . / and blanks")
        sets[name] = shlex.split(words)
    return sets


def records(path):
    try:
        with open(path) as file:
            return [json.loads(line) for line in file if line.endswith("\n")]
    except (OSError, ValueError):
        return []


def finished(path, command):
    log = records(path)
    return bool(log) and log[0].get("command") in (shlex.join(command), " ".join(command)) and any(
        r["type"] == "event" and r["kind"] == "stop" and r["text"].startswith("finished") for r in log)


def last_line(path):
    evals = [r for r in records(path) if r["type"] == "eval"]
    times = sorted(r["step_seconds"] for r in records(path) if r["type"] == "step")
    speed = f"{times[len(times) // 2]:.4f} s/it" if times else "no step"
    return f"{speed}, validation loss {evals[-1]['loss']:.4f} at step {evals[-1]['step']}" if evals else speed


class Runs:
    """Does runs {CONFIGURATION.SEED: command}, one at a time on each of the GPUs. Begins none that would end after the
    `deadline` (time.monotonic()) if it took as long as the longest so far. `failed` and `left` have the names of those
    without a finished log."""

    def __init__(self, runs, gpus, out, deadline=None):
        self.out, self.deadline, self.longest = out, deadline, 0
        self.waiting, self.failed = queue.Queue(), []
        os.makedirs(out, exist_ok=True)
        for name, command in runs.items():
            command = [*command, "--log-file", self.path(name, "jsonl")]
            if not finished(command[-1], command):
                self.waiting.put((name, command))
        threads = [threading.Thread(target=self._work, args=(gpu,)) for gpu in gpus]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.left = [name for name, _ in self.waiting.queue]

    def path(self, name, kind):
        return os.path.join(self.out, f"{name}.{kind}")

    def _work(self, gpu):
        while self.deadline is None or time.monotonic() + self.longest < self.deadline:
            try:
                name, command = self.waiting.get_nowait()
            except queue.Empty:
                return
            begin = time.monotonic()
            with open(self.path(name, "txt"), "w") as text:
                code = subprocess.call(command, stdout=text, stderr=subprocess.STDOUT,
                                       env=dict(os.environ, CUDA_VISIBLE_DEVICES=gpu))
            self.longest = max(self.longest, time.monotonic() - begin)
            said = last_line(self.path(name, "jsonl"))
            if code:
                self.failed.append(name)
                said = error_of(Path(self.path(name, "txt")).read_text(errors="replace"))
            print(f"GPU {gpu}: {name}: exit {code}, {said}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gpus", default="0", help="numbers of GPUs, one run at a time on each")
    parser.add_argument("--seeds", default="1")
    parser.add_argument("--only", help=f"of {','.join(CONFIGURATIONS)} (default without --set: {DEFAULT})")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=OPTIONS", help="another set")
    parser.add_argument("--out", required=True)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="after --: the BF16 run")
    options = parser.parse_args()
    command = [word for word in options.command if word != "--"]
    only = (options.only or ("" if options.set else DEFAULT)).split(",")
    unknown = [name for name in only if name and name not in CONFIGURATIONS]
    if unknown or not command:
        parser.error(f"unknown configuration {', '.join(unknown)}" if unknown else "no command after --")
    sets = {**{name: CONFIGURATIONS[name] for name in only if name}, **named_sets(options.set)}
    commands = {f"{name}.{seed}": [*command, "--seed", seed, *words]
                for seed in options.seeds.split(",") for name, words in sets.items()}
    runs = Runs(commands, options.gpus.split(","), options.out)
    if runs.failed:
        print(f"error: failed: {', '.join(runs.failed)}; see their .txt in {options.out}", file=sys.stderr)
        return 1
    compare = os.path.join(os.path.dirname(os.path.abspath(__file__)), "compare_losses.py")
    logs = [f"{name}={runs.path(name, 'jsonl')}" for name in commands]
    return subprocess.call([sys.executable, compare, "--out", options.out, *logs])


if __name__ == "__main__":
    run_main(main)
