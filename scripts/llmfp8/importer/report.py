"""The importer's report: every setting in the order of the input, the errors found, and what is left to do."""
import textwrap

from .engine import is_open
from .rows import CANNOT, NONE, OTHER, TAKEN, UNKNOWN
from .shared_rows import SEVEN

WIDTH = 112
_COUNTED = ((TAKEN, "taken over"), (OTHER, "done differently"), (NONE, "without effect anywhere"),
            (CANNOT, "not done here"), (UNKNOWN, "not understood"))


def wrapped(text, indent):
    return textwrap.fill(text, WIDTH, initial_indent=" " * indent, subsequent_indent=" " * (indent + 2),
                         break_long_words=False, break_on_hyphens=False)


def report(run, inputs, out_name):
    """All lines as one text. inputs: [(file, "a DeepSpeed configuration", number of lines)]."""
    lines = []
    for name, kind, count in inputs:
        lines += [f"{name}: {kind}, {count} line{'s' * (count != 1)}", ""]
        for finding in sorted((f for f in run.findings if f.file == name), key=lambda f: f.line):
            mark = f"error {finding.error}, " if finding.error else ""
            lines.append(f"{finding.line or '':>5}  {finding.text}")
            fact = f": {finding.fact}" if finding.fact else ""
            lines.append(wrapped(mark + finding.action + fact, 9))
        lines.append("")
    lines += seven(run) + written_defaults(run) + left(run)
    lines.append(summary(run, out_name))
    return "\n".join(lines)


def seven(run):
    """The configuration errors that were found, each with the facts and its correction."""
    met = sorted({f.error for f in run.findings if f.error})
    if not met:
        return ["None of the seven configuration errors was met.", ""]
    lines = ["Of the seven configuration errors:"]
    for number in met:
        title, fact, correction = SEVEN[number]
        places = sorted({(f.file, f.line) for f in run.findings if f.error == number})
        where = ", ".join(f"{file}:{line}" if line else file for file, line in places[:6])
        where += " ..." if len(places) > 6 else ""
        lines += [wrapped(f"{number} {title} ({where})", 2), wrapped(fact, 4), wrapped("Correction: " + correction, 4)]
    return lines + [""]


def written_defaults(run):
    """The other trainer's defaults that differ from ours and were written to the JSON."""
    if not run.defaults:
        return []
    values = [f"{option} {str(run.get(option)).lower() if isinstance(run.get(option), bool) else run.get(option)}"
              for option, _ in run.defaults]
    return [wrapped("Written out because the input leaves them open and its trainer has other defaults than ours: "
                    + ", ".join(values) + ".", 0), ""]


def left(run):
    return ["Left to you:", *(wrapped(note, 2) for note in run.notes), ""] if run.notes else []


def summary(run, out_name):
    counts = [(sum(f.action == action for f in run.findings), words) for action, words in _COUNTED]
    text = ", ".join(f"{n} {words}" for n, words in counts if n) or "no settings"
    family = run.family()
    program = f"./train_{family}" if family else "./train_gpt2 or ./train_llama, as the model is,"
    launch = f"scripts/launch/launch_mpi.sh -np {run.ranks} " if run.ranks > 1 else ""
    warning = ": read those of the last kinds before you trust the run" if is_open(run) else ""
    lines = [wrapped(text + warning + ".", 0), f"Look: {program} --config {out_name} --dry-run",
             f"Run:  {launch}{program} --config {out_name}"]
    return "\n".join(lines)
