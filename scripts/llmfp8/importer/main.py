"""The command line of scripts/import_config."""
import argparse
import json
import re
import sys
from pathlib import Path

from ..support import InputError, Parser, read_bounded, whole_number
from .engine import Import, is_open
from .read_files import read_json, read_toml, read_yaml
from .report import report
from .rows import MOST_BYTES, MOST_IN_LINE, MOST_SETTINGS, plain
from .script import Script
from .option_table import own_rows
from .tables import LAUNCHER, MEGATRON, SHARED_NAMES, SOURCES

FORMATS = {".json": "json", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".sh": "shell", ".bash": "shell",
           ".sbatch": "shell", ".slurm": "shell"}
READERS = {"json": read_json, "yaml": read_yaml, "toml": read_toml}
ABOUT = """Turn the configuration of another trainer into one of ours, and say what is different.

  scripts/import_config train.sh --out run.json            a launch script: Megatron-LM, LLaMA-Factory
  scripts/import_config ds_config.json                     or YAML, TOML: the JSON follows the report
  scripts/import_config sft.yaml ds_config.json --ranks 8  several files about one run
  ./train_llama --config run.json --dry-run

Nothing of the input is run. Exit codes: 0 if every line was understood and can be done, 1 if the JSON was written but
a line was not understood or has no equal here, 2 if an input cannot be read."""


def parse_arguments(arguments):
    parser = Parser(prog="import_config", description=ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", nargs="+", metavar="FILE", help="JSON, YAML, TOML or a launch script")
    parser.add_argument("--out", metavar="FILE", help="write the JSON there (-: to standard output, with no report)")
    parser.add_argument("--ranks", type=whole_number, default=0, metavar="N",
                        help="number of GPUs, if the input does not say it")
    parser.add_argument("--all", action="store_true", help="explain every line, not only what is different")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE",
                        help="value of a variable or option that a script takes from elsewhere or computes")
    args = parser.parse_args(arguments)
    args.given = dict(word.partition("=")[::2] for word in args.set)
    if not all(re.match(r"[A-Za-z_]\w*=", word) for word in args.set) or args.ranks < 0:
        raise InputError(f"--set {' '.join(args.set)} --ranks {args.ranks}: must be NAME=VALUE, and 1 or more")
    return args


def read_text(path):
    data = read_bounded(path, MOST_BYTES, "a configuration file")
    try:
        lines = data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n").split("\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(f"{path}:{line}: byte {data[error.start]:#04x} is no UTF-8; save the file as UTF-8") from None
    wrong = next((number for number, line in enumerate(lines, 1) if len(line) > MOST_IN_LINE or "\0" in line), 0)
    if wrong or not data.strip():
        raise InputError(f"{path}:{wrong or 1}: is {'no text' if wrong else 'empty'}, or has a line of more than "
                         f"{MOST_IN_LINE} characters; name a JSON, YAML, TOML or bash file")
    return "\n".join(lines)


def format_of(path, text):
    """A value of FORMATS: by the file's ending, or by how it begins."""
    first = text.lstrip()
    guess = "json" if first.startswith("{") else "shell" if first.startswith("#!") or " --" in f" {text}" else "yaml"
    return FORMATS.get(Path(path).suffix.lower(), guess)


def source_of(path, form, settings):
    """The kind of input, among those of this format, that has most of the keys; then, most with those of ours (which
    are Megatron-LM's) or that several kinds share."""
    keys = {plain(s.key) for s in settings}
    ours = {plain(key) for row in own_rows() for key in row.keys.split()}

    def known(source):
        return len(keys & source.names), len(keys & (ours if source is MEGATRON else SHARED_NAMES))
    best = max((source for source in SOURCES if form in source.forms), key=known)
    if not any(known(best)):
        shown = ", ".join(s.key for s in settings[:4]) or "no settings at all"
        raise InputError(f"{path}:{settings[0].line if settings else 1}: neither a DeepSpeed, Megatron-LM, "
                         "LLaMA-Factory, accelerate or torchtitan configuration nor one with use_fp8 keys "
                         f"({shown}); name the file that holds them")
    return best


def read_input(run, path, given):
    """Applies one file; returns what it is."""
    text = read_text(path)
    form, name = format_of(path, text), Path(path).name
    if name in run.inputs:
        raise InputError(f"{path}: a file of that name was read already; give each input once, under its own name")
    run.inputs.append(name)
    script = Script(name, text, given) if form == "shell" else None
    settings = script.settings if script else READERS[form](name, text)
    if len(settings) > MOST_SETTINGS:
        raise InputError(f"{path}:{settings[MOST_SETTINGS].line}: has more than {MOST_SETTINGS} settings; name the "
                         "configuration of one run")
    source = source_of(path, form, settings)
    if script:
        run.findings += script.findings
        for setting in script.launcher:
            run.one(setting, LAUNCHER)
    run.apply(source, settings)
    return f"{name}: {source.name}"


def main(arguments=None):
    args = parse_arguments(arguments)
    run = Import(args.ranks)
    try:
        inputs = [read_input(run, path, args.given) for path in args.inputs]
    except RecursionError:
        raise InputError(f"{', '.join(args.inputs)}: nested too deeply to be a configuration") from None
    run.finish()
    text = json.dumps(run.options(), indent=2) + "\n"
    alone = args.out == "-"
    print(report(run, inputs, args.out if args.out and not alone else "run.json", args.all),
          file=sys.stderr if alone else sys.stdout)
    if args.out and not alone:
        try:
            Path(args.out).write_text(text, encoding="utf-8")
        except OSError as error:
            raise InputError(f"--out {args.out}: {error.strerror}; name a file in a folder you may write to") from None
    else:
        print("" if alone else "\n", text, sep="", end="")
    return 1 if is_open(run) else 0
