#!/usr/bin/env python3
"""What dev/gpu_checks/resume_check.sh compares.

    python3 dev/gpu_checks/resume_report.py files CHECKPOINT OTHER    exit 1 unless all state is equal to the byte
    python3 dev/gpu_checks/resume_report.py table OUT RECIPE          exit 1 unless the logs in OUT agree as they must

Standard library only.
"""
import argparse
import json
import os
import statistics
import sys

# Losses are sums in double of the same values in another order: an epsilon for each of up to 10^6 targets, far more
# than an order can cost, and far less than one wrong sample.
ORDER_OF_A_SUM = 1e6 * 2**-53
# Later losses, against what another number of ranks does to a run that never stops: of two such runs one is as near to
# the truth as the other, so each may be this many times as far from the third.
SPREADS = 4
# Of the run that saved, not of its state; the last two have no effect when resuming.
RUN_OPTIONS = ("save", "save-interval", "save-async", "resume", "log-file", "train-iters", "load", "init-method-std")


def files_of(checkpoint):
    names = {os.path.relpath(os.path.join(folder, name), checkpoint)
             for folder, _, names in os.walk(checkpoint) for name in names}
    return names - {"manifest.json"}   # hashes of the others, by rank


def same_bytes(a, b):
    if os.path.getsize(a) != os.path.getsize(b):
        return False
    with open(a, "rb") as x, open(b, "rb") as y:
        while block := x.read(1 << 24):
            if block != y.read(1 << 24):
                return False
    return True


def run_state(checkpoint):
    with open(os.path.join(checkpoint, "state.json")) as file:
        state = json.load(file)
    for option in RUN_OPTIONS:
        state["config"].pop(option, None)
    state.pop("gemm_plans")   # a loaded run knows shapes that it has not met yet
    return state


def files(a, b):
    names = files_of(a)
    if not names or names != files_of(b):
        print(f"{b}: its files are not those of {a}: {sorted(names ^ files_of(b))}")
        return 1
    differ = [name for name in sorted(names - {"state.json"})
              if not same_bytes(os.path.join(a, name), os.path.join(b, name))]
    if run_state(a) != run_state(b):
        differ.append("state.json")
    total = sum(os.path.getsize(os.path.join(a, name)) for name in names)
    print(f"{os.path.basename(os.path.dirname(b))}: " + (f"{', '.join(differ)} differ" if differ else "equal")
          + f", {len(names)} files, {total * 1e-9:.2f} GB")
    return 1 if differ else 0


class Log:
    def __init__(self, path):
        with open(path) as file:
            records = [json.loads(line) for line in file]
        self.world = records[0]["world"]
        self.steps = {r["step"]: r for r in records if r["type"] == "step"}
        self.saves = [r for r in records if r["type"] == "checkpoint"]

    def far_from(self, other):
        """Relative difference of the loss, by step."""
        return {step: abs(r["loss"] / other.steps[step]["loss"] - 1) for step, r in self.steps.items()}


def same_figures(name, log, straight):
    """Loss, norm and data cursor, to the bit."""
    differ = [step for step, r in log.steps.items()
              if any(r[key] != straight.steps[step][key] for key in ("loss", "grad_norm", "samples"))]
    print(f"  {name:26} {log.world:5} {min(log.steps):5} to {max(log.steps):<3} "
          + (f"DIFFERS at steps {differ}" if differ else "equal to the bit"))
    return bool(differ)


def near_figures(name, log, before, straight, spread):
    """before: the run whose checkpoint this one continues from."""
    first = min(log.steps)
    start = log.far_from(before)[first]
    far = log.far_from(straight)
    worst = max(far.values())
    failed = [start > ORDER_OF_A_SUM and "first loss", worst > SPREADS * spread and "later losses",
              any(r["samples"] != straight.steps[s]["samples"] for s, r in log.steps.items()) and "data"]
    print(f"  {name:26} {log.world:5} {first:5} to {max(far):<3} first loss {start:.1e} apart (bound "
          f"{ORDER_OF_A_SUM:.1e}), worst {worst:.1e} (bound {SPREADS * spread:.1e})"
          + "".join(f", {what} FAILED" for what in failed if what))
    return any(failed)


def show_saves(name, log, idle):
    for save in log.saves[:-1]:   # the run waits for the last one in any case
        stall = save["stall_seconds"]
        print(f"  {name:26} {log.world:5} step {save['step']:<8} {save['seconds']:6.2f} s to the disk, training stood "
              f"still for {stall:.3f} s = {stall / idle:.2f} steps")


def table(out, recipe):
    logs = {name: Log(os.path.join(out, f"{recipe}-{name}.jsonl"))
            for name in ("straight", "straight-half", "half", "back", "same", "async")}
    straight = logs["straight"]
    # Half the ranks from the first step on: that they begin alike is the first bound's to show.
    spread = max(logs["straight-half"].far_from(straight).values())
    idle = statistics.median(r["step_seconds"] for r in list(straight.steps.values())[2:])
    print(f"{recipe}: losses against {straight.world} ranks without a stop; a step takes {idle:.3f} s; "
          f"{logs['straight-half'].world} ranks without a stop are {spread:.1e} apart")
    failed = same_figures("the same ranks, resumed", logs["same"], straight)
    failed |= near_figures("half the ranks, resumed", logs["half"], straight, straight, spread)
    failed |= near_figures("and all of them again", logs["back"], logs["half"], straight, spread)
    failed |= same_figures("saved behind training", logs["async"], straight)
    show_saves("save", straight, idle)
    show_saves("save behind training", logs["async"], idle)
    late = [s for s in logs["async"].saves[:-1] if s["stall_seconds"] > idle]
    if late:
        print("  FAILED: training stood still for more than a step")
    return 1 if failed or late else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("files", "table"))
    parser.add_argument("first")
    parser.add_argument("second")
    options = parser.parse_args()
    try:
        return {"files": files, "table": table}[options.what](options.first, options.second)
    except (OSError, ValueError, KeyError) as error:
        print(f"resume_report.py: {type(error).__name__}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
