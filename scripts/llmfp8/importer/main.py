"""The command line of scripts/import_config."""
import argparse
import json
import sys
from pathlib import Path

from ..support import InputError, Parser, read_bounded, whole_number
from .engine import Import, find_row, is_open, plain
from .read_files import read_json, read_lines, read_toml, read_yaml
from .report import report
from .rows import MOST_BYTES, MOST_SETTINGS
from .script import Script
from .shared_rows import LAUNCHER
from .sources import MEGATRON, NANOGPT, SOURCES, TORCHTITAN

# Names of nanoGPT are names of guides, too: only the ending of a file tells them apart.
OF_FORMAT = {"python": [NANOGPT], "toml": [TORCHTITAN]}
FORMATS = {".json": "json", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".py": "python", ".sh": "shell",
           ".bash": "shell", ".sbatch": "shell", ".slurm": "shell"}
ABOUT = """Turn the configuration of another trainer into one of ours, and say what is different.

  scripts/import_config train.sh --out run.json            a launch script: Megatron-LM, LLaMA-Factory, llm.c
  scripts/import_config llama3_8b.toml                     torchtitan
  scripts/import_config config/train_gpt2.py               nanoGPT
  scripts/import_config ds_config.json                     a DeepSpeed configuration; the JSON follows the report
  scripts/import_config sft.yaml ds_config.json --ranks 8  several files about one run
  ./train_llama --config run.json --dry-run

Nothing of the input is run. Exit codes: 0 if every line was understood and can be done, 1 if the JSON was written but
a line was not understood or has no equal here, 2 if an input cannot be read."""


def parse_arguments(arguments):
    parser = Parser(prog="import_config", description=ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", nargs="+", metavar="FILE",
                        help="JSON, YAML, TOML, NAME = value lines or a launch script")
    parser.add_argument("--out", metavar="FILE", help="write the JSON there (-: to standard output, with no report)")
    parser.add_argument("--ranks", type=whole_number, default=0, metavar="N",
                        help="number of GPUs, if the input does not say it")
    parser.add_argument("--all", action="store_true", help="explain every line, not only what is different")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE",
                        help="value of a variable or option that a script takes from elsewhere or computes")
    args = parser.parse_args(arguments)
    args.given = {}
    for word in args.set:
        name, equals, value = word.partition("=")
        if not equals or not name.isidentifier():
            raise InputError(f"--set {word}: must be NAME=VALUE")
        args.given[name] = value
    if args.ranks < 0:
        raise InputError(f"--ranks {args.ranks}: must be 1 or more")
    return args


def read_text(path):
    data = read_bounded(path, MOST_BYTES, "a configuration file")
    if b"\0" in data:
        raise InputError(f"{path}:1: is not text; name a JSON, YAML, TOML, Python or bash file")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(f"{path}:{line}: byte {data[error.start]:#04x} is no UTF-8; save the file as UTF-8") from None
    if not text.strip():
        raise InputError(f"{path}:1: the file is empty")
    return text


def format_of(path, text):
    """A value of FORMATS: by the file's ending, or by how it begins."""
    ending = Path(path).suffix.lower()
    if ending in FORMATS:
        return FORMATS[ending]
    first = text.lstrip()
    if first.startswith("{"):
        return "json"
    return "shell" if first.startswith(("#!", "--")) or "\n--" in text or " --" in text else "yaml"


def source_of(path, settings, form):
    """The kind of input whose own keys it has most of."""
    sources = OF_FORMAT.get(form, [s for s in SOURCES if s is not NANOGPT])
    keys = {plain(s.key) for s in settings}
    if "architectures" in keys and "model-type" in keys:
        raise InputError(f"{path}:1: is the config.json of a Hugging Face model; give its directory to the trainer, "
                         f"--load {Path(path).parent}")
    known = [sum(find_row([row for row in source.rows if row.keys != "*"], s) is not None for s in settings)
             for source in sources]
    marks = [sum(any(matches(key, mark) for key in keys) for mark in source.marks.split()) for source in sources]
    best = max(range(len(sources)), key=lambda i: (marks[i], known[i]))
    if not marks[best]:
        shown = ", ".join(s.key for s in settings[:4]) or "no settings at all"
        line = settings[0].line if settings else 1
        raise InputError(f"{path}:{line}: neither a DeepSpeed, Megatron-LM, LLaMA-Factory, accelerate, torchtitan, "
                         f"llm.c or nanoGPT configuration nor one with use_fp8 keys ({shown}); name the file that "
                         "holds them")
    return sources[best]


def require_few(path, settings):
    if len(settings) > MOST_SETTINGS:
        raise InputError(f"{path}:{settings[MOST_SETTINGS].line}: has {len(settings)} settings, more than the "
                         f"{MOST_SETTINGS} that are read; name the configuration of one run")


def matches(key, mark):
    mark = plain(mark)
    return key.startswith(mark[:-1]) if mark.endswith("*") else key == mark


def read_input(run, path, given):
    """Applies one file; returns the line that the report begins with."""
    text = read_text(path)
    kind = format_of(path, text)
    name = Path(path).name
    if name in run.inputs:
        raise InputError(f"{path}: a file of that name was read already; give each input once, under its own name")
    run.inputs.append(name)
    if kind == "shell":
        script = Script(name, text, given)
        require_few(path, script.settings + script.environment + script.launcher)
        source = source_of(path, script.settings, kind)
        run.findings += script.findings
        for setting in script.settings + script.launcher:   # values that the script takes from elsewhere
            key = setting.key.lstrip("-").replace("-", "_")
            if "$" in setting.word() and key in given:
                setting.value = given[key]
        for setting in script.launcher:
            run.one(setting, LAUNCHER)
        run.apply(source, script.settings)
        run.apply_environment(script.environment)
        run.note_absent(name, script.environment)
        kind_name = source.name if source is MEGATRON else f"a launch script with {source.name}"
    else:
        if kind == "python":
            settings, findings = read_lines(name, text, given)
            run.findings += findings
        else:
            settings = {"json": read_json, "yaml": read_yaml, "toml": read_toml}[kind](name, text)
        require_few(path, settings)
        source = source_of(path, settings, kind)
        run.apply(source, settings)
        kind_name = source.name
    return name, kind_name, len(text.splitlines())


def main(arguments=None):
    args = parse_arguments(arguments)
    run = Import(args.ranks)
    try:
        inputs = [read_input(run, path, args.given) for path in args.inputs]
    except RecursionError:
        raise InputError(f"{', '.join(args.inputs)}: nested too deeply to be a configuration") from None
    run.finish()
    text = json.dumps(run.options(), indent=2, ensure_ascii=False) + "\n"
    if not text.isascii() and text.encode("utf-8", "replace").decode() != text:   # half of a surrogate pair
        text = json.dumps(run.options(), indent=2) + "\n"
    alone = args.out == "-"
    out_name = "run.json" if alone or not args.out else args.out
    print(report(run, inputs, out_name, args.all), file=sys.stderr if alone else sys.stdout)
    if args.out and not alone:
        try:
            Path(args.out).write_text(text, encoding="utf-8")
        except OSError as error:
            raise InputError(f"--out {args.out}: {error.strerror}; name a file in a folder you may write to") from None
    else:
        print("" if alone else "\n", end="")
        print(text, end="")
    return 1 if is_open(run) else 0
