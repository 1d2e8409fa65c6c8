#!/usr/bin/env python3
"""Train a small GPT-2 and a small Llama on a made-up text, and prove that they learned.

The text is the same everywhere, so the CPU's losses are those of the README on every machine.

For each model: training with a validation loss, a checkpoint on the way, and a second run that resumes from that
checkpoint and does the last steps again. Fails, with one line, unless the validation loss ends below the bigram entropy
of the validation text (a predictor that sees only the byte before cannot get there) and the resumed run ends at the
same validation loss to the last bit. Standard library only; `make smoke` builds the executables first.
"""
import argparse
import json
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Preset, executable, optimizer steps. Learned positions need more steps than rope.
MODELS = [("gpt2-tiny", "train_gpt2", 400), ("llama-tiny", "train_llama", 200)]
SEQUENCE, BATCH = 128, 2

# The words of the text.
WHO = "Anna Boris Clara David Emma Felix Greta Henry Irene Jonas".split()
WHAT = "apple basket candle drum engine flute globe hammer island jacket kettle ladder".split()
HOW = "blue broken cheap heavy little new old quiet red strange warm yellow".split()
DID = "bought carried found hid lost painted sold took".split()
WHERE = "at home,behind the mill,by the river,in the market,near the harbour,on the bridge,under a tree".split(",")


class SmokeError(Exception):
    pass


def story(rng, sentences):
    """Sentences in which words depend on words long before: who keeps which thing."""
    def draw(words):
        return words[int(rng.random() * len(words))]   # choice() may differ between versions of Python
    lines = []
    for _ in range(sentences):
        who, what, how = draw(WHO), draw(WHAT), draw(HOW)
        lines.append(f"{who} {draw(DID)} the {how} {what} {draw(WHERE)}, and the {what} of {who} was {how}.")
    return "\n".join(lines) + "\n"


def run(command, capture=False):
    """Run a command in the repository's root; its output is shown or returned."""
    try:
        done = subprocess.run([str(c) for c in command], cwd=ROOT, text=True,
                              stdout=subprocess.PIPE if capture else None)
    except OSError as error:
        raise SmokeError(f"{command[0]}: {error.strerror}; run `make` first") from None
    if done.returncode != 0:
        raise SmokeError(f"exit code {done.returncode} of {' '.join(map(str, command))}")
    return done.stdout


def prepare_data(folder):
    """Byte shards of the text; returns the bigram entropy of the validation split in nats."""
    folder.mkdir(parents=True)
    text = folder / "text.txt"
    text.write_text(story(random.Random(1), 7000))
    run([sys.executable, "data/prepare_text.py", "--tokenizer", "bytes", "--out", folder, "--valid-fraction", "0.05",
         "--overwrite", "--quiet", text])
    valid = sorted(folder.glob("valid_*.bin"))
    if not valid:
        raise SmokeError(f"no validation shard in {folder}")
    text = run([sys.executable, "data/inspect_shards.py", "--bigram-entropy", *valid], capture=True)
    print(text, end="", flush=True)
    return float(text.split("bigram entropy ")[1].split()[0])


def last_validation(log_file, step):
    """Validation loss of the record of `step`, at full precision."""
    losses = [r["loss"] for r in map(json.loads, log_file.read_text().splitlines())
              if r["type"] == "eval" and r["step"] == step]
    if not losses:
        raise SmokeError(f"{log_file}: no validation loss of step {step}")
    return losses[-1]


def train(model, executable, steps, data, folder):
    """Train, drop the last checkpoint, resume from the one before; returns both final validation losses."""
    # Evaluate the whole validation split, as the entropy does. A shard has a header of 1024 bytes and 16-bit tokens.
    tokens = [(shard.stat().st_size - 1024) // 2 for shard in data.glob("valid_*.bin")]
    eval_iters = sum((n - 1) // SEQUENCE for n in tokens) // BATCH
    middle = steps - max(1, steps // 10)
    command = [
        ROOT / executable, "--model", model, "--num-layers", "2", "--init-method-std", "0.06",
        "--train-data", data / "train_*.bin", "--valid-data", data / "valid_*.bin",
        "--seq-length", SEQUENCE, "--micro-batch-size", BATCH, "--train-iters", steps, "--lr", "2e-3",
        "--lr-warmup-iters", max(1, steps // 20), "--adam-beta2", "0.99", "--weight-decay", "0.01",
        "--eval-interval", "0", "--eval-iters", eval_iters, "--log-interval", max(1, steps // 10),
        "--save", folder, "--save-interval", middle, "--log-file", folder / "log.jsonl",
        "--sample-every", steps, "--sample-tokens", "160", "--resume", "auto",
    ]
    print(f"\n== {model}: {steps} steps", flush=True)
    run(command)
    whole = last_validation(folder / "log.jsonl", steps)

    newest = sorted(p for p in folder.iterdir() if p.name.startswith("step-"))[-1]
    shutil.rmtree(newest)
    print(f"\n== {model}: {newest.name} removed, resuming from step {middle}", flush=True)
    run(command)
    return whole, last_validation(folder / "log.jsonl", steps)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "smoke", help="folder to write to, emptied first")
    options = parser.parse_args()

    start = time.monotonic()
    out = options.out.resolve()
    try:
        shutil.rmtree(out, ignore_errors=True)
        entropy = prepare_data(out / "data")
        results = {model: train(model, executable, steps, out / "data", out / model)
                   for model, executable, steps in MODELS}
        print()
        for model, (whole, resumed) in results.items():
            print(f"{model}: validation loss {whole:.4f}, bigram entropy {entropy:.4f} nats")
            if not whole < entropy:
                raise SmokeError(f"{model}: validation loss {whole:.4f} is not below the bigram entropy {entropy:.4f}")
            if whole != resumed:
                raise SmokeError(f"{model}: validation loss {whole!r}, but {resumed!r} after a resume")
    except SmokeError as error:
        print(f"smoke: FAILED: {error}", file=sys.stderr)
        return 1
    print(f"smoke: passed in {time.monotonic() - start:.0f} s; both models learned, and resumed to equal bits")
    return 0


if __name__ == "__main__":
    sys.exit(main())
