"""The two plots of a comparison: s/it and loss (matplotlib)."""
import math

from run_figure import points, scale_y, smooth
from support import need


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
    """Every timed step in the order of its configuration's rounds, which lie side by side."""
    longest = max(len(timed) for c in comparison.configurations for timed in c.rounds)
    rounds = max(len(c.rounds) for c in comparison.configurations)
    for c, colour in zip(comparison.configurations, colours):
        for i, timed in enumerate(c.rounds):
            axes.plot([i * (longest + 1) + k for k in range(len(timed))], [record["step_seconds"] for record in timed],
                      color=colour, linewidth=0.8, marker="." if longest * rounds <= 200 else None,
                      label=c.name if i == 0 else None)
    for i in range(1, rounds):
        axes.axvline(i * (longest + 1) - 1, color="grey", linewidth=0.5)
    axes.set_xticks([i * (longest + 1) + (longest - 1) / 2 for i in range(rounds)],
                    [f"round {i + 1}" for i in range(rounds)])
    axes.set_ylim(bottom=0)
    axes.set_ylabel("s/it")
    axes.set_title(f"timed steps, the first {comparison.warmup} of every start left out", fontsize=9)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize=8)


def draw_bars(axes, comparison, colours):
    rows = comparison.rows
    for i, (row, colour) in enumerate(zip(rows, colours)):
        rate = row.seconds
        axes.barh(i, rate.median, color=colour, alpha=0.7, xerr=[[rate.median - rate.low], [rate.high - rate.median]],
                  capsize=3)
        ratio = "" if row.is_base else ", not compared" if row.ratio is None else f", {row.ratio:.3f} x"
        axes.text(rate.high, i, f"  {rate.median:.4g} s{ratio}" + " *" * (not row.is_base and row.ratio is not None
                                                                          and bool(row.verdict.text())),
                  va="center", fontsize=9)
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, 1.35 * max(row.seconds.high for row in rows))
    axes.set_xlabel("s/it: median, least and most")
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
    """places: of a configuration, {step: where it stands on the axis}; validation losses are circles."""
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


def loss_figure(comparison, title):
    """None where no run has a loss that means something."""
    if comparison.limits.tokens is None:
        return None
    figure = new_figure(f"{title}; circles: validation, dotted: where the table compares", comparison)
    left, right = figure.subplots(1, 2, sharey=True)
    colours = colours_of(comparison.configurations)
    draw_losses(left, comparison, colours,
                lambda c: {step: record["tokens"] for step, record in c.first.steps.items()}, comparison.limits.tokens)
    left.set_xlabel("tokens")
    left.xaxis.set_major_formatter(need("matplotlib.ticker", "matplotlib", "scripts/compare").EngFormatter(sep=""))
    draw_losses(right, comparison, colours, lambda c: c.clock(), comparison.limits.seconds)
    right.set_xlabel("seconds of training steps")
    right.set_ylabel("")
    return figure
