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


def table(header, rows):
    return ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header),
            *("| " + " | ".join(cell(value) for value in row) + " |" for row in rows)]


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


def median(field, factor=1):
    def value(configuration):
        found = configuration.median(field)
        return None if found is None else factor * found
    return value


# Columns that not every log has: name, value of a configuration, format.
LOGGED_COLUMNS = [
    ("forward pass of a micro-batch ms, median", median("forward_seconds", 1000), ".4g"),
    ("loss and backward pass ms, median", median("backward_seconds", 1000), ".4g"),
    ("GPU utilisation %, median", median("gpu_utilization"), ".0f"),
    ("power W a GPU, median", median("power_w"), ".0f"),
    ("SM clock MHz, median", median("sm_clock_mhz"), ".0f"),
    ("highest C", lambda configuration: configuration.hottest, ".0f"),
    ("clocks held back by (share of steps)", lambda configuration: configuration.throttled, ""),
    ("J/token", lambda configuration: configuration.joules_per_token, ".4g"),
]


def more_columns(comparison):
    """Columns, as in LOGGED_COLUMNS, that all logs have but only some tables show."""
    if len({row.configuration.accumulation_steps for row in comparison.rows}) > 1:
        yield "gradient accumulation steps", lambda configuration: configuration.accumulation_steps, "d"
    if comparison.corpus:
        name, tokens = comparison.corpus
        yield (f"hours for {name}",
               lambda c: tokens / (c.tokens_per_gpu().median * c.world) / 3600, ".2f")


def speed_table(comparison, marks):
    rows = comparison.rows
    fp32 = any(row.configuration.config.get("dtype") == "fp32" for row in rows)
    peaks = ["bf16", "fp8"] + ["fp32"] * fp32
    sampled = [column for column in LOGGED_COLUMNS if any(column[1](row.configuration) is not None for row in rows)]
    sampled += more_columns(comparison)
    lines = []
    for row in rows:
        if row.is_base:
            ratio = "1"
        elif row.ratio is None:
            ratio = "not compared"
        else:
            ratio = f"{row.ratio:.3f}"
            if row.ratio_low is not None:
                ratio += f" ({row.ratio_low:.3f} to {row.ratio_high:.3f})"
        lines.append([row.name, row.precision, spread(row.seconds), row.seconds.count,
                      ", ".join(f"{median:.4g}" for median in row.round_medians),
                      f"{row.tokens_per_gpu.median:,.0f}", f"{row.samples.median:.4g}", f"{row.tflops:.4g}",
                      *(figure(row.mfu(peak), ".1%") for peak in peaks), f"{row.configuration.memory_gib:.2f}",
                      *(figure(value(row.configuration), form) for _, value, form in sampled),
                      ratio + marks.mark("" if row.is_base else row.verdict.text())])
    return table(["configuration", "precision", "s/it, median (min to max)", "timed steps", "medians of rounds",
                  "tokens/s/GPU", "samples/s", "TFLOP/s/GPU", *(f"MFU of {peak.upper()} peak" for peak in peaks),
                  "memory GiB", *(name for name, _, _ in sampled), f"speed against {comparison.base.name}"], lines)


def loss_table(comparison, marks):
    base, lines = comparison.base_row.losses, []
    for row in comparison.rows:
        mine, note = row.losses, marks.mark("" if row.is_base else row.verdict.text())
        valid_gap, why_not = row.valid_gap(base)

        def gap(difference, value, reason=""):
            if row.is_base or value is None:
                return ""
            if row.verdict.refused:
                return "not compared" + note
            return reason if difference is None else f"{100 * difference:+.2f} %" + note
        lines.append([row.name,
                      figure(mine.train_tokens, ",", ""), figure(mine.train, ".4f", mine.reason),
                      gap(row.gap(mine.train, base.train), mine.train),
                      figure(mine.valid_tokens, ",", ""), figure(mine.valid, ".4f", mine.valid_reason),
                      gap(valid_gap, mine.valid, why_not),
                      figure(mine.timed_tokens, ",", ""), figure(mine.timed, ".4f", mine.time_reason),
                      gap(row.gap(mine.timed, base.timed), mine.timed),
                      "" if row.configuration.synthetic else figure(row.configuration.least_loss, ".4f"),
                      figure(row.configuration.training_seconds, ".4g")])
    limits, against = comparison.limits, f"against {comparison.base.name}"
    time = "equal time" if limits.seconds is None else f"{limits.seconds:.4g} s"
    return table(["configuration", "training tokens", "training loss at equal tokens", against,
                  "training tokens", "validation loss at equal tokens", against,
                  f"tokens after {time}", f"training loss after {time}", against,
                  "least loss of a step", "training time s"], lines)


def when(run):
    return datetime.fromtimestamp(run.headers[0]["unix_time"], timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def provenance(comparison):
    lines = []
    for c in comparison.configurations:
        header, device = c.header, c.header["device"]
        parts = [f"commit {header['commit']}", f"{c.world} x {device['name']}"]
        parts += [f"{word} {device[key]}" for word, key in (("driver", "driver"), ("CUDA", "toolkit"),
                                                            ("matmuls by", "matmul_library")) if device.get(key)]
        notes = [event["text"] for event in c.first.events if event["text"].startswith("attention: ")]
        parts += [cell(note) for note in notes[:1]]
        lines += [f"**{cell(c.name)}**: {', '.join(parts)}; {len(c.runs)} log{'s' * (len(c.runs) > 1)}, from "
                  f"{when(c.first)}: {', '.join(run.path for run in c.runs)}", "", "```", header["command"],
                  *(header.get("fp8_plan") or "").rstrip("\n").splitlines(), "```", ""]
    return lines[:-1]


def explain(comparison):
    limits = comparison.limits
    lines = [f"The first {comparison.warmup} steps of every start are warm-up and left out. s/it is the time of a step "
             "without evaluation and checkpoints; speed is the ratio of median tokens/s/GPU, of several rounds the "
             "median (least to most) of their ratios. TFLOP/s and MFU count the model's FLOPs, FP8 or not."]
    if any(row.mfu(peak) is None for row in comparison.rows for peak in ("bf16", "fp8")):
        lines.append("MFU is n/a where the trainer has no audited peak of the GPU in that type, or its log is of a "
                     "commit that did not write it down.")
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
    lines += [*speed_table(comparison, marks), "", *loss_table(comparison, marks), ""]
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
        "s_per_it_quarter": row.seconds.quarter, "s_per_it_three_quarters": row.seconds.three_quarters,
        "s_per_it_max": row.seconds.high, "s_per_it_rounds": " ".join(map(repr, row.round_medians)),
        "tokens_per_s_per_gpu": row.tokens_per_gpu.median, "samples_per_s": row.samples.median,
        "tflops_per_gpu": row.tflops, "mfu_bf16_peak": row.mfu("bf16"), "mfu_fp8_peak": row.mfu("fp8"),
        "mfu_fp32_peak": row.mfu("fp32"), "memory_gib": c.memory_gib, "speed_ratio": row.ratio,
        "speed_ratio_min": row.ratio_low, "speed_ratio_max": row.ratio_high,
        "differences": "" if row.is_base else row.verdict.text(),
        "tokens_trained": c.tokens, "equal_tokens": losses.train_tokens, "loss_equal_tokens": losses.train,
        "loss_equal_tokens_gap": row.gap(losses.train, base.train), "loss_reason": losses.reason,
        "valid_tokens": losses.valid_tokens, "valid_loss_equal_tokens": losses.valid,
        "valid_loss_gap": row.valid_gap(base)[0],
        "valid_reason": losses.valid_reason or row.valid_gap(base)[1],
        "equal_time_s": None if c.synthetic else comparison.limits.seconds,
        "equal_time_tokens": losses.timed_tokens, "loss_equal_time": losses.timed,
        "loss_equal_time_gap": row.gap(losses.timed, base.timed), "equal_time_reason": losses.time_reason,
        "gpu_utilization_median": c.median("gpu_utilization"), "gpu_power_w_median": c.median("power_w"),
        "sm_clock_mhz_median": c.median("sm_clock_mhz"), "celsius_max": c.hottest, "throttled_by": c.throttled,
        "joules_per_token": c.joules_per_token,
        "forward_seconds_median": c.median("forward_seconds"), "backward_seconds_median": c.median("backward_seconds"),
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
