"""What the page shows of a StreamedLog, as JSON: curves of at most 2 * BUCKETS points that keep the smallest and the
largest value of each bucket, heat maps of a byte a cell, events."""
import base64
import math
from bisect import bisect_right

from ..run_figure import tensor_order
from ..run_log import ENDS
from .exponents import page_data
from .stream import HEAT_FIELDS

BUCKETS = 700
MOST_MARKS = 2000   # events shown on the time axis
# Curves: panel -> fields of the step record.
CURVES = ("loss", "lr", "grad_norm", "grad_mul", "step_seconds", "tokens_per_second", "mfu", "exposed_comm_seconds",
          "power_w", "sm_clock_mhz", "gpu_temperature_c", "gpu_utilization", "gpu_memory_gib", "memory_gib",
          "joules_per_token")
LEVELS = 254   # of a cell; 255: no value
OWN_RANGES = ("amax", "scale")   # differ from linear to linear and from x to dy; the others are shares or counts


def short(value):
    """A number with six digits, None where there is none: JSON has no nan."""
    if value is None or not math.isfinite(value):
        return None
    return int(value) if value == int(value) and abs(value) < 1e15 else float(f"{value:.6g}")


def buckets(count):
    """[(begin, end)] of at most BUCKETS parts of `count` values; parts of one value if they all fit on the screen."""
    if count <= 2 * BUCKETS:
        return [(i, i + 1) for i in range(count)]
    edges = [count * i // BUCKETS for i in range(BUCKETS + 1)]
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


def hours(column):
    total, sums = 0.0, []
    for seconds in column:
        total += seconds if math.isfinite(seconds) else 0.0
        sums.append(total / 3600)
    return sums


def axis_points(values, parts):
    """Positions of what thin() gives: the first and the last place of each part."""
    if parts and parts[-1][1] == len(parts):
        return [short(value) for value in values]
    return [short(values[i]) for begin, end in parts for i in (begin, end - 1)]


def axes(run):
    """(values of the axes at each step, function from a step to its place on each)"""
    at, table = run.steps.at, run.steps.columns
    values = {"step": at, "tokens": table["tokens"], "hours": hours(table["step_seconds"])}

    def place(step):
        i = bisect_right(at, step) - 1
        if i < 0:
            return {"step": step, "tokens": 0, "hours": 0}
        return {name: short(column[i]) if name != "step" else step for name, column in values.items()}
    return values, place


def marks(run, place):
    """Events for the lane and its table: [{kind, step, tokens, hours, text}], the most important ones first if there
    are too many."""
    table = run.steps.columns
    found = [("skipped", step, "the update was skipped")
             for step, skipped in zip(run.steps.at, table["skipped"]) if skipped == 1]
    found += [(event["kind"], event["step"], event["text"]) for event in run.events]
    found += [("resumed", step, "resumed from a checkpoint") for step in run.resumed_at]
    found += [("evaluation", step, f"validation loss {record['loss']:.4f}") for step, record in run.evals.items()]
    found += [("checkpoint", record["step"], record["path"]) for record in run.checkpoints]
    order = {**dict.fromkeys(ENDS, 0), "resumed": 1, "skipped": 2, "warning": 2, "evaluation": 5, "note": 6}
    left_out = max(0, len(found) - MOST_MARKS) + run.left_out
    found = sorted(found, key=lambda mark: (order.get(mark[0], 3), mark[1]))[:MOST_MARKS]
    return [{"kind": kind, **place(step), "text": text[:500]}
            for kind, step, text in sorted(found, key=lambda mark: mark[1])], left_out


def cells(columns, counts, field, logarithmic):
    """A field as bytes by row and column, and the ranges that 1 and LEVELS mean: one of each group of `counts` rows.
    A group has its own range in a field of OWN_RANGES, for example because a level of a range that holds both amaxes
    of gradients and those of activations would be 10 % wide."""
    lines = [[column[field][row] if row < len(column[field]) else math.nan for _, _, column in columns]
             for row in range(sum(counts))]
    scale = math.log10 if logarithmic else float

    def finite_of(part):
        return [value for line in part for value in line if math.isfinite(value) and (value > 0 or not logarithmic)]

    def level(value, low, high):
        if math.isnan(value):
            return LEVELS + 1
        if math.isinf(value):
            return LEVELS
        if logarithmic and value <= 0:
            return 0
        # Level 0 is for zero; the smallest value has level 1.
        return 1 + round((LEVELS - 1) * (scale(value) - scale(low)) / (scale(high) - scale(low))) \
            if high > low else LEVELS // 2
    data, ranges, begin = bytearray(), [], 0
    for count in counts:
        part = lines[begin:begin + count]
        begin += count
        finite = finite_of(part if field in OWN_RANGES else lines)
        low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
        ranges.append([short(low), short(high)])
        data += bytes(level(value, low, high) for line in part for value in line)
    return {"ranges": ranges, "data": base64.b64encode(bytes(data)).decode()}


def heat(run, place):
    """The heat maps, None without FP8 records. Rows are grouped by linear and role, in the order of layers."""
    columns, names = run.heat.columns, run.heat.names
    if not columns:
        return None
    groups = tensor_order(names)
    order = [name for _, members in groups for name in members]
    rows = [names[name] for name in order]
    maps = {}
    for field in HEAT_FIELDS:
        if any(math.isfinite(value) for _, _, column in columns for value in column[field]):
            picked = [(first, last, {field: [column[field][row] if row < len(column[field]) else math.nan
                                             for row in rows]}) for first, last, column in columns]
            maps[field] = cells(picked, [len(members) for _, members in groups], field, True)
    return {"names": order, "formats": [run.heat.formats[name] or "" for name in order],
            "groups": [[group, len(members)] for group, members in groups],
            "columns": [{"first": first, "last": last, **{axis: value for axis, value in place(last).items()
                                                          if axis != "step"}} for first, last, _ in columns],
            "maps": maps, "exponents": page_data(run.exponents, order, short)}


def run_data(run):
    """The JSON of one run."""
    values, place = axes(run)
    parts = buckets(len(run.steps))
    table = run.steps.columns
    curves = {field: thin(table[field], parts) for field in CURVES if any(map(math.isfinite, table[field]))}
    at_most = [place(step) for step in sorted(run.evals)]
    shown, left_out = marks(run, place)
    return {"name": run.name, "axes": {name: axis_points(column, parts) for name, column in values.items()},
            "curves": curves, "means": bucket_means(run, parts),
            "valid": {**{name: [at[name] for at in at_most] for name in values},
                      "loss": [short(run.evals[step]["loss"]) for step in sorted(run.evals)]},
            "marks": shown, "left_out": left_out, "heat": heat(run, place)}


def bucket_means(run, parts):
    """Mean loss of each part by the step at its end."""
    loss, means = run.steps.columns["loss"], {}
    for begin, end in parts:
        finite = [value for value in loss[begin:end] if math.isfinite(value)]
        if finite:
            means[run.steps.at[end - 1]] = math.fsum(finite) / len(finite)
    return means


def gaps(runs, width=21):
    """Loss minus that of the first run's name (the mean over its runs), smoothed over `width` points, at the steps
    that the runs share; band: half the spread of the baseline's own runs. None for one run."""
    if len(runs) < 2:
        return None
    base = [run for run in runs if run["name"] == runs[0]["name"]]
    steps = sorted(set.intersection(*(set(run["means"]) for run in runs)))
    if len(steps) < 2:
        return None

    def smooth(run):
        values = [run["means"][step] for step in steps]
        return [math.fsum(part) / len(part) for part in
                (values[max(0, i - width // 2):i + width // 2 + 1] for i in range(len(values)))]
    smoothed = [smooth(run) for run in runs]
    of_base = [line for run, line in zip(runs, smoothed) if run in base]
    mean = [math.fsum(column) / len(column) for column in zip(*of_base)]
    band = [max(abs(value - middle) for value in column) for column, middle in zip(zip(*of_base), mean)]
    return {"step": steps, "baseline": runs[0]["name"], "seeds": len(base), "band": list(map(short, band)),
            "runs": [[run["name"], [short(value - middle) for value, middle in zip(line, mean)]]
                     for run, line in zip(runs, smoothed) if run not in base or len(base) > 1]}
