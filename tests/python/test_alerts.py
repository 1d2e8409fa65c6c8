"""scripts/alerts: which records are alerts, and their delivery to real commands and a real web server. Beside a run:
tests/end_to_end/test_beside_a_run.py."""
import collections
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import unittest
from unittest import mock

from llmfp8 import alerts
from llmfp8.alerts import SAME_KIND_S, Deliveries, WatchedLog
from tests.support.alerts import Webhook, make_certificate
from tests.support.log_tools import LogToolTest, ROOT, records
from tests.support.run_command import run_command

USAGE = collections.namedtuple("USAGE", "free")
HEADER, STEP = (next(r for r in records("bf16.jsonl") if r["type"] == kind) for kind in ("header", "step"))
WARNING = {"type": "event", "step": 3, "kind": "warning", "text": "look"}
END = {"type": "event", "step": 3, "kind": "stop", "text": "finished 3 steps"}


def steps(count, first=1, seconds=1.0, **values):
    return [{**STEP, "step": first + i, "step_seconds": seconds, **values} for i in range(count)]


class Records(LogToolTest):
    def setUp(self):
        super().setUp()
        self.free, self.path = 1 << 50, self.folder / "log.jsonl"
        self.log = WatchedLog(self.path, disk=lambda folder: USAGE(self.free))
        self.take({**HEADER, "unix_time": time.time()})

    def take(self, *added, last=False):
        """The alerts (kind, text) of records that are added to the log."""
        with open(self.path, "a") as file:
            file.writelines(json.dumps(record) + "\n" for record in added)
        self.log.poll()
        self.log.look(last)
        found, self.log.alerts = self.log.alerts, []
        return [(kind, text) for kind, _, text in found]

    def kinds(self, *added, **more):
        return [kind for kind, _ in self.take(*added, **more)]

    def test_what_the_trainer_has_found(self):
        self.assertEqual(self.kinds(*steps(40)), [])
        self.assertEqual(self.kinds(*steps(1, 41, skipped=True, loss="nan")), ["skip"])
        for kind, text, said in (("fp8", "saturated: 0.down.x 0.46%", "saturated"),
                                 ("warning", "loss 18 (median of 3 steps) is 1.7 times its start of 10", "divergence"),
                                 ("warning", "other", "warning"), ("note", "x", None),
                                 ("diverged", "not finite for 11 steps", "divergence"), ("failed", "no disk", "end"),
                                 ("stop", "finished", "end")):
            self.assertEqual(self.kinds({"type": "event", "step": 41, "kind": kind, "text": text}),
                             [said] if said else [])

    def test_slower_than_predicted(self):
        plan = {"type": "plan", "step": 30, "predicted_ms": 1000.0, "measured_ms": 1010.0}
        self.assertEqual(self.kinds(*steps(30, seconds=9.0), plan), [])
        self.assertEqual(self.kinds(*steps(20, 31)), ["slow"])   # the median still has steps of 9 s
        self.assertEqual(self.kinds(*steps(40, 51, seconds=1.29)), [])
        self.assertEqual(self.kinds(*steps(20, 91)), [])
        (kind, text), = self.take(*steps(20, 111, seconds=1.31))   # with the eleventh, half of them
        self.assertRegex(text, r"^step 12[01]: .* s/it \(median of 20 steps\), .* times the 1 s that were predicted$")
        # Another process has its own; without a prediction its first measured time counts.
        unknown = {"type": "plan", "step": 200, "predicted_ms": None, "measured_ms": 1000.0}
        self.assertEqual(self.kinds({**HEADER, "step": 200, "unix_time": time.time()}, unknown,
                                    *steps(30, 201, seconds=1.49)), [])
        self.assertEqual(self.kinds(*steps(30, 231, seconds=1.51)), ["slow"])

    def test_low_disk(self):
        saved = {"type": "checkpoint", "step": 5, "path": str(self.folder / "saved"), "seconds": 1.0}
        with open(self.file("saved/model", b""), "wb") as file:
            file.truncate(10 << 30)
        self.free = 20 << 30
        self.assertEqual(self.kinds(saved), [])
        self.free -= 1
        self.assertEqual(self.take(saved), [("disk", f"{self.folder}: 20.00 GiB are free, a checkpoint takes 10.00 "
                                                     "GiB")])
        self.assertEqual(self.kinds(saved), [])

    def test_stalls_and_a_run_without_an_end(self):
        self.take(*steps(20, seconds=2.0))
        for silent, expected in ((599, []), (601, ["stalled"]), (700, [])):   # once
            self.log.grew = time.monotonic() - silent
            self.assertEqual(self.kinds(), expected)
        self.take(*steps(20, 21, seconds=40.0))
        self.log.grew = time.monotonic() - 799
        self.assertEqual(self.kinds(), [])   # less than 20 steps
        self.assertRegex(self.take(last=True)[0][1], "the last record is of step 40: it was killed")
        self.assertEqual(self.kinds(END, last=True), ["end"])

    def test_what_was_there_before_is_no_alert(self):
        self.path.unlink()
        self.assertEqual(self.kinds({**HEADER, "unix_time": time.time() - 1000}, WARNING), [])
        self.assertEqual(self.kinds(WARNING), ["warning"])
        # A resume rewrites the log, and then adds to it.
        old = self.path.read_text()
        self.path.unlink()
        self.path.write_text(old)
        self.assertEqual(self.kinds(), [])
        self.assertEqual(self.kinds({**HEADER, "step": 3, "unix_time": time.time()}, WARNING), ["warning"])


class Delivery(LogToolTest):
    def setUp(self):
        super().setUp()
        self.said = []
        for name, value in (("COMMAND_S", 1), ("POST_S", 0.3), ("PAUSE_S", 0.01)):
            patch = mock.patch.object(alerts, name, value)
            patch.start()
            self.addCleanup(patch.stop)

    def hook(self, *arguments):
        hook = Webhook(*arguments)
        self.addCleanup(hook.close)
        return hook

    def post(self, url):
        said = alerts.post(url, {"kind": "end"})
        self.assertNotIn("secret", said)
        self.assertNotIn("\n", said)
        return said

    def test_a_burst_is_two_alerts(self):
        hook = self.hook()
        deliveries = Deliveries(self.said.append, "log.jsonl", "", hook.url)
        for i in range(100):
            deliveries.offer([("skip", i, f"step {i}")], i * 0.1)
        deliveries.offer([("warning", 5, "")], 1)
        deliveries.offer([], SAME_KIND_S - 1)
        self.assertEqual([(data["kind"], data["count"]) for data in hook.alerts()], [("skip", 1), ("warning", 1)])
        deliveries.offer([], SAME_KIND_S)
        self.assertEqual(hook.alerts()[2]["text"], f"[skip] {socket.gethostname()}: step 99 (99 since the last one)")
        deliveries.offer([("skip", 100, ""), ("end", 1, "")], SAME_KIND_S + 1, last=True)
        self.assertEqual([data["kind"] for data in hook.alerts()][3:], ["end", "skip"])
        self.assertEqual((self.said, deliveries.undelivered), ([], 0))

    def test_a_command_gets_text_and_json(self):
        """Text of a log is data: nothing in it is expanded or run."""
        evil = "$(touch owned) `touch owned` \"; touch owned; ' \\ $HOME \x1b[0m\nnext"
        command = (f'cd {self.folder}; printf %s "$ALERT_TEXT" > text; printf %s "$ALERT_KIND/$ALERT_STEP" > kind; '
                   'cat > json; printf %s "$ALERT_JSON" > env')
        self.assertEqual(alerts.run_command(command, alerts.message(("warning", 3, evil), 1, "x")), "")
        found = {name: (self.folder / name).read_text() for name in ("text", "kind", "json", "env")}
        self.assertTrue(found["text"].endswith(": " + evil.replace("\x1b", "\\x1b")))
        self.assertEqual(found["kind"], "warning/3")
        self.assertEqual(json.loads(found["json"]), json.loads(found["env"]))
        self.assertEqual(json.loads(found["json"])["message"], evil.replace("\x1b", "\\x1b"))
        self.assertFalse((self.folder / "owned").exists())

    def test_commands_that_fail(self):
        data = alerts.message(("skip", 4, "x"), 1, "log.jsonl")
        for command, said in (("exec 0<&-; exit 0", ""), ("exit 3", "the command ended with 3"),
                              (f"sleep 60 & echo $! > {self.folder}/pid; wait", "the command was ended after 1 s")):
            self.assertEqual(alerts.run_command(command, data), said)
        pid, end = int((self.folder / "pid").read_text()), time.monotonic() + 10
        while os.path.exists(f"/proc/{pid}") and open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "Z":
            self.assertLess(time.monotonic(), end)   # what it had started is ended, too
            time.sleep(0.02)
        with mock.patch.object(subprocess, "Popen", side_effect=BlockingIOError(11, "Resource unavailable")):
            self.assertEqual(alerts.run_command("true", data), "the command cannot be started: Resource unavailable")

    def test_web_servers(self):
        hook = self.hook()
        self.assertEqual(self.post(hook.url), "")
        self.assertEqual(hook.got, [("/hook/secret", "application/json", {"kind": "end"})])
        hook.answers = [503, 429]   # for the moment
        self.assertEqual((self.post(hook.url), len(hook.got)), ("", 4))
        for answer, tries, said in ((404, 1, "answers 404"), (60, alerts.TRIES, "cannot be reached: timed out"),
                                    (307, 1, "answers 307, a redirect that is not followed")):
            hook = self.hook(answer)
            hook.location = hook.url if answer == 307 else None
            self.assertIn(f"the webhook {said}", self.post(hook.url))
            self.assertEqual(len(hook.got), tries)
        self.assertIn("the webhook cannot be reached: Connection refused", self.post("http://127.0.0.1:9/secret"))
        for address in ("http://127.0.0.1:9/se cret", "http://[x/", "http://127.0.0.1:x/"):
            self.assertIn("the webhook cannot be used: wrong address", self.post(address))

    def test_a_server_of_something_else(self):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            def serve():
                connection, _ = listener.accept()
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(b"220 mail.example \x1b[31m secret\r\n")
            threading.Thread(target=serve, daemon=True).start()
            self.assertIn("no web server (BadStatusLine)", self.post(f"http://127.0.0.1:{listener.getsockname()[1]}/"))

    @unittest.skipUnless(shutil.which("openssl"), "needs openssl")
    def test_certificates(self):
        certificate = make_certificate(self.folder / "certificate.pem")
        hook = self.hook(200, certificate)
        self.assertIn("the webhook cannot be reached: [SSL: CERTIFICATE_VERIFY_FAILED]", self.post(hook.url))
        with mock.patch.dict(os.environ, {"SSL_CERT_FILE": str(certificate)}):
            self.assertEqual(self.post(hook.url), "")
            self.assertIn("Hostname mismatch", self.post(hook.url.replace("127.0.0.1", "localhost")))
        self.assertEqual(len(hook.got), 1)

    def test_options(self):
        file = self.file("address", "file:///etc/hostname\n")
        for options, said in (([], "give --command or --webhook"), (["--webhook", "example.com"], "begins with http"),
                              (["--webhook", f"@{file}"], "begins with http"),
                              (["--webhook", "@none"], "No such file")):
            done = run_command([sys.executable, ROOT / "scripts/alerts", "out", *options], None)
            self.assertEqual((done.returncode, done.stderr.count("\n")), (2, 1))
            self.assertIn(said, done.stderr)
