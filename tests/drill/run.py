#!/usr/bin/env python3
"""The hostile drill: kills and hostile input, by chance from a seed.

    make drill                                   the whole of it, an hour at most on two cores
    tests/drill/run.py --scale 0.1               a tenth of it, as in make test-full
    tests/drill/run.py --parts kills --only 37   one trial again, with what it did

Prints what was found and a table; exit status 1 if anything was. LLMC_BUILD names the folder of the executables.
"""
import argparse
import concurrent.futures
import os
import shutil
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
from tests.drill import hostile, kills  # noqa: E402
from tests.drill.case import KINDS, Case  # noqa: E402
from tests.support.train import LLAMA, SHAPE, make_tokens, write_shard  # noqa: E402

# Name, module with prepare(shared), what one trial does, and how many of them the whole drill has.
PARTS = (
    ("kills", kills, kills.trial, 500), ("suspended ranks", kills, kills.suspended_rank, 60),
    ("hostile input", hostile, hostile.trial, 2000),
)


class Shared:
    """Data that the trials of a drill share."""

    def __init__(self, seed, keep):
        self.seed, self.keep = seed, keep
        self.folder = tempfile.mkdtemp(prefix="llmc-drill-")
        write_shard(os.path.join(self.folder, "train.bin"), make_tokens(3000, 1))

    def case(self, part, number):
        folder = os.path.join(self.folder, f"{part}-{number}".replace(" ", "-"))
        os.mkdir(folder)
        return Case(part, number, self.seed, folder)

    def command(self, binary):
        model, groups = ("llama-tiny", "2") if binary == LLAMA else ("gpt2-tiny", "4")
        return [binary, "--model", model, *SHAPE, "--num-query-groups", groups, "--train-data",
                os.path.join(self.folder, "train.bin")]

    def trial(self, part, function, number):
        case = self.case(part, number)
        try:
            function(self, case)
        except Exception as error:   # a defect of the drill is a finding, too
            case.found("text", f"the drill itself failed: {type(error).__name__}: {error}")
        case.kill_all()
        if not self.keep:
            shutil.rmtree(case.folder, ignore_errors=True)
        return case


def row(name, count, cases, seconds):
    found = [kind for case in cases for kind, _ in case.findings]
    return [name, str(count), *(str(found.count(kind)) for kind in KINDS), f"{seconds:.0f} s"]


def run_part(shared, options, name, function, count):
    numbers = range(max(1, round(count * options.scale)))
    if options.only is not None:
        numbers = [options.only]
    begin, ended = time.monotonic(), []
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for case in pool.map(lambda number: shared.trial(name, function, number), numbers):
            ended.append(case)
            if case.findings or options.only is not None:
                print(f"{name} {case.number}: {'; '.join(f'{kind}: {text}' for kind, text in case.findings)}")
                print("".join(f"    {line}\n" for text in case.story for line in text.splitlines()), end="", flush=True)
    return row(name, len(numbers), ended, time.monotonic() - begin)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the whole drill")
    parser.add_argument("--parts", nargs="*", choices=[part[0] for part in PARTS], default=[part[0] for part in PARTS])
    parser.add_argument("--only", type=int, help="number of one trial")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--keep", action="store_true", help="leave the folders of the trials")
    options = parser.parse_args()
    shared = Shared(options.seed, options.keep)
    parts = [part for part in PARTS if part[0] in options.parts]
    rows, begin = [], time.monotonic()
    try:
        for module in dict.fromkeys(part[1] for part in parts):
            module.prepare(shared)
        for part in parts:
            rows.append(run_part(shared, options, part[0], *part[2:]))
    finally:
        if not options.keep:
            shutil.rmtree(shared.folder, ignore_errors=True)
    print(f"\ndrill, seed {options.seed}, {time.monotonic() - begin:.0f} s with {options.jobs} at a time\n")
    for cells in (["part", "trials", *KINDS, "time"], ["---"] * (len(KINDS) + 3), *rows):
        print("| " + " | ".join(cells) + " |")
    return 1 if any(cell != "0" for cells in rows for cell in cells[2:-1]) else 0


if __name__ == "__main__":
    sys.exit(main())
