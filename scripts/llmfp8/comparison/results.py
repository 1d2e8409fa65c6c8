"""The numbers of a comparison: each configuration against the baseline, at equal tokens and at equal time."""
import math

from ..run_log import InputError, bf16_loss

from .differences import Verdict, precision_text, run_differences
from .runs import Rate

SYNTHETIC = "synthetic data: no loss"


class Losses:
    """A configuration's losses; a missing one is None, and `reason` says why."""

    def __init__(self, configuration, limits):
        self.reason = self.time_reason = self.valid_reason = ""
        self.train = self.train_tokens = self.valid = self.valid_tokens = self.timed = self.timed_tokens = None
        self.valid_as_trained = self.valid_in_bf16 = self.valid_of = None   # of: tokens; Comparison sets valid
        if configuration.synthetic:
            self.reason = self.time_reason = self.valid_reason = SYNTHETIC
            return
        step = configuration.step_at_tokens(limits.tokens)
        if step is None:
            self.reason = f"its log has no step up to {limits.tokens:,} tokens"
        else:
            self.train = configuration.mean_loss(step, limits.window)
            self.train_tokens = configuration.first.steps[step]["tokens"]
        self._validation(configuration, limits)
        step = configuration.step_at_seconds(limits.seconds) if limits.seconds else None
        if configuration.clock() is None:
            self.time_reason = "its log does not begin with step 1"
        elif step is None:
            self.time_reason = "no step was done in that time"
        else:
            self.timed = configuration.mean_loss(step, limits.window)
            self.timed_tokens = configuration.first.steps[step]["tokens"]

    def _validation(self, configuration, limits):
        losses = configuration.validations()
        if not losses:
            self.valid_reason = "none"
        elif limits.valid_tokens is None:
            self.valid_reason = "at no equal tokens"
        else:
            record, self.valid_tokens = losses[limits.valid_tokens], limits.valid_tokens
            self.valid = self.valid_as_trained = record["loss"]
            self.valid_in_bf16, self.valid_of = bf16_loss(configuration.header, record), record["counted_tokens"]


class Limits:
    """The points at which losses are compared: the tokens and the time of the shortest run."""

    def __init__(self, configurations, window):
        self.window = window
        real = [c for c in configurations if not c.synthetic]
        self.tokens = min((c.first.step_list()[-1]["tokens"] for c in real), default=None)
        clocks = [c.clock() for c in real]
        self.seconds = min((max(clock.values()) for clock in clocks if clock), default=None)
        common = None
        for losses in [c.validations() for c in real]:
            if losses:
                common = set(losses) if common is None else common & set(losses)
        self.valid_tokens = max((tokens for tokens in common or () if tokens <= self.tokens), default=None)


class Row:
    def __init__(self, configuration, base, allowed, limits):
        self.configuration, self.name = configuration, configuration.name
        self.is_base = configuration is base
        self.verdict = Verdict(base, configuration, allowed)
        self.precision = precision_text(configuration.config)
        self.seconds, self.samples = map(configuration.rate, ("step_seconds", "samples_per_second"))
        self.tokens_per_gpu = configuration.tokens_per_gpu()
        self.tflops = self.tokens_per_gpu.median * configuration.header["flops_per_token"] / 1e12   # per GPU
        self.round_medians = configuration.medians("step_seconds")
        self.losses = Losses(configuration, limits)
        self.ratio = self.ratio_low = self.ratio_high = None
        if not self.verdict.refused:
            self._compare(base)

    def mfu(self, dtype):
        peak = self.configuration.peak(dtype)
        return self.tflops * 1e12 / peak if peak else None

    def _compare(self, base):
        """Ratio of tokens/s/GPU, which for equal batches is the inverse of s/it. With several rounds it is the median
        of the rounds' ratios, so that a drift of clocks, which affects both, cancels."""
        self.ratio = self.tokens_per_gpu.median / base.tokens_per_gpu().median
        mine, other = (c.medians("tokens_per_second") for c in (self.configuration, base))
        if len(mine) == len(other) > 1:
            each = Rate([a / self.configuration.world / (b / base.world) for a, b in zip(mine, other)])
            self.ratio, self.ratio_low, self.ratio_high = each.median, each.low, each.high

    def gap(self, mine, other):
        """Relative difference of losses; None where there is nothing to compare."""
        if self.is_base or self.verdict.refused or mine is None or other is None:
            return None
        return mine / other - 1 if other else math.nan

    def valid_gap(self, base):
        """(relative difference to the baseline's validation loss, why there is none)."""
        if self.losses.valid_of != base.valid_of and None not in (self.losses.valid_of, base.valid_of):
            return None, f"validated on {self.losses.valid_of:,} tokens, not {base.valid_of:,}"
        return self.gap(self.losses.valid, base.valid), ""


class Comparison:
    def __init__(self, configurations, baseline=None, allowed=(), window=10, asked=()):
        """asked: keys that the user allowed; one that allows nothing is an error."""
        self.configurations, self.warmup, self.failures = configurations, configurations[0].warmup, {}
        names = [c.name for c in configurations]
        if baseline is not None and baseline not in names:
            raise InputError(f"--baseline {baseline}: none of the configurations: {', '.join(names)}")
        self.base = configurations[names.index(baseline)] if baseline is not None else configurations[0]
        self.limits = Limits(configurations, window)
        self.rows = [Row(c, self.base, {*allowed, *asked}, self.limits) for c in configurations]
        self.base_row = next(row for row in self.rows if row.is_base)
        # What is compared is the loss of the exported weights if all runs have it, and it is another one.
        evaluated = [row.losses for row in self.rows if row.losses.valid is not None]
        self.in_bf16 = (all(losses.valid_in_bf16 is not None for losses in evaluated)
                        and any(losses.valid_in_bf16 is not losses.valid for losses in evaluated))
        for losses in evaluated if self.in_bf16 else []:
            losses.valid = losses.valid_in_bf16
        differing = sorted(set().union(*(row.verdict.keys for row in self.rows)))
        for key in asked:
            if key not in differing:
                raise InputError(f"--allow {key}: nothing to allow; what keeps runs here from being compared: "
                                 f"{', '.join(differing) or 'nothing'}")

    @property
    def synthetic(self):
        return [c.name for c in self.configurations if c.synthetic]

    def notes(self):
        """Remarks that a reader of the tables needs."""
        lines = [f"{name}: FAILED: {said}" for name, said in self.failures.items()]
        for c in self.configurations:
            for run in c.runs:
                lines += [f"{c.name}: {d.key} {d.other} in {run.path}, {d.base} in {c.first.path}"
                          for header in run.headers for d in run_differences(c.header, header)]
                if not run.finished:
                    lines.append(f"{c.name}: {run.path} does not say that its run ended")
                lines += [line for line in run.warnings() if "synthetic data" not in line]
                warned = [event for event in run.events if event["kind"] not in ("note", "stop", "alerts")]
                if warned:
                    lines.append(f"{c.name}: {len(warned)} warnings in {run.path}, the first in step "
                                 f"{warned[0]['step']}: {' '.join(warned[0]['text'].split())}")
            skipped = sum(record["skipped"] for run in c.runs for record in run.step_list())
            if skipped:
                lines.append(f"{c.name}: {skipped} steps were skipped: their gradients were not finite or too large")
            repeats = c.repeats()
            if repeats and not c.synthetic:
                lines.append(f"{c.name}: losses of its rounds differ by up to {100 * repeats:.2g} %; those of the "
                             "first round are shown")
        return lines
