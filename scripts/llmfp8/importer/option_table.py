"""Our options, read from an executable's --print-options, so that its rules are not repeated here."""
import json
import os
import re
import subprocess
from functools import lru_cache
from pathlib import Path

ROOT = next(p for p in Path(__file__).resolve().parents if (p / "llmc").is_dir())


@lru_cache(None)
def option_table(family):
    """{name: row} of train_FAMILY, or None if it is not built."""
    folders = [ROOT, Path(os.environ.get("LLMC_BUILD", ROOT / "build" / "cpu"))]
    program = next((f / f"train_{family}" for f in folders if (f / f"train_{family}").exists()), None)
    if program is None:
        return None
    try:
        done = subprocess.run([program, "--print-options"], capture_output=True, text=True, check=True, timeout=60)
        return {row["name"]: row for row in json.loads(done.stdout)["options"]}
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def _text(value):
    if value is None or value == "" or value == []:
        return "unset"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value == int(value):
        return str(int(value))
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _holds(values, value):
    if values == ">0":
        return isinstance(value, (int, float)) and value > 0
    words = values.lstrip("!").split()
    return (_text(value) in words) != values.startswith("!")


def _follows(row, options):
    """Whether the default may depend on options that are set here. A rule that names no option may depend on any."""
    rule = row.get("default_rule", "")
    named = re.findall(r"--([\w-]+)", rule)
    return any(name in options for name in named) if named else bool(rule)


def why_inert(table, options, name):
    """The reason why an option would have no effect with these options {name: value}, or None."""
    for condition in table.get(name, {}).get("acts_if", []):
        decider = condition["option"]
        if decider in options:
            value = options[decider]
        elif _follows(table[decider], options):
            continue   # the executable knows the value
        else:
            value = table[decider]["default"]
        if not _holds(condition["values"], value):
            return condition["reason"]
    return None
