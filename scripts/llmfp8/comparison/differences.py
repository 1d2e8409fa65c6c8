"""The differences between two runs, and whether their ratio may be shown in a table."""
from collections import namedtuple

# kind "precision": what is compared. "refused": no ratio unless --allow names the key. "noted": a ratio with a note.
Difference = namedtuple("Difference", "key base other kind")

# Options that affect neither results nor speed.
NEUTRAL = {"save", "save-interval", "keep", "save-async", "resume", "tokenizer", "log-interval", "log-file",
           "sample-every", "sample-tokens", "prompt", "temperature", "top-k", "hellaswag-data",
           "eval-interval", "eval-bf16", "dry-run", "profile", "exit-duration-in-mins", "comm-timeout", "ranks"}
# Options about precision besides those named fp8-*.
PRECISION = {"dtype", "grad-dtype", "moment-dtype", "grad-comm-dtype", "grad-shard-dtype",
             "first-last-layers-bf16", "num-layers-at-start-in-bf16", "num-layers-at-end-in-bf16", "bf16-linears"}
# Fields of the header besides the configuration: key, kind of the difference, value.
FACTS = {
    "gpu": ("refused", lambda header: header["device"]["name"]),
    "gpus": ("refused", lambda header: header["world"]),
    "synthetic-data": ("refused", lambda header: bool(header.get("synthetic_data"))),
    "commit": ("noted", lambda header: header["commit"]),
    "driver": ("noted", lambda header: header["device"].get("driver", "")),
    "toolkit": ("noted", lambda header: header["device"].get("toolkit", "")),
    "matmul library": ("noted", lambda header: header["device"].get("matmul_library", "")),
}
# Defaults, which precision_text leaves out. --print-options may be of another commit than the log, or not built.
USUAL = {"fp8-margin": 0, "fp8-interval": 1, "fp8-amax-history-len": 16, "fp8-amax-compute-algo": "max",
         "fp8-fast-accum": "fprop", "grad-dtype": "fp32", "moment-dtype": "fp32",
         "grad-shard-dtype": "fp32", "fp8-stats-interval": 100}
SUMMARIZED = {"dtype", "fp8-recipe", "fp8-format", "first-last-layers-bf16", "num-layers-at-start-in-bf16",
              "num-layers-at-end-in-bf16"}


def is_precision(key):
    return key in PRECISION or key.startswith("fp8-")


def same(a, b):
    """Headers leave out options without effect, so a missing option equals one that is off."""
    off = (None, False, 0, "", [], "none")
    return a == b or (None in (a, b) and a in off and b in off)


def shown(value):
    if value is None:
        return "without effect"
    if isinstance(value, list):
        return ",".join(map(str, value)) or "none"
    return str(value).lower() if isinstance(value, bool) else str(value) if value != "" else "none"


def contents(header, key):
    """(fingerprint, text) of what is in the files that an option names; None and their names if the log lacks it."""
    identity = header.get("identity", {}).get(key)
    if not identity:
        return None, shown(header["config"].get(key))
    facts = [form.format(identity[fact]) for fact, form in (("tokens", "{:,} tokens"), ("tokenizer", "tokenizer {}"),
                                                            ("fingerprint", "fingerprint {}")) if fact in identity]
    return identity["fingerprint"], f"{shown(header['config'].get(key))} ({', '.join(facts)})"


def run_differences(base, other):
    """The Differences between two headers."""
    found = []
    for key, (kind, fact) in FACTS.items():
        if fact(base) != fact(other):
            found.append(Difference(key, shown(fact(base)), shown(fact(other)), kind))
    first, second = base["config"], other["config"]
    for key in dict.fromkeys([*first, *second]):
        mine, its = contents(base, key), contents(other, key)
        if mine[0] and its[0]:   # whatever the files are called
            found += [Difference(key, mine[1], its[1], "refused")] * (mine[0] != its[0])
            continue
        if key in NEUTRAL or key in FACTS or same(first.get(key), second.get(key)):
            continue
        kind = "precision" if is_precision(key) else "refused"
        found.append(Difference(key, shown(first.get(key)), shown(second.get(key)), kind))
    return found


def precision_text(config):
    """The precision of a run in a few words: its recipe, and options that are not at their defaults."""
    if config.get("fp8-recipe", "none") == "none":
        words = [str(config.get("dtype", "bf16")).upper()]
    else:
        words = [f"FP8 {config['fp8-recipe']} {config.get('fp8-format', '')}".strip()]
        if config.get("first-last-layers-bf16"):
            words.append(f"first {config.get('num-layers-at-start-in-bf16', 1)} and last "
                         f"{config.get('num-layers-at-end-in-bf16', 1)} layers BF16")
    usual = {**USUAL, "grad-comm-dtype": config.get("grad-dtype", "fp32")}
    for key, value in config.items():
        if is_precision(key) and key not in SUMMARIZED and value != usual.get(key, value if not value else None):
            words.append(f"{key} {shown(value)}")
    return ", ".join(words)


class Verdict:
    """Whether a configuration is compared with the baseline, and the notes about it."""

    def __init__(self, base, other, allowed):
        self.refused, self.notes = [], []
        self.keys = set()   # of differences that --allow can name
        for difference in run_differences(base.header, other.header):
            text = f"{difference.key} {difference.other}, {base.name} has {difference.base}"
            if difference.kind == "refused":
                self.keys.add(difference.key)
                (self.notes if difference.key in allowed else self.refused).append(text)
            elif difference.kind == "noted":
                self.notes.append(text)
        if base.tokens != other.tokens:
            self.notes.append(f"{other.tokens:,} tokens trained on, {base.name} {base.tokens:,}")

    def text(self):
        """The line below the table, "" if there is none."""
        parts = []
        if self.refused:
            names = ",".join(sorted({text.split(" ")[0] for text in self.refused}))
            parts.append(f"not compared: {'; '.join(self.refused)} (--allow {names} compares anyway)")
        if self.notes:
            parts.append(f"differs: {'; '.join(self.notes)}")
        return "; ".join(parts)
