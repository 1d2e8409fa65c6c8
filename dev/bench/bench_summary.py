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
            steps.append((os.path.basename(path)[:-len(".json")], bench))
    return steps


def parts_of(bench):
    return {row["name"]: row for row in bench["rows"] if row["part"] == "step"}


def step_rows(steps):
    bf16 = {name[:-len("-bf16")]: parts_of(bench)["step"]["ms"] for name, bench in steps if name.endswith("-bf16")}
    yield row("model and recipe", "ms a step", "spread", "tokens/s", "against BF16", *PARTS)
    yield row(*["---"] * (5 + len(PARTS)))
    for name, bench in steps:
        parts, config = parts_of(bench), bench["config"]
        ms, model = parts["step"]["ms"], name.rsplit("-", 1)[0]
        against = f"{bf16[model] / ms:.3f}" if model in bf16 else ""
        yield row(name, f"{ms:.2f}", f"{min(bench['steps_ms']):.2f}-{max(bench['steps_ms']):.2f}",
                  f"{1e3 * config['global-batch-size'] * config['seq-length'] / ms:.0f}", against,
                  *(f"{parts[part]['ms']:.2f} / {parts[part]['floor_ms']:.2f}" for part in PARTS))


def operation_rows(bench):
    step_ms = parts_of(bench)["step"]["ms"]
    yield row("operation", "calls", "ms", "floor", "lost", "% of the step")
    yield row(*["---"] * 6)
    for r in [r for r in bench["rows"] if r["part"] in PARTS][:LARGEST]:
        yield row(r["name"], r["calls"], f"{r['ms']:.3f}", f"{r['floor_ms']:.3f}", f"{r['ms'] - r['floor_ms']:.3f}",
                  f"{100 * r['ms'] / step_ms:.1f}")


def notes(bench):
    for r in bench["rows"]:
        if r["part"] == "ceiling" and r["ms"] > 0:
            flops, copied = f"{1e-9 * r['flop'] / r['ms']:.0f} TFLOP/s", f"{1e-6 * r['bytes'] / r['ms']:.0f} GB/s"
            yield f"* ceiling: {r['name']}, {flops if r['flop'] else copied}"
    yield from (f"* {note}" for note in bench["notes"])


def main():
    folder = sys.argv[1]
    steps = read_steps(folder)
    if steps:
        print(f"# bench: {steps[0][1]['device']}, {steps[0][1]['matmul_library']}, commit {steps[0][1]['commit']}\n")
        print("Milliseconds of a step, measured / floor\n")
        print("\n".join(step_rows(steps)))
    for name, bench in steps:
        print(f"\n## {name}\n")
        print("\n".join([*notes(bench), "", *operation_rows(bench)]))
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
