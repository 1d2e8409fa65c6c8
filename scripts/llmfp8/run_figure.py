"""The figure of scripts/plot: curves, marks and FP8 statistics as data, and their drawing with matplotlib."""
import math
import re
import statistics
from pathlib import Path

from .run_log import InputError
from .support import need, one_line, replacement

# Panels: the step's field, axis label, logarithmic axis.
PANELS = {
    "loss": ("loss", "loss (nats a token)", True),
    "norm": ("grad_norm", "gradient norm", True),
    "seconds": ("step_seconds", "s/it", False),
    "rate": ("tokens_per_second", "tokens/s", False),
    "clip": ("grad_mul", "clip ratio (1: not clipped)", False),
    "utilization": ("gpu_utilization", "GPU utilisation (%)", False),
    "power": ("power_w", "power of a GPU (W)", False),
    "energy": ("joules_per_token", "energy (J/token)", False),
}
ALWAYS = ["loss", "norm", "seconds", "rate"]   # the others are drawn if a run has values for them
# Heat maps: axis label, range of the colours; amax takes that of its values.
HEALTH = {
    "amax": ("amax", None),
    "flushed": ("flushed to zero (share of values)", (1e-6, 1.0)),
    "saturated": ("saturated (share of values)", (1e-6, 1.0)),
}
BLOCK_SCALES = {
    "scale_min": ("smallest scale of a block", None),
    "scale_median": ("median scale of the blocks", None),
    "scale_max": ("largest scale of a block", None),
    "scale_at_ends": ("scales at an end of their range (share of blocks)", (1e-6, 1.0)),
}
PANEL_HEIGHTS = [3.4, 2.8, 1.8, 1.8]   # inches, of two panels each
MAX_SMOOTH = 101
MARKS = {"skipped": "x", "warning": "^", "fp8": "d", "resumed": ">", "checkpoint": "s", "stop": "|"}


# ---- data ----

def place(run, step, x):
    """Position of a step on the axis: the step, or its tokens (None if the log does not have them)."""
    return step if x == "step" else run.tokens_at(step)


def points(run, values, x):
    """Positions and values of {step: value}; a value that is not finite becomes nan, a gap."""
    pairs = [(place(run, step, x), values[step]) for step in sorted(values)]
    pairs = [(at, value) for at, value in pairs if at is not None]
    return [at for at, _ in pairs], [value if value is not None and math.isfinite(value) else math.nan
                                     for _, value in pairs]


def smooth(values, width, middle=statistics.fmean):
    """Centred moving mean (`middle`: or median) over `width` values, fewer at the ends, without nan."""
    half = width // 2
    means = []
    for i in range(len(values)):
        window = [v for v in values[max(0, i - half):i + half + 1] if not math.isnan(v)]
        means.append(middle(window) if window else math.nan)
    return means


def curves(run, x="step"):
    """{panel: (positions, values)}, with the validation loss as "valid"."""
    data = {panel: points(run, {step: record[field] for step, record in run.steps.items() if field in record}, x)
            for panel, (field, _, _) in PANELS.items()}
    data["valid"] = points(run, {step: record["loss"] for step, record in run.evals.items()}, x)
    return data


def panel_rows(runs):
    """The panels to draw, two in a row; a last one alone is as wide as two."""
    def has(panel):
        shown = [value for run in runs for value in curves(run)[panel][1] if not math.isnan(value)]
        return any(value != 1 for value in shown) if panel == "clip" else bool(shown)
    names = [panel for panel in PANELS if panel in ALWAYS or has(panel)]
    return [(names[i:i + 2] * 2)[:2] for i in range(0, len(names), 2)]


def marks(run, x="step"):
    """{kind: positions} of skipped steps, events other than notes, resumes and checkpoints."""
    steps = {"skipped": [step for step, record in sorted(run.steps.items()) if record["skipped"]],
             "resumed": run.resumed_at, "checkpoint": [record["step"] for record in run.checkpoints]}
    for event in run.events:
        if event["kind"] != "note":
            steps.setdefault(event["kind"], []).append(event["step"])
    places = {kind: [place(run, step, x) for step in of_kind] for kind, of_kind in steps.items()}
    return {kind: [at for at in of_kind if at is not None] for kind, of_kind in places.items() if any(of_kind)}


def tensor_order(names):
    """Groups names by linear and role, in the order of layers: [(group, [names])], "3.down.dy" in "down.dy"."""
    groups = {}
    for name in names:
        layer, group = re.fullmatch(r"(?:(\d+)\.)?(.*)", name).groups()
        groups.setdefault(group, []).append((int(layer or 0), name))
    return [(group, [name for _, name in sorted(members)]) for group, members in groups.items()]


def health(run, x="step", fields=HEALTH):
    """Positions of the records, groups of tensor_order, and {field: one row of values per tensor}, nan if missing."""
    steps = [step for step in sorted(run.fp8) if place(run, step, x) is not None]
    names = dict.fromkeys(name for step in steps for name in run.fp8[step])
    groups = tensor_order(names)
    rows = {field: [[run.fp8[step].get(name, {}).get(field, math.nan) for step in steps]
                    for _, members in groups for name in members] for field in fields}
    return [place(run, step, x) for step in steps], groups, rows


def worst(run, field):
    """(value, tensor, step) of the largest finite value, None if none is above zero."""
    found = [(tensor[field], name, step) for step, tensors in run.fp8.items() for name, tensor in tensors.items()
             if math.isfinite(tensor.get(field, math.nan)) and tensor[field] > 0]
    return max(found) if found else None


def edges(places):
    """Borders of columns: half way between positions; the outer columns are symmetric."""
    if len(places) == 1:
        return [places[0] - 0.5, places[0] + 0.5]
    middles = [(a + b) / 2 for a, b in zip(places, places[1:])]
    return [2 * places[0] - middles[0], *middles, 2 * places[-1] - middles[-1]]


def robust_top(values):
    """Top of an axis without a few slow steps (the first ones, evaluations); None if all fit."""
    finite = sorted(v for v in values if not math.isnan(v))
    if len(finite) < 8:
        return None
    usual = finite[int(0.98 * (len(finite) - 1))]
    top = usual + 0.5 * (usual - finite[0]) + 0.05 * usual
    return top if finite[-1] > 1.5 * top else None


# ---- figure ----

def label_of(run):
    return run.name + (", synthetic data" if run.synthetic else "")


def label_x(axes, x):
    axes.set_xlabel("step" if x == "step" else "tokens")
    if x == "tokens":
        axes.xaxis.set_major_formatter(need("matplotlib.ticker", "matplotlib", "plot").EngFormatter(sep=""))


def scale_y(axes, panel, shown):
    """Sets the vertical axis: logarithmic if the panel wants it and all values are positive, else from 0."""
    ticker = need("matplotlib.ticker", "matplotlib", "plot")
    label, logarithmic = PANELS[panel][1:]
    axes.set_ylabel(label)
    finite = [v for v in shown if not math.isnan(v)]
    if logarithmic and finite and min(finite) > 0:
        axes.set_yscale("log")
        span = max(finite) / min(finite)
        if span < 1000:   # few powers of ten: adds ticks between them, as plain numbers
            axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 6, 8) if span < 20 else (1, 2, 5)))
            axes.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
            axes.yaxis.set_minor_formatter(ticker.NullFormatter())
    elif not logarithmic:
        top = robust_top(shown)
        if top is not None and panel == "seconds":
            axes.set_ylim(top=top)
            axes.set_title(f"{sum(v > top for v in finite)} of {len(finite)} steps are above the axis, at most "
                           f"{max(finite):.4g} s", fontsize=8, loc="right")
        axes.set_ylim(bottom=0)
    if panel == "rate":
        axes.yaxis.set_major_formatter(ticker.EngFormatter(sep=""))


def draw_panel(axes, panel, runs, colours, x, width):
    shown = []
    for run, colour in zip(runs, colours):
        data = curves(run, x)
        at, values = data[panel]
        shown += values
        if width > 1:
            axes.plot(at, values, color=colour, linewidth=0.6, alpha=0.3)
            values = smooth(values, width, statistics.median if panel in ("seconds", "rate") else statistics.fmean)
        axes.plot(at, values, color=colour, linewidth=1.2, label=label_of(run), marker="." if len(at) < 30 else None)
        if panel == "loss":
            axes.plot(*data["valid"], color=colour, linestyle="--", linewidth=0.8, marker="o", markersize=5,
                      markerfacecolor="white")
            shown += data["valid"][1]
        for skipped in marks(run, x).get("skipped", []):
            axes.axvline(skipped, color="red", linewidth=0.8, alpha=0.5)
    scale_y(axes, panel, shown)
    axes.grid(alpha=0.3)
    label_x(axes, x)


def draw_marks(axes, runs, colours, x):
    all_marks = [marks(run, x) for run in runs]
    kinds = [kind for kind in dict.fromkeys([*MARKS, *(kind for found in all_marks for kind in found)])
             if any(kind in found for found in all_marks)]
    for i, (found, colour) in enumerate(zip(all_marks, colours)):
        # The runs' marks are one below the other within a kind's row.
        shift = (i + 0.5) / len(runs) - 0.5
        for kind, at in found.items():
            axes.plot(at, [kinds.index(kind) + 0.7 * shift] * len(at), MARKS.get(kind, "*"), color=colour,
                      markersize=5, linestyle="none")
    axes.set_yticks(range(len(kinds)), kinds)
    axes.set_ylim(len(kinds) - 0.5, -0.5)
    axes.grid(axis="x", alpha=0.3)
    label_x(axes, x)


def draw_curves(figure, runs, x, width, mark_height):
    """Draws the panels, the marks below them, and the legend above them."""
    colour_map = need("matplotlib", "matplotlib", "plot").colormaps["tab10" if len(runs) <= 10 else "tab20"].colors
    colours = [colour_map[i % len(colour_map)] for i in range(len(runs))]
    rows = panel_rows(runs)
    all_axes = figure.subplot_mosaic(rows + [["marks", "marks"]] * (mark_height > 0),
                                     height_ratios=PANEL_HEIGHTS[:len(rows)] + [mark_height] * (mark_height > 0))
    for name, axes in all_axes.items():
        if axes is not all_axes["loss"]:
            axes.sharex(all_axes["loss"])
        if name == "marks":
            draw_marks(axes, runs, colours, x)
        else:
            draw_panel(axes, name, runs, colours, x, width)
    handles, labels = all_axes["loss"].get_legend_handles_labels()
    extra = []
    if any(run.evals for run in runs):
        extra.append(({"linestyle": "--", "marker": "o", "markerfacecolor": "white", "color": "grey"}, "validation"))
    if width > 1:
        extra.append(({"color": "grey", "linewidth": 0.6}, f"each step (thick: mean, of speed the median, of {width})"))
    if any(record["skipped"] for run in runs for record in run.steps.values()):
        extra.append(({"color": "red", "linewidth": 0.8}, "skipped step"))
    line = need("matplotlib.lines", "matplotlib", "plot").Line2D
    handles += [line([], [], **style) for style, _ in extra]
    figure.legend(handles, labels + [label for _, label in extra], loc="outside upper center", fontsize=9,
                  ncols=min(5, len(handles)))


def draw_health(figure, run, x, fields):
    """Draws a heat map of each field of a run's FP8 tensors, with one row per tensor and one column per record."""
    at, groups, rows = health(run, x, fields)
    package = need("matplotlib.colors", "matplotlib", "plot")
    colormaps = need("matplotlib", "matplotlib", "plot").colormaps
    bounds = [0]
    for _, members in groups:
        bounds.append(bounds[-1] + len(members))
    figure.suptitle(f"{label_of(run)}: FP8 tensors", fontsize=10)
    for axes, (field, (label, limits)) in zip(figure.subplots(1, len(fields), sharey=True), fields.items()):
        positive = [v for row in rows[field] for v in row if math.isfinite(v) and v > 0]
        low, high = limits or (min(positive, default=1), max(positive, default=1))
        # White: zero. Magenta: not finite, or the tensor is not in the record.
        palette = colormaps["viridis" if limits is None else "YlOrRd"].with_extremes(under="white", bad="magenta")
        # Zero has no logarithm: it is drawn as a value below the range.
        mesh = axes.pcolormesh(edges(at), range(bounds[-1] + 1),
                               [[max(v, low / 10) if math.isfinite(v) else math.nan for v in row]
                                for row in rows[field]],
                               norm=package.LogNorm(low, max(high, low * 1.01)), cmap=palette)
        axes.set_ylim(bounds[-1], 0)
        axes.set_yticks([(a + b) / 2 for a, b in zip(bounds, bounds[1:])], [group for group, _ in groups], fontsize=8)
        axes.tick_params(axis="y", length=0)
        for bound in bounds[1:-1]:
            axes.axhline(bound, color="grey", linewidth=0.5)
        figure.colorbar(mesh, ax=axes, label=label, extend="neither" if limits is None else "min", pad=0.01)
        top = worst(run, field)
        axes.set_title(f"largest {field}: {top[0]:.3g} ({top[1]}, step {top[2]})" if top else f"nothing {field}",
                       fontsize=9)
        axes.set_ylabel("tensors; layer 0 at the top of each group" if field == next(iter(fields)) else "")
        label_x(axes, x)


def draw(runs, x="step", width=0):
    """A matplotlib Figure of all runs. width of the moving mean; 0: a fiftieth of the longest run."""
    width = width or min(MAX_SMOOTH, max(1, max((len(run.steps) for run in runs), default=0) // 50))
    kinds = len({kind for run in runs for kind in marks(run, x)})
    mark_height = 0.5 + 0.22 * kinds * max(1, len(runs) / 3) if kinds else 0
    fp8 = [(run, HEALTH) for run in runs if run.fp8]
    fp8 += [(run, BLOCK_SCALES) for run in runs if any("scale_min" in tensor for tensors in run.fp8.values()
                                                       for tensor in tensors.values())]
    heights = [sum(PANEL_HEIGHTS[:len(panel_rows(runs))]) + mark_height + 0.8]
    heights += [max(2.6, 0.24 * len(tensor_order(next(iter(run.fp8.values())))) + 1) for run, _ in fp8]
    figure = need("matplotlib.figure", "matplotlib", "plot").Figure(figsize=(15, sum(heights)), layout="constrained")
    parts = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    draw_curves(parts[0], runs, x, width, mark_height)
    for part, (run, fields) in zip(parts[1:], fp8):
        draw_health(part, run, x, fields)
    return figure


def save(figure, path):
    """Replaces the file atomically, so that viewers never see half a picture."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacement(path) as aside:
            figure.savefig(aside, dpi=100)
    except (OSError, ValueError) as error:   # ValueError: a suffix that matplotlib does not know
        raise InputError(f"{path}: {one_line(error)}") from None


def usual_seconds(run):
    seconds = [record["step_seconds"] for record in run.step_list()[-20:] if record["step_seconds"] is not None]
    return statistics.median(seconds) if seconds else math.nan
