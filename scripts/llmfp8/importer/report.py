"""The importer's report: what is different from the input, the other decisions by name, the remaining work; with --all
every setting in the order of the input."""
import collections
import textwrap

from .engine import is_open, said
from .rows import CANNOT, MEANT, NONE, OTHER, TAKEN, UNKNOWN
from .tables import SEVEN

FIRST_LINES = 15   # of what is different, without --all


def wrapped(text, indent, **more):
    return textwrap.fill(text, 112, initial_indent=" " * indent, subsequent_indent=" " * (indent + 2),
                         break_long_words=False, break_on_hyphens=False, **more)


def report(run, inputs, out_name, everything=False):
    """All lines as one text. inputs: ["ds.json: a DeepSpeed configuration"]."""
    lines = [*inputs, "", *different(run, everything), ""]
    lines += every_line(run) if everything else others(run)
    defaults = ", ".join(said(o, entry.value) for o, entry in run.config.items() if entry.finding is None)
    if defaults:
        lines += [wrapped(f"Written though no line says it, mostly as the other trainer's default: {defaults}.", 0), ""]
    if run.notes:
        lines += ["Left to you:", *(wrapped(note, 2) for note in run.notes), ""]
    return "\n".join(lines + summary(run, out_name))


def differs(run, finding):
    """How much the run differs from the input in this point: 0 most, 4 not at all."""
    if finding.action == OTHER and any(entry.finding is finding for entry in run.config.values()):
        return 2   # another value of ours is written
    return {CANNOT: 0, UNKNOWN: 0, MEANT: 1}.get(finding.action, 3 if finding.error else 4)


def different(run, everything):
    """The differences, most important first; settings with the same fact share an entry."""
    groups = {}
    for finding in sorted((f for f in run.findings if differs(run, f) < 4), key=lambda f: differs(run, f)):
        groups.setdefault((finding.file, finding.action, finding.fact), []).append(finding)
    if not groups:
        return ["Nothing is different from what you asked; --all explains every line."]
    lines, shown = ["Different from what you asked:"], 0
    for (file, action, fact), same in groups.items():
        named = same if everything or len(same) < 6 else same[:4]
        places = ", ".join(dict.fromkeys(str(f.line) for f in named))
        texts = ", ".join(f.text for f in named) + f" and {len(same) - len(named)} like them" * (len(named) < len(same))
        entry = wrapped(f"{file}:{places}  {texts}: {action}{': ' * bool(fact)}{fact}", 2).split("\n")
        if not everything and len(lines) + len(entry) >= FIRST_LINES:
            break
        lines, shown = lines + entry, shown + len(same)
    more = sum(map(len, groups.values())) - shown
    return lines + [f"  and {more} more: --all shows them, and explains every line"] * bool(more)


def others(run):
    """By name, what the report does not explain without --all."""
    named = [f for f in run.findings if f.action in (OTHER, NONE) and differs(run, f) == 4]
    texts = [f"{f.file}:{f.line} {f.text}" if i == 0 or f.file != named[i - 1].file else f"{f.line} {f.text}"
             for i, f in enumerate(named)]
    return [wrapped(f"Done in another way, or without effect here and there (--all says how): {', '.join(texts)}.", 0,
                    max_lines=6, placeholder=" ..."), ""] if named else []


def every_line(run):
    lines = []
    for name in run.inputs:
        lines += [f"{name}, line by line:", ""]
        for finding in sorted((f for f in run.findings if f.file == name), key=lambda f: f.line):
            error = f"error {finding.error} ({SEVEN[finding.error]}), " if finding.error else ""
            fact = f": {finding.fact}" if finding.fact else ""
            lines += [f"{finding.line:>5}  {finding.text}", wrapped(error + finding.action + fact, 9)]
        lines.append("")
    return lines


def summary(run, out_name):
    counts = collections.Counter(f.action for f in run.findings)
    text = ", ".join(f"{counts[action]} {action}" for action in (TAKEN, OTHER, NONE, MEANT, CANNOT, UNKNOWN)
                     if counts[action]) or "no settings"
    program = f"./train_{run.family()}" if run.family() else "./train_gpt2 or ./train_llama, as the model is,"
    launch = f"scripts/launch/launch_mpi.sh -np {run.ranks} " if run.ranks > 1 else ""
    warning = ": read what is different before you trust the run" if is_open(run) else ""
    return [wrapped(text + warning + ".", 0), f"Look: {program} --config {out_name} --dry-run",
            f"Run:  {launch}{program} --config {out_name}"]
