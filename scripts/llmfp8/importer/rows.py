"""Types of import_config: settings of the input with what becomes of them, and rows that say how to translate them
(llmc/config/foreign has the tables and explains them)."""
import collections
import dataclasses
import fnmatch
import json
import math
import operator
from pathlib import Path

from ..support import InputError

# Limits, far above any real configuration, so that no input takes long or much memory.
MOST_BYTES = 256 << 10   # of a file
MOST_IN_LINE = 8 << 10   # characters of a line
MOST_SETTINGS = 1000     # of a file
MOST_IN_VARIABLES = 256 << 10   # characters that a variable of a script becomes

# Actions.
TAKEN = "taken over"
OTHER = "done differently"
NONE = "no effect anywhere"
CANNOT = "not done here"
MEANT = "read as it was meant"
UNKNOWN = "not understood"
ACTIONS = {"take": TAKEN, "other": OTHER, "none": NONE, "cannot": CANNOT}


@dataclasses.dataclass
class Setting:
    """One key of the input with its value, or a remarkable line of a script, and what becomes of it."""
    file: str
    line: int
    key: str        # dotted path in a file, the option's name in a script
    value: object   # True, a word, or a list of words; numbers as they are written
    text: str       # as the report shows it
    action: str = ""
    fact: str = ""
    error: int = 0  # of the seven configuration errors
    options: list = dataclasses.field(default_factory=list)   # of ours that it asked for

    @property
    def where(self):
        return f"{self.file}:{self.line}"

    def word(self):
        """The value as the tables match it."""
        if isinstance(self.value, list):
            return ",".join(map(str, self.value)).lower() or "[]"
        return "null" if self.value is None else str(self.value).strip().lower()

    def decide(self, action, fact, error=0):
        self.action, self.fact, self.error = action, fact, error or self.error
        return self


# A row of llmc/config/foreign, whose README.md explains the fields.
Row = collections.namedtuple("Row", "keys action fact option read when value sets weak keep error",
                             defaults=("", "", "", "", None, {}, {}, "", 0))


def plain(key):
    return key.replace("_", "-").lower()


def rows_of(rows, key):
    """The rows that name a key; none if only a star alone matches."""
    named = [row for row in rows if any(fnmatch.fnmatchcase(plain(key), plain(k)) for k in row.keys.split())]
    return named if any(row.keys != "*" for row in named) else []


def find_row(rows, setting):
    return next((r for r in rows_of(rows, setting.key) if not r.when or setting.word() in r.when.split()), None)


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
    root = next(p for p in Path(__file__).resolve().parents if (p / "llmc").is_dir())
    text = (root / "llmc" / "config" / "foreign" / f"{name}.inl").read_text(encoding="utf-8")
    rows = []
    for whole in json.loads(text[text.index('json(') + 5:text.rindex(")json")]):
        for fields in _expanded(whole):
            fields = {k: "".join(v) if isinstance(v, list) else v for k, v in fields.items() if k != "say"}
            word = next((word for word in ACTIONS if word in fields), "take")
            fields["option" if word == "take" else "fact"] = fields.pop(word, "")
            rows.append(Row(action=ACTIONS[word], **fields))
    return rows


def _number(value):
    number = float(str(value).replace("_", ""))   # people write 1_000
    if not math.isfinite(number):
        raise ValueError
    return int(number) if number == int(number) else number


def _integer(value):
    return operator.index(_number(value))


def _flag(value):
    return {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False,
            "0": False}[str(value).lower()]


def _text(value):
    if value is None or isinstance(value, (bool, list)):
        raise ValueError
    return str(value)


def _words(value):
    return [str(x) for x in value] if isinstance(value, list) else [_text(value)]


# By `read` of a row, or by the type of an option of ours.
READERS = {"integer": (_integer, "a whole number"), "number": (_number, "a number"), "flag": (_flag, "true or false"),
           "text": (_text, "one word or path"), "choice": (_text, "one word"), "words": (_words, "words"),
           "list": (_words, "words"), "tuple": (lambda value: " ".join(_words(value)), "words")}


def read_value(setting, kind):
    function, expects = READERS[kind]
    try:
        return function(setting.value)
    except (ValueError, TypeError, KeyError):
        shown = " ".join(setting.word()[:100].split()) or "without a value"
        raise InputError(f"{setting.where}: {setting.key} {shown}: must be {expects}; correct it there, or take the "
                         "line out and give our option on the command line") from None
