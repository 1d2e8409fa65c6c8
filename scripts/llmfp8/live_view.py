"""The log of a run as one screen of plain text, for scripts/watch. Standard library only."""
import math
import os
import statistics
import textwrap
import time
from collections import deque

from .report.stream import StreamedLog
from .support import InputError

LABEL = 9            # columns of the numbers beside a chart
USUAL_STEPS = 20     # whose median is the expected time of a step
START_S = 600        # without a record before the first step of a process, until the run counts as stalled
PATIENCE_S, PATIENCE_STEPS = 30, 10   # the same afterwards: the larger of both, and the longest evaluation or save


def plain(text):
    """Printable ASCII: one column a character on every terminal, and no escape sequence."""
    return "".join(c if " " <= c <= "~" else " " if c in "\n\t" else "?" for c in str(text))


def duration(seconds):
    """"42 s", "5 min", "1:02:03", "3 d 04:05"."""
    if not math.isfinite(seconds) or seconds < 0:
        return "unknown"
    if seconds < 600:
        return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
    days, rest = divmod(int(seconds), 86400)
    clock = f"{rest // 3600}:{rest // 60 % 60:02d}:{rest % 60:02d}"
    return f"{days} d {rest // 3600:02d}:{rest // 60 % 60:02d}" if days else clock


def short(value, digits=4):
    """A number for a label: 10.8, 1.2e-05, 318k."""
    if not math.isfinite(value):
        return str(value)
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= unit:
            return f"{value / (1e3 if name == 'k' else unit):.{digits - 1}g}{name}"
    return f"{value:.{digits}g}"


class WatchedRun(StreamedLog):
    """A log that is followed. Problems with the file are not raised, but described in `error`."""

    def _forget(self):
        super()._forget()
        self.lines = deque(maxlen=100)   # (step, text) of what is no step and no note
        self.throttled, self.hosts, self.longest_s, self.fp8_at = "", [], 0.0, None

    def look(self):
        """Reads what is new."""
        self.error = ""
        try:
            self.poll()
            self.written = os.stat(self.path).st_mtime
            if not self.headers:
                self.error = "no line is complete yet"
        except FileNotFoundError:
            self.error = "not there yet"
        except OSError as error:
            self.error = error.strerror
        except InputError as error:
            self.error = str(error).removeprefix(self.path).lstrip(":0123456789 ")

    def _note(self, step, text):
        self.lines.append((step, plain(text)))

    def _took(self, record):
        seconds = record.get("seconds")
        if isinstance(seconds, (int, float)) and math.isfinite(seconds):
            self.longest_s = max(self.longest_s, seconds)

    def _take_header(self, record):
        super()._take_header(record)
        if record["step"] > 0:
            self._note(record["step"], "resumed from a checkpoint")

    def _take_step(self, record):
        super()._take_step(record)
        if "throttled_by" in record:
            self.throttled = plain(record["throttled_by"])
        if record["skipped"]:
            self._note(record["step"], "SKIPPED: loss or gradient norm not finite")

    def _take_eval(self, record):
        super()._take_eval(record)
        self._took(record)
        self._note(record["step"], f"validation loss {short(self.evals[record['step']]['loss'], 5)}")

    def _take_hellaswag(self, record):
        super()._take_hellaswag(record)
        self._took(record)
        self._note(record["step"], f"HellaSwag accuracy {short(self.hellaswag[record['step']]['accuracy'])}")

    def _take_checkpoint(self, record):
        super()._take_checkpoint(record)
        self._took(record)
        self._note(record["step"], f"checkpoint {record['path']}")

    def _take_event(self, record):
        super()._take_event(record)
        if record["text"].startswith("ranks of host "):
            self.hosts.append(plain(record["text"].removeprefix("ranks of host ")))
        if record["kind"] != "note":
            self._note(record["step"], f"{record['kind']}: {record['text']}")

    # ---- what the screen says ----

    @property
    def step(self):
        return self.steps.at[-1] if self.steps.at else 0

    def last(self, field):
        """The field's newest value that is a number, nan if there is none."""
        for value in reversed(self.steps.columns[field]):
            if not math.isnan(value):
                return value
        return math.nan

    @property
    def step_seconds(self):
        recent = [value for value in self.steps.columns["step_seconds"][-USUAL_STEPS:] if math.isfinite(value)]
        return statistics.median(recent) if recent else math.nan

    @property
    def train_iters(self):
        found = self.last("train_iters")
        return int(found) if math.isfinite(found) else 0

    @property
    def ended(self):
        """The text of the end, "" while there is none."""
        if not self.finished:
            return ""
        kind, said = self.events[-1]["kind"], self.events[-1]["text"]
        return plain(said if kind == "stop" else f"{kind}: {said}")

    def state(self, now):
        """(word, explanation): ended, starting, running or STALLED."""
        if self.ended:
            return "ended", self.ended
        age = max(0.0, now - self.written)
        said = f"last record {duration(age)} ago"
        if len(self.steps) == 0 or self.headers[-1]["step"] >= self.step:   # no step of this process yet
            if age < START_S:
                return "starting", said
            return "STALLED", f"{said}, no step is done yet"
        usual = self.step_seconds
        allowed = max(PATIENCE_S, PATIENCE_STEPS * usual if math.isfinite(usual) else 0) + self.longest_s
        if age <= allowed:
            return "running", said
        return "STALLED", f"{said}, a step takes {short(usual, 3)} s: hangs, or was killed"

    def eta(self, now):
        return max(0.0, self.last("eta_seconds") - max(0.0, now - self.written))


# ---- parts of the screen ----

def chart(title, at, values, width, height):
    """`height` lines: the title, a chart (: from the smallest to the largest value of a column, * the mean), steps."""
    columns, rows = max(4, width - LABEL - 1), max(2, height - 2)
    count = len(values)
    parts = [(count * i // columns, count * (i + 1) // columns) for i in range(columns)] if count >= columns else \
        [(i, i + 1) for i in range(count)]
    cells = [[value for value in values[begin:end] if math.isfinite(value)] for begin, end in parts]
    known = [value for cell in cells for value in cell]
    if not known:
        return [f"{title}: no value yet"[:width]] + [""] * (height - 1)
    low, high = min(known), max(known)
    logarithmic = low > 0 and high > 3 * low
    scale = math.log if logarithmic else float
    begin, size = scale(low), scale(high) - scale(low)

    def row(value):
        return rows - 1 - round((scale(value) - begin) / size * (rows - 1)) if size > 0 else rows // 2
    grid = [[" "] * columns for _ in range(rows)]
    for i, cell in enumerate(cells):
        x = i if count >= columns else round(i * (columns - 1) / max(1, count - 1))
        if cell:
            for y in range(row(max(cell)), row(min(cell)) + 1):
                grid[y][x] = ":"
            grid[row(math.fsum(cell) / len(cell) if not logarithmic else statistics.geometric_mean(cell))][x] = "*"

    def label(y):
        value = begin + size * (rows - 1 - y) / (rows - 1)
        return short(math.exp(value) if logarithmic else value) if y in (0, rows // 2, rows - 1) else ""
    first, last = f"step {at[0]}", str(at[-1])
    foot = first + last.rjust(columns - len(first)) if len(first) + len(last) < columns else first
    return [(title + (" (log scale)" if logarithmic else ""))[:width],
            *(f"{label(y):>{LABEL}}|{''.join(line)}" for y, line in enumerate(grid)), " " * (LABEL + 1) + foot]


def beside(left, right, width):
    """Two charts in a row of `width` columns."""
    return [f"{a:<{width // 2}}{b}" for a, b in zip(left, right)]


def charts(run, columns, rows):
    """Curves that fill `rows` lines, at least 5 of them."""
    at, table = run.steps.at, run.steps.columns
    if rows < 5 or not at:
        return []
    recent = min(len(at), max(50, len(at) // 10))
    wide = columns >= 70
    width = columns // 2 - 1 if wide else columns
    tall = wide and rows >= 18
    height = rows // 2 if tall else rows
    loss = chart("loss", at, table["loss"], width, height)
    if not wide:
        return loss
    norm = chart("gradient norm", at, table["grad_norm"], width, height)
    if not tall and len(at) == recent:
        return beside(loss, norm, columns)
    lines = beside(loss, chart(f"loss, last {recent} steps", at[-recent:], table["loss"][-recent:], width, height),
                   columns)
    if tall:
        lines += beside(norm, chart(f"s/it, last {recent} steps", at[-recent:], table["step_seconds"][-recent:], width,
                                    height), columns)
    return lines


def bar(run, columns):
    total = run.train_iters
    text = f" step {run.step} of {total}" if total else f" step {run.step}"
    if total <= 0:
        return text.strip()
    share = min(1.0, run.step / total)
    text = f" {100 * share:.1f} %" + text
    width = max(4, columns - len(text) - 2)
    return "[" + "#" * int(share * width) + "-" * (width - int(share * width)) + "]" + text


def wrapped(line, columns):
    """At most two lines of text."""
    return textwrap.wrap(line, columns, subsequent_indent=" " * 10, max_lines=2, placeholder=" ...",
                         drop_whitespace=True) if len(line) > columns else [line]


def figures(pairs):
    return "  ".join(text for value, text in pairs if not math.isnan(value))


def gpu_line(run):
    names = {"gpu_utilization": "{:.0f} % busy", "power_w": "{:.0f} W", "sm_clock_mhz": "{:.0f} MHz",
             "gpu_temperature_c": "{:.0f} C", "gpu_memory_gib": "{:.1f} GiB used", "joules_per_token": "{:.3g} J/token"}
    found = figures([(value, form.format(value)) for field, form in names.items() for value in [run.last(field)]])
    return f"GPU   {found}" + (f"  throttled by {run.throttled}" if run.throttled not in ("", "none") else "") \
        if found else ""


def rank_line(run):
    world = run.headers[-1]["world"]
    if world == 1 and not run.hosts:
        return ""
    exposed = run.last("exposed_comm_seconds")
    comm = f"  exposed communication {1e3 * exposed:.1f} ms a step" if not math.isnan(exposed) else ""
    return f"ranks {world}{comm}" + (f"  {'; '.join(run.hosts[-8:])}" if run.hosts else "")


def fp8_line(run):
    """The largest shares of the newest FP8 record."""
    if not run.heat.columns:
        return ""
    names = list(run.heat.names)
    first, step, fields = run.heat.columns[-1]
    if all(math.isnan(value) for value in fields["saturated"]):
        return ""   # of a BF16 run
    found = []
    for field in ("saturated", "flushed"):
        values = [(value, names[row]) for row, value in enumerate(fields[field]) if not math.isnan(value)]
        if values and max(values)[0] > 0:
            share, name = max(values)
            found.append(f"{field} at most {100 * share:.3g} % ({plain(name)})")
    when = f"step {step}" if first == step else f"steps {first}-{step}"
    return f"FP8   {when}: {', '.join(found) or 'nothing saturated or flushed'}"


def view(run, columns, rows, now):
    """The lines of one run, in at most `rows`."""
    if run.error:
        return [f"{run.name}: {plain(run.error)}"]
    header, config = run.headers[-1], run.headers[-1]["config"]
    config = config if isinstance(config, dict) else {}
    recipe = config.get("fp8-recipe", "none")
    state, why = run.state(now)
    left = "" if state in ("ended", "STALLED") or not run.train_iters or math.isnan(run.last("eta_seconds")) else \
        f"  eta {duration(run.eta(now))}, " + time.strftime("%a %H:%M", time.localtime(now + run.eta(now)))
    valid = run.evals[max(run.evals)]["loss"] if run.evals else math.nan
    skipped = sum(value == 1 for value in run.steps.columns["skipped"])
    last = run.last
    lines = [plain(f"{run.name}: {config.get('model', 'model')}, "
                   f"{'FP8 ' + recipe if recipe != 'none' else config.get('dtype', '')}, "
                   f"{header['device'].get('name', '?')}" + (", SYNTHETIC DATA" if run.synthetic else "")),
             bar(run, columns), f"{state}: {why}" if not left else f"{state}{left}  {why}",
             figures([(last("loss"), f"loss {last('loss'):.4f}"),
                      (valid, f"validation {valid:.4f} at step {max(run.evals, default=0)}"),
                      (last("grad_norm"), f"norm {last('grad_norm'):.3g}"), (last("lr"), f"lr {last('lr'):.2e}"),
                      (skipped or math.nan, f"SKIPPED {skipped}")]),
             figures([(run.step_seconds, f"{short(run.step_seconds)} s/it"),
                      (last("tokens_per_second"), f"{short(last('tokens_per_second'))} tok/s"),
                      (last("mfu"), f"{100 * last('mfu'):.1f} % MFU"),
                      (last("tokens"), f"{short(last('tokens'))} tokens"),
                      (last("memory_gib"), f"{last('memory_gib'):.2f} GiB")]),
             gpu_line(run), rank_line(run), fp8_line(run),
             *([f"{len(run.damaged)} damaged lines are left out"] if run.damaged else []),
             *(["the last line of the log is cut off"] if run.torn and state == "STALLED" else [])]
    lines = [part for line in lines if line for part in wrapped(line, columns)]
    most = max(1, min(6, (rows - len(lines)) // 4))
    said = [part for step, text in list(run.lines)[-most:] for part in wrapped(f"{step:>8}  {text}", columns)][-most:]
    space = rows - len(lines) - len(said) - bool(said)
    return [*lines, *charts(run, columns, space), *(["last lines"] if said else []), *said]


def overview(runs, now, most):
    """A line per run."""
    rows = [("run", "step", "loss", "s/it", "eta", "state")]
    for run in runs[:most]:
        if run.error:
            rows.append((plain(run.name), "", "", "", "", plain(run.error)))
            continue
        eta = "" if run.ended or math.isnan(run.last("eta_seconds")) else duration(run.eta(now))
        rows.append((plain(run.name), f"{run.step}/{run.train_iters}", short(run.last("loss")),
                     short(run.step_seconds, 3), eta, ": ".join(run.state(now))))
    widths = [min(28, max(len(row[i]) for row in rows)) for i in range(5)]
    lines = ["  ".join(f"{cell[:width]:<{width}}" for cell, width in zip(row, widths)) + "  " + row[5] for row in rows]
    return lines + ([f"and {len(runs) - most} more"] if len(runs) > most else [])


def frame(runs, columns, rows, now):
    """The whole screen: at most `rows` lines of at most `columns` characters."""
    if len(runs) == 1:
        lines = view(runs[0], columns, rows, now)
    else:
        # Running ones come first, then the newest; the first of all is shown in full.
        order = sorted(runs, key=lambda run: (bool(run.error), bool(not run.error and run.ended),
                                              -getattr(run, "written", 0)))
        lines = [*overview(order, now, max(1, rows // 3 - 2)), ""]
        lines += view(order[0], columns, rows - len(lines), now)
    return [line[:columns].rstrip() for line in lines[:rows]]
