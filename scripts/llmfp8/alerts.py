"""Turns new records of a log into alerts, and delivers them by a command or a POST, for scripts/alerts. Standard
library only."""
import http.client
import json
import math
import os
import shutil
import signal
import socket
import statistics
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

from .run_log import ENDS, END_OF_ANOTHER_S, RunLog
from .support import escaped

SAME_KIND_S = 60       # between two alerts of a kind; what comes meanwhile is counted
DISK_S = 60            # between two looks at the disk
COMMAND_S, POST_S = 20, 10   # until a delivery is given up
TRIES, PAUSE_S = 3, 2  # of a POST that fails for the moment
SLOW_STEPS = 20


class WatchedLog(RunLog):
    """A log whose new records become alerts, (kind, step, text) in `alerts`. What it already had of a process that
    began long before is history, and so is what it has again when a resume has rewritten it."""

    def __init__(self, path, disk=shutil.disk_usage):
        self.disk, self.alerts, self.headers = disk, [], []
        self.known_s = time.time() - END_OF_ANOTHER_S   # the start of the last process whose records are history
        self.grew, self.looked = time.monotonic(), -math.inf
        super().__init__(path, skip_damaged=True)

    def _forget(self):
        self.known_s = max([self.known_s, *(header["unix_time"] for header in self.headers)])
        super()._forget()
        self.read_once = False   # since it was forgotten
        self.step, self.checkpoint_bytes, self.longest_s = 0, 0, 0.0
        self.said_slow = self.said_stalled = self.said_full = False
        self.seconds = []   # of the last steps

    def alert(self, kind, text):
        if self.read_once or self.headers[-1]["unix_time"] > self.known_s:
            self.alerts.append((kind, self.step, text))

    def taken(self, record):
        self.step, self.grew, self.said_stalled = max(self.step, record["step"]), time.monotonic(), False
        seconds = record.get("seconds")
        self.longest_s = max(self.longest_s, seconds if isinstance(seconds, (int, float)) else 0)
        if record["type"] == "header":
            self.step, self.seconds, self.said_slow = record["step"], [], False
            self.plans.clear()
        elif record["type"] == "step":
            self._look_at_step(self.steps[record["step"]])
        elif record["type"] == "checkpoint":
            self.checkpoint_bytes = folder_bytes(record["path"])
            self.looked = -math.inf
        elif record["type"] == "event":
            self._look_at_event(record["kind"], record["text"])

    def _look_at_step(self, record):
        if record["skipped"]:
            why = "gradient norm above its limit" if record.get("norm_skipped") else "loss or gradient norm not finite"
            return self.alert("skip", f"step {self.step}: {why}, the update was skipped")
        self.seconds = [*self.seconds, record["step_seconds"]][-SLOW_STEPS:]
        if not self.plans or len(self.seconds) < SLOW_STEPS:
            return None
        usual, what, factor = self.plans[-1].get("predicted_ms"), "were predicted", 1.3
        if usual is None:
            usual, what, factor = self.plans[-1].get("measured_ms") or math.inf, "a step took at first", 1.5
        now, usual = statistics.median(self.seconds), usual / 1e3
        if now > usual * factor and not self.said_slow:
            self.alert("slow", f"step {self.step}: {now:.4g} s/it (median of {SLOW_STEPS} steps), {now / usual:.2f} "
                               f"times the {usual:.4g} s that {what}")
        self.said_slow = now > usual * ((1 + factor) / 2 if self.said_slow else factor)
        return None

    def _look_at_event(self, kind, text):
        """The trainer itself looks for divergence, saturation and more, and says what it has found."""
        if kind in ENDS:
            self.alert("divergence" if kind == "diverged" else "end", text if kind == "stop" else f"{kind}: {text}")
        elif kind == "warning":
            self.alert("divergence" if " times its start of " in text else "warning", text)
        elif kind == "fp8":
            self.alert("saturated", text)

    def look(self, last=False):
        """Looks for what no record says; `last`: the job is over."""
        self.read_once = bool(self.headers)
        if not self.headers or self.finished:
            return
        if last:
            self.alert("lost", f"the run has not said that it ended; the last record is of step {self.step}: it was "
                               "killed, lost a rank, or crashed")
        usual = statistics.median(self.seconds) if self.seconds else 0.0
        silent = time.monotonic() - self.grew
        limit = max(600.0, 20 * usual if math.isfinite(usual) else 0.0, 5 * self.longest_s)
        if silent > limit and not self.said_stalled:
            self.said_stalled = True
            self.alert("stalled", f"no record for {silent:.0f} s after step {self.step}: the run hangs, or was killed")
        if time.monotonic() - self.looked >= DISK_S:
            self.looked = time.monotonic()
            self._look_at_disk()

    def _look_at_disk(self):
        folder = Path(self.headers[-1]["config"].get("save") or self.path).absolute()
        while not folder.is_dir() and folder != folder.parent:
            folder = folder.parent
        try:
            free = self.disk(folder).free
        except OSError:
            return
        full = free < max(2 * self.checkpoint_bytes, 1 << 30)
        if full and not self.said_full:
            saved = f", a checkpoint takes {self.checkpoint_bytes / 2 ** 30:.2f} GiB" if self.checkpoint_bytes else ""
            self.alert("disk", f"{folder}: {free / 2 ** 30:.2f} GiB are free{saved}")
        self.said_full = full


def folder_bytes(path):
    try:
        return sum(entry.stat().st_size for entry in os.scandir(path) if entry.is_file())
    except OSError:   # removed already, or on another machine
        return 0


# ---- deliveries ----

def message(alert, count, path):
    """The JSON that is posted. Slack and Mattermost show "text", Discord "content"."""
    kind, step, text = alert
    text = escaped(text)[:1000]
    more = f" ({count} since the last one)" if count > 1 else ""
    line = f"[{kind}] {socket.gethostname()}: {text}{more}"
    return {"text": line, "content": line, "kind": kind, "step": step, "message": text, "count": count,
            "host": socket.gethostname(), "log": path, "unix_time": round(time.time(), 3)}


def run_command(command, data):
    """Runs a command of the shell; its text comes from the environment and standard input, never from the command.
    Returns what failed."""
    body = json.dumps(data)
    environment = dict(os.environ, ALERT_KIND=data["kind"], ALERT_STEP=str(data["step"]), ALERT_TEXT=data["text"],
                       ALERT_JSON=body)
    try:
        process = subprocess.Popen(["/bin/sh", "-c", command], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                                   env=environment, start_new_session=True)
    except OSError as error:   # no more processes or memory
        return f"the command cannot be started: {error.strerror}"
    with process:
        try:
            process.communicate(body.encode() + b"\n", COMMAND_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)   # with whatever it has started
            return f"the command was ended after {COMMAND_S} s"
    return f"the command ended with {process.returncode}" if process.returncode else ""


class NoRedirects(urllib.request.HTTPRedirectHandler):
    """urllib would send a GET, without the alert."""

    def redirect_request(self, *_):
        return None


def post(address, data):
    """Posts, several times if it may succeed then. Returns what failed, without the address, which may be a secret."""
    for attempt in range(TRIES):
        time.sleep(PAUSE_S if attempt else 0)
        try:
            request = urllib.request.Request(address, json.dumps(data).encode(),
                                             {"Content-Type": "application/json", "User-Agent": "llm.fp8"})
            with urllib.request.build_opener(NoRedirects).open(request, timeout=POST_S):
                return ""
        except urllib.error.HTTPError as error:
            error.close()
            failed = f"the webhook answers {error.code}"
            if error.code < 500 and error.code != 429:
                return failed + ", a redirect that is not followed" * (error.code < 400)
        except OSError as error:   # URLError has the error of the connection in its reason, which may be text
            reason = getattr(error, "reason", error)
            reason = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
            failed = f"the webhook cannot be reached: {escaped(reason)[:200]}"
        except (ValueError, http.client.HTTPException) as error:   # a wrong address is one of both
            return f"the webhook cannot be used: wrong address, or no web server ({type(error).__name__})"
    return failed


class Deliveries:
    """Sends the first alert of a kind at once; those that follow within SAME_KIND_S are counted, and one is sent for
    them then. What cannot be delivered is said on standard error."""

    def __init__(self, say, path, command, webhook):
        self.say, self.path, self.command, self.webhook = say, path, command, webhook
        self.sent, self.waiting, self.undelivered = {}, {}, 0   # by kind: time of the last one; (count, last alert)

    def offer(self, alerts, now, last=False):
        """Takes new alerts, and sends what is due."""
        for alert in alerts:
            self.waiting[alert[0]] = (self.waiting.get(alert[0], (0,))[0] + 1, alert)
            self._send(now, False)
        self._send(now, last)

    def _send(self, now, last):
        for kind in [kind for kind in self.waiting if last or kind in ("end", "lost")
                     or now - self.sent.get(kind, -math.inf) >= SAME_KIND_S]:
            count, alert = self.waiting.pop(kind)
            self.sent[kind] = now
            data = message(alert, count, self.path)
            failures = [run_command(self.command, data)] if self.command else []
            failures += [post(self.webhook, data)] if self.webhook else []
            self.undelivered += any(failures)
            for failure in filter(None, failures):
                self.say(f"[{kind}] of step {alert[1]}: {failure}")
