"""Configurations: logs of equal runs under one name, with their timed steps and losses."""
import math
import statistics

from ..run_log import InputError

from .differences import run_differences


class Rate:
    """Statistics of a quantity over the timed steps."""

    def __init__(self, values):
        self.count = len(values)
        self.median, self.low, self.high = statistics.median(values), min(values), max(values)


def lives(run):
    """[(first step, records)] of each process of the run: that of the start, and one for each resume."""
    parts = {}
    for record in run.step_list():
        parts.setdefault(run.header_at(record["step"])["step"], []).append(record)
    return [(begin, parts[begin]) for begin in sorted(parts)]


class Configuration:
    """Runs of one name. Each process of each log is a round with its own warm-up."""

    def __init__(self, name, runs, warmup):
        self.name, self.runs, self.warmup = name, runs, warmup
        self.first = runs[0]   # other rounds repeat its losses
        self.synthetic = any(run.synthetic for run in runs)
        self.header = runs[0].headers[0]
        self.config = self.header["config"]
        self.world = self.header["world"]
        self._check_equal()
        self.rounds = [timed for run in runs for timed in self._timed(run)]
        self.timed = [record for timed in self.rounds for record in timed]
        if len(self.timed) < 2:
            raise InputError(f"{runs[0].path}: {len(self.timed)} steps after {warmup} of warm-up in each start, at "
                             f"least 2 are needed: train longer, or lower --warmup")

    def _timed(self, run):
        for begin, records in lives(run):
            timed = [record for record in records if record["step"] - begin > self.warmup]
            for record in timed:
                seconds = record["step_seconds"]
                if not (isinstance(seconds, (int, float)) and math.isfinite(seconds) and seconds > 0):
                    raise InputError(f"{run.path}: step {record['step']} took {seconds} s: no time to compare")
            if timed:
                yield timed

    def _check_equal(self):
        """Requires that all runs of the name have the same configuration and kind of GPU."""
        for run in self.runs:
            for header in run.headers:
                for difference in run_differences(run.headers[0], header):
                    if difference.kind != "noted":   # within one log names cannot help
                        raise InputError(f"{run.path}: {difference.key} is {difference.other} since step "
                                         f"{header['step']} and was {difference.base}: no one configuration; put the "
                                         "lines from that header on into a separate log")
                for difference in run_differences(self.header, header):
                    if difference.kind != "noted":
                        raise InputError(f"{run.path}: {difference.key} is {difference.other}, but "
                                         f"{self.runs[0].path} of the same name {self.name} has {difference.base}: "
                                         "give them different names")

    # ---- speed ----

    def rate(self, field):
        """Rate of a field over the timed steps."""
        return Rate([record[field] for record in self.timed])

    def tokens_per_gpu(self):
        return Rate([record["tokens_per_second"] / self.world for record in self.timed])

    def medians(self, field):
        """The field's median in each round."""
        return [statistics.median(record[field] for record in timed) for timed in self.rounds]

    @property
    def accumulation_steps(self):
        """Micro-batches of a step on each GPU."""
        return self.config["global-batch-size"] // (self.config["micro-batch-size"] * self.world)

    def peak(self, dtype):
        """Peak FLOP/s of the GPU in that dtype; None if the log does not have it."""
        return self.header["device"].get("peak_flops_" + dtype) or None

    def median(self, field):
        """Median of a field that not every record has; None if none has it."""
        values = self.logged(field)
        return statistics.median(values) if values else None

    def logged(self, field):
        return [record[field] for record in self.timed if record.get(field) is not None]

    @property
    def throttled(self):
        """What held the clocks of the GPUs back, with its share of the timed steps; None if it was not logged."""
        reasons = self.logged("throttled_by")
        shares = {reason: reasons.count(reason) / len(reasons) for reason in sorted(set(reasons)) if reason != "none"}
        return "; ".join(f"{reason} {share:.0%}" for reason, share in shares.items()) or "none" if reasons else None

    @property
    def joules_per_token(self):
        """Energy of all GPUs in the timed steps, per token; None if it was not logged."""
        joules = self.logged("energy_j")
        tokens = sum(record["tokens_per_second"] * record["step_seconds"] for record in self.timed)
        return math.fsum(joules) / tokens if joules else None

    @property
    def memory_gib(self):
        return max(record["memory_gib"] for run in self.runs for record in run.step_list())

    # ---- losses of the first log ----

    @property
    def tokens(self):
        """Tokens of the longest run."""
        return max(run.step_list()[-1]["tokens"] for run in self.runs)

    def clock(self):
        """{step: seconds of training since the first step}, None if the log does not begin with step 1."""
        times, total = {}, 0.0
        for number, record in enumerate(self.first.step_list(), 1):
            if record["step"] != number:
                return None
            total += record["step_seconds"]
            times[number] = total
        return times

    @property
    def least_loss(self):
        """The least training loss of a single step; nan if no loss is finite."""
        return min((record["loss"] for record in self.first.step_list() if math.isfinite(record["loss"])),
                   default=math.nan)

    @property
    def training_seconds(self):
        """Time of all training steps in the first log, without evaluation and checkpoints; None as with clock()."""
        clock = self.clock()
        return max(clock.values()) if clock else None

    def mean_loss(self, step, window):
        """Mean training loss of the last `window` steps up to this one; nan if one of them is not finite."""
        losses = [record["loss"] for record in self.first.step_list() if step - window < record["step"] <= step]
        return statistics.fmean(losses) if losses else math.nan

    def step_at_tokens(self, tokens):
        """The last step within so many tokens, None if there is none."""
        steps = [record["step"] for record in self.first.step_list() if record["tokens"] <= tokens]
        return steps[-1] if steps else None

    def step_at_seconds(self, seconds):
        times = self.clock() or {}
        steps = [step for step, at in times.items() if at <= seconds * (1 + 1e-12)]
        return steps[-1] if steps else None

    def validations(self):
        """{tokens trained on: validation record}, without the one before training."""
        found = {self.first.tokens_at(step): record for step, record in self.first.evals.items() if step > 0}
        return {tokens: record for tokens, record in found.items() if tokens is not None}

    def repeats(self):
        """Largest relative difference of losses between rounds that did the same steps; None with one round."""
        first = self.first.steps
        gaps = [abs(record["loss"] / first[step]["loss"] - 1) if record["loss"] != first[step]["loss"] else 0.0
                for run in self.runs[1:] for step, record in run.steps.items()
                if step in first and first[step]["loss"]]
        return max(gaps) if gaps else None
