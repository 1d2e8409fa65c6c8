#!/usr/bin/env python3
"""Compares losses of runs with a baseline of the same seed at equal tokens: a table and a CSV.

    python3 dev/losses/compare_losses.py --out DIR NAME=LOG.jsonl ...

A NAME is CONFIGURATION.SEED, for instance bf16.1 and delayed.1; the baseline of a seed is bf16.SEED. The table has
the last validation loss of each run and its last training losses, their gaps to the baseline, the mean of a
configuration's gaps, and the baselines' own gap between seeds. losses.csv has every training and validation loss, a
column a run. scripts/report draws the curves and their gaps.
"""
import csv
import os
import re
import statistics
import sys
from collections import namedtuple
from pathlib import Path

sys.path[:0] = [str(p / "scripts") for p in Path(__file__).resolve().parents if (p / "scripts/llmfp8").is_dir()]
from llmfp8 import run_log  # noqa: E402
from llmfp8.comparison.differences import run_differences  # noqa: E402
from llmfp8.support import InputError, Parser, run_main  # noqa: E402


# {tokens: loss} of training and of validation, of validation with the weights rounded to BF16 as they are exported
# (an FP8 run that has it), and the median of s/it.
Losses = namedtuple("Losses", "train valid in_bf16 seconds")


def losses_of(run):
    if not run.evals:
        raise InputError(f"{run.path} has no validation loss (--valid-data)")
    evals = {run.tokens_at(step): run.evals[step] for step in sorted(run.evals)}
    return Losses({record["tokens"]: record["loss"] for record in run.step_list()},
                  {tokens: record["loss"] for tokens, record in evals.items()},
                  {tokens: record["loss_bf16"] for tokens, record in evals.items() if "loss_bf16" in record},
                  statistics.median(record["step_seconds"] for record in run.step_list()))


LAST_STEPS = 100   # of the mean training loss


def ends(run, tokens):
    """Validation loss at `tokens`, that in BF16 or None, and mean training loss of the last steps until then."""
    last = [t for t in sorted(run.train) if t <= tokens][-LAST_STEPS:]
    return run.valid[tokens], run.in_bf16.get(tokens), sum(run.train[t] for t in last) / max(1, len(last))


def gap(loss, reference):
    return 100 * (loss / reference - 1)


def gaps_at(run, base, tokens):
    """The gaps to ends() of a BF16 run, in percent; None for a loss that there is not. That in BF16 is compared with
    the validation loss of the BF16 run."""
    reference = base.valid[tokens], base.valid[tokens], ends(base, tokens)[2]
    return [None if loss is None else gap(loss, of) for loss, of in zip(ends(run, tokens), reference)]


def figure(value, form):
    return "" if value is None else format(value, form)


def row(configuration, seed, tokens, losses, gaps, seconds=None):
    pairs = [cell for loss, gap in zip(losses, gaps) for cell in (figure(loss, ".4f"), figure(gap, "+.2f") + " %" * (
        gap is not None))]
    return f"| {' | '.join([configuration, seed, f'{tokens / 1e6:.1f}M', *pairs, figure(seconds, '.4f')])} |"


def mean_line(configuration, pairs):
    """The gaps of runs to the baselines of their seeds, at the last validation that all of them have."""
    tokens = max(set.intersection(*(set(run.valid) for pair in pairs for run in pair)), default=None)
    if tokens is None:
        raise InputError(f"the seeds of {configuration} have no validation at equal tokens")
    columns = zip(*(gaps_at(run, base, tokens) for run, base in pairs))
    means = [None if None in column else sum(column) / len(pairs) for column in columns]
    return row(configuration, f"mean of {len(pairs)}", tokens, [None] * 3, means)


def table(runs):
    """Lines of a Markdown table: each run beside its baseline at the last validation that both have, and the means of
    the gaps of a configuration that ran with several seeds."""
    lines = ["| configuration | seed | tokens | validation loss | gap to BF16 | its weights in BF16 | gap to BF16 "
             f"| loss of the last {LAST_STEPS} steps | gap to BF16 | s/it |", "| --- " * 10 + "|"]
    baselines = {name.rsplit(".", 1)[1]: run for name, run in runs.items() if name.startswith("bf16.")}
    pairs = {}   # of a configuration: runs and their baselines
    for name, run in sorted(runs.items(), key=lambda item: item[0].rsplit(".", 1)[::-1]):
        configuration, seed = name.rsplit(".", 1)
        base = baselines.get(seed)
        common = run.valid.keys() if base is None else run.valid.keys() & base.valid.keys()
        if not common:
            raise InputError(f"{name} and bf16.{seed} have no validation at equal tokens")
        tokens = max(common)
        lines.append(row(configuration, seed, tokens, ends(run, tokens),
                         gaps_at(run, base, tokens) if base else [None] * 3, run.seconds))
        if base:
            pairs.setdefault(configuration, []).append((run, base))
    lines += [mean_line(configuration, of_it) for configuration, of_it in pairs.items()
              if configuration != "bf16" and len(of_it) > 1]
    if len(baselines) > 1:
        common = set.intersection(*(set(base.valid) for base in baselines.values()))
        if not common:
            raise InputError("the seeds of bf16 have no validation at equal tokens")
        tokens = max(common)
        losses = [base.valid[tokens] for base in baselines.values()]
        lines.append(f"\nBF16 between seeds, {tokens / 1e6:.1f}M: {gap(max(losses), min(losses)):.2f} %")
    return lines


def write_csv(path, runs):
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["split", "tokens", *runs])
        for i, split in enumerate(("train", "valid", "valid_bf16")):
            losses = [run[i] for run in runs.values()]
            for tokens in sorted(set().union(*losses)):
                writer.writerow([split, tokens, *(f"{run[tokens]:.6f}" if tokens in run else "" for run in losses)])


def read_runs(paths):
    """{name: Losses} of {name: path of a log}; InputError if they read other data."""
    runs, first = {}, None
    for name, path in paths.items():
        log = run_log.read_log(path)
        first = first or log
        for key, base, other, _ in run_differences(first.headers[0], log.headers[0]):
            if key in ("train-data", "valid-data"):
                raise InputError(f"{path}: {key} {other}, {first.path} has {base}: their losses do not compare")
        runs[name] = losses_of(log)
    return runs


def main():
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", required=True, help="folder of losses.csv")
    parser.add_argument("runs", nargs="+", metavar="NAME=LOG")
    options = parser.parse_args()
    for run in options.runs:
        if not re.fullmatch(r"[^=]+\.[^=.]+=.+", run):
            raise InputError(f"{run}: not CONFIGURATION.SEED=LOG")
    runs = read_runs(dict(run.split("=", 1) for run in options.runs))
    lines = table(runs)
    os.makedirs(options.out, exist_ok=True)
    write_csv(os.path.join(options.out, "losses.csv"), runs)
    print("\n".join(lines))


if __name__ == "__main__":
    run_main(main)
