"""The two plots of a comparison: s/it and loss (matplotlib)."""
import math

from ..run_figure import points, scale_y, smooth
from ..support import need


def colours_of(configurations):
    names = need("matplotlib", "matplotlib", "scripts/compare").colormaps["tab10" if len(configurations) <= 10
                                                                           else "tab20"].colors
    return [names[i % len(names)] for i in range(len(configurations))]


def new_figure(title, comparison):
    figure = need("matplotlib.figure", "matplotlib", "scripts/compare").Figure(figsize=(14, 5.5), layout="constrained")
    if comparison.synthetic:
        title += f"; SYNTHETIC DATA: {', '.join(comparison.synthetic)}"
    figure.suptitle(title, fontsize=10)
    return figure


def draw_steps(axes, comparison, colours):
    """Draws every timed step; the rounds of all configurations have the same places on the axis."""
    rounds = range(max(len(c.rounds) for c in comparison.configurations))
    widths = [max(len(c.rounds[i]) for c in comparison.configurations if i < len(c.rounds)) for i in rounds]
    begins = [sum(widths[:i]) + i for i in rounds]
    shown = []
    for c, colour in zip(comparison.configurations, colours):
        for begin, timed in zip(begins, c.rounds):
            seconds = [record["step_seconds"] for record in timed]
            axes.plot(range(begin, begin + len(timed)), seconds, color=colour, linewidth=0.8,
                      marker="." if sum(widths) <= 200 else None, label=c.name if begin == 0 else None)
            shown += seconds
    for begin in begins[1:]:
        axes.axvline(begin - 1, color="grey", linewidth=0.5)
    axes.set_xticks([begin + (width - 1) / 2 for begin, width in zip(begins, widths)],
                    [f"round {i + 1}" for i in rounds])
    scale_y(axes, "seconds", shown)
    axes.set_title(f"timed steps ({comparison.warmup} of warm-up left out)", fontsize=9, loc="left")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize=8)


def draw_bars(axes, comparison, colours):
    rows = comparison.rows
    for i, (row, colour) in enumerate(zip(rows, colours)):
        rate = row.seconds
        axes.barh(i, rate.median, color=colour, alpha=0.7, capsize=3,
                  xerr=[[rate.median - rate.quarter], [rate.three_quarters - rate.median]])
        ratio = "" if row.is_base else ", not compared" if row.ratio is None else f", {row.ratio:.3f} x"
        star = " *" if ratio and row.ratio is not None and row.verdict.text() else ""
        axes.text(rate.three_quarters, i, f"  {rate.median:.4g} s{ratio}{star}", va="center", fontsize=9)
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, 1.35 * max(row.seconds.three_quarters for row in rows))
    axes.set_xlabel("s/it: median and quartiles")
    starred = any(row.verdict.text() and row.ratio is not None and not row.is_base for row in rows)
    axes.set_title(f"speed against {comparison.base.name}"
                   + (" (*: they differ in more than precision, see the table)" if starred else ""), fontsize=9)
    axes.grid(axis="x", alpha=0.3)


def speed_figure(comparison, title):
    figure = new_figure(title, comparison)
    left, right = figure.subplots(1, 2)
    colours = colours_of(comparison.configurations)
    draw_steps(left, comparison, colours)
    draw_bars(right, comparison, colours)
    return figure


def draw_losses(axes, comparison, colours, places, limit):
    """places(configuration): {step: position on the axis}; validation losses are circles."""
    shown, window = [], comparison.limits.window
    for c, colour in zip(comparison.configurations, colours):
        at = places(c)
        if c.synthetic or at is None:
            continue
        steps = [step for step in sorted(c.first.steps) if step in at]
        _, losses = points(c.first, {step: c.first.steps[step]["loss"] for step in steps}, "step")
        width = window if len(steps) >= 10 * window else 1
        if width > 1:
            axes.plot([at[step] for step in steps], losses, color=colour, linewidth=0.5, alpha=0.3)
        axes.plot([at[step] for step in steps], smooth(losses, width), color=colour, linewidth=1.2, label=c.name,
                  marker="." if len(steps) < 30 else None)
        valid = {step: record["loss"] for step, record in c.first.evals.items() if step in at}
        axes.plot([at[step] for step in sorted(valid)], [valid[step] for step in sorted(valid)], color=colour,
                  linestyle="--", linewidth=0.8, marker="o", markersize=5, markerfacecolor="white")
        shown += [loss for loss in [*losses, *valid.values()] if not math.isnan(loss)]
    if limit is not None:
        axes.axvline(limit, color="grey", linewidth=0.8, linestyle=":")
    scale_y(axes, "loss", shown)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def gaps(comparison):
    """{name: [(tokens, relative difference to the baseline's loss)]} of comparable configurations."""
    base = {record["tokens"]: record["loss"] for record in comparison.base.first.step_list()}
    found = {}
    for row in comparison.rows:
        if row.is_base or not row.verdict.comparable or row.configuration.synthetic:
            continue
        found[row.name] = [(record["tokens"], record["loss"] / base[record["tokens"]] - 1)
                           for record in row.configuration.first.step_list() if base.get(record["tokens"])]
    return found


def draw_gaps(axes, comparison, colours):
    names = [c.name for c in comparison.configurations]
    for name, pairs in gaps(comparison).items():
        values = [100 * gap if math.isfinite(gap) else math.nan for _, gap in pairs]
        width = comparison.limits.window if len(values) >= 10 * comparison.limits.window else 1
        axes.plot([tokens for tokens, _ in pairs], smooth(values, width), color=colours[names.index(name)],
                  linewidth=1, marker="." if len(pairs) < 30 else None)
    axes.axhline(0, color=colours[names.index(comparison.base.name)], linewidth=1)
    axes.set_ylabel(f"training loss against {comparison.base.name}, %")
    axes.grid(alpha=0.3)


def label_tokens(axes):
    axes.set_xlabel("tokens")
    axes.xaxis.set_major_formatter(need("matplotlib.ticker", "matplotlib", "scripts/compare").EngFormatter(sep=""))


def loss_figure(comparison, title):
    """None if all runs have synthetic data."""
    if comparison.limits.tokens is None:
        return None
    figure = new_figure(f"{title}; circles: validation, dotted: where the table compares", comparison)
    left, middle, right = figure.subplots(1, 3)
    middle.sharey(left)
    colours = colours_of(comparison.configurations)
    draw_losses(left, comparison, colours,
                lambda c: {step: record["tokens"] for step, record in c.first.steps.items()}, comparison.limits.tokens)
    draw_losses(middle, comparison, colours, lambda c: c.clock(), comparison.limits.seconds)
    middle.set_xlabel("seconds of training steps")
    middle.set_ylabel("")
    draw_gaps(right, comparison, colours)
    label_tokens(left)
    label_tokens(right)
    return figure
