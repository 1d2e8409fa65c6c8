#!/usr/bin/env python3
"""Logs of runs on several ranks: whether they are equal to the bit, or a table of what the ranks cost.

    python3 dev/gpu_checks/rank_report.py same LOG.jsonl OTHER.jsonl ... exit 1 unless their figures are equal
    python3 dev/gpu_checks/rank_report.py table ONE.jsonl LOG.jsonl ...  speed against ONE.jsonl, of one rank

The first steps of a table are left out (--skip): they search matmul algorithms and load kernels. Standard library only.
"""
import argparse
import json
import os
import statistics
import sys

SKIP = 3


def read(path):
    """Header, records of steps, records of FP8 tensors, records of evaluations."""
    with open(path) as file:
        records = [json.loads(line) for line in file]
    steps = [r for r in records if r["type"] == "step"]
    if not records or records[0]["type"] != "header" or not steps:
        raise ValueError(f"{path}: not a log with steps")
    return records[0], steps, *([r for r in records if r["type"] == kind] for kind in ("fp8", "eval"))


def figures(path):
    """What must not depend on overlap, on who owns what, nor on the form of gathered weights."""
    _, steps, fp8, evaluations = read(path)
    return ([(f"step {r['step']}: validation loss", r["loss"]) for r in evaluations]
            + [(f"step {r['step']}: {key}", r[key]) for r in steps for key in ("loss", "grad_norm", "skipped")]
            + [(f"step {r['step']}: {key} of {t['name']}", t[key]) for r in fp8 for t in r["tensors"]
               for key in ("amax", "quant_mul", "saturated", "flushed", "nonfinite")])


def same(logs):
    first, *others = logs
    expected = figures(first)
    apart = 0
    for log in others:
        found = figures(log)
        differ = [(a, b) for a, b in zip(expected, found) if a != b]
        if len(found) != len(expected):
            print(f"{log}: {len(found)} figures, {first} has {len(expected)}")
        elif differ:
            (name, value), (_, other) = differ[0]
            print(f"{log}: {len(differ)} of {len(expected)} figures differ from {first}; {name} is {other!r}, not "
                  f"{value!r}")
        apart += len(found) != len(expected) or bool(differ)
    print(f"{os.path.basename(first)}: {len(others) - apart} of {len(others)} runs equal to the bit, "
          f"{len(expected)} figures each")
    return 1 if apart else 0


def sent_gb(header, names):
    return sum(c["sent_bytes"] for c in header["communication"] if c["collective"] in names) * 1e-9


def row(log, one_rank_speed):
    header, steps, *_ = read(log)
    steps = steps[SKIP:]
    if len(steps) < 2:
        raise ValueError(f"{log}: {len(steps)} steps after the first {SKIP}, at least 2 needed")
    seconds = statistics.median(r["step_seconds"] for r in steps)
    tokens = statistics.median(r["tokens_per_second"] for r in steps)
    exposed = statistics.median(r["exposed_comm_seconds"] or 0 for r in steps)
    share = tokens / (one_rank_speed * header["world"]) if one_rank_speed else 1
    planned, used = header["arena_bytes"] / 2**30, steps[-1]["memory_gib"]
    return tokens, (f"{os.path.basename(log).removesuffix('.jsonl'):24} {header['world']:5} {1e3 * seconds:9.2f} "
                    f"{tokens:11.0f} {100 * share:8.2f} {1e3 * exposed:10.2f} {100 * exposed / seconds:9.2f} "
                    f"{sent_gb(header, ('reduce-scatter', 'all-to-all')):9.3f} {sent_gb(header, ('all-gather',)):9.3f} "
                    f"{planned:9.2f} {used:9.2f}")


def table(logs):
    print(f"{'run':24} {'ranks':>5} {'ms/step':>9} {'tokens/s':>11} {'% of N':>8} {'exposed ms':>10} {'exposed %':>9} "
          f"{'GB reduce':>9} {'GB gather':>9} {'plan GiB':>9} {'used GiB':>9}")
    speed = None
    for log in logs:
        tokens, line = row(log, speed)
        speed = speed or tokens
        print(line)
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("same", "table"))
    parser.add_argument("logs", nargs="+")
    options = parser.parse_args()
    try:
        return {"same": same, "table": table}[options.what](options.logs)
    except (OSError, ValueError, KeyError) as error:
        print(f"rank_report.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
