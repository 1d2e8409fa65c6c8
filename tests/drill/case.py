"""Shared by the parts of the drill: running a command, and judging how it ended."""
import os
import random
import re
import resource
import shlex
import signal
import subprocess
import time

# Kinds of findings. loss: saved bytes are lost, or others than expected.
KINDS = ("signal", "hang", "loss", "code", "text", "left behind")
MARK = "HOSTILE_DRILL"   # in the environment of every process of a case
# Words of libraries or languages that a user must never see.
FOREIGN = re.compile(r"Traceback|json\.exception|basic_filebuf|basic_string|std::|terminate called|bad_alloc|"
                     r"AddressSanitizer|runtime error:|Segmentation|core dumped|Assertion")


class Case:
    """One trial with its own random generator; `number` and the seed reproduce it."""

    def __init__(self, part, number, seed, folder):
        self.part, self.number, self.folder = part, number, folder
        self.draw = random.Random(f"{seed} {part} {number}")
        self.mark = f"{os.getpid()}-{part}-{number}"
        self.findings, self.story = [], []

    def path(self, *parts):
        return os.path.join(self.folder, *parts)

    def found(self, kind, text):
        assert kind in KINDS
        self.findings.append((kind, text))

    def start(self, command, env=None, cwd=None, limits=(), **streams):
        """Starts a command in a new session. limits: (RLIMIT name, value)."""
        def child():
            for name, value in limits:
                resource.setrlimit(getattr(resource, "RLIMIT_" + name), (value, value))
        streams.setdefault("stdin", subprocess.DEVNULL)
        streams.setdefault("stdout", subprocess.PIPE)
        streams.setdefault("stderr", subprocess.PIPE)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {}), MARK: self.mark}
        self.story.append(" ".join(shlex.quote(word[:300]) for word in command))
        return subprocess.Popen(command, cwd=cwd or self.folder, preexec_fn=child, start_new_session=True,
                                env=environment, **streams)

    def end(self, process, seconds=60, may_stay=""):
        """Waits for the end and returns (code, output, error). Code None: the command hung and was killed.
        may_stay: the name of a process that is not ours; that it hangs alone is no finding."""
        try:
            out, error = process.communicate(timeout=seconds)
            code = process.returncode
        except subprocess.TimeoutExpired:
            living = [name for _, name in self.processes()]
            text = f"still there after {seconds} s: {', '.join(living)}"
            if living == [may_stay]:
                print(f"{self.part} {self.number}: {text}", flush=True)
            else:
                self.found("hang", text)
            self.kill_all()
            out, error = process.communicate()
            code = None
        out, error = ((text or b"").decode("utf-8", "replace") for text in (out, error))
        self.story.append(f"-> {code}: {error[-1500:]}")
        return code, out, error

    def run(self, command, seconds=60, **how):
        return self.end(self.start(command, **how), seconds)

    def judge(self, code, error, allowed):
        """Adds a finding if the exit code is not one of the allowed ones, or if the error is not one clear line."""
        if code is None:
            return
        if code < 0 or code >= 128:
            self.found("signal", f"ended by signal {-code if code < 0 else code - 128}")
        elif code not in allowed:
            self.found("code", f"exit code {code}, expected one of {sorted(allowed)}")
        if FOREIGN.search(error):
            self.found("text", "shows a library's or the language's own words")
        lines = [line for line in error.split("\n")
                 if line and not line.startswith(("note: ", "warning: ", "libgomp: ", "weights: "))]
        if code > 0 and len(lines) != 1:
            self.found("text", f"{len(lines)} lines of error instead of one")
        if any(len(line) > 1500 for line in lines):
            self.found("text", "a line of more than 1,500 characters")
        if re.search(r"[\x00-\x08\x0b-\x1f\x7f]", error):
            self.found("text", "control characters")

    def processes(self):
        """Living processes of this case."""
        mark, found = f"{MARK}={self.mark}".encode(), []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{pid}/environ", "rb") as file:
                    if mark not in file.read().split(b"\0"):
                        continue
                with open(f"/proc/{pid}/stat") as file:
                    name, rest = file.read().split("(", 1)[1].rsplit(")", 1)
            except (OSError, IndexError):
                continue
            if rest.split()[0] not in "ZX":
                found.append((int(pid), name))
        return found

    def kill_all(self):
        for pid, _ in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def require_gone(self, seconds):
        """Adds a finding if a process of the case still lives after this time."""
        end = time.monotonic() + seconds
        while self.processes():
            if time.monotonic() > end:
                self.found("left behind", f"processes {self.processes()} after {seconds} s")
                self.kill_all()
                return
            time.sleep(0.05)
