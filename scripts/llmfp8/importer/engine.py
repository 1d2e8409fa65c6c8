"""Applies the tables to settings: one finding per setting, and the resulting options of ours."""
import dataclasses
import difflib
import fnmatch

from ..support import InputError
from .finish import finish_batch
from .option_table import option_table, our_value, own_rows, why_no_effect
from .rows import CANNOT, NONE, OTHER, READERS, TAKEN, UNKNOWN, VARIABLE, Finding
from .shared_rows import ABSENT, ENVIRONMENT, SECOND_FILE


@dataclasses.dataclass
class Entry:
    value: object
    finding: object   # None: it was not set explicitly
    weak: bool


FP8_OPTIONS = ("fp8-", "num-layers-at-", "first-last")


def plain(key):
    return key.replace("_", "-").lower()


def overrule(old, finding, says):
    """Two places contradict each other: in one file the later one wins, two files are an error."""
    if old.file != finding.file:
        raise InputError(f"{old.where}: {old.text} and {finding.where}: {finding.text} contradict each other: make "
                         "them equal, or take one out")
    old.fact = f"{old.fact}; " if old.fact else ""
    old.fact += f"overruled by {finding.file}:{finding.line}, which says {says}"
    old.action, old.error, finding.error = NONE, old.error or 7, finding.error or 7


class Import:
    """The run that one or several inputs describe."""

    def __init__(self, ranks=0):
        self.config, self.kept, self.findings, self.notes, self.defaults = {}, {}, [], [], []
        self.ranks, self.inputs, self.fp8_switch = ranks, [], ""

    # ---- options of ours ----

    def get(self, option):
        return self.config[option].value if option in self.config else None

    def value(self, name, fallback=None):
        return self.kept[name][0] if name in self.kept else fallback

    def set(self, option, value, finding, weak=False):
        old = self.config.get(option)
        two = old and old.finding and finding and finding is not old.finding
        if two and weak:
            tell(finding, option, old.value, old.finding)
        if old and weak and not (finding and old.finding is None):
            return
        if two and old.value != value and not old.weak:
            overrule(old.finding, finding, f"{option} {value}")
        elif two and old.value != value:
            old.finding.fact = old.finding.fact.replace(said(option, old.value), "", 1).removeprefix("; ")
            tell(old.finding, option, value, finding)
        self.config.pop(option, None)
        self.config[option] = Entry(value, finding, weak)
        tell(finding, option, value)

    def drop(self, option, fact):
        entry = self.config.pop(option, None)
        if entry and entry.finding:
            entry.finding.action, entry.finding.fact = NONE, fact

    # ---- settings ----

    def apply(self, source, settings):
        """Applies the settings of one input, the defaults of its trainer, and rules about several settings."""
        last = {plain(s.key): s for s in settings}
        for setting in settings:
            if last[plain(setting.key)] is not setting:
                self.note(setting, NONE, f"given again in line {last[plain(setting.key)].line}, which wins")
            else:
                self.one(setting, source.rows + own_rows())
        for default in source.defaults:
            if default.option not in self.config and not (default.unless and default.unless in self.config):
                self.set(default.option, default.value, None, weak=True)
                self.defaults.append((default.option, source.name))
        self.fp8_switch = source.fp8_switch or self.fp8_switch
        if source.finish:
            source.finish(self)

    def apply_environment(self, settings):
        for setting in settings:
            key = setting.key.replace("(not exported) ", "")
            row = find_row(ENVIRONMENT, dataclasses.replace(setting, key=key))
            if key != setting.key and row:
                self.note(setting, NONE, "set without export, so no command sees it")
            elif row:
                self.note(setting, row.action, row.fact, row.error)
            elif key != setting.key:
                self.note(setting, NONE, "nothing in the script uses this variable")
            else:
                self.note(setting, UNKNOWN, "an environment variable that is in no table here")

    def note_absent(self, name, settings):
        """Notes variables that guides recommend for FP8 and that the script does not set."""
        if "fp8" not in self.kept:
            return
        for variable, error, fact in ABSENT:
            if variable not in {s.key for s in settings}:
                self.findings.append(Finding(name, 0, f"{variable} is not set", VARIABLE, fact, error))

    def note(self, setting, action, fact, error=0):
        finding = Finding(setting.file, setting.line, setting.text, action, fact, error)
        self.findings.append(finding)
        return finding

    def one(self, setting, rows):
        row = find_row(rows, setting)
        unresolved = "$" in setting.word() and (row.action == TAKEN or row.when if row else find_row(
            [dataclasses.replace(r, when="") for r in rows], setting))
        if row is None and not unresolved:
            self.note(setting, UNKNOWN, unknown_fact(rows, setting))
            return
        if unresolved:
            self.note(setting, UNKNOWN, "no plain value, and nothing is run: name that of a variable with --set "
                      f"NAME=VALUE, or this one with --set {setting.key.lstrip('-').replace('-', '_')}=VALUE")
            return
        finding = self.note(setting, row.action, row.fact, row.error)
        value = row.value
        if row.action == TAKEN and value is None:
            kind = row.read or (option_table("llama")[row.option]["type"] if row.option else "text")
            value = READERS[kind](setting)
            value, refused = our_value(row.option, value) if row.option else (value, "")
            if refused:
                finding.action, finding.fact = CANNOT, refused
                return
        if row.keep:
            old, before = self.kept.get(row.keep, (None, None))
            # If the row has an option of ours, set() reports the contradiction.
            if not row.option and old is not None and value is not None and old != value:
                overrule(before, finding, setting.text)
            self.kept[row.keep] = (value, finding)
        if row.action == TAKEN and row.option:
            self.set(row.option, value, finding)
        for option, more in row.sets.items():
            self.set(option, more, finding)
        for option, more in row.weak.items():
            self.set(option, more, finding, weak=True)

    # ---- the whole ----

    def finish(self):
        finish_batch(self)
        is_off = "fp8" not in self.kept and self.fp8_switch
        for option in [o for o in self.config if o.startswith(FP8_OPTIONS)] if is_off else []:
            self.drop(option, f"no FP8 runs there without {self.fp8_switch}")
        for finding in self.findings:
            for name in self.inputs if finding.fact.startswith(SECOND_FILE) else []:
                if finding.text.split("/")[-1].split(" ")[-1] == name:
                    finding.fact = f"a second file about the same run, imported with this one: {name} below or above"
        if self.get("fp8-recipe") not in (None, "none") and self.get("dtype") == "fp32":
            finding = self.config["dtype"].finding
            self.set("dtype", "bf16", None)
            if finding:
                finding.action, finding.fact = OTHER, "dtype bf16: only BF16 tensors are quantized"
        self.drop_without_effect()
        if self.get("lr-decay-style") == "wsd" and self.get("train-iters") and not self.get("lr-wsd-decay-iters"):
            self.notes.append("wsd: the final decay is a tenth of the run unless lr-wsd-decay-iters says otherwise")
        if "train-data" not in self.config and "synthetic-data" not in self.config:
            self.notes.append("--train-data GLOB: the shards to train on (data/README.md; --dry-run works without)")
        if "train-iters" not in self.config and "epochs" not in self.config:
            self.notes.append("--train-iters N or --epochs X: the length of the run (--dry-run works without)")
        self.defaults = [(o, n) for o, n in self.defaults if o in self.config and self.config[o].weak]

    def drop_without_effect(self):
        """Drops options that the executable would refuse because they have no effect with the others."""
        table = option_table(self.family() or "llama")
        dropped = True
        while dropped:
            options = {name: entry.value for name, entry in self.config.items()}
            reasons = {name: why_no_effect(table, options, name) for name in options}
            dropped = next(((name, reason) for name, reason in reasons.items() if reason), None)
            if dropped:
                self.drop(*dropped)

    def options(self):
        """Our JSON: the model first, then in the order of the input."""
        names = sorted(self.config, key=lambda o: o != "model")
        return {name: self.config[name].value for name in names}

    def family(self):
        if "load" in self.config and "model" not in self.config:
            return ""
        return "gpt2" if str(self.get("model")).startswith("gpt2") else "llama"


def said(option, value):
    shown = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return f"{option} {shown.lower() if isinstance(value, bool) else shown}"


def tell(finding, option, value, decider=None):
    """Puts the option that a finding sets, or that `decider` sets instead, at the beginning of its fact."""
    if finding is None or finding.action not in (TAKEN, OTHER) or said(option, value) in finding.fact:
        return
    fact = said(option, value)
    if decider:
        fact += f", as {f'line {decider.line}' if decider.file == finding.file else decider.where} says"
    finding.fact = fact + (f"; {finding.fact}" if finding.fact else "")


def find_row(rows, setting):
    key, word = plain(setting.key), setting.word()
    named = [row for row in rows if any(fnmatch.fnmatchcase(key, plain(k)) for k in row.keys.split())]
    if not [row for row in named if row.keys != "*"]:
        return None
    fits = [row for row in named if not row.when or word in row.when.split()]
    return fits[0] if fits else None


def unknown_fact(rows, setting):
    key = plain(setting.key)
    if any(fnmatch.fnmatchcase(key, plain(k)) for row in rows if row.keys != "*" for k in row.keys.split()):
        return f"the value {setting.word()} is none that is known for this key"
    names = sorted({k for row in rows for k in row.keys.split() if "*" not in k})
    near = difflib.get_close_matches(setting.key, names, 1, 0.75)
    return "not in our tables" + (f": did you mean {near[0]}?" if near else
                                  "; nothing was written for it, look for an option with --help")


def is_open(run):
    return any(f.action in (CANNOT, UNKNOWN) for f in run.findings)
