"""Types of import_config: settings of the input, rows that say how to translate them (llmc/config/foreign has the
tables and explains them), and findings, one per setting, for the report."""
import dataclasses
import json
from pathlib import Path

from ..support import InputError

# Limits, far above any real configuration, so that no input takes long or much memory.
MOST_BYTES = 256 << 10    # of a file
MOST_SETTINGS = 1000      # of a file, and lines of a script that are none
MOST_DEPTH = 32           # of JSON, YAML and TOML
MOST_EXPANDED = 1 << 20   # characters that the variables of a script become, entries with the aliases of YAML followed

# Actions.
TAKEN = "taken over"
OTHER = "done differently"
NONE = "no effect anywhere"
CANNOT = "not done here"
VARIABLE = "no setting"
UNKNOWN = "not understood"


@dataclasses.dataclass
class Setting:
    """One key of the input with its value."""
    file: str
    line: int
    key: str        # dotted path in JSON and YAML, the option's name without dashes in a script
    value: object   # of JSON or YAML; of a script True, a word, or a list of words
    text: str       # as the report shows it

    @property
    def where(self):
        return f"{self.file}:{self.line}"

    def word(self):
        """The value as the tables match it."""
        if isinstance(self.value, bool) or self.value is None:
            return {True: "true", False: "false", None: "null"}[self.value]
        if isinstance(self.value, list):
            return ",".join(str(x) for x in self.value).lower() or "[]"
        return str(self.value).strip().lower()


@dataclasses.dataclass
class Row:
    """The translation of a key. If several rows name it, the first whose `when` holds counts."""
    keys: str               # separated by spaces; a star stands for any text
    action: str
    fact: str = ""
    option: str = ""        # ours, for TAKEN
    read: str = ""          # how the value is read, see READERS; "": as our option's type says
    when: str = ""          # values, separated by spaces, to which the row applies; empty: all
    value: object = None    # ours, in place of the one that was read
    sets: dict = dataclasses.field(default_factory=dict)   # further options of ours
    weak: dict = dataclasses.field(default_factory=dict)   # the same, unless another setting sets them
    keep: str = ""          # the name under which the source's `finish` finds the value
    error: int = 0          # of the seven configuration errors


def other(keys, fact, **more):
    return Row(keys, OTHER, fact, **more)


def none(keys, fact, **more):
    return Row(keys, NONE, fact, **more)


TABLES = next(p for p in Path(__file__).resolve().parents if (p / "llmc").is_dir()) / "llmc" / "config" / "foreign"
ACTIONS = {"take": TAKEN, "other": OTHER, "none": NONE, "cannot": CANNOT}


def _expanded(fields):
    """The rows that one row of a table stands for: one each for `same` values, and for the entries of an object."""
    same, take, value = fields.pop("same", ""), fields.get("take"), fields.get("value")
    if same:
        yield {"keys": fields["keys"], "when": same, "value": True, "fact": "that is so here, too"}
    if isinstance(take, dict):
        yield from ({**fields, "keys": theirs, "take": ours} for theirs, ours in take.items())
    elif isinstance(value, dict):
        yield from ({**fields, "when": theirs, "value": ours} for theirs, ours in value.items())
    else:
        yield fields


def read_rows(name):
    """The rows of one table of other trainers' options."""
    text = (TABLES / f"{name}.inl").read_text(encoding="utf-8")
    rows = []
    for whole in json.loads(text[text.index('json(') + 5:text.rindex(")json")]):
        for fields in _expanded(whole):
            fields = {k: "".join(v) if isinstance(v, list) else v for k, v in fields.items() if k != "say"}
            word = next((word for word in ACTIONS if word in fields), "take")
            fields["option" if word == "take" else "fact"] = fields.pop(word, "")
            rows.append(Row(action=ACTIONS[word], **fields))
    return rows


@dataclasses.dataclass
class Finding:
    """The result for one setting, or for one line of a script."""
    file: str
    line: int
    text: str
    action: str
    fact: str = ""
    error: int = 0

    @property
    def where(self):
        return f"{self.file}:{self.line}"


@dataclasses.dataclass
class Default:
    """A default of the other trainer that differs from ours: written out unless the input sets the option."""
    option: str
    unless: str        # not written if this option of ours is set; "" for always
    value: object


@dataclasses.dataclass
class Source:
    """A kind of input."""
    name: str                  # "a DeepSpeed configuration"
    table: str                 # of its options, in llmc/config/foreign
    finish: object             # function(Import) for what follows from several settings together
    marks: str                 # keys that only this kind has, separated by spaces
    defaults: list = dataclasses.field(default_factory=list)
    fp8_switch: str = ""       # what switches FP8 on: without it no setting of FP8 acts in that trainer

    def __post_init__(self):
        self.rows = read_rows(self.table) + read_rows("shared")


def _fail(setting, expects):
    shown = " ".join(setting.word()[:100].split()) or "without a value"
    raise InputError(f"{setting.where}: {setting.key} {shown}: must be {expects}; correct it there, or take the line "
                     "out and give our option on the command line")


def _number(setting, expects="a number"):
    value = setting.value
    if isinstance(value, bool) or value is None:
        _fail(setting, expects)
    try:
        # YAML 1.1 reads 5e-5 as text, and people write 1_000.
        number = float(str(value).replace("_", ""))
    except ValueError:
        _fail(setting, expects)
    if number != number or number in (float("inf"), float("-inf")):
        _fail(setting, "a finite number")
    return int(number) if number == int(number) and "e-" not in str(value) else number


def _integer(setting):
    number = _number(setting, "a whole number")
    if number != int(number):
        _fail(setting, "a whole number")
    return int(number)


def _flag(setting):
    word = setting.word()
    if word in ("true", "yes", "on", "1"):
        return True
    if word in ("false", "no", "off", "0"):
        return False
    return _fail(setting, "true or false")


def _text(setting):
    if setting.value is None or isinstance(setting.value, (bool, list)):
        _fail(setting, "one word or path")
    return str(setting.value)


def _words(setting):
    return [str(x) for x in setting.value] if isinstance(setting.value, list) else [_text(setting)]


def _joined(setting):
    return " ".join(_words(setting))


# By `read` of a row, or by the type of an option of ours.
READERS = {"integer": _integer, "number": _number, "flag": _flag, "text": _text, "words": _words, "choice": _text,
           "list": _words, "tuple": _joined}
