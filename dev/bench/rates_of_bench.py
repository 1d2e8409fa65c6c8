#!/usr/bin/env python3
"""Prints the rates of a GPU, as in llmc/perf/rates, from files that `bench --json` wrote on it.

    dev/bench/rates_of_bench.py 'H100 SXM' bf16.json delayed.json tensorwise.json blockwise.json

Name the GPU as plan --gpu does. A run has only the operations of its recipe, so give one in BF16 and one with each.
"""
import json
import re
import sys
from statistics import median

MATMUL = re.compile(r"matmul (forward|dgrad|wgrad) (\d+) x (\d+) x (\d+) (\w+?)( blocks)? (?:to|\+=) (\w+)(, fast)?")
ATTENTION = re.compile(r"attention_(forward|backward) (\d+) x (\d+), (\d+) heads of (\d+) (\w+)")
OPERATION = re.compile(r"(\w+) (\w+)(?:, (sums|amax|FP8 blocks|FP8))?")
MODES = {None: "plain", "sums": "sums", "amax": "amax", "FP8": "copies", "FP8 blocks": "blocks"}
PASSES = ("forward", "dgrad", "wgrad")


def linear_of(pass_name, m, n, k):
    """(tokens, out, in) of the linear layer."""
    return {"forward": (m, n, k), "dgrad": (m, k, n), "wgrad": (k, m, n)}[pass_name]


def main(gpu, paths):
    linears, operations, attention, overheads, copies, links = {}, {}, {}, [], [], []
    for path in paths:
        with open(path, encoding="utf-8") as file:
            bench = json.load(file)
        totals = {name: part["ms"] for name, part in bench["totals"].items()}
        gaps, exposed = totals.pop("gaps"), totals.pop("exposed communication")
        overheads.append(gaps / (bench["step_ms"] - exposed - gaps))
        copies.append(bench["ceilings"]["copy_bytes_per_s"])
        links.append(bench["ceilings"]["host_link_bytes_per_s"])
        for row in bench["rows"]:
            us = 1e3 * row["ms"] / row["calls"]
            if found := MATMUL.fullmatch(row["name"]):
                pass_name, m, n, k, dtype, blocks, result, fast = found.groups()
                if pass_name == "wgrad" and result != "fp32":
                    continue   # the predictions know how much faster a sum in BF16 is
                mode = 0 if not dtype.startswith("e") else 3 if blocks else 1 if fast else 2
                column = 4 * PASSES.index(pass_name) + mode
                linears.setdefault(linear_of(pass_name, int(m), int(n), int(k)), {}).setdefault(column, []).append(us)
            elif found := ATTENTION.fullmatch(row["name"]):
                pass_name, b, t, heads, dim, dtype = found.groups()
                column = 1 if pass_name == "backward" else 2 if dtype == "e4m3" else 0
                shape = ("bf16" if dtype == "e4m3" else dtype, b, heads, t, dim)
                attention.setdefault(shape, {}).setdefault(column, []).append(us)
            elif (found := OPERATION.fullmatch(row["name"])) and row["bytes"] > 0:
                kind, dtype, mode = found.groups()
                operations.setdefault((kind, dtype, MODES[mode], row["bytes"] // row["calls"]), []).append(us)
    print(f"# By bench of {', '.join(paths)}; llmc/perf/rates.h says what a row is.\ngpu {gpu}")
    print(f"copy {median(copies):.4g}\nhost-link {median(links):.4g}\noverhead {median(overheads):.4f}")
    for shape, times in sorted(linears.items()):
        print("linear", *shape, *(f"{median(times[i]):.4g}" if i in times else "0" for i in range(12)))
    for (kind, dtype, mode, size), times in sorted(operations.items()):
        print("op", kind, dtype, mode, size, f"{median(times):.1f}")
    for shape, times in sorted(attention.items()):
        print("attention", *shape, *(f"{median(times[i]):.1f}" if i in times else "0" for i in range(3)))


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2:])
