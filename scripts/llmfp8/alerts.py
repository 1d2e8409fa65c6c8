"""Turns a run's records on standard input into alerts, and delivers them by commands and POSTs, for scripts/alerts.

The trainer starts this process before MPI and writes to a pipe without waiting, so reading must never wait for a
delivery: a separate thread delivers. Standard library only."""
import collections
import http.client
import json
import math
import os
import queue
import shutil
import signal
import socket
import ssl
import statistics
import subprocess
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

from .run_log import ENDS as RUN_ENDS
from .support import escaped, parse_json

QUIET_S = 60           # between two alerts of a kind; what comes meanwhile is counted
DISK_S = 60            # between two looks at the disk
COMMAND_S, POST_S = 20, 10   # until a delivery is given up
TRIES, PAUSE_S = 3, 2  # of a POST that fails for the moment
END_S = 25             # for what is not delivered yet when the run has ended
UNKNOWN_ISSUER = (18, 19, 20, 21)   # X509_V_ERR_ of OpenSSL: signed by itself, or by an authority not known here
MOST_COMPLAINTS = 20   # lines about failed deliveries
ENDS = ("end", "lost")  # kinds that are never held back
WINDOW, LEAST = 64, 16   # steps whose median is usual, at most and at least
SLOW_STEPS = 20


class Judge:
    """Decides which records are alerts: take() and silence() return [(kind, step, text)]."""

    def __init__(self, disk=shutil.disk_usage):
        self.options, self.disk = {}, disk
        self.step = 0
        self.losses, self.norms = (collections.deque(maxlen=WINDOW) for _ in range(2))
        self.seconds = collections.deque(maxlen=SLOW_STEPS)
        self.above = set()          # names of conditions that were reported and have not ended
        self.reference = None       # (seconds of a step, what they are, factor that is slow)
        self.checkpoint_bytes = 0
        self.ended, self.stalled, self.longest_s, self.said_end = None, False, 0.0, ""

    def take(self, record):
        self.step = max(self.step, int(number(record.get("step"), self.step)))
        self.stalled = False
        handler = getattr(self, "_take_" + str(record.get("type")), None)
        return [(kind, self.step, text) for kind, text in (handler(record) if handler else [])]

    def _take_options(self, record):
        self.options = record
        return []

    def _take_start(self, record):
        self.checkpoint_bytes = int(number(record.get("checkpoint_bytes"), 0))
        return self.look_at_disk()

    def _take_step(self, record):
        if record.get("skipped"):
            return [("skip", f"step {self.step}: loss or gradient norm not finite, the update was skipped")]
        loss, norm, seconds = (number(record.get(field)) for field in ("loss", "grad_norm", "step_seconds"))
        alerts = [*self._unusual("loss", self.losses, loss, self._loss_limit),
                  *self._unusual("gradient norm", self.norms, norm, lambda usual, _: 10 * usual)]
        self.seconds.append(seconds)
        return alerts + self._slow()

    @staticmethod
    def _loss_limit(usual, values):
        spread = 1.4826 * statistics.median(abs(value - usual) for value in values)
        return usual + max(8 * spread, 0.05 * abs(usual))

    def _unusual(self, name, values, value, limit_of):
        """Reports a spike, a value far above the median of the last steps; the next one only after its end."""
        if not math.isfinite(value):
            return []
        if len(values) >= LEAST:
            usual = statistics.median(values)
            if value > limit_of(usual, values):
                first = name not in self.above
                self.above.add(name)
                return [("spike", f"step {self.step}: {name} {value:.4g}, the median of {len(values)} steps is "
                                  f"{usual:.4g}")] if first else self._level(values, value)
        self.above.discard(name)
        values.append(value)
        return []

    @staticmethod
    def _level(values, value):
        values.append(value)   # a new level becomes the usual one
        return []

    def _slow(self):
        if self.reference is None or len(self.seconds) < SLOW_STEPS:
            return []
        usual, what, factor = self.reference
        now = statistics.median(self.seconds)
        if now <= usual * (1 + (factor - 1) / 2):
            self.above.discard("slow")
        if not now > usual * factor or "slow" in self.above:
            return []
        self.above.add("slow")
        return [("slow", f"step {self.step}: {now:.4g} s/it (median of {SLOW_STEPS} steps), {now / usual:.2f} times "
                         f"the {usual:.4g} s that {what}")]

    def _take_plan(self, record):
        predicted, measured = (number(record.get(field)) / 1e3 for field in ("predicted_ms", "measured_ms"))
        if predicted > 0:
            self.reference = (predicted, "were predicted", 1.3)
        elif measured > 0:
            self.reference = (measured, "a step took at first", 1.5)
        return []

    def _take_checkpoint(self, record):
        self.longest_s = max(self.longest_s, number(record.get("seconds"), 0))
        return self.look_at_disk()

    def _take_event(self, record):
        kind, text = record.get("kind"), str(record.get("text"))
        if kind in RUN_ENDS:
            self.said_end = text
        if kind == "diverged" or kind == "warning" and "-on-divergence " in text:
            return [("divergence", text)]
        return [({"warning": "warning", "fp8": "saturated"}[kind], text)] if kind in ("warning", "fp8") else []

    def _take_end(self, record):
        code = record.get("exit_code")
        text = str(record.get("text") or self.said_end or "the run has ended")
        self.ended = code
        if code == 6:
            return [("lost", text)]
        return [("end", text if code == 0 else f"exit code {code}: {text}")]

    def closed(self):
        """Called when the pipe is closed: reports a run that has ended without a word."""
        if self.ended is not None or not self.options:
            return []
        self.ended = "lost"
        ranks = self.options.get("ranks", 1)
        who = "rank 0" if ranks != 1 else "the run"
        return [("lost", self.step, f"{who} ended without a word after step {self.step}: killed, or "
                 + (f"one of the {ranks} ranks failed" if ranks != 1 else "it crashed"))]

    def silence(self, seconds):
        """Called when no record has come for `seconds`: looks at the disk, and whether the run stalls."""
        alerts = [(kind, self.step, text) for kind, text in self.look_at_disk()]
        usual = statistics.median(self.seconds) if self.seconds else math.nan
        limit = max(600.0, 20 * usual if math.isfinite(usual) else 0.0, 5 * self.longest_s)
        if self.options and self.ended is None and not self.stalled and seconds > limit:
            self.stalled = True
            alerts.append(("stalled", self.step, f"no step for {seconds:.0f} s after step {self.step}"))
        return alerts

    def look_at_disk(self):
        folder = Path(self.options.get("save") or self.options.get("log") or ".").absolute()
        while not folder.is_dir() and folder != folder.parent:
            folder = folder.parent
        try:
            free = self.disk(folder).free
        except OSError:
            return []
        needed = max(2 * self.checkpoint_bytes if self.options.get("save") else 0, 1 << 30)
        if free >= needed:
            self.above.discard("disk")
        if free >= needed or "disk" in self.above:
            return []
        self.above.add("disk")
        return [("disk", f"{folder}: {free / 2 ** 30:.2f} GiB are free"
                 + (f", a checkpoint takes {self.checkpoint_bytes / 2 ** 30:.2f} GiB" if self.checkpoint_bytes
                    else ""))]


def number(value, otherwise=math.nan):
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else otherwise


class Held:
    """Lets the first alert of a kind through and counts the others until QUIET_S later."""

    def __init__(self):
        self.sent, self.waiting = {}, {}   # kind -> time of the last one; kind -> (count, last alert)

    def offer(self, alert, now):
        kind = alert[0]
        if kind not in ENDS and now - self.sent.get(kind, -math.inf) < QUIET_S:
            self.waiting[kind] = (self.waiting.get(kind, (0, None))[0] + 1, alert)
            return []
        self.sent[kind] = now
        return [(alert, 1)]

    def due(self, now, all_of_them=False):
        kinds = [kind for kind in self.waiting if all_of_them or now - self.sent[kind] >= QUIET_S]
        found = []
        for kind in kinds:
            count, alert = self.waiting.pop(kind)
            self.sent[kind] = now
            found.append((alert, count))
        return found


# ---- deliveries ----

def message(alert, count, options):
    """The JSON that is posted. Slack and Mattermost show "text", Discord "content"."""
    kind, step, text = alert
    text = escaped(text)[:1000]
    more = f" ({count} since the last one)" if count > 1 else ""
    line = f"[{kind}] {options.get('host', socket.gethostname())}: {text}{more}"
    return {"text": line, "content": line, "kind": kind, "step": step, "message": text, "count": count,
            "host": options.get("host"), "pid": options.get("pid"), "log": options.get("log"),
            "run": str(options.get("run"))[:500], "unix_time": round(time.time(), 3)}


def run_command(command, data):
    """Runs a command of the shell; its text comes from the environment and standard input, never from the command."""
    body = json.dumps(data)
    environment = dict(os.environ, ALERT_KIND=data["kind"], ALERT_STEP=str(data["step"]), ALERT_TEXT=data["text"],
                       ALERT_JSON=body)
    try:
        process = subprocess.Popen(["/bin/sh", "-c", command], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                                   stderr=subprocess.PIPE, env=environment, start_new_session=True)
    except OSError as error:   # no more processes or memory
        return f"the command cannot be started: {error.strerror}"
    try:
        _, said = process.communicate(body.encode() + b"\n", COMMAND_S)
    except subprocess.TimeoutExpired:
        said = b""
    except OSError:
        said = b""
    finally:
        late = process.poll() is None
        try:   # with whatever it has started
            if late:
                os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
        process.stderr.close()
    if late:
        return f"the command was ended after {COMMAND_S} s"
    last = escaped(said.decode("utf-8", "replace").strip().split("\n")[-1])[:200]
    return f"the command ended with {process.returncode}" + (f": {last}" if last else "") if process.returncode else ""


def address_of(webhook):
    """The address, or that in the file. Raises ValueError unless it is one of http or https."""
    address = Path(webhook[1:]).read_text().strip() if webhook.startswith("@") else webhook
    if not address.startswith(("http://", "https://")):   # urllib opens others, too
        raise ValueError
    return address


class Redirects(urllib.request.HTTPRedirectHandler):
    """Repeats the POST for 307 and 308, which ask for it, and never without the encryption that was asked for. For 301
    to 303 urllib would send a GET, without the alert."""
    http_error_308 = urllib.request.HTTPRedirectHandler.http_error_302   # Python before 3.11 has none

    def redirect_request(self, request, file, code, text, headers, address):
        if code not in (307, 308) or request.type == "https" and not address.startswith("https:"):
            return None
        return urllib.request.Request(address, request.data, request.headers)


def post_once(webhook, body):
    """Returns (what failed, whether another try may succeed)."""
    try:
        request = urllib.request.Request(address_of(webhook), body,
                                         {"Content-Type": "application/json", "User-Agent": "llm.fp8"})
        with urllib.request.build_opener(Redirects).open(request, timeout=POST_S + 1):   # more than within() waits
            return "", False
    except urllib.error.HTTPError as error:
        error.close()
        redirect = ", a redirect that is not followed: give the address that it leads to" if error.code < 400 else ""
        return f"the webhook answers {error.code}{redirect}", error.code >= 500 or error.code == 429
    except OSError as error:   # URLError has the error of the connection in its reason, which may be text
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLCertVerificationError):
            return certificate_failure(reason), False
        reason = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
        return f"the webhook cannot be reached: {escaped(reason)[:200]}", not isinstance(error, FileNotFoundError)
    except (ValueError, http.client.InvalidURL):
        return "the webhook cannot be reached: wrong address", False
    except http.client.HTTPException as error:
        return f"the webhook does not answer as a web server ({type(error).__name__})", True


def certificate_failure(error):
    """The text of the failure, with a hint if the issuer of the certificate is not known here."""
    hint = "; SSL_CERT_FILE=FILE trusts those in FILE" if error.verify_code in UNKNOWN_ISSUER else ""
    return f"the certificate of the webhook is refused: {error.verify_message}{hint}"


def within(seconds, function, *arguments):
    """Calls the function in a thread; returns its result, or None after so many seconds, even if a server sends a byte
    now and then, or a name server is silent."""
    result = queue.Queue()
    threading.Thread(target=lambda: result.put(function(*arguments)), daemon=True).start()
    try:
        return result.get(timeout=seconds)
    except queue.Empty:
        return None


def post(webhook, data, until):
    """Posts, several times if need be; returns what failed, without the address, which may be a secret."""
    body = json.dumps(data).encode()
    for attempt in range(TRIES):
        left = until() - time.monotonic()
        if attempt and left <= PAUSE_S:
            break
        if attempt:
            time.sleep(PAUSE_S)
        seconds = max(0.5, min(POST_S, until() - time.monotonic()))
        failed, may_pass = within(seconds, post_once, webhook, body) or (
            f"the webhook does not answer within {seconds:.0f} s", True)
        if not failed or not may_pass:
            break
    return failed


class Deliveries:
    """A thread that delivers one alert after the other."""

    def __init__(self, say):
        self.say, self.options, self.complaints, self.undelivered = say, {}, 0, 0
        self.queue = queue.Queue()   # short, since alerts are held back by kind
        self.deadline = math.inf
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def put(self, alert, count):
        self.queue.put((alert, count))

    def _run(self):
        while (entry := self.queue.get()) is not None:
            data = message(*entry, self.options)
            failures = []
            if self.options.get("command"):
                failures.append(run_command(self.options["command"], data))
            if self.options.get("webhook"):
                failures.append(post(self.options["webhook"], data, lambda: self.deadline))
            failures = [failure for failure in failures if failure]
            self.undelivered += bool(failures)
            for failure in failures:
                self._complain(f"[{data['kind']}] of step {data['step']}: {failure}")

    def _complain(self, line):
        self.complaints += 1
        if self.complaints <= MOST_COMPLAINTS:
            self.say(line)
        if self.complaints == MOST_COMPLAINTS:
            self.say("further failures are counted only")

    def finish(self):
        """Delivers what is left, for at most END_S; returns how many alerts were not delivered."""
        self.deadline = time.monotonic() + END_S
        self.queue.put(None)
        self.thread.join(END_S)
        return self.undelivered + (self.queue.qsize() if self.thread.is_alive() else 0)


class Reader:
    """Lines of a pipe, with the time until which to wait for them."""

    def __init__(self, stream):
        self.lines = queue.Queue(4096)
        threading.Thread(target=self._run, args=(stream,), daemon=True).start()

    def _run(self, stream):
        for line in stream:
            self.lines.put(line)
        self.lines.put(None)

    def next(self, seconds):
        """A line, "" after so many seconds, None at the end."""
        try:
            return self.lines.get(timeout=seconds)
        except queue.Empty:
            return b""


def watch(stream, say, judge=None, tick_s=1.0):
    """Reads records until the pipe is closed; returns (options, number of alerts that were not delivered)."""
    judge, held, deliveries, reader = judge or Judge(), Held(), Deliveries(say), Reader(stream)
    last = looked = time.monotonic()
    while (line := reader.next(tick_s)) is not None:
        now = time.monotonic()
        alerts = []
        if line:
            last = now
            try:
                record = parse_json(line)
                alerts = judge.take(record) if isinstance(record, dict) else []
            except ValueError:   # cut by a process that was killed
                pass
            deliveries.options = judge.options
        if now - looked >= DISK_S:
            looked = now
            alerts += judge.silence(now - last)
        for alert in alerts:
            for entry in held.offer(alert, now):
                deliveries.put(*entry)
        for entry in held.due(now):
            deliveries.put(*entry)
    end = judge.closed()
    for entry in [*held.due(time.monotonic(), all_of_them=True), *((alert, 1) for alert in end)]:
        deliveries.put(*entry)
    return judge.options, deliveries.finish() if judge.options else 0
