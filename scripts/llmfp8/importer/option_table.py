"""Our options, presets and rules, asked from the executables, so that none is repeated here."""
import json
import os
import re
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

from ..support import InputError
from .rows import TAKEN, Row

ROOT = next(p for p in Path(__file__).resolve().parents if (p / "llmc").is_dir())
_GPT2 = {"gpt2": "gpt2-124M", "gpt2-small": "gpt2-124M", "gpt2-medium": "gpt2-350M", "gpt2-large": "gpt2-774M",
         "gpt2-xl": "gpt2-1558M"}


@lru_cache(None)
def executable(family):
    """The path of train_FAMILY."""
    folders = [ROOT, Path(os.environ.get("LLMC_BUILD", ROOT / "build" / "cpu"))]
    found = next((f / f"train_{family}" for f in folders if (f / f"train_{family}").exists()), None)
    if found is None:
        raise InputError(f"there is no train_{family}, which knows the options and presets: make train_gpt2 "
                         "train_llama, and import again")
    return found


@lru_cache(None)
def printed(family):
    """What train_FAMILY --print-options prints."""
    program = executable(family)
    try:
        done = subprocess.run([program, "--print-options"], capture_output=True, text=True, check=True, timeout=60)
        return json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise InputError(f"{program} --print-options: {error}; make train_{family}, and import again") from None


def option_table(family):
    """{name: row} of train_FAMILY."""
    return {row["name"]: row for row in printed(family)["options"]}


@lru_cache(None)
def own_rows():
    """Rows of what the executables take, too: our options, and flags of Megatron-LM."""
    rows = []
    for name, option in option_table("llama").items():
        rows.append(Row(name, TAKEN, option=name))
        rows += [Row(flag["name"], TAKEN, option=name, when=when, value=our_value(name, flag[when])[0])
                 for flag in option.get("megatron_flags", []) for when in ("true", "false")]
    return rows


def our_value(name, value):
    """The value of an option as JSON has it, and "" or why it cannot have this value."""
    option = option_table("llama")[name]
    if option["type"] == "choice":
        value = next((word for word in option["words"] if word.lower() == str(value).lower()), None)
    elif option["type"] == "integer":
        value = int(value)
    limits = option.get("range")
    outside = limits and (value < limits["low"] or limits["high"] is not None and value > limits["high"])
    return value, f"{name} is {option['expects']}" if value is None or outside else ""


def preset_of_shape(family, shape):
    """The first preset of GPT-2 or Llama that has these values {option: value}, None if there is none."""
    return next((p["name"] for p in printed(family)["presets"] if p["name"].startswith(family)
                 and all(p[option] == value for option, value in shape.items())), None)


def preset_of_model(path):
    """The preset of a published model, by the last part of its name: meta-llama/Llama-3.1-8B is llama3.1-8B."""
    def plain(name):
        return re.sub(r"^meta-|-(instruct|base)$|-", "", re.sub(r"-(instruct|base)$", "", name.lower()))
    name = path.rstrip("/").split("/")[-1].lower()
    names = [p["name"] for family in ("gpt2", "llama") for p in printed(family)["presets"]]
    return _GPT2.get(name) or next((p for p in names if plain(p) == plain(name)), None)


def without_effect(family, options):
    """(option, why) of the first of these options {name: value} that train_FAMILY refuses because it has no effect
    beside the others, None if there is none."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(options, file)
        file.flush()
        done = subprocess.run([executable(family), "--config", file.name, "--print-config"], capture_output=True,
                              text=True, check=False)
    found = re.search(r": ([\w-]+) has no effect: (.*)", done.stderr)
    return found and found.groups()
