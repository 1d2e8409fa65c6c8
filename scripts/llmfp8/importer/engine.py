"""Applies the tables to settings: one finding per setting, and the resulting options of ours."""
import collections
import difflib

from ..support import InputError
from .finish import finish_batch, known_ranks
from .option_table import option_table, our_value, own_rows, without_effect
from .rows import CANNOT, NONE, OTHER, TAKEN, UNKNOWN, find_row, plain, read_value, rows_of

FP8_OPTIONS = ("fp8-", "num-layers-at-", "first-last")
# Of an option of ours: the setting that decides it (None: no line says it), and whether any other setting wins.
Entry = collections.namedtuple("Entry", "value finding weak")


def said(option, value):
    shown = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return f"{option} {shown.lower() if isinstance(value, bool) else shown}"


def overrule(old, finding, says):
    """Two places contradict each other: in one file the later one wins, two files are an error."""
    if old.file != finding.file:
        raise InputError(f"{old.where}: {old.text} and {finding.where}: {finding.text} contradict each other: make "
                         "them equal, or take one out")
    old.decide(NONE, f"overruled by {finding.where}, which says {says}", old.error or 7)
    finding.error = finding.error or 7


class Import:
    """The run that one or several inputs describe."""

    def __init__(self, ranks=0):
        self.config, self.kept, self.findings, self.notes, self.inputs = {}, {}, [], [], []
        self.ranks, self.fp8_switch, self.finishers = ranks, "", {}

    def get(self, option):
        return self.config[option].value if option in self.config else None

    def kept_as(self, name, fallback=None):
        """(value, setting) that a row of the tables keeps under this name."""
        return self.kept.get(name, (fallback, None))

    def set(self, option, value, finding, weak=False):
        old = self.config.get(option)
        if finding:
            finding.options.append(option)
        if old and weak and (old.finding or not finding):
            return
        two = old and old.finding and finding and finding is not old.finding and old.value != value
        if two and not old.weak:
            overrule(old.finding, finding, said(option, value))
        self.config.pop(option, None)
        self.config[option] = Entry(value, finding, weak)

    def default(self, option, value):
        """Sets what no line says, unless a line does."""
        if value is not None:
            self.set(option, value, None, weak=True)

    def drop(self, option, fact):
        entry = self.config.pop(option, None)
        if entry and entry.finding:
            entry.finding.decide(NONE, fact)

    def apply(self, source, settings):
        """Applies the settings of one input and the defaults of its trainer."""
        last = {plain(s.key): s for s in settings}
        for setting in settings:
            winner = last[plain(setting.key)]
            if winner is not setting:
                self.findings.append(setting.decide(NONE, f"given again in line {winner.line}, which wins"))
            else:
                self.one(setting, source.rows + own_rows())
        for name, value in source.defaults.items():
            option, _, other = name.partition(" unless ")
            if option not in self.config and other not in self.config:
                self.default(option, value)
        self.fp8_switch = source.fp8_switch or self.fp8_switch
        self.finishers[source.finish] = True   # in the order of the inputs, each once

    def one(self, setting, rows):
        self.findings.append(setting)
        row, named = find_row(rows, setting), rows_of(rows, setting.key)
        if "$" in setting.word() and any(r.keys != "*" and (r.action == TAKEN or r.when) for r in named):
            setting.decide(UNKNOWN, "no plain value, and nothing is run: name that of a variable with --set "
                           f"NAME=VALUE, or this one with --set {setting.key.replace('-', '_')}=VALUE")
            return
        if row is None:
            setting.decide(UNKNOWN, f"the value {setting.word()} is none that is known for this key" if named
                           else unknown_key(rows, setting.key))
            return
        setting.decide(row.action, row.fact, row.error)
        value = row.value
        if row.action == TAKEN and value is None:
            kind = row.read or (option_table("llama")[row.option]["type"] if row.option else "text")
            value, refused = read_value(setting, kind), ""
            if row.option:
                value, refused = our_value(row.option, value)
            if refused:
                setting.decide(CANNOT, refused)
                return
        if row.keep:
            old, before = self.kept_as(row.keep)
            # If the row has an option of ours, set() reports the contradiction.
            if not row.option and None not in (old, value) and old != value:
                overrule(before, setting, setting.text)
            self.kept[row.keep] = (value, setting)
        if row.action == TAKEN and row.option:
            self.set(row.option, value, setting)
        for option, more in row.sets.items():
            self.set(option, more, setting)
        for option, more in row.weak.items():
            self.set(option, more, setting, weak=True)

    def finish(self):
        """Applies rules about several settings, once all inputs are read."""
        known_ranks(self)
        for finish in self.finishers:
            finish(self)
        finish_batch(self)
        is_off = "fp8" not in self.kept and self.fp8_switch
        for option in [o for o in self.config if o.startswith(FP8_OPTIONS)] if is_off else []:
            self.drop(option, f"no FP8 runs there without {self.fp8_switch}")
        if self.get("fp8-recipe") not in (None, "none") and self.get("dtype") == "fp32":
            finding = self.config.pop("dtype").finding
            self.set("dtype", "bf16", finding and finding.decide(OTHER, "only BF16 tensors are quantized"))
        while found := without_effect(self.family() or "llama", self.options()):
            self.drop(*found)
        for options, note in (("model load num-layers", "--model NAME or --load DIR: there is no model in the input; "
                               "without one llama3-small is trained"),
                              ("train-data synthetic-data", "--train-data GLOB: the shards to train on "
                               "(data/README.md; --dry-run works without)"),
                              ("train-iters epochs", "--train-iters N or --epochs X: the length of the run (--dry-run "
                               "works without)")):
            if not any(option in self.config for option in options.split()):
                self.notes.append(note)
        for option in ("context-parallel", "expert-parallel"):
            if (self.get(option) or 1) > 1 and not self.ranks:
                self.notes.append(f"{option} {self.get(option)} divides ranks, whose number no line says: --ranks N")
        for finding in self.findings:
            self.tell_options(finding)

    def tell_options(self, finding):
        """Puts the options that a setting asked for at the beginning of its fact, with their values in the end."""
        facts = []
        for option in dict.fromkeys(finding.options) if finding.action in (TAKEN, OTHER) else []:
            if option in self.config:
                decider = self.config[option].finding or finding
                place = f"line {decider.line}" if decider.file == finding.file else decider.where
                facts.append(said(option, self.get(option)) + f", as {place} says" * (decider is not finding))
        finding.fact = "; ".join(facts + [finding.fact] * bool(finding.fact))

    def options(self):
        """Our JSON: the model first, then in the order of the input."""
        return {name: self.get(name) for name in sorted(self.config, key=lambda o: o != "model")}

    def family(self):
        if "load" in self.config and "model" not in self.config:
            return ""
        return "gpt2" if str(self.get("model")).startswith("gpt2") else "llama"


def unknown_key(rows, key):
    names = sorted({k for row in rows for k in row.keys.split() if "*" not in k})
    near = difflib.get_close_matches(key, names, 1, 0.75)
    return "not in our tables" + (f": did you mean {near[0]}?" if near else
                                  "; nothing was written for it, look for an option with --help")


def is_open(run):
    return any(f.action in (CANNOT, UNKNOWN) for f in run.findings)
