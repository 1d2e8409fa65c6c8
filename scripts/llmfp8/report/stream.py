"""Reads a log of any length in bounded memory: step records become columns of doubles, FP8 records a heat map of at
most COLUMNS columns."""
import math
from array import array
from bisect import bisect_right
from collections.abc import Mapping
from itertools import repeat
from operator import contains, itemgetter

from ..run_export import STEP_COLUMNS
from ..run_log import ENDS, FIELDS, NOT_IN_JSON, OPTIONAL, WHOLE, RunLog, is_number
from ..support import parse_json
from .exponents import Exponents

COLUMNS = 128
# Fields of a tensor that the heat maps show; of several steps in a column the largest counts.
FP8_FIELDS = ("amax", "scale", "saturated", "flushed", "nonfinite", "scale_at_ends")
# Of a BF16 run: what FP8 would do.
SHADOW_FIELDS = ("tensorwise_flushed", "delayed_saturated", "delayed_flushed", "blockwise_flushed_at_most")
HEAT_FIELDS = FP8_FIELDS + SHADOW_FIELDS
STEP_FIELDS = [field for _, _, field in STEP_COLUMNS if field != "step"] + ["train_iters", "eta_seconds"]
MOST_EVENTS = 10_000   # of a log that repeats itself
MOST_SHAPES = 1000     # of a log whose records are all different
WHOLE_FIELDS = [field for field in FIELDS["step"] if field in WHOLE]
LOGGED_SCALE = "quant_mul"   # the scale's name in the log
WITHOUT_BLOCKS = itemgetter("amax", LOGGED_SCALE, *FP8_FIELDS[2:5])


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
        try:
            values = array("d", [math.nan if value is None else value for value in map(record.get, STEP_FIELDS)])
        except (TypeError, OverflowError):   # "nan", which JSON has not
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

    def _place(self, step):
        i = bisect_right(self.at, step) - 1
        return i if i >= 0 and self.at[i] == step else -1

    def __contains__(self, step):
        return self._place(step) >= 0

    def __getitem__(self, step):
        i = self._place(step)
        if i < 0:
            raise KeyError(step)
        record = {field: int(column[i]) if field in self.WHOLE else column[i]
                  for field, column in self.columns.items() if not math.isnan(column[i]) or field in ("loss",)}
        for field in ("grad_norm", "grad_mul", "lr", "step_seconds", "tokens_per_second", "samples_per_second"):
            record.setdefault(field, math.nan)
        return {"step": step, **record}


class HeatColumns:
    """The FP8 records. Neighbours are merged whenever there are more than COLUMNS."""

    def __init__(self):
        self.names, self.formats = {}, {}   # tensor -> row, tensor -> format
        self.columns = []   # (first step, last step, {field: array of a value per row})
        self.stride, self.filled, self.totals = 1, 0, {}   # totals: step -> what the CSV has of it
        self.last, self.rows = None, []   # names of the last record's tensors, and their rows

    def add(self, step, names, formats, values):
        """The tensors of a record: their names, formats, and {field of HEAT_FIELDS: array of their values}."""
        if names != self.last:
            for name, form in zip(names, formats):
                if name not in self.names:
                    self.names[name] = len(self.names)
                    self.formats[name] = form
            self.last, self.rows = names, [self.names[name] for name in names]
        if self.columns and self.filled < self.stride:
            first, _, fields = self.columns[-1]
            self.columns[-1] = (first, step, fields)
        else:
            if len(self.columns) == COLUMNS:
                self.merge()
            self.columns.append((step, step, {field: array("d") for field in HEAT_FIELDS}))
            self.filled = 0
        self.filled += 1
        self._take_larger(self.columns[-1][2], values)
        if "saturated" in values:
            self.totals[step] = {"": self._totals(values)}

    def _take_larger(self, fields, values):
        """Keeps the larger values. A nan replaces any value, and any value replaces a nan, with which rows begin."""
        all_rows = self.rows == list(range(len(self.names)))
        for field, column in fields.items():
            column.extend([math.nan] * (len(self.names) - len(column)))
            found = values.get(field, ())
            if found and all_rows:
                fields[field] = array("d", [new if not new <= old else old for old, new in zip(column, found)])
                continue
            for row, value in zip(self.rows, found):
                if not value <= column[row]:
                    column[row] = value

    @staticmethod
    def _totals(values):
        def most(column):
            if math.isnan(sum(column)):
                column = [value for value in column if not math.isnan(value)]
            return max(column, default=math.nan)
        totals = {"saturated": most(values["saturated"]), "flushed": most(values["flushed"]),
                  "nonfinite": sum(values["nonfinite"])}
        ends = most(values["scale_at_ends"])
        return totals if math.isnan(ends) else {**totals, "scale_at_ends": ends}

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
        self.shapes = set()   # fields and types of step records that RunLog has found right, whatever the values

    @property
    def fp8(self):
        return self.heat.totals

    @fp8.setter
    def fp8(self, _):
        pass   # RunLog's own dictionary is not used

    def _take(self, line):
        """Takes records of common forms without a look at each field. RunLog takes the others, or refuses them."""
        if self.headers:
            try:
                if line.startswith(b'{"type":"fp8"') and self._add_fp8(parse_json(line)):
                    return
                if line.startswith(b'{"type":"step"') and self._add_step(parse_json(line)):
                    return
            except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
                pass
        super()._take(line)

    def _add_step(self, record):
        if self.shape(record) not in self.shapes:
            return False
        array("q", [record[field] for field in WHOLE_FIELDS])   # OverflowError
        self.steps.append(record)
        return True

    @staticmethod
    def shape(record):
        return *record, *map(type, record.values())

    def _add_fp8(self, record):
        tensors = record["tensors"]
        names = [tensor["name"] for tensor in tensors]
        if type(record["step"]) is not int or not {str}.issuperset(map(type, names)):
            return False
        self.heat.add(record["step"], names, [tensor.get("format") for tensor in tensors],
                      dict(zip(FP8_FIELDS, self._values(tensors))))
        return True

    @classmethod
    def _values(cls, tensors):
        """An array for each of FP8_FIELDS."""
        if not any(map(contains, tensors, repeat("block_scales"))):
            try:
                found = [array("d", column) for column in zip(*map(WITHOUT_BLOCKS, tensors))]
                return [*found, array("d", [math.nan]) * len(tensors)] if found else [array("d")] * len(FP8_FIELDS)
            except (TypeError, KeyError):   # "nan", or no amax
                pass
        return [array("d", column) for column in zip(*map(cls._tensor, tensors))]

    @staticmethod
    def _tensor(tensor):
        blocks = tensor.get("block_scales")
        scale, ends = (blocks["median"], blocks["at_ends"]) if blocks else (tensor.get(LOGGED_SCALE, "nan"), "nan")
        # float() reads the strings of numbers that JSON has not.
        return (float(tensor.get("amax", "nan")), float(scale), float(tensor["saturated"]), float(tensor["flushed"]),
                float(tensor["nonfinite"]), float(ends))

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
        if len(self.shapes) < MOST_SHAPES and not any(type(value) is str for field, value in record.items()
                                                      if field != "type"):
            self.shapes.add(self.shape(record))
        self.steps.append(record)

    def _take_fp8(self, record):
        self._add_fp8(record)

    def _take_exponents(self, record):
        self.exponents.add(record["step"], record["tensors"])
        shadows = [tensor for tensor in record["tensors"] if "tensorwise_flushed" in tensor]
        if shadows:
            values = {"scale": [number(tensor["scale"]) for tensor in shadows],
                      **{field: [number(tensor.get(field)) for tensor in shadows]
                         for field in ("amax", "nonfinite", *SHADOW_FIELDS)}}
            self.heat.add(record["step"], [tensor["name"] for tensor in shadows],
                          [tensor.get("format") for tensor in shadows], values)

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
