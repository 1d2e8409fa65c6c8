#!/usr/bin/env python3
"""Prints the rates of a GPU, as in llmc/perf/rates_h200.inl, from files that `bench --json` wrote on it.

    dev/bench/rates_of_bench.py 'H100 SXM' bf16.json delayed.json tensorwise.json blockwise.json

Name the GPU as plan --gpu does. A run has only the operations of its recipe, so give one in BF16 and one with each, of
several models: three numbers for a kind of matmul are fitted to the shapes that the runs have.
"""
import itertools
import json
import re
import sys
from statistics import median

MATMUL = re.compile(r"matmul (forward|dgrad|wgrad) (\d+) x (\d+) x (\d+) (\w+?)( blocks)? (?:to|\+=) (\w+)(, fast)?")
ATTENTION = re.compile(r"attention_(forward|backward) (\d+) x (\d+), (\d+) heads of (\d+) (\w+)")
OPERATION = re.compile(r"(\w+) (\w+)(?:, (sums|amax|FP8 blocks|FP8))?")
MODES = (None, "sums", "amax", "FP8", "FP8 blocks")
PASSES = ("forward", "dgrad", "wgrad")
KERNEL_US = 3   # as in Rates::op_us


def solve(rows, values):
    """Gauss-Jordan elimination; None for a singular matrix."""
    m = [[*row, value] for row, value in zip(rows, values)]
    for i in range(len(m)):
        pivot = max(range(i, len(m)), key=lambda r: abs(m[r][i]))
        m[i], m[pivot] = m[pivot], m[i]
        if abs(m[i][i]) < 1e-12:
            return None
        for r in range(len(m)):
            if r != i:
                factor = m[r][i] / m[i][i]
                m[r] = [a - factor * b for a, b in zip(m[r], m[i])]
    return [row[-1] / row[i] for i, row in enumerate(m)]


def fit(shapes):
    """(fixed us, TFLOP/s, us for 10^6 outputs), none of them negative: least squares of the relative error, which
    counts more for long matmuls, since most of a step is theirs."""
    best, least = (0, 0, 0), float("inf")
    weights = [us ** 0.2 for us in shapes.values()]
    points = [(w / us, w * 1e-9 * m * n * k / us, w * 1e-6 * m * n / us)
              for w, ((m, n, k), us) in zip(weights, shapes.items())]
    for used in itertools.chain.from_iterable(itertools.combinations(range(3), size) for size in (1, 2, 3)):
        found = solve([[sum(p[i] * p[j] for p in points) for j in used] for i in used],
                      [sum(w * p[i] for w, p in zip(weights, points)) for i in used])
        if 1 not in used or found is None or min(found) < 0:
            continue
        terms = [found[used.index(i)] if i in used else 0 for i in range(3)]
        error = sum((sum(t * x for t, x in zip(terms, p)) - w) ** 2 for w, p in zip(weights, points))
        if error < least:
            best, least = (terms[0], 2e3 / terms[1], terms[2]), error
    return best


def main(gpu, paths):
    matmuls, operations, attention, overheads, copies = {}, {}, {}, [], []
    for path in paths:
        with open(path, encoding="utf-8") as file:
            rows = json.load(file)["rows"]
        steps = {row["name"]: row["ms"] for row in rows if row["part"] == "step"}
        overheads.append(steps["gaps"] / (steps["step"] - steps["exposed communication"] - steps["gaps"]))
        copies += [1e3 * row["bytes"] / row["ms"] for row in rows if row["name"] == "device copy"]
        for row in rows:
            if row["part"] in ("ceiling", "step") or row["ms"] == 0:
                continue
            us = 1e3 * row["ms"] / row["calls"]
            if found := MATMUL.fullmatch(row["name"]):
                pass_name, m, n, k, dtype, blocks, result, fast = found.groups()
                if pass_name == "wgrad" and result != "fp32":
                    continue   # the predictions know how much faster a sum in BF16 is
                mode = 0 if not dtype.startswith("e") else 3 if blocks else 1 if fast else 2
                matmuls.setdefault((mode, pass_name), {}).setdefault((int(m), int(n), int(k)), []).append(us)
            elif found := ATTENTION.fullmatch(row["name"]):
                pass_name, b, t, heads, dim, dtype = found.groups()
                column = 1 if pass_name == "backward" else 2 if dtype == "e4m3" else 0
                shape = ("Fp32" if dtype == "fp32" else "Bf16", b, heads, t, dim)
                attention.setdefault(shape, {}).setdefault(column, []).append(us)
            elif (found := OPERATION.fullmatch(row["name"])) and us > 2 * KERNEL_US and row["bytes"] > 0:
                name, _, mode = found.groups()
                rate = row["bytes"] / row["calls"] / (1e-6 * (us - KERNEL_US))
                operations.setdefault(name, {}).setdefault(MODES.index(mode), []).append(rate)
    copy = median(copies)
    print(f"// By bench of {', '.join(paths)}; see llmc/perf/rates.h.\n{{\n    .gpu = \"{gpu}\",")
    print(f"    .copy_rate = {copy:.4g},\n    .overhead = {median(overheads):.4f},\n    .gemms = {{{{")
    for mode in range(4):
        fits = [fit({shape: median(times) for shape, times in matmuls.get((mode, name), {}).items()})
                for name in PASSES]
        print("        {{" + ", ".join("{%.3g, %.4g, %.3g}" % numbers for numbers in fits) + "}},")
    print("    }},\n    .ops = {")
    for name, rates in sorted(operations.items()):
        shares = [f"{median(rates[i]) / copy:.2f}" if i in rates else "0" for i in range(5)]
        print(f'        {{"{name}", {{{", ".join(shares)}}}}},')
    print("    },\n    .attention = {")
    for (dtype, *shape), times in sorted(attention.items()):
        numbers = shape + [f"{median(times[i]):.1f}" if i in times else "0" for i in range(3)]
        print(f"        {{Dtype::k{dtype}, {', '.join(numbers)}}},")
    print("    },\n},")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2:])
