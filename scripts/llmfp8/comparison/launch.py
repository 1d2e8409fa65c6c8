"""Measures configurations alternately; each start is a process with its own log."""
import json
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

from ..run_log import InputError, read_log
from ..support import no_follow, parse_json

from .report import write_text

MEASURED = "measured.json"   # in the folder of a measurement: facts that its logs do not have
NAME = re.compile(r"[A-Za-z0-9][\w.+-]*")
# Options that the measurement sets itself.
OWN_OPTIONS = {"train-iters", "x", "epochs", "e", "log-file", "save", "o", "resume", "save-interval", "n", "keep",
               "exit-duration-in-mins", "dry-run", "help"}


def check_command(name, words):
    if not NAME.fullmatch(name):
        raise InputError(f"--run {name}=: a name is letters, digits and . _ + - (it becomes part of file names)")
    if not words:
        raise InputError(f"--run {name}=: no command after the name")
    check_options(f"--run {name}=", words)


def check_options(where, words):
    for word in words:
        option = word.lstrip("-").partition("=")[0].replace("_", "-")
        if word.startswith("-") and option in OWN_OPTIONS:
            raise InputError(f"{where}: {word} is set by the comparison itself: leave it out (--iters, --warmup and "
                             "--rounds, or --train-iters before the --, say how long runs are)")


def error_of(text):
    """The error line in the output of a run, that of a plan which does not fit, or else the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(("error: ", "does not fit: "))]
    return (errors or lines or ["no output"])[-1].removeprefix("error: ")


def refuse_bad_options(commands):
    """Checks every configuration with --dry-run, which needs no data and no GPU."""
    for name, words in commands.items():
        try:
            done = subprocess.run([*words, "--dry-run"], text=True, errors="replace", stdout=subprocess.PIPE,
                                  stderr=subprocess.STDOUT)
        except OSError as error:
            raise InputError(f"{name}: {words[0]}: {error.strerror}") from None
        if done.returncode:
            raise InputError(f"{name}: {error_of(done.stdout)} (exit code {done.returncode} of "
                             f"{shlex.join([*words, '--dry-run'])})")


def say(text):
    print(text, file=sys.stderr, flush=True)


def read_measured(folder):
    """The folder's measured.json, None if there is none."""
    path = Path(folder) / MEASURED
    if not path.exists():
        return None
    try:
        measured = parse_json(path.read_text(encoding="utf-8"))
        return {key: kind(measured[key]) if measured[key] is not None else None
                for key, kind in (("table", str), ("warmup", int), ("train_iters", int), ("failures", dict),
                                  ("commands", dict))}
    except (ValueError, KeyError, TypeError):
        raise InputError(f"{path}: damaged; name the logs instead of the folder, or choose another one") from None


class Measurement:
    """options: out, table, rounds, iters, warmup, train_iters."""

    def __init__(self, commands, options):
        self.commands, self.options = commands, options
        self.out = Path(options.out)
        self.logs = {name: [] for name in commands}
        self.failures = {}   # error message by name

    def log(self, name, number):
        return self.out / f"{name}.{number}.jsonl"

    def words(self, name, number):
        """The command of a start. A long run continues from its checkpoint, in the same log."""
        options = self.options
        if options.train_iters is None:
            length = ["--train-iters", str(options.warmup + options.iters)]
        else:
            length = ["--train-iters", str(options.train_iters), "--save", str(self.out / name), "--save-interval", "0",
                      "--keep", "1", "--resume", "auto"]
        return [*self.commands[name], *length, "--log-file", str(self.log(name, number))]

    def check(self):
        """Checks options and folder before anything is started."""
        refuse_bad_options({name: self.words(name, 1) for name in self.commands})
        if self.options.train_iters is not None:
            self.check_continued()
        else:
            there = [str(path) for name in self.commands for path in sorted(self.out.glob(f"{name}.*.jsonl"))]
            if there:
                raise InputError(f"--out {self.out}: has {there[0]} of an earlier measurement: choose another folder "
                                 f"(scripts/compare {self.out} makes the tables of its logs)")

    def check_continued(self):
        """Requires that an earlier measurement in the folder had the same commands."""
        measured = read_measured(self.out) or {"commands": {}, "train_iters": None}
        for name, words in self.commands.items():
            if not self.log(name, 1).exists():
                continue
            before = measured["commands"].get(name)
            if before != words or measured["train_iters"] != self.options.train_iters:
                what = f"{shlex.join(before)}, {measured['train_iters']} steps" if before else "another measurement"
                raise InputError(f"--out {self.out}: its {name} is a run of {what}: use that, or choose another folder")

    def record(self):
        text = json.dumps({"table": self.options.table, "warmup": self.options.warmup,
                           "train_iters": self.options.train_iters, "failures": self.failures,
                           "commands": self.commands}, indent=1)
        write_text(self.out / MEASURED, text + "\n")

    def start(self, name, number):
        """Runs one process, with its output in a .txt file next to its log. Returns its error, or ""."""
        log, words = self.log(name, number), self.words(name, number)
        with open(log.with_suffix(".txt"), "a", encoding="utf-8", opener=no_follow) as text:
            print("$", shlex.join(words), file=text, flush=True)
            # In its own session, so that Ctrl-C reaches it once, as our SIGTERM: a second signal would end it unsaved.
            process = subprocess.Popen(words, stdout=text, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                code = process.wait()
            except BaseException:
                process.terminate()
                process.wait()
                raise
        if code:
            said = error_of(log.with_suffix(".txt").read_text(encoding="utf-8", errors="replace"))
            if self.options.train_iters is None and log.exists():
                log.replace(log.with_suffix(".failed"))   # so that it does not count as a round
            return f"exit code {code}: {said}"
        if log not in self.logs[name]:
            self.logs[name].append(log)
        return ""

    def attempt(self, name, number, label):
        """Runs a configuration once and prints the outcome; after a failure it is not started again."""
        begin = time.monotonic()
        said = self.start(name, number)
        if said:
            self.failures[name] = said
            say(f"{label} {name}: FAILED: {said}")
            return
        steps = read_log(self.log(name, number)).step_list()
        if not steps:
            raise InputError(f"{self.log(name, number)}: no step was done; the same command goes on")
        say(f"{label} {name}: step {steps[-1]['step']}, {steps[-1]['step_seconds']:.4g} s/it, "
            f"{time.monotonic() - begin:.0f} s")

    def left(self):
        return [name for name in self.commands if name not in self.failures]

    def run_rounds(self):
        """In each round, runs every configuration with the same steps on the same tokens."""
        for number in range(1, self.options.rounds + 1):
            for name in self.left():
                self.attempt(name, number, f"round {number}/{self.options.rounds}")

    def run_long(self):
        """Runs each configuration once to its end, or what an interrupted measurement has left of it."""
        for name in self.left():
            done = max(read_log(self.log(name, 1)).steps, default=0) if self.log(name, 1).exists() else 0
            if done < self.options.train_iters:
                self.attempt(name, 1, "run")
            else:
                self.logs[name].append(self.log(name, 1))

    def run(self):
        """Returns the logs of each configuration that ran, by name."""
        self.record()
        if self.options.train_iters is None:
            self.run_rounds()
        else:
            self.run_long()
        self.record()
        return {name: logs for name, logs in self.logs.items() if logs}
