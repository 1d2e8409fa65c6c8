#!/usr/bin/env python3
"""The outputs of dev/bench/bench.sh as one Markdown file.

    python3 dev/bench/bench_summary.py OUT > OUT/summary.md

Steps of every model and recipe with what they are spent on, the operations that lose most against their floors, and the
tables of the kernel benches. Standard library only.
"""
import glob
import json
import os
import sys

PARTS = ("matmul", "attention", "memory-bound", "exposed communication", "gaps")
LARGEST = 12   # rows of operations


def row(*cells):
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def read_steps(folder):
    steps = []
    for path in sorted(glob.glob(os.path.join(folder, "*.json"))):
        with open(path, encoding="utf-8") as file:
            bench = json.load(file)
        if bench.get("type") == "bench":
            steps.append((os.path.basename(path)[:-len(".json")].rsplit("-", 1)[0], bench))
    return steps


def step_rows(steps):
    bf16 = {model: bench["step_ms"] for model, bench in steps if bench["recipe"] == "BF16"}
    yield row("model", "recipe", "ms a step", "spread", "micro-batch", "tokens/s", "against BF16", "MFU %", *PARTS,
              "SM MHz", "throttled by")
    yield row(*["---"] * (10 + len(PARTS)))
    for model, bench in steps:
        ms, clocks = bench["step_ms"], bench["clocks"]
        against = f"{bf16[model] / ms:.3f}" if model in bf16 else ""
        mfu = f"{100 * bench['mfu']:.1f}" if bench["mfu"] else ""
        yield row(model, bench["recipe"], f"{ms:.2f}", f"{min(bench['steps_ms']):.2f}-{max(bench['steps_ms']):.2f}",
                  f"{bench['micro_batch_ms']:.2f}", f"{bench['tokens_per_second']:.0f}", against, mfu,
                  *(f"{bench['totals'][part]['ms']:.2f} / {bench['totals'][part]['floor_ms']:.2f}" for part in PARTS),
                  f"{clocks['sm_mhz']:.0f}" if clocks["samples"] else "", clocks["throttled_by"])


def operation_rows(bench):
    yield row("operation", "calls", "ms", "floor", "difference", "% of the step")
    yield row(*["---"] * 6)
    for r in [r for r in bench["rows"] if not r["overlapped"]][:LARGEST]:
        yield row(r["name"], r["calls"], f"{r['ms']:.3f}", f"{r['floor_ms']:.3f}", f"{r['difference_ms']:.3f}",
                  f"{100 * r['ms'] / bench['step_ms']:.1f}")


def ceilings_text(bench):
    ceilings = bench["ceilings"]
    rates = [f"{dtype} matmul {1e-12 * flops:.0f} TFLOP/s" for dtype, flops in ceilings["flops"].items()]
    events = f"{1e3 * ceilings['event_ms']:.2f} us"
    return (f"Ceilings: device copy {1e-9 * ceilings['copy_bytes_per_s']:.0f} GB/s, {', '.join(rates)}. "
            f"Two events add {events} to an operation.")


def main():
    folder = sys.argv[1]
    steps = read_steps(folder)
    if steps:
        print(f"# bench: {steps[0][1]['device']}, {steps[0][1]['matmul_library']}, commit {steps[0][1]['commit']}\n")
        print("Milliseconds of a step, measured / floor\n")
        print("\n".join(step_rows(steps)))
    for model, bench in steps:
        print(f"\n## {model}, {bench['recipe']}\n\n{ceilings_text(bench)}\n")
        print("\n".join(operation_rows(bench)))
    for path in sorted(glob.glob(os.path.join(folder, "*.txt"))):
        name = os.path.basename(path)[:-len(".txt")]
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read().rstrip()
        if name.startswith("bench_"):
            print(f"\n## {name}\n\n```\n{text}\n```")
        elif not os.path.exists(path[:-len(".txt")] + ".json"):
            print(f"\n## {name}: left out\n\n{text.splitlines()[-1] if text else 'no output'}")


if __name__ == "__main__":
    main()
