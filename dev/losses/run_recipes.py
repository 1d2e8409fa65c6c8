#!/usr/bin/env python3
"""The same training run in several recipes and seeds, spread over the GPUs of a machine; then compare_losses.py.

    python3 dev/losses/run_recipes.py --gpus 0,1,2,3 --seeds 1,2 --out DIR [--only bf16] -- ./train_gpt2 ...

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
from pathlib import Path

sys.path[:0] = [str(p / "scripts") for p in Path(__file__).resolve().parents if (p / "scripts/llmfp8").is_dir()]
from llmfp8.comparison.tables import RECIPES  # noqa: E402

CONFIGURATIONS = {
    **RECIPES,
    "delayed-fast-all": ["--fp8-recipe", "delayed", "--fp8-fast-accum", "all"],
    "delayed-head": ["--fp8-recipe", "delayed", "--fp8-lm-head"],
    **{f"delayed-margin{m}": ["--fp8-recipe", "delayed", "--fp8-margin", str(m)] for m in (1, 2, 3, 4)},
}
DEFAULT = ",".join(RECIPES)


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


def worker(gpu, runs, options, failures):
    while True:
        try:
            name, command = runs.get_nowait()
        except queue.Empty:
            return
        log = os.path.join(options.out, name + ".jsonl")
        environment = dict(os.environ, CUDA_VISIBLE_DEVICES=gpu)
        with open(os.path.join(options.out, name + ".txt"), "w") as text:
            code = subprocess.call(command, stdout=text, stderr=subprocess.STDOUT, env=environment)
        if code:
            failures.append(name)
        print(f"GPU {gpu}: {name}: exit {code}, {last_line(log)}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gpus", default="0", help="numbers of GPUs, one run at a time on each")
    parser.add_argument("--seeds", default="1")
    parser.add_argument("--only", default=DEFAULT, help=f"of {','.join(CONFIGURATIONS)}")
    parser.add_argument("--out", required=True)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="after --: the BF16 run")
    options = parser.parse_args()
    command = [word for word in options.command if word != "--"]
    unknown = [name for name in options.only.split(",") if name not in CONFIGURATIONS]
    if unknown or not command:
        parser.error(f"unknown configuration {', '.join(unknown)}" if unknown else "no command after --")
    os.makedirs(options.out, exist_ok=True)
    runs, names, failures = queue.Queue(), [], []
    for seed in options.seeds.split(","):
        for name in options.only.split(","):
            names.append(f"{name}.{seed}")
            log = os.path.join(options.out, names[-1] + ".jsonl")
            whole = [*command, "--seed", seed, *CONFIGURATIONS[name], "--log-file", log]
            if not finished(log, whole):
                runs.put((names[-1], whole))
    threads = [threading.Thread(target=worker, args=(gpu, runs, options, failures)) for gpu in options.gpus.split(",")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        print(f"error: failed: {', '.join(failures)}; see their .txt in {options.out}", file=sys.stderr)
        return 1
    compare = os.path.join(os.path.dirname(os.path.abspath(__file__)), "compare_losses.py")
    logs = [f"{name}={os.path.join(options.out, name + '.jsonl')}" for name in names]
    return subprocess.call([sys.executable, compare, "--out", options.out, *logs])


if __name__ == "__main__":
    sys.exit(main())
