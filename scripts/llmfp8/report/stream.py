"""Reads a log of any length in bounded memory: step records become columns of doubles, FP8 records a heat map of at
most COLUMNS columns."""
import math
from array import array
from bisect import bisect_right
from collections.abc import Mapping

from ..run_export import STEP_COLUMNS
from ..run_log import ENDS, NOT_IN_JSON, OPTIONAL, RunLog, is_number
from ..support import parse_json
from .exponents import Exponents

COLUMNS = 128
# Fields of a tensor that the heat maps show; of several steps in a column the largest counts.
FP8_FIELDS = ("amax", "quant_mul", "saturated", "flushed", "nonfinite", "scale_at_ends")
# Of a BF16 run: what FP8 would do.
SHADOW_FIELDS = ("tensorwise_flushed", "delayed_saturated", "delayed_flushed", "blockwise_flushed_at_most")
HEAT_FIELDS = FP8_FIELDS + SHADOW_FIELDS
NO_SHADOW = (math.nan,) * len(SHADOW_FIELDS)
STEP_FIELDS = [field for _, _, field in STEP_COLUMNS if field != "step"] + ["train_iters", "eta_seconds"]
MOST_EVENTS = 10_000   # of a log that repeats itself


def number(value):
    """A number of a record as a double, nan if there is none. RunLog has looked at the fields that it needs."""
    if not is_number(value) and not isinstance(value, bool):
        return math.nan
    try:
        return float(NOT_IN_JSON.get(value, value) if isinstance(value, str) else value)
    except OverflowError:
        return math.nan


class StepTable(Mapping):
    """Step records by step, in the order of steps, as columns. A record is made anew when it is asked for."""

    WHOLE = {"samples", "tokens", "counted_tokens", "train_iters"}

    def __init__(self):
        self.at = array("q")
        self.columns = {field: array("d") for field in STEP_FIELDS}

    def append(self, record):
        while self.at and self.at[-1] >= record["step"]:   # a step that was done again
            self.cut(record["step"] - 1)
        values = [number(record.get(field)) for field in STEP_FIELDS]
        self.at.append(record["step"])
        for column, value in zip(self.columns.values(), values):
            column.append(value)

    def cut(self, step):
        """Forgets the steps after `step`."""
        keep = bisect_right(self.at, step)
        for column in (self.at, *self.columns.values()):
            del column[keep:]

    def __len__(self):
        return len(self.at)

    def __iter__(self):
        return iter(self.at)

    def __getitem__(self, step):
        i = bisect_right(self.at, step) - 1
        if i < 0 or self.at[i] != step:
            raise KeyError(step)
        record = {field: int(column[i]) if field in self.WHOLE else column[i]
                  for field, column in self.columns.items() if not math.isnan(column[i]) or field in ("loss",)}
        for field in ("grad_norm", "grad_mul", "lr", "step_seconds", "tokens_per_second", "samples_per_second"):
            record.setdefault(field, math.nan)
        return {"step": step, **record}


class HeatColumns:
    """The FP8 records, of which neighbours are merged whenever there are more than COLUMNS."""

    def __init__(self):
        self.names, self.formats = {}, {}   # tensor -> row, tensor -> format
        self.columns = []   # (first step, last step, {field: array of a value per row})
        self.stride, self.filled, self.totals = 1, 0, {}   # totals: step -> what the CSV has of it

    def add(self, step, tensors, casts=True):
        """casts: these are records of casts to FP8. tensors: [(name, format, values of HEAT_FIELDS)]"""
        for name, form, _ in tensors:
            if name not in self.names:
                self.names[name] = len(self.names)
                self.formats[name] = form
        if self.columns and self.filled < self.stride:
            first, _, fields = self.columns[-1]
            self.columns[-1] = (first, step, fields)
        else:
            if len(self.columns) == COLUMNS:
                self.merge()
            self.columns.append((step, step, {field: array("d") for field in HEAT_FIELDS}))
            self.filled = 0
        self.filled += 1
        fields = self.columns[-1][2]
        rows = len(self.names)
        for column in fields.values():
            column.extend([math.nan] * (rows - len(column)))
        arrays, names = [fields[field] for field in HEAT_FIELDS], self.names
        for name, _, values in tensors:
            row = names[name]
            for column, value in zip(arrays, values):
                if not value <= column[row]:   # also nan, which was not seen yet
                    column[row] = value
        if not casts:
            return
        self.totals[step] = {"": dict(zip(
            ("saturated", "flushed", "nonfinite", "scale_at_ends"),
            (self.most(tensors, 2), self.most(tensors, 3), sum(values[4] for _, _, values in tensors),
             self.most(tensors, 5))))}
        if math.isnan(self.totals[step][""]["scale_at_ends"]):
            del self.totals[step][""]["scale_at_ends"]

    @staticmethod
    def most(tensors, i):
        return max((values[i] for _, _, values in tensors if not math.isnan(values[i])), default=math.nan)

    def merge(self):
        """Two columns become one."""
        self.stride *= 2
        pairs = [self.columns[i:i + 2] for i in range(0, len(self.columns), 2)]
        self.columns = [(pair[0][0], pair[-1][1], {field: self.larger([fields[field] for _, _, fields in pair])
                                                   for field in HEAT_FIELDS}) for pair in pairs]
        self.filled = self.stride   # the last one is full

    @staticmethod
    def larger(columns):
        rows = max(map(len, columns))
        padded = [[*column, *[math.nan] * (rows - len(column))] for column in columns]
        return array("d", [a if b != b or a >= b else b for a, b in zip(padded[0], padded[-1])])

    def cut(self, step):
        """Forgets the records after `step`; a column that has both kept and forgotten steps stays."""
        self.columns = [column for column in self.columns if column[0] <= step]
        self.totals = {at: total for at, total in self.totals.items() if at <= step}


class StreamedLog(RunLog):
    """A RunLog whose `steps` are a StepTable, whose `fp8` has what the CSV needs and whose `heat` the heat maps."""

    def _forget(self):
        super()._forget()
        self.steps, self.heat, self.plans = StepTable(), HeatColumns(), []
        self.exponents = Exponents()
        self.left_out = 0   # events beyond MOST_EVENTS

    @property
    def fp8(self):
        return self.heat.totals

    @fp8.setter
    def fp8(self, _):
        pass   # RunLog's own dictionary is not used

    def _take(self, line):
        if self.headers and line.startswith(b'{"type":"fp8"'):
            try:   # the common form, without a look at each field
                record = parse_json(line)
                tensors = [self._tensor(tensor) for tensor in record["tensors"]]
                if type(record["step"]) is int and all(type(name) is str for name, _, _ in tensors):
                    return self.heat.add(record["step"], tensors)
            except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
                pass   # the slow way says what is wrong
        super()._take(line)

    @staticmethod
    def _tensor(tensor):
        blocks = tensor.get("block_scales")
        scale, ends = (blocks["median"], blocks["at_ends"]) if blocks else (tensor.get("quant_mul", "nan"), "nan")
        # float() reads the strings of numbers that JSON has not.
        return (tensor["name"], tensor.get("format"), (
            float(tensor.get("amax", "nan")), float(scale), float(tensor["saturated"]), float(tensor["flushed"]),
            float(tensor["nonfinite"]), float(ends), *NO_SHADOW))

    def _take_header(self, record):
        begin = record["step"]
        redone = self.redone + len(self.steps) - bisect_right(self.steps.at, begin)
        self.steps.cut(begin)
        steps, self.steps = self.steps, {}   # RunLog deletes from dictionaries
        super()._take_header(record)
        self.steps, self.redone = steps, redone
        self.heat.cut(begin)
        self.exponents.cut(begin)

    def _take_step(self, record):
        self.steps.append({field: record.get(field) for field in (*STEP_FIELDS, "step")})

    def _take_fp8(self, record):
        self.heat.add(record["step"], [self._tensor(tensor) for tensor in record["tensors"]])

    def _take_exponents(self, record):
        self.exponents.add(record["step"], record["tensors"])
        shadows = [tensor for tensor in record["tensors"] if "tensorwise_flushed" in tensor]
        if shadows:
            self.heat.add(record["step"], [
                (tensor["name"], tensor.get("format"), (
                    number(tensor["amax"]), number(tensor["scale"]), math.nan, math.nan, number(tensor["nonfinite"]),
                    math.nan, *(number(tensor.get(field)) for field in SHADOW_FIELDS))) for tensor in shadows], False)

    def _take_plan(self, record):
        self.plans.append(record)

    def _take_event(self, record):
        if len(self.events) >= MOST_EVENTS and record["kind"] not in ENDS:
            self.left_out += 1
        else:
            self.events.append(record)

    def _take_checkpoint(self, record):
        if len(self.checkpoints) < MOST_EVENTS:
            self.checkpoints.append(record)


assert set(OPTIONAL["step"]) <= set(STEP_FIELDS)
