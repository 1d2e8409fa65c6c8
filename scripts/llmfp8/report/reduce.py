"""What the page shows of a RunLog, as JSON: curves of at most 2 * BUCKETS points that keep the smallest and the largest
value of each bucket, heat maps of a byte a cell, events."""
import base64
import math
import re
from bisect import bisect_right

from ..run_log import ENDS, evaluation_text

BUCKETS = 700
COLUMNS = 128       # of a heat map
MOST_MARKS = 300    # events in the table
# Curves: panel -> fields of the step record.
CURVES = ("loss", "lr", "grad_norm", "grad_mul", "z_loss", "max_logit", "expert_load", "rank_load", "dead_experts",
          "router_entropy", "router_loss", "step_seconds", "tokens_per_second", "mfu", "exposed_comm_seconds",
          "power_w", "sm_clock_mhz", "gpu_temperature_c", "gpu_utilization", "gpu_memory_gib", "memory_gib",
          "joules_per_token")
SMOOTHED = ("loss", "grad_norm")   # shown as moving means over a SPAN-th of the steps, with the values behind them
SPAN = 40
MIN_GAP_SPAN = 21
# Heat maps: name on the page -> field of a tensor of the fp8 record.
HEAT = {"amax": "amax", "scale": "quant_mul", "saturated": "saturated", "flushed": "flushed", "nonfinite": "nonfinite",
        "scale_at_ends": "scale_at_ends", "load": "load"}
LEVELS = 254   # of a cell; 255: no value
OWN_RANGES = ("amax", "scale")   # differ from linear to linear and from x to dy; the others are shares or counts


def short(value):
    """A number with six digits, None where there is none: JSON has no nan."""
    if value is None or not math.isfinite(value):
        return None
    return int(value) if value == int(value) and abs(value) < 1e15 else float(f"{value:.6g}")


def buckets(count, most=BUCKETS):
    """[(begin, end)] of at most `most` parts of `count` values; parts of one value if there are at most 2 * `most`."""
    if count <= 2 * most:
        return [(i, i + 1) for i in range(count)]
    edges = [count * i // most for i in range(most + 1)]
    return list(zip(edges, edges[1:]))


def thin(column, parts):
    """The smallest and the largest value of each part, in their order; of parts of one value, that value."""
    if parts and parts[-1][1] == len(parts):
        return [short(value) for value in column]
    shown = []
    for begin, end in parts:
        values = [(value, i) for i, value in enumerate(column[begin:end]) if math.isfinite(value)]
        pair = sorted((min(values), max(values)), key=lambda entry: entry[1]) if values else [(None, 0)] * 2
        shown += [short(value) for value, _ in pair]
    return shown


def axis_points(values, parts):
    """Positions of what thin() gives: the first and the last place of each part."""
    if parts and parts[-1][1] == len(parts):
        return [short(value) for value in values]
    return [short(values[i]) for begin, end in parts for i in (begin, end - 1)]


def moving_mean(column, steps, parts):
    """Mean of the finite values of so many steps around each of axis_points(). At the beginning, where losses fall
    fast, as many steps count after a place as there are before it."""
    shown = []
    for i in axis_points(range(len(column)), parts):
        half = min(steps // 2, i)
        finite = list(filter(math.isfinite, column[i - half:i + half + 1]))
        shown.append(short(math.fsum(finite) / len(finite)) if finite else None)
    return shown


class Steps:
    """The steps of a run in order, their fields as columns with nan where a record has no number, and the axes."""

    def __init__(self, run):
        records = run.step_list()
        self.at = [record["step"] for record in records]
        self.columns = {field: [math.nan if record.get(field) is None else record[field] for record in records]
                        for field in CURVES}
        hours, total = [], 0.0
        for seconds in self.columns["step_seconds"]:
            total += seconds if math.isfinite(seconds) else 0.0
            hours.append(total / 3600)
        self.axes = {"step": self.at, "tokens": [record["tokens"] for record in records], "hours": hours}

    def place(self, step):
        """The place of a step on each axis."""
        i = bisect_right(self.at, step) - 1
        if i < 0:
            return {"step": step, "tokens": 0, "hours": 0}
        return {name: short(column[i]) if name != "step" else step for name, column in self.axes.items()}


def marks(run):
    """The most important events in the order of steps: [{kind, step, text}]."""
    found = [("skipped", record["step"], "the update was skipped") for record in run.step_list() if record["skipped"]]
    found += [(event["kind"], event["step"], event["text"]) for event in run.events]
    found += [("resumed", step, "resumed from a checkpoint") for step in run.resumed_at]
    found += [("evaluation", step, "validation loss " + evaluation_text(record, "loss", ".4f"))
              for step, record in run.evals.items()]
    found += [("checkpoint", record["step"], record["path"]) for record in run.checkpoints]
    order = {**dict.fromkeys(ENDS, 0), "resumed": 1, "skipped": 2, "warning": 2, "evaluation": 5, "note": 6}
    shown = sorted(found, key=lambda mark: (order.get(mark[0], 3), mark[1]))[:MOST_MARKS]
    return [{"kind": kind, "step": step, "text": text[:500]}
            for kind, step, text in sorted(shown, key=lambda mark: mark[1])]


def tensor_order(names):
    """Groups names by linear and role, in the order of layers: [(group, [names])], "3.down.dy" in "down.dy"."""
    groups = {}
    for name in names:
        layer, group = re.fullmatch(r"(?:(\d+)\.)?(.*)", name, re.S).groups()
        groups.setdefault(group, []).append((int(layer or 0), name))
    return [(group, [name for _, name in sorted(members)]) for group, members in groups.items()]


def level_of(value, low, high):
    """A byte: 0 for zero, 1 to LEVELS for low to high on a logarithmic scale, LEVELS + 1 for no value."""
    if math.isnan(value):
        return LEVELS + 1
    if math.isinf(value):
        return LEVELS
    if value <= 0:
        return 0
    if high == low:
        return LEVELS // 2
    return 1 + round((LEVELS - 1) * (math.log(value) - math.log(low)) / (math.log(high) - math.log(low)))


def cells(lines, counts, own_ranges):
    """Values by row and column as bytes, and the ranges that 1 to LEVELS mean: one of each group of `counts` rows. With
    own_ranges a group has its own range, because a level of a range that holds both amaxes of gradients and those of
    activations would be 10 % wide."""
    data, ranges, begin = bytearray(), [], 0
    for count in counts:
        part = lines[begin:begin + count]
        begin += count
        positive = [value for line in (part if own_ranges else lines) for value in line if 0 < value < math.inf]
        low, high = (min(positive), max(positive)) if positive else (0.0, 0.0)
        ranges.append([short(low), short(high)])
        data += bytes(level_of(value, low, high) for line in part for value in line)
    return {"ranges": ranges, "data": base64.b64encode(bytes(data)).decode()}


def loads(run):
    """The rows of every expert, divided by the mean of its layer, as tensors of records by step."""
    found, experts = {}, run.headers[-1]["config"].get("num-experts") if run.experts else 0
    for step, load in run.experts.items() if isinstance(experts, int) and experts > 0 else ():
        rows = [(layer, load[layer * experts:(layer + 1) * experts]) for layer in range(len(load) // experts)]
        found[step] = {f"{expert}.layer {layer}": {"load": value * experts / sum(part)}
                       for layer, part in rows if sum(part) > 0 for expert, value in enumerate(part)}
    return found


def heat(tensors):
    """The heat maps of tensors by step, None without any. Rows are grouped by linear and role, in the order of
    layers; a column has the largest values of neighbouring records if there are more than COLUMNS."""
    steps = sorted(tensors)
    groups = tensor_order(dict.fromkeys(name for step in steps for name in tensors[step]))
    order = [name for _, members in groups for name in members]
    if not order:
        return None
    # Neighbours are merged in powers of two, so that a page that is made anew does not shift them.
    stride = 1
    while len(steps) > COLUMNS * stride:
        stride *= 2
    columns = [steps[i:i + stride] for i in range(0, len(steps), stride)]

    def largest(name, field, column):
        values = [tensors[step].get(name, {}).get(field, math.nan) for step in column]
        return max((value for value in values if not math.isnan(value)), default=math.nan)
    maps = {}
    for shown, field in HEAT.items():
        lines = [[largest(name, field, column) for column in columns] for name in order]
        if any(math.isfinite(value) for line in lines for value in line):
            maps[shown] = cells(lines, [len(members) for _, members in groups], shown in OWN_RANGES)
    if not maps:
        return None
    formats = {name: str(tensor.get("format") or "") for step in steps for name, tensor in tensors[step].items()}
    return {"names": order, "formats": [formats[name] for name in order],
            "groups": [[group, len(members)] for group, members in groups],
            "columns": [{"first": column[0], "last": column[-1]} for column in columns], "maps": maps}


def run_data(run):
    """The JSON of one run."""
    steps = Steps(run)
    parts = buckets(len(steps.at))
    at_evals = [steps.place(step) for step in sorted(run.evals)]
    span = len(steps.at) // SPAN
    return {"name": run.name, "axes": {name: axis_points(column, parts) for name, column in steps.axes.items()},
            "curves": {field: thin(column, parts) for field, column in steps.columns.items()
                       if any(map(math.isfinite, column))},
            "smooth": {field: moving_mean(steps.columns[field], span, parts) for field in SMOOTHED if span > 1},
            "smooth_steps": span,
            "valid": {**{name: [at[name] for at in at_evals] for name in steps.axes},
                      **{name: [short(run.evals[step].get(name)) for step in sorted(run.evals)]
                         for name in ("loss", "loss_bf16", "loss_ema")}},
            "marks": marks(run), "heat": heat(run.fp8), "experts": heat(loads(run))}


def gaps(runs):
    """Moving means of the loss minus that of the first run (the mean over the runs of its name), over the steps that
    all runs have; band: half the spread of the baseline's own runs. None for one run."""
    steps = sorted(set.intersection(*(set(run.steps) for run in runs)))
    if len(runs) < 2 or len(steps) < 2:
        return None
    base = [run for run in runs if run.name == runs[0].name]
    parts, span = buckets(len(steps)), max(MIN_GAP_SPAN, len(steps) // SPAN)
    mean = [math.fsum(run.steps[step]["loss"] for run in base) / len(base) for step in steps]
    lines = [moving_mean([run.steps[step]["loss"] - middle for step, middle in zip(steps, mean)], span, parts)
             for run in runs]
    band = [max((abs(value) for value in column if value is not None), default=None)
            for column in zip(*(line for run, line in zip(runs, lines) if run in base))]
    return {"step": axis_points(steps, parts), "baseline": base[0].name, "seeds": len(base), "span": span, "band": band,
            "runs": [[run.name, line] for run, line in zip(runs, lines) if run not in base or len(base) > 1]}
