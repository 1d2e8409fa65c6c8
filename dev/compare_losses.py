#!/usr/bin/env python3
"""Losses of runs at equal tokens beside a baseline of the same seed: a table, a CSV and a plot.

    python3 dev/compare_losses.py --out DIR NAME=LOG.jsonl ...

A NAME is CONFIGURATION.SEED, for instance bf16.1 and delayed.1; the baseline of a seed is bf16.SEED. The table has
the last validation loss of each run, its gap to the baseline, and the baselines' own gaps between seeds. losses.csv
has every training and validation loss at full precision. The plot needs matplotlib and is left out without it.
"""
import argparse
import csv
import json
import os
import sys


def read_log(path):
    """Training losses {tokens: loss} and validation losses {tokens: loss}."""
    train, valid, tokens = {}, {}, {0: 0}
    with open(path) as file:
        for record in map(json.loads, file):
            if record["type"] == "step":
                tokens[record["step"]] = record["tokens"]
                train[record["tokens"]] = float(record["loss"])   # "nan" and "inf" are strings in the log
            elif record["type"] == "eval":
                valid[tokens.get(record["step"], 0)] = float(record["loss"])
    if not valid:
        raise ValueError(f"{path} has no validation loss (--valid-data)")
    return train, valid


def table(runs):
    """Lines of a Markdown table; runs that do not end at the baseline's tokens are refused."""
    lines = ["| configuration | seed | tokens | validation loss | gap to BF16 |", "| --- | --- | --- | --- | --- |"]
    baselines = {}
    for name, (_, valid) in runs.items():
        configuration, seed = name.rsplit(".", 1)
        if configuration == "bf16":
            baselines[seed] = max(valid), valid[max(valid)]
    for name, (_, valid) in sorted(runs.items(), key=lambda item: item[0].rsplit(".", 1)[::-1]):
        configuration, seed = name.rsplit(".", 1)
        tokens, loss = max(valid), valid[max(valid)]
        gap = "no baseline"
        if seed in baselines:
            if baselines[seed][0] != tokens:
                raise ValueError(f"{name} ends at {tokens} tokens, its baseline at {baselines[seed][0]}")
            gap = f"{100 * (loss / baselines[seed][1] - 1):+.3f} %"
        lines.append(f"| {configuration} | {seed} | {tokens / 1e6:.1f}M | {loss:.4f} | {gap} |")
    losses = [loss for _, loss in baselines.values()]
    if len(losses) > 1:
        lines.append(f"\nBF16 between seeds: {100 * (max(losses) / min(losses) - 1):.3f} %")
    return lines


def write_csv(path, runs):
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["run", "split", "tokens", "loss"])
        for name, (train, valid) in runs.items():
            for split, losses in (("train", train), ("valid", valid)):
                writer.writerows([name, split, tokens, repr(loss)] for tokens, loss in losses.items())


def plot(path, runs):
    try:
        import matplotlib
        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        print("no matplotlib: no plot", file=sys.stderr)
        return
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 8), sharex=True, height_ratios=[3, 2])
    for name, (train, _) in runs.items():
        seed = name.rsplit(".", 1)[1]
        top.plot([t / 1e6 for t in train], list(train.values()), linewidth=0.8, label=name)
        base = runs.get(f"bf16.{seed}")
        if base and not name.startswith("bf16."):
            shared = [t for t in train if t in base[0]]
            bottom.plot([t / 1e6 for t in shared], [100 * (train[t] / base[0][t] - 1) for t in shared], linewidth=0.6,
                        label=name)
    top.set_ylabel("training loss")
    top.legend(fontsize=7, ncols=2)
    bottom.set_ylabel("gap to BF16, %")
    bottom.set_ylim(-2, 2)
    bottom.axhline(0, color="black", linewidth=0.5)
    bottom.set_xlabel("million tokens")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", required=True, help="folder of losses.csv and losses.png")
    parser.add_argument("runs", nargs="+", metavar="NAME=LOG")
    options = parser.parse_args()
    runs = {}
    try:
        for run in options.runs:
            name, path = run.split("=", 1)
            runs[name] = read_log(path)
        lines = table(runs)
    except (OSError, ValueError, KeyError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    os.makedirs(options.out, exist_ok=True)
    write_csv(os.path.join(options.out, "losses.csv"), runs)
    plot(os.path.join(options.out, "losses.png"), runs)
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
