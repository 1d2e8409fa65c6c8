"""The importer's report: first the differences from the input; then, with --all, every setting in the order of the
input and the errors found; last the remaining work."""
import textwrap

from .engine import is_open
from .rows import CANNOT, NONE, OTHER, TAKEN, UNKNOWN, VARIABLE
from .shared_rows import SEVEN

WIDTH = 112
FIRST_LINES = 15   # of what is different, without --all
_COUNTED = ((TAKEN, "taken over"), (OTHER, "done differently"), (NONE, "without effect anywhere"),
            (CANNOT, "not done here"), (UNKNOWN, "not understood"))


def wrapped(text, indent):
    return textwrap.fill(text, WIDTH, initial_indent=" " * indent, subsequent_indent=" " * (indent + 2),
                         break_long_words=False, break_on_hyphens=False)


def report(run, inputs, out_name, everything=False):
    """All lines as one text. inputs: [(file, "a DeepSpeed configuration", number of lines)]."""
    lines = [f"{name}: {kind}, {count} line{'s' * (count != 1)}" for name, kind, count in inputs]
    lines += [""] + different(run, everything)
    lines += every_line(run, inputs) + seven(run) + written_defaults(run) if everything else errors_met(run)
    lines += left(run) + [summary(run, out_name)]
    return "\n".join(lines)


def differs(run, finding):
    """How much the run differs from the input in this point: 0 most, None not at all."""
    if finding.action in (CANNOT, UNKNOWN):
        return 0
    if finding.action == OTHER and any(entry.finding is finding for entry in run.config.values()):
        return 1   # another value of ours is written
    return 2 if finding.error and finding.action != VARIABLE else None


def different(run, everything):
    """The differences, most important first; settings with the same fact share an entry."""
    groups = {}
    for finding in sorted((f for f in run.findings if differs(run, f) is not None), key=lambda f: differs(run, f)):
        groups.setdefault((finding.file, finding.action, finding.fact), []).append(finding)
    if not groups:
        return ["Nothing is different from what you asked; --all explains every line.", ""]
    lines, shown = ["Different from what you asked:"], 0
    for (file, action, fact), same in groups.items():
        named = same if everything or len(same) < 6 else same[:4]
        places = ", ".join(dict.fromkeys(str(f.line) for f in named))
        texts = ", ".join(f.text for f in named) + f" and {len(same) - len(named)} like them" * (len(named) < len(same))
        text = f"{file}:{places}  {texts}: {action}{': ' * bool(fact)}{fact}"
        entry = wrapped(text, 2).split("\n")
        if not everything and len(lines) + len(entry) >= FIRST_LINES:
            break
        lines, shown = lines + entry, shown + len(same)
    more = sum(map(len, groups.values())) - shown
    return lines + [f"  and {more} more: --all shows them, and explains every line"] * bool(more) + [""]


def errors_met(run):
    met = sorted({f.error for f in run.findings if f.error})
    if not met:
        return []
    titles = "; ".join(SEVEN[number][0] for number in met)
    return [wrapped(f"Found here of what guides to FP8 call errors: {titles} (--all says what is true of each).", 0),
            ""]


def every_line(run, inputs):
    lines = []
    for name, _, _ in inputs:
        lines += [f"{name}, line by line:", ""]
        for finding in sorted((f for f in run.findings if f.file == name), key=lambda f: f.line):
            mark = f"error {finding.error}, " if finding.error else ""
            lines.append(f"{finding.line or '':>5}  {finding.text}")
            fact = f": {finding.fact}" if finding.fact else ""
            lines.append(wrapped(mark + finding.action + fact, 9))
        lines.append("")
    return lines


def seven(run):
    """The configuration errors that were found, each with the facts and its correction."""
    met = sorted({f.error for f in run.findings if f.error})
    if not met:
        return ["None of the seven points that guides to FP8 call errors was found.", ""]
    lines = ["Found here of the seven points that guides to FP8 call errors:"]
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
    warning = ": read what is different before you trust the run" if is_open(run) else ""
    lines = [wrapped(text + warning + ".", 0), f"Look: {program} --config {out_name} --dry-run",
             f"Run:  {launch}{program} --config {out_name}"]
    return "\n".join(lines)
