"""Comparisons of logs for the checks: equality to the bit, differences of losses, and the cost of several ranks."""
import json
import statistics

SKIP = 3   # steps that search matmul algorithms and load kernels


class Log:
    def __init__(self, path):
        with open(path) as file:
            records = [json.loads(line) for line in file]
        if not records or records[0]["type"] != "header":
            raise ValueError(f"{path}: not a log")
        self.name, self.header, self.world = path.stem, records[0], records[0]["world"]
        self.steps = {r["step"]: r for r in records if r["type"] == "step"}
        self.fp8, self.evals, self.saves = ([r for r in records if r["type"] == kind]
                                            for kind in ("fp8", "eval", "checkpoint"))
        if not self.steps:
            raise ValueError(f"{path}: no step")

    def figures(self):
        """[(name, value)] of the values that must not depend on overlap, on sharding, or on the form of gathered
        weights."""
        return ([(f"step {r['step']}: validation loss", r["loss"]) for r in self.evals]
                + [(f"step {step}: {key}", r[key]) for step, r in self.steps.items()
                   for key in ("loss", "grad_norm", "skipped")]
                + [(f"step {r['step']}: {key} of {tensor['name']}", value) for r in self.fp8 for tensor in r["tensors"]
                   for key, value in tensor.items() if key != "name"])

    def far_from(self, other, key="loss"):
        """Relative difference of the loss, or of another value that may be "nan", by step."""
        return {step: abs(float(r[key]) / float(other.steps[step][key]) - 1) for step, r in self.steps.items()}

    def median(self, key):
        timed = list(self.steps.values())[SKIP:]
        if len(timed) < 2:
            raise ValueError(f"{self.name}: {len(timed)} steps after the first {SKIP}, at least 2 needed")
        return statistics.median(r[key] or 0 for r in timed)

    def sent_gb(self, *collectives):
        return sum(c["sent_bytes"] for c in self.header["communication"] if c["collective"] in collectives) * 1e-9


def differences(first, other):
    """One line on the differences between the values of two logs; empty if there are none."""
    expected, found = first.figures(), other.figures()
    if len(found) != len(expected):
        return f"{other.name}: {len(found)} figures, {first.name} has {len(expected)}"
    differ = [(a, b) for a, b in zip(expected, found) if a != b]
    if not differ:
        return ""
    (name, value), (_, changed) = differ[0]
    return (f"{other.name}: {len(differ)} of {len(expected)} figures differ from {first.name}; {name} is {changed!r}, "
            f"not {value!r}")


def rank_table(logs):
    """Lines with the speed of each log relative to the first, which is of one rank, and with its exposed
    communication."""
    yield (f"{'run':24} {'ranks':>5} {'ms/step':>9} {'tokens/s':>11} {'% of N':>8} {'exposed ms':>10} "
           f"{'exposed %':>9} {'GB reduce':>9} {'GB gather':>9} {'plan GiB':>9} {'used GiB':>9}")
    one = logs[0].median("tokens_per_second")
    for log in logs:
        seconds, exposed = log.median("step_seconds"), log.median("exposed_comm_seconds")
        tokens = log.median("tokens_per_second")
        reduced, gathered = log.sent_gb("reduce-scatter", "all-to-all"), log.sent_gb("all-gather")
        planned, used = log.header["arena_bytes"] / 2**30, list(log.steps.values())[-1]["memory_gib"]
        share = 100 * tokens / (one * log.world)
        yield (f"{log.name:24} {log.world:5} {1e3 * seconds:9.2f} {tokens:11.0f} {share:8.2f} "
               f"{1e3 * exposed:10.2f} {100 * exposed / seconds:9.2f} {reduced:9.3f} {gathered:9.3f} {planned:9.2f} "
               f"{used:9.2f}")
