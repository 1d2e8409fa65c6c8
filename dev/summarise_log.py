#!/usr/bin/env python3
"""Median and spread of a run's speed from its JSONL log, for dev/results.

    python3 dev/summarise_log.py LOG.jsonl [--skip 3]

The first steps are left out: they search matmul algorithms and load kernels. Standard library only.
"""
import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
from run_log import read_log  # noqa: E402
from support import InputError, run_main  # noqa: E402


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("log")
    parser.add_argument("--skip", type=int, default=3, help="steps at the start that are not counted")
    options = parser.parse_args()
    run = read_log(options.log)
    header, steps = run.headers[0], run.step_list()[options.skip:]
    if len(steps) < 2:
        raise InputError(f"{options.log}: {len(steps)} steps after the first {options.skip}, at least 2 needed")
    print(f"{header['device']['name']}, driver {header['device']['driver']}, {header['device']['matmul_library']}, "
          f"commit {header['commit']}")
    print(header["command"])
    for field, unit in (("step_seconds", "s/it"), ("tokens_per_second", "tok/s"), ("mfu", "MFU")):
        values = [r[field] for r in steps if r[field] is not None]
        if values:
            print(f"  {unit:6} median {statistics.median(values):.6g}, min {min(values):.6g}, max {max(values):.6g} "
                  f"({len(values)} steps)")
    print(f"  loss   {steps[0]['loss']:.4f} at step {steps[0]['step']}, {steps[-1]['loss']:.4f} at step "
          f"{steps[-1]['step']}; memory {steps[-1]['memory_gib']:.2f} GiB")
    return 0


if __name__ == "__main__":
    run_main(main)
