"""What scripts/plot draws: curves, marks and FP8 health as data, and the figure made of them (matplotlib)."""
import math
import re
import statistics
from pathlib import Path

from run_log import InputError  # also puts data/ on the path
from support import need, one_line

# Panels: the step's field, axis label, logarithmic axis.
PANELS = {
    "loss": ("loss", "loss (nats a token)", False),
    "norm": ("grad_norm", "gradient norm", True),
    "seconds": ("step_seconds", "s/it", False),
    "rate": ("tokens_per_second", "tokens/s", False),
}
# Heat maps: axis label, range of the colours; amax takes that of its values.
HEALTH = {
    "amax": ("amax", None),
    "flushed": ("flushed to zero (share of values)", (1e-6, 1.0)),
    "saturated": ("saturated (share of values)", (1e-6, 1.0)),
}
MARKS = {"skipped": "x", "warning": "^", "fp8": "d", "resumed": ">", "checkpoint": "s", "stop": "|"}


# ---- data ----

def place(run, step, x):
    """Where a step stands on the axis: step, or tokens (None where the log does not say)."""
    return step if x == "step" else run.tokens_at(step)


def points(run, values, x):
    """({step: value}) as lists of places and values; what is not finite is a gap (nan)."""
    pairs = [(place(run, step, x), values[step]) for step in sorted(values)]
    pairs = [(at, value) for at, value in pairs if at is not None]
    return [at for at, _ in pairs], [value if value is not None and math.isfinite(value) else math.nan
                                     for _, value in pairs]


def smooth(values, width):
    """Centred moving mean over `width` values (fewer at the ends), which passes over gaps."""
    half = width // 2
    means = []
    for i in range(len(values)):
        window = [v for v in values[max(0, i - half):i + half + 1] if not math.isnan(v)]
        means.append(sum(window) / len(window) if window else math.nan)
    return means


def curves(run, x="step"):
    """{panel: (places, values)}, validation loss in "valid"."""
    data = {panel: points(run, {step: record[field] for step, record in run.steps.items()}, x)
            for panel, (field, _, _) in PANELS.items()}
    data["valid"] = points(run, {step: record["loss"] for step, record in run.evals.items()}, x)
    return data


def marks(run, x="step"):
    """{kind: places} of what happened: skipped steps, events other than notes, resumes, checkpoints."""
    steps = {"skipped": [step for step, record in sorted(run.steps.items()) if record["skipped"]],
             "resumed": run.resumed_at, "checkpoint": [record["step"] for record in run.checkpoints]}
    for event in run.events:
        if event["kind"] != "note":
            steps.setdefault(event["kind"], []).append(event["step"])
    places = {kind: [place(run, step, x) for step in of_kind] for kind, of_kind in steps.items()}
    return {kind: [at for at in of_kind if at is not None] for kind, of_kind in places.items() if any(of_kind)}


def tensor_order(names):
    """Names sorted into groups of one linear and role, each by layer: [(group, [names])], "3.down.dy" in "down.dy"."""
    groups = {}
    for name in names:
        layer, group = re.fullmatch(r"(?:(\d+)\.)?(.*)", name).groups()
        groups.setdefault(group, []).append((int(layer or 0), name))
    return [(group, [name for _, name in sorted(members)]) for group, members in groups.items()]


def health(run, x="step"):
    """Places of the records, groups as of tensor_order, and {field: a row of values a tensor, nan where none}."""
    steps = [step for step in sorted(run.fp8) if place(run, step, x) is not None]
    names = dict.fromkeys(name for step in steps for name in run.fp8[step])
    groups = tensor_order(names)
    rows = {field: [[run.fp8[step].get(name, {}).get(field, math.nan) for step in steps]
                    for _, members in groups for name in members] for field in HEALTH}
    return [place(run, step, x) for step in steps], groups, rows


def worst(run, field):
    """(value, tensor, step) of the largest finite one, None without one above zero."""
    found = [(tensor[field], name, step) for step, tensors in run.fp8.items() for name, tensor in tensors.items()
             if math.isfinite(tensor[field]) and tensor[field] > 0]
    return max(found) if found else None


def edges(places):
    """Borders of columns: half way between the places, the outer ones as wide as their neighbours."""
    if len(places) == 1:
        return [places[0] - 0.5, places[0] + 0.5]
    middles = [(a + b) / 2 for a, b in zip(places, places[1:])]
    return [2 * places[0] - middles[0], *middles, 2 * places[-1] - middles[-1]]


def robust_top(values):
    """Top of an axis that a few slow steps (the first ones, evaluations) do not squeeze; None if all fit."""
    finite = sorted(v for v in values if not math.isnan(v))
    if len(finite) < 8:
        return None
    usual = finite[int(0.98 * (len(finite) - 1))]
    top = usual + 0.5 * (usual - finite[0]) + 0.05 * usual
    return top if finite[-1] > 1.5 * top else None


# ---- figure ----

def label_x(axes, x):
    axes.set_xlabel("step" if x == "step" else "tokens")
    if x == "tokens":
        axes.xaxis.set_major_formatter(need("matplotlib.ticker", "matplotlib", "plot").EngFormatter(sep=""))


def draw_panel(axes, panel, runs, colours, x, width):
    label, logarithmic = PANELS[panel][1:]
    shown = []
    for run, colour in zip(runs, colours):
        data = curves(run, x)
        at, values = data[panel]
        shown += values
        points_only = "." if len(at) < 30 else None
        if width > 1:
            axes.plot(at, values, color=colour, linewidth=0.6, alpha=0.3)
            values = smooth(values, width)
        axes.plot(at, values, color=colour, linewidth=1.2, label=run.name, marker=points_only)
        if panel == "loss" and data["valid"][0]:
            axes.plot(*data["valid"], color=colour, linestyle="--", linewidth=0.8, marker="o", markersize=5,
                      markerfacecolor="white", label=f"{run.name}, validation")
        for at in marks(run, x).get("skipped", []):
            axes.axvline(at, color="red", linewidth=0.8, alpha=0.5)
    axes.set_ylabel(label)
    if logarithmic and any(v > 0 for v in shown):
        axes.set_yscale("log")
    elif panel == "seconds" or panel == "loss":
        top = robust_top(shown)
        if top is not None:
            axes.set_ylim(top=top)
            axes.set_title(f"{sum(v > top for v in shown)} of {len(shown)} steps above the axis, at most "
                           f"{max(v for v in shown if v == v):.4g}", fontsize=8, loc="right")
    if panel in ("seconds", "rate"):
        axes.set_ylim(bottom=0)
    if panel == "rate":
        axes.yaxis.set_major_formatter(need("matplotlib.ticker", "matplotlib", "plot").EngFormatter(sep=""))
    axes.grid(alpha=0.3)
    label_x(axes, x)


def draw_marks(axes, runs, colours, x):
    all_marks = [marks(run, x) for run in runs]
    kinds = [kind for kind in dict.fromkeys([*MARKS, *(kind for found in all_marks for kind in found)])
             if any(kind in found for found in all_marks)]
    for i, (found, colour) in enumerate(zip(all_marks, colours)):
        # Runs side by side within a kind's line.
        shift = (i + 0.5) / len(runs) - 0.5
        for kind, at in found.items():
            axes.plot(at, [kinds.index(kind) + 0.7 * shift] * len(at), MARKS.get(kind, "*"), color=colour,
                      markersize=5, linestyle="none")
    axes.set_yticks(range(len(kinds)), kinds)
    axes.set_ylim(len(kinds) - 0.5, -0.5)
    axes.grid(axis="x", alpha=0.3)
    label_x(axes, x)


def draw_health(figure, all_axes, run, x):
    at, groups, rows = health(run, x)
    colours = need("matplotlib.colors", "matplotlib", "plot")
    bounds = [0]
    for _, members in groups:
        bounds.append(bounds[-1] + len(members))
    for axes, (field, (label, limits)) in zip(all_axes, HEALTH.items()):
        positive = [v for row in rows[field] for v in row if math.isfinite(v) and v > 0]
        low, high = limits or (min(positive, default=1), max(positive, default=1))
        palette = need("matplotlib", "matplotlib", "plot").colormaps["viridis" if limits is None else "inferno"].copy()
        palette.set_under("white")    # none
        palette.set_bad("magenta")    # not finite, or the tensor was not in the record
        # Zero has no logarithm: it goes below the range.
        mesh = axes.pcolormesh(edges(at), range(bounds[-1] + 1),
                               [[max(v, low / 10) if math.isfinite(v) else math.nan for v in row]
                                for row in rows[field]],
                               norm=colours.LogNorm(low, max(high, low * 1.01)), cmap=palette)
        axes.set_ylim(bounds[-1], 0)
        axes.set_yticks([(a + b) / 2 for a, b in zip(bounds, bounds[1:])], [group for group, _ in groups], fontsize=8)
        axes.tick_params(axis="y", length=0)
        for bound in bounds[1:-1]:
            axes.axhline(bound, color="grey", linewidth=0.5)
        figure.colorbar(mesh, ax=axes, label=label, extend="neither" if limits is None else "min")
        top = worst(run, field)
        axes.set_title(f"{run.name}: {field}, " + (f"largest {top[0]:.3g} ({top[1]}, step {top[2]})" if top else
                                                   "none"), fontsize=9)
        label_x(axes, x)
    all_axes[0].set_ylabel(f"tensors; in each group layer 0 at the top of {max(len(m) for _, m in groups)}")


def draw(runs, x="step", width=0):
    """A matplotlib Figure of all runs. width: of the moving mean; 0: a fiftieth of the longest run."""
    figure_class = need("matplotlib.figure", "matplotlib", "plot").Figure
    colour_map = need("matplotlib", "matplotlib", "plot").colormaps["tab10" if len(runs) <= 10 else "tab20"].colors
    colours = [colour_map[i % len(colour_map)] for i in range(len(runs))]
    longest = max((len(run.steps) for run in runs), default=0)
    width = width or max(1, longest // 50)
    fp8 = [run for run in runs if run.fp8]
    has_marks = any(marks(run, x) for run in runs)
    kinds = len({kind for run in runs for kind in marks(run, x)})
    heights = [3.4, 2.8] + [0.6 + 0.22 * kinds * max(1, len(runs) / 3)] * has_marks
    heights += [max(2.6, 0.24 * len(tensor_order(next(iter(run.fp8.values())))) + 1) for run in fp8]
    figure = figure_class(figsize=(15, sum(heights) + 0.6), layout="constrained")
    grid = figure.add_gridspec(len(heights), 6, height_ratios=heights)
    first = None
    for i, panel in enumerate(PANELS):
        axes = figure.add_subplot(grid[i // 2, 3 * (i % 2):3 * (i % 2) + 3], sharex=first)
        first = first or axes
        draw_panel(axes, panel, runs, colours, x, width)
    if has_marks:
        draw_marks(figure.add_subplot(grid[2, :], sharex=first), runs, colours, x)
    for row, run in enumerate(fp8, 2 + has_marks):
        draw_health(figure, [figure.add_subplot(grid[row, 2 * i:2 * i + 2]) for i in range(3)], run, x)
    handles, labels = first.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=min(4, len(labels)), fontsize=9)
    return figure


def save(figure, path):
    """Writes beside the file and renames: whoever looks at it sees a whole picture."""
    path = Path(path)
    aside = path.with_name(f".{path.stem}.tmp{path.suffix}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(aside, dpi=100)
        aside.replace(path)
    except (OSError, ValueError) as error:   # ValueError: a suffix that matplotlib does not know
        aside.unlink(missing_ok=True)
        raise InputError(f"{path}: {one_line(error)}") from None


def usual_seconds(run):
    seconds = [record["step_seconds"] for record in run.step_list()[-20:] if record["step_seconds"] is not None]
    return statistics.median(seconds) if seconds else math.nan
