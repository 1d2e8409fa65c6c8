"""The command line of scripts/compare."""
import argparse
import os
import re
import shlex
import signal
import sys
from pathlib import Path

from ..report.page import report
from ..run_log import InputError, named_logs, read_log
from ..support import Parser

from .launch import Measurement, check_command, check_options, read_measured
from .report import markdown, write_csv, write_text
from .results import Comparison
from .runs import Configuration
from .tables import TABLES, commands, ranks, title

ABOUT = """Runs configurations in turn, or takes finished logs, and says which is faster and what they learnt.

  scripts/compare --table llama3-small --out runs/small -- --synthetic-data   a named table, measured
  scripts/compare --run 'a=./train_gpt2 --model gpt2-124M ...' --run 'b=...' --out runs/ab
  scripts/compare bf16=a.jsonl fp8=b.jsonl --out runs/tables                  finished logs; a name twice: two rounds
  scripts/compare runs/small                                                  the tables once more, from the logs there

Writes compare.md (printed as well), compare.csv, and compare.html, the page of scripts/report with all curves. What is
after -- goes to every run. scripts/README.md says what the columns mean. Exit codes: 0, 1 if a run failed, 2 if the
input is wrong."""
LOG_NAME = re.compile(r"(.+)\.(\d+)\.jsonl")
# Options of measurements, without effect on finished logs, and their defaults.
MEASURING = {"rounds": 2, "iters": None, "train_iters": None, "only": None, "dry_run": False}
STEPS = (3, 10)   # of a start, warm-up and timed, unless a table has others


def whole_from(at_least):
    def read(text):
        if not at_least <= int(text) < 1e9:
            raise ValueError
        return int(text)
    read.__name__ = f"int of at least {at_least}"
    return read


def parser():
    p = Parser(prog="compare", description=ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter,
               allow_abbrev=False)
    p.add_argument("logs", nargs="*", metavar="[NAME=]LOG|FOLDER",
                   help="finished logs, or a folder of a measurement or of runs")
    p.add_argument("--out", help="folder for logs, tables and the page (default for a FOLDER: itself)")
    p.add_argument("--baseline", metavar="NAME", help="what ratios are against (default: the table's, or the first)")
    p.add_argument("--allow", default="", metavar="KEY,...",
                   help="compare although these differ: options, gpu, gpus, synthetic-data")
    p.add_argument("--warmup", type=whole_from(0), metavar="STEPS",
                   help="first steps of every start that are not counted (default: 3, the table's, or the FOLDER's)")
    p.add_argument("--loss-steps", type=whole_from(1), default=10, metavar="STEPS",
                   help="steps over which training losses are averaged (default: 10)")
    m = p.add_argument_group("measuring")
    m.add_argument("--table", choices=sorted(TABLES), help="; ".join(f"{name}: {title(name)}" for name in TABLES))
    m.add_argument("--only", metavar="NAME,...", help="measure only these rows of the table")
    m.add_argument("--run", action="append", default=[], metavar="NAME=COMMAND",
                   help="a configuration; its options must leave --log-file, --save and the length to the comparison")
    m.add_argument("--rounds", type=whole_from(1), help="starts of each configuration, in turn (default: 2)")
    m.add_argument("--iters", type=whole_from(1), help="timed steps of a start (default: 10, or the table's)")
    m.add_argument("--train-iters", type=whole_from(1), metavar="STEPS",
                   help="instead of rounds: one run of so many steps for each, also what is left of one")
    m.add_argument("--dry-run", action="store_true", help="check every configuration and print the commands")
    return p


def parse(arguments):
    """The options, checked for contradictions, and the words after --."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    options, extra = parser().parse_args(arguments[:at]), arguments[at + 1:]
    measuring = bool(options.table or options.run)
    if measuring == bool(options.logs):
        raise InputError("give either logs, or --table or --run" if measuring else
                         "nothing to compare: give logs, --table or --run (--help has examples)")
    if options.table and options.run:
        raise InputError("--table and --run: one or the other")
    given = [name for name in MEASURING if getattr(options, name) not in (None, False)]
    if not measuring and (given or extra):
        option = "--" + given[0].replace("_", "-") if given else shlex.join(["--", *extra])
        raise InputError(f"{option}: has no effect on finished logs")
    if options.only and not options.table:
        raise InputError("--only: chooses rows of a --table")
    for name in ("rounds", "iters"):
        if options.train_iters is not None and getattr(options, name) is not None:
            raise InputError(f"--{name}: has no effect with --train-iters, which trains one run of each")
    for name, default in MEASURING.items():
        if getattr(options, name) is None:
            setattr(options, name, default)
    if options.out is None and (measuring or len(options.logs) != 1 or not Path(options.logs[0]).is_dir()):
        raise InputError("--out FOLDER is needed: where logs, tables and the page go")
    options.failures = {}
    warmup, iters = TABLES[options.table].steps if options.table else STEPS
    if measuring:
        options.warmup, options.iters = (given if given is not None else usual for given, usual in
                                         ((options.warmup, warmup), (options.iters, iters)))
    options.allow = [key for key in options.allow.split(",") if key]
    return options, extra


def chosen_commands(options, extra):
    """{name: words} of --table or --run."""
    if options.table:
        rows = list(TABLES[options.table].rows)
        only = options.only.split(",") if options.only else rows
        for name in only:
            if name not in rows:
                raise InputError(f"--only {name}: not in --table {options.table}, which has {', '.join(rows)}")
        os.environ["RANKS"] = ranks(options.table)   # for the recipes
        found = commands(options.table, only)
    else:
        found = {}
        for run in options.run:
            name, equals, command = run.partition("=")
            try:
                words = shlex.split(command)
            except ValueError as error:
                raise InputError(f"--run {run}: {error}") from None
            if not equals:
                raise InputError(f"--run {run}: not NAME=COMMAND")
            if name in found:
                raise InputError(f"--run {name}=: given twice")
            check_command(name, words)
            found[name] = words
    check_options("after --", extra)
    return {name: [*words, *extra] for name, words in found.items()}


def measure(options, extra):
    """{name: logs} of the configurations that ran; those that failed are in options.failures."""
    measurement = Measurement(chosen_commands(options, extra), options)
    measurement.check()
    if options.dry_run:
        for name in measurement.commands:
            where = f"RANKS={os.environ['RANKS']} " if options.table else ""
            print(f"{name}: {where}{shlex.join(measurement.words(name, 1))}")
        return {}
    logs = measurement.run()
    if not logs:
        name, said = next(iter(measurement.failures.items()))
        raise InputError(f"no run ended well; {name}: {said}")
    options.failures = measurement.failures
    return logs


def measured_logs(folder, options):
    """{name: logs} of a measurement in this folder, {} if there is none: configurations in the order in which they were
    started. Sets what was chosen then."""
    found = {}
    for path in sorted(Path(folder).glob("*.jsonl")):
        match = LOG_NAME.fullmatch(path.name)
        if match:
            found.setdefault(match[1], []).append((int(match[2]), path))
    measured = read_measured(folder) if found else None
    if measured:
        options.table, options.failures = measured["table"], measured["failures"]
        options.warmup = measured["warmup"] if options.warmup is None else options.warmup
    logs = {name: [path for _, path in sorted(paths)] for name, paths in found.items()}
    return dict(sorted(logs.items(), key=lambda item: read_log(item[1][0]).headers[0]["unix_time"]))


def chosen_logs(options):
    """{name: logs} of a measurement, or of what the arguments name."""
    logs = measured_logs(options.logs[0], options) if len(options.logs) == 1 else {}
    for path, name in [] if logs else named_logs(options.logs):
        if path in logs.setdefault(name, []):
            raise InputError(f"{path}: given twice")
        logs[name].append(path)
    return logs


def compare(logs, options):
    table = TABLES.get(options.table)
    configurations = []
    for name, paths in logs.items():
        runs = [read_log(path, name) for path in paths]
        for run in runs:
            if not run.steps:
                raise InputError(f"{run.path}: no step yet")
        configurations.append(Configuration(name, runs, STEPS[0] if options.warmup is None else options.warmup))
    baseline = options.baseline
    if baseline is None and table and table.baseline in logs:
        baseline = table.baseline
    comparison = Comparison(configurations, baseline, table.allowed if table else (), options.loss_steps, options.allow)
    comparison.failures = options.failures
    return comparison


def write(comparison, options):
    out = Path(options.out or options.logs[0])
    heading = title(options.table) if options.table else f"Comparison with {comparison.base.name}"
    text = markdown(comparison, heading)
    write_text(out / "compare.md", text)
    write_csv(comparison, out / "compare.csv")
    write_text(out / "compare.html", report([run for c in comparison.configurations for run in c.runs]))
    print(text)
    print(out / "compare.md")


def stop(*_):
    raise KeyboardInterrupt


def main():
    options, extra = parse(sys.argv[1:])
    signal.signal(signal.SIGTERM, stop)   # the signal is also passed on to the present run
    logs = chosen_logs(options) if options.logs else measure(options, extra)
    if options.dry_run:
        return 0
    write(compare(logs, options), options)
    return 1 if options.failures else 0
