"""The log of a run as one screen of plain text, for scripts/watch. Standard library only."""
import math
import os
import statistics
import textwrap
from collections import deque

from .run_log import RunLog, evaluation_text, last_text, numbers
from .support import InputError

LABEL = 9            # columns of the numbers beside a chart
USUAL_STEPS = 20     # whose median is the expected time of a step
START_S = 600        # without a record before the first step of a process, until the run counts as stalled
PATIENCE_S, PATIENCE_STEPS = 30, 10   # the same afterwards: the larger of both, and the longest evaluation or save
# Fields of a step in the lines below the state, with their forms.
LINES = [("", {"loss": "loss {:.4f}", "grad_norm": "norm {:.3g}", "lr": "lr {:.2e}"}),
         ("", {"tokens_per_second": "{:,.0f} tok/s", "mfu": "{:.1%} MFU", "tokens": "{:,} tokens",
               "memory_gib": "{:.2f} GiB", "exposed_comm_seconds": "exposed communication {:.2g} s a step"}),
         ("GPU  ", {"gpu_utilization": "{:.0f} % busy", "power_w": "{:.0f} W", "sm_clock_mhz": "{:.0f} MHz",
                    "gpu_temperature_c": "{:.0f} C", "gpu_memory_gib": "{:.1f} GiB used",
                    "joules_per_token": "{:.3g} J/token", "throttled_by": "throttled by {}"})]


def plain(text):
    """Printable ASCII: one column a character on every terminal, and no escape sequence."""
    return "".join(c if " " <= c <= "~" else " " if c in "\n\t" else "?" for c in str(text))


def duration(seconds):
    """"42 s", "5 min", "1:02:03", "3 d 04:05:06"."""
    if not math.isfinite(seconds) or seconds < 0:
        return "unknown"
    if seconds < 600:
        return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
    days, rest = divmod(int(seconds), 86400)
    return f"{days} d " * (days > 0) + f"{rest // 3600}:{rest // 60 % 60:02d}:{rest % 60:02d}"


class WatchedRun(RunLog):
    """A log that is followed. Problems with the file are not raised, but described in `error`."""

    def _forget(self):
        super()._forget()
        self.lines = deque(maxlen=100)   # (step, text) of what is no step and no note
        self.longest_s, self.written, self.fp8_line = 0.0, 0.0, ""

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

    def taken(self, record):
        kind, step, record = record["type"], record["step"], numbers(record)
        seconds = record.get("seconds", 0) if kind != "step" else 0
        self.longest_s = max(self.longest_s, seconds if math.isfinite(seconds) else 0)
        result = {"eval": "loss", "hellaswag": "accuracy"}.get(kind)
        said = evaluation_text(record, result, ".5g") if result else ""
        form = {"header": "resumed from a checkpoint" * (step > 0), "eval": "validation loss {said}",
                "step": ("SKIPPED: gradient norm above {norm_limit:.3g}" if record.get("norm_skipped") else
                         "SKIPPED: loss or gradient norm not finite") * bool(record.get("skipped")),
                "hellaswag": "HellaSwag accuracy {said}", "checkpoint": "checkpoint {path}",
                "event": "{kind}: {text}" * (record.get("kind") != "note")}.get(kind)
        if form:
            self.lines.append((step, plain(form.format(**{**record, "said": said}))))
        if kind == "fp8":
            self.fp8_line = fp8_line(step, self.fp8[step])
            self.fp8.clear()   # a long run has many

    @property
    def last(self):
        """The newest step, {} before the first one."""
        return self.steps[max(self.steps)] if self.steps else {}

    @property
    def step_seconds(self):
        recent = [record["step_seconds"] for record in self.step_list()[-USUAL_STEPS:]]
        recent = [value for value in recent if math.isfinite(value)]
        return statistics.median(recent) if recent else math.nan

    @property
    def ended(self):
        """The text of the end, "" while there is none."""
        if not self.finished:
            return ""
        kind, said = self.events[-1]["kind"], self.events[-1]["text"]
        return plain(said if kind == "stop" else f"{kind}: {said}")

    def state(self, now):
        """The state and what explains it: ended, starting, running or STALLED."""
        if self.ended:
            return f"ended: {self.ended}"
        age = max(0.0, now - self.written)
        said = f"last record {duration(age)} ago"
        if not self.steps or self.headers[-1]["step"] >= max(self.steps):   # no step of this process yet
            return f"starting: {said}" if age < START_S else f"STALLED: {said}, no step is done yet"
        usual = self.step_seconds
        if age <= max(PATIENCE_S, PATIENCE_STEPS * usual if math.isfinite(usual) else 0) + self.longest_s:
            return f"running, eta {duration(self.eta(now))}: {said}"
        return f"STALLED: {said}, a step takes {usual:.3g} s: hangs, or was killed"

    def eta(self, now):
        eta = self.last.get("eta_seconds")
        return math.nan if eta is None or math.isnan(eta) else max(0.0, eta - max(0.0, now - self.written))


def fp8_line(step, tensors):
    """The largest shares of a record."""
    found = []
    for field in ("saturated", "flushed"):
        share, name = max(((tensor[field], name) for name, tensor in tensors.items()), default=(0, ""))
        if share > 0:
            found.append(f"{field} at most {100 * share:.3g} % ({plain(name)})")
    return f"FP8   step {step}: {', '.join(found) or 'nothing saturated or flushed'}"


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
    logarithmic = low > 0 and high / low > 3
    begin, end = (math.log(low), math.log(high)) if logarithmic else (low, high)
    if not math.isfinite(end - begin):   # of numbers near the largest
        return [f"{title}: {low:.3g} to {high:.3g}"[:width]] + [""] * (height - 1)

    def row(value):
        place = ((math.log(value) if logarithmic else value) - begin) / (end - begin) if end > begin else 0.5
        return rows - 1 - round(place * (rows - 1))
    grid = [[" "] * columns for _ in range(rows)]
    for i, cell in enumerate(cells):
        x = i if count >= columns else round(i * (columns - 1) / max(1, count - 1))
        if cell:
            for y in range(row(max(cell)), row(min(cell)) + 1):
                grid[y][x] = ":"
            grid[row(statistics.geometric_mean(cell) if logarithmic else math.fsum(cell) / len(cell))][x] = "*"

    def label(y):
        value = begin + (end - begin) * (rows - 1 - y) / (rows - 1)
        return f"{math.exp(value) if logarithmic else value:.4g}" if y in (0, rows // 2, rows - 1) else ""
    first, last = f"step {at[0]}", str(at[-1])
    foot = first + last.rjust(columns - len(first)) if len(first) + len(last) < columns else first
    return [(title + (" (log scale)" if logarithmic else ""))[:width],
            *(f"{label(y):>{LABEL}}|{''.join(line)}" for y, line in enumerate(grid)), " " * (LABEL + 1) + foot]


def charts(run, columns, rows):
    """Curves that fill `rows` lines, at least 5 of them: two side by side if there is room."""
    if rows < 5 or not run.steps:
        return []
    records = run.step_list()
    recent = records[-max(50, len(records) // 10):]
    width = columns // 2 - 1 if columns >= 70 else columns

    def of(title, field, shown):
        return chart(title, [record["step"] for record in shown], [record[field] for record in shown], width, rows)
    loss = of("loss", "loss", records)
    if width == columns:
        return loss
    right = of("gradient norm", "grad_norm", records) if recent == records else of(f"loss, last {len(recent)} steps",
                                                                                   "loss", recent)
    return [f"{a:<{columns // 2}}{b}" for a, b in zip(loss, right)]


def bar(run, columns):
    step, total = run.last.get("step", 0), run.last.get("train_iters", 0)
    if total <= 0:
        return f"step {step}"
    share = min(1.0, step / total)
    text = f" {100 * share:.1f} % step {step} of {total}"
    width = max(4, columns - len(text) - 2)
    return "[" + "#" * int(share * width) + "-" * (width - int(share * width)) + "]" + text


def wrapped(line, columns):
    """At most two lines of text."""
    return textwrap.wrap(line, columns, subsequent_indent=" " * 10, max_lines=2, placeholder=" ...",
                         drop_whitespace=True) if len(line) > columns else [line]


def figures(run, head, forms):
    """A line of the newest step's fields that it has."""
    last = run.last
    found = [plain(form.format(last[field])) for field, form in forms.items()
             if last.get(field) not in (None, "", "none")]
    return "  ".join([head] * bool(head) + found) if found else ""


def view(run, columns, rows, now):
    """The lines of one run, in at most `rows`."""
    if run.error:
        return [f"{run.name}: {plain(run.error)}"]
    header, config = run.headers[-1], run.headers[-1]["config"]
    recipe = config.get("fp8-recipe", "none")
    skipped = sum(record["skipped"] for record in run.steps.values())
    lines = [plain(f"{run.name}: {config.get('model', 'model')}, "
                   f"{f'FP8 {recipe}' if recipe != 'none' else config.get('dtype', '')}, "
                   f"{header['world']} x {header['device'].get('name', '?')}"
                   + (", SYNTHETIC DATA" if run.synthetic else "")), bar(run, columns), run.state(now)]
    lines += [figures(run, *line) for line in LINES]
    lines += [f"{run.step_seconds:.4g} s/it" if run.steps else "", f"SKIPPED {skipped}" if skipped else "",
              f"validation {last_text(run.evals)}" if run.evals else "",
              run.fp8_line, f"{len(run.damaged)} damaged lines are left out" if run.damaged else "",
              "the last line of the log is cut off" if run.torn and "STALLED" in lines[2] else ""]
    lines = [part for line in lines if line for part in wrapped(line, columns)]
    most = max(1, min(6, (rows - len(lines)) // 4))
    said = [part for step, text in list(run.lines)[-most:] for part in wrapped(f"{step:>8}  {text}", columns)][-most:]
    space = rows - len(lines) - len(said) - bool(said)
    return [*lines, *charts(run, columns, space), *(["last lines"] if said else []), *said]


def line_of(run, now, width):
    if run.error:
        return f"{plain(run.name)[:width]:<{width}}  {plain(run.error)}"
    last = run.last
    done = f"{last['step']}/{last['train_iters']}  {last['loss']:.4g}  {run.step_seconds:.3g} s/it  " if last else ""
    return f"{plain(run.name)[:width]:<{width}}  {done}{run.state(now)}"


def frame(runs, columns, rows, now):
    """The whole screen: at most `rows` lines of at most `columns` characters. Of several runs each has a line; those
    that go on come first, then the newest, and the first of all is shown in full."""
    order = sorted(runs, key=lambda run: (bool(run.error), run.finished, -run.written))
    width = min(28, max(len(run.name) for run in runs))
    lines = [line_of(run, now, width) for run in order[:max(1, rows // 3)]] + [""] if len(runs) > 1 else []
    lines += view(order[0], columns, rows - len(lines), now)
    return [line[:columns].rstrip() for line in lines[:rows]]
