"""After a change of the watchdog or of the launcher, on --ranks (2) GPUs: during training under
scripts/launch/launch_mpi.sh the first or the last rank is killed or suspended, or hangs, or the launcher
gets a signal. The table has the event, the seconds until no rank was left, the exit code, the MiB used on the GPUs
before and after, and the hang report. Each run also shows that the GPUs can be used after the run before it."""
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path

from check import ROOT

MODEL = "--model llama3-small --fp8-recipe delayed --micro-batch-size 2 --bucket-mb 40"
LOST = r"launch_mpi\.sh: rank \d+ .* (is gone|is stopped by a signal|without progress)"
SLACK_MIB = 16   # used by the driver
# Name, exit code, expected text, the action after step `at` (on the rank or the launcher), further options, and faults
# (tests/support/faults.cpp). LIMIT: --comm-timeout plus 5 s; {last} is the last rank.
LIMIT = None
CASES = (
    ("kill-first", 6, LIMIT, LOST, 8, [("rank", 0, signal.SIGKILL)], ""),
    ("kill-last", 6, LIMIT, LOST, 8, [("rank", -1, signal.SIGKILL)], ""),
    ("stop-first", 6, LIMIT, LOST, 8, [("rank", 0, signal.SIGSTOP)], ""),
    ("stop-last", 6, LIMIT, LOST, 8, [("rank", -1, signal.SIGSTOP)], ""),
    ("stall", 6, LIMIT, LOST, 10, [], "", "stall:rank={last}@backward=12"),
    ("term-saves", 0, 60, "a signal to the launch wrapper after step", 8, [("launcher", 0, signal.SIGTERM)],
     "--save {out}/save"),
    ("second-term", 143, 10, "second signal", 10,
     [("launcher", 1, signal.SIGTERM), ("launcher", 1, signal.SIGTERM)], "",
     "stall:rank={last}@backward=12"),
)


def used_mib(count):
    try:
        done = subprocess.run(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"],
                              capture_output=True, text=True)
    except OSError:
        return 0
    return sum(int(line) for line in done.stdout.splitlines()[:count] if line.strip().isdigit())


def children_of(pid):
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += map(int, path.read_text().split())
        except OSError:
            pass
    return sorted(found)


def lives(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


class Case:
    def __init__(self, check, name, expect, limit, said, at, actions, options, faults=""):
        self.check, self.name, self.expect, self.said, self.at, self.actions = check, name, expect, said, at, actions
        self.count = check.options.ranks
        self.limit = limit or check.options.timeout + 5
        self.options = shlex.split(options.format(last=self.count - 1, out=check.out))
        self.log = check.out / f"{name}.jsonl"
        self.environment = {**os.environ, "LLMC_FAULTS": faults.format(last=self.count - 1)}

    def fail(self, text):
        self.check.fail(f"{self.name}: {text}")

    def command(self):
        return [ROOT / "scripts" / "launch" / "launch_mpi.sh", *self.check.mpirun[1:], "-np", str(self.count),
                self.check.build / "faults/train_llama", "--train-data", self.check.shards(),
                "--train-iters", "1000000",
                "--log-interval", "1", "--comm-timeout", str(self.check.options.timeout), "--log-file", self.log,
                "--global-batch-size", str(4 * self.count), *shlex.split(self.check.options.model or MODEL),
                *shlex.split(self.check.options.options), *self.options]

    def wait_for_step(self, step):
        """Waits until the log has this step, or the launcher has ended."""
        while self.launcher.poll() is None:
            if self.log.exists() and re.search(rf'"step":{step}[,}}]', self.log.read_text()):
                return
            time.sleep(0.1)

    def act(self):
        for whom, number, what in self.actions:
            if whom == "rank":
                os.kill(self.ranks[number], what)
            else:
                time.sleep(number)   # seconds between signals
                self.launcher.send_signal(what)

    def run(self):
        """Starts the ranks, does the action of the case, and checks the end. Returns a row of the table."""
        self.log.unlink(missing_ok=True)
        shutil.rmtree(self.check.out / "save", ignore_errors=True)   # a run refuses another one's checkpoints
        before = used_mib(self.count)
        output = self.check.out / f"{self.name}.txt"
        with open(output, "w") as text:
            self.launcher = subprocess.Popen([str(word) for word in self.command()], cwd=ROOT, stdout=text,
                                             env=self.environment,
                                             stderr=subprocess.STDOUT)
            self.wait_for_step(4)
            self.ranks = [rank for mpirun in children_of(self.launcher.pid) for rank in children_of(mpirun)]
            if len(self.ranks) != self.count:
                self.fail(f"{len(self.ranks)} ranks run")
            self.wait_for_step(self.at)
            begin = time.monotonic()
            if self.ranks:
                self.act()
            while any(map(lives, self.ranks)) and time.monotonic() - begin < 120:
                time.sleep(0.05)
            took = time.monotonic() - begin
            left = [pid for pid in self.ranks if lives(pid)]
            for pid in left:
                self.fail("a rank lives on")
                os.kill(pid, signal.SIGKILL)
            code = self.launcher.wait()
        for _ in range(50):   # the driver takes a moment
            after = used_mib(self.count)
            if after <= before + SLACK_MIB:
                break
            time.sleep(0.1)
        return self.judge(took, code, before, after, output.read_text(errors="replace"))

    def judge(self, took, code, before, after, output):
        said = [line for line in output.splitlines() if re.search(self.said, line)][-1:]
        if code != self.expect:
            self.fail(f"exit {code}, not {self.expect}")
        if not said:
            self.fail(f"nobody said: {self.said}")
        if took > self.limit:
            self.fail(f"took {took:.1f} s, at most {self.limit} s")
        if after > before + SLACK_MIB:
            self.fail(f"{before} MiB were used before, {after} after")
        return row(self.name, f"{took:.1f}", code, before, after, "".join(said)[:150])


def row(*cells):
    return "{:12} {:>8} {:>5} {:>11} {:>10}  {}".format(*cells)


def run(check):
    check.options.ranks = check.options.ranks or 2
    check.make("build/cuda/faults/train_llama")
    rows = [row("what", "seconds", "exit", "MiB before", "MiB after", "said")]
    for case in CASES:
        rows.append(Case(check, *case).run())
    print("\n".join(rows))
