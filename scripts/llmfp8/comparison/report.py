"""Prints a comparison as Markdown and as CSV."""
import csv
import math
import shlex
from datetime import datetime, timezone

from ..run_log import InputError
from ..support import replacement


def cell(text):
    return " ".join(str(text).split()).replace("|", "\\|")


def spread(rate, digits=4):
    return f"{rate.median:.{digits}g} ({rate.low:.{digits}g} to {rate.high:.{digits}g})"


def figure(value, form, none="n/a"):
    return none if value is None or isinstance(value, float) and math.isnan(value) else format(value, form)


def table(columns, rows):
    """Markdown, aligned for a terminal, too. columns: [(heading, text of a row)]."""
    lines = [[heading for heading, _ in columns], *([cell(text(row)) for _, text in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines)]
    lines.insert(1, ["---".ljust(width, "-") for width in widths])
    return ["| " + " | ".join(f"{value:<{width}}" for value, width in zip(line, widths)) + " |" for line in lines]


class Footnotes:
    """Numbered lines below the tables; equal ones appear once."""

    def __init__(self):
        self.lines = []

    def mark(self, text):
        if not text:
            return ""
        if text not in self.lines:
            self.lines.append(text)
        return f" [{self.lines.index(text) + 1}]"


def median(field):
    return lambda configuration: configuration.median(field)


# What not every log has: column of the CSV, heading, format, value of a configuration.
LOGGED = [("gpu_utilization_median", "GPU utilisation %", ".0f", median("gpu_utilization")),
          ("gpu_power_w_median", "power W a GPU", ".0f", median("power_w")),
          ("sm_clock_mhz_median", "SM clock MHz", ".0f", median("sm_clock_mhz")),
          ("celsius_max", "highest C", ".0f", lambda c: max(c.logged("gpu_temperature_c"), default=None)),
          ("throttled_by", "clocks held back by (share of steps)", "", lambda c: c.throttled),
          ("joules_per_token", "J/token", ".4g", lambda c: c.joules_per_token),
          ("forward_seconds_median", "forward pass s", ".4g", median("forward_seconds")),
          ("backward_seconds_median", "loss and backward pass s", ".4g", median("backward_seconds"))]
NAME = ("configuration", lambda row: row.name)


def speed_columns(comparison, marks):
    peaks = ["bf16", "fp8"] + ["fp32"] * any(c.config.get("dtype") == "fp32" for c in comparison.configurations)

    def ratio(row):
        if row.is_base:
            return "1"
        text = "not compared" if row.ratio is None else f"{row.ratio:.3f}"
        rounds = "" if row.ratio_low is None else f" ({row.ratio_low:.3f} to {row.ratio_high:.3f})"
        return text + rounds + marks.mark(row.verdict.text())
    return [NAME, ("s/it (min to max)", lambda row: spread(row.seconds)),
            ("tokens/s/GPU", lambda row: f"{row.tokens_per_gpu.median:,.0f}"),
            (f"MFU of {', '.join(peaks).upper()} peak",
             lambda row: ", ".join(figure(row.mfu(peak), ".1%") for peak in peaks)),
            ("memory GiB", lambda row: f"{row.configuration.memory_gib:.2f}"),
            (f"speed against {comparison.base.name}", ratio), ("precision", lambda row: row.precision)]


def loss_columns(comparison, marks):
    """The columns of two tables: at equal tokens, and at equal time."""
    base, limits = comparison.base_row.losses, comparison.limits

    def against(kind, why=lambda row: ""):
        def text(row):
            mine = getattr(row.losses, kind)
            if row.is_base or mine is None:
                return ""
            note = marks.mark(row.verdict.text())
            if row.verdict.refused:
                return "not compared" + note
            gap = None if why(row) else row.gap(mine, getattr(base, kind))
            return why(row) if gap is None else f"{100 * gap:+.2f} %" + note
        return f"against {comparison.base.name}", text

    def trained(row):
        """With the tokens, if they are not those of the heading."""
        mine, tokens = row.losses, row.losses.train_tokens
        return figure(mine.train, ".4f", mine.reason) + (f" (at {tokens:,})" if tokens not in (None, limits.tokens)
                                                         else "")
    after = "equal time" if limits.seconds is None else f"{limits.seconds:.4g} s"
    return [NAME, (f"training loss at {figure(limits.tokens, ',', 'equal')} tokens", trained), against("train"),
            (f"validation loss{' in BF16' * comparison.in_bf16} at {figure(limits.valid_tokens, ',', 'equal')} tokens",
             lambda row: figure(row.losses.valid, ".4f", row.losses.valid_reason)),
            against("valid", lambda row: row.valid_gap(base)[1]),
            *[("as trained", lambda row: figure(row.losses.valid_as_trained, ".4f", "")),
              against("valid_as_trained", lambda row: row.valid_gap(base)[1])] * comparison.in_bf16], [
            NAME, (f"training loss after {after}", lambda row: figure(row.losses.timed, ".4f", row.losses.time_reason)),
            ("tokens by then", lambda row: figure(row.losses.timed_tokens, ",", "")), against("timed")]


def more_columns(comparison):
    """Of a step and of the whole training."""
    columns = [NAME, ("timed steps", lambda row: row.seconds.count),
               ("s/it of the rounds", lambda row: ", ".join(f"{median:.4g}" for median in row.round_medians)),
               ("samples/s", lambda row: f"{row.samples.median:.4g}"), ("TFLOP/s/GPU", lambda row: f"{row.tflops:.4g}"),
               ("least loss of a step",
                lambda row: "" if row.configuration.synthetic else figure(row.configuration.least_loss, ".4f")),
               ("training time s", lambda row: figure(row.configuration.training_seconds, ".4g"))]
    if len({row.configuration.accumulation_steps for row in comparison.rows}) > 1:
        columns.append(("gradient accumulation steps", lambda row: row.configuration.accumulation_steps))
    return columns


def logged_columns(comparison):
    """What the driver reported, and the times of a micro-batch: medians over the timed steps."""
    return [NAME, *((heading, lambda row, value=value, form=form: figure(value(row.configuration), form))
                    for _, heading, form, value in LOGGED
                    if any(value(configuration) is not None for configuration in comparison.configurations))]


def provenance(comparison):
    lines = []
    for c in comparison.configurations:
        header, device = c.header, c.header["device"]
        parts = [f"commit {header['commit']}", f"{c.world} x {device['name']}"]
        parts += [f"{word} {device[key]}" for word, key in (("driver", "driver"), ("CUDA", "toolkit"),
                                                            ("matmuls by", "matmul_library")) if device.get(key)]
        when = datetime.fromtimestamp(header["unix_time"], timezone.utc)
        lines += [f"**{cell(c.name)}**: {', '.join(parts)}; {len(c.runs)} log{'s' * (len(c.runs) > 1)}, from "
                  f"{when:%Y-%m-%d %H:%M} UTC: {', '.join(run.path for run in c.runs)}", "", "```", header["command"],
                  *(header.get("fp8_plan") or "").rstrip("\n").splitlines(), "```", ""]
    return lines[:-1]


def explain(comparison):
    limits = comparison.limits
    lines = [f"The first {comparison.warmup} steps of every start are warm-up and left out. s/it is the time of a step "
             "without evaluation and checkpoints; speed is the ratio of median tokens/s/GPU, of several rounds the "
             "median (least to most) of their ratios. TFLOP/s and MFU count the model's FLOPs, FP8 or not; MFU is n/a "
             "for a GPU and type of which the trainer has no audited peak."]
    if comparison.in_bf16:
        lines.append("Validation in BF16 is that of the weights that a run exports (--eval-bf16); as trained, in FP8.")
    if limits.tokens is not None:
        lines.append(f"Training losses are means of the last {limits.window} steps, of the first round. Equal tokens "
                     "and equal time are those of the run that has least; time is that of all training steps, "
                     "warm-up included, and of nothing else.")
    return lines


def markdown(comparison, title="Comparison"):
    marks = Footnotes()
    lines = [f"# {title}", ""]
    if comparison.synthetic:
        lines += [f"SYNTHETIC DATA ({', '.join(map(cell, comparison.synthetic))}): for timing alone, losses say "
                  "nothing.", ""]
    for columns in (speed_columns(comparison, marks), *loss_columns(comparison, marks), more_columns(comparison),
                    logged_columns(comparison)):
        if len(columns) > 1:
            lines += [*table(columns, comparison.rows), ""]
    lines += [f"[{i}] {text}" + "  " for i, text in enumerate(marks.lines, 1)]
    lines += [""] * bool(marks.lines) + [f"* {cell(line)}" for line in comparison.notes() + explain(comparison)]
    return "\n".join(line.rstrip() if not line.startswith("[") else line
                     for line in [*lines, "", "## Provenance", "", *provenance(comparison)]) + "\n"


def csv_row(comparison, row):
    """{column: value} at full precision; None is an empty cell."""
    c, losses, base = row.configuration, row.losses, comparison.base_row.losses
    device = c.header["device"]
    return {
        "configuration": row.name, "precision": row.precision, "baseline": comparison.base.name,
        "synthetic_data": int(c.synthetic), "warmup_steps": c.warmup, "timed_steps": row.seconds.count,
        "rounds": len(c.rounds), "s_per_it_median": row.seconds.median, "s_per_it_min": row.seconds.low,
        "s_per_it_max": row.seconds.high, "s_per_it_rounds": " ".join(map(repr, row.round_medians)),
        "tokens_per_s_per_gpu": row.tokens_per_gpu.median, "samples_per_s": row.samples.median,
        "tflops_per_gpu": row.tflops, "mfu_bf16_peak": row.mfu("bf16"), "mfu_fp8_peak": row.mfu("fp8"),
        "mfu_fp32_peak": row.mfu("fp32"), "memory_gib": c.memory_gib, "speed_ratio": row.ratio,
        "speed_ratio_min": row.ratio_low, "speed_ratio_max": row.ratio_high,
        "differences": "" if row.is_base else row.verdict.text(),
        "tokens_trained": c.tokens, "equal_tokens": losses.train_tokens, "loss_equal_tokens": losses.train,
        "loss_equal_tokens_gap": row.gap(losses.train, base.train), "loss_reason": losses.reason,
        "valid_tokens": losses.valid_tokens, "valid_loss_equal_tokens": losses.valid,
        "valid_loss_gap": row.valid_gap(base)[0], "valid_loss_in_bf16": int(comparison.in_bf16),
        "valid_loss_as_trained": losses.valid_as_trained,
        "valid_reason": losses.valid_reason or row.valid_gap(base)[1],
        "equal_time_s": None if c.synthetic else comparison.limits.seconds,
        "equal_time_tokens": losses.timed_tokens, "loss_equal_time": losses.timed,
        "loss_equal_time_gap": row.gap(losses.timed, base.timed), "equal_time_reason": losses.time_reason,
        **{column: value(c) for column, _, _, value in LOGGED},
        "least_loss": None if c.synthetic else c.least_loss, "training_seconds": c.training_seconds,
        "gpu": device["name"], "gpus": c.world, "driver": device.get("driver", ""),
        "toolkit": device.get("toolkit", ""), "matmul_library": device.get("matmul_library", ""),
        "commit": c.header["commit"], "command": c.header["command"], "logs": shlex.join(run.path for run in c.runs)}


def write_csv(comparison, path):
    rows = [csv_row(comparison, row) for row in comparison.rows]
    with replacement(path) as aside, open(aside, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({key: "" if value is None or value != value else value for key, value in row.items()})


def write_text(path, text):
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacement(path) as aside:
            aside.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"--out {path}: {error.strerror}") from None
