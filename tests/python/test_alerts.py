"""scripts/alerts: which records are alerts, and their delivery to real commands and a real web server."""
import collections
import json
import os
import subprocess
import sys
import time
import unittest
from unittest import mock

from llmfp8 import alerts
from llmfp8.alerts import QUIET_S, Held, Judge
from tests.support.alerts import Webhook
from tests.support.log_tools import LOGS, LogToolTest, ROOT, STOP_SIGNALS

USAGE = collections.namedtuple("USAGE", "free")


def step(number, loss=3.0, norm=1.0, seconds=1.0, skipped=False):
    return {"type": "step", "step": number, "loss": loss, "grad_norm": norm, "step_seconds": seconds,
            "skipped": skipped}


class Judging(unittest.TestCase):
    def setUp(self):
        self.free = 1 << 50
        self.judge = Judge(disk=lambda folder: USAGE(self.free))
        self.take({"type": "options", "save": "/", "ranks": 2})

    def take(self, record):
        return [(kind, text) for kind, _, text in self.judge.take(record)]

    def kinds(self, *records):
        return [kind for record in records for kind, _ in self.take(record)]

    def steps(self, count, first=1, **values):
        return [step(first + i, **values) for i in range(count)]

    def test_ordinary_steps_are_no_alerts(self):
        losses = [4 - i / 500 + 0.05 * (i * 37 % 11) for i in range(1000)]
        self.assertEqual(self.kinds(*(step(i + 1, loss, 1 + i * 7 % 5, 1 + 0.1 * (i % 3))
                                      for i, loss in enumerate(losses))), [])

    def test_spikes(self):
        self.assertEqual(self.kinds(*self.steps(40)), [])
        found = self.take(step(41, loss=3.2))
        self.assertEqual(found, [("spike", "step 41: loss 3.2, the median of 40 steps is 3")])
        self.assertEqual(self.kinds(step(42, loss=3.2)), [])   # the same excursion
        self.assertEqual(self.kinds(step(43), step(44, loss=3.2)), ["spike"])
        self.assertEqual(self.kinds(step(45, loss=3.14), step(46, norm=9.9)), [])
        self.assertEqual(self.take(step(47, norm=10.1)),
                         [("spike", "step 47: gradient norm 10.1, the median of 46 steps is 1")])
        # A new level is told once and then the usual one.
        self.assertEqual(self.kinds(*self.steps(200, 48, loss=5.0)), ["spike"])
        self.assertEqual(self.kinds(step(300, loss=6.0)), ["spike"])
        self.assertEqual(self.kinds(step(301, loss="nan")), [])

    def test_skips_saturation_divergence(self):
        self.assertEqual(self.kinds(step(1, skipped=True, loss="nan")), ["skip"])
        for kind, text, said in (("fp8", "step 3: saturated: 0.down.x 0.46%", "saturated"),
                                 ("warning", "loss 18 (median of 3 steps) is 1.7 times its start", "divergence"),
                                 ("diverged", "not finite for 11 steps", "divergence"), ("warning", "other", "warning"),
                                 ("note", "x", None), ("alerts", "x", None), ("stop", "finished", None)):
            self.assertEqual(self.kinds({"type": "event", "step": 1, "kind": kind, "text": text}),
                             [said] if said else [])

    def test_slower_than_predicted(self):
        self.assertEqual(self.kinds(*self.steps(30, seconds=9)), [])   # no prediction yet
        plan = {"type": "plan", "step": 30, "predicted_ms": 1000.0, "measured_ms": 1010.0}
        self.assertEqual(self.kinds(plan, *self.steps(20, 31)), ["slow"])   # the median still has steps of 9 s
        self.assertEqual(self.kinds(*self.steps(40, 51, seconds=1.29)), [])
        self.assertEqual(self.kinds(*self.steps(20, 91)), [])
        said = [alert for r in self.steps(20, 111, seconds=1.31) for alert in self.take(r)]
        self.assertEqual(len(said), 1)   # with the eleventh, half of them
        self.assertRegex(said[0][1], r"^step 12[01]: .* s/it \(median of 20 steps\), .* times the 1 s that were "
                                     "predicted$")
        unknown = {"type": "plan", "step": 30, "predicted_ms": None, "measured_ms": 1000.0}
        self.judge = Judge(disk=self.judge.disk)
        self.assertEqual(self.kinds(unknown, *self.steps(30, seconds=1.49)), [])
        self.assertEqual(self.kinds(*self.steps(30, seconds=1.51)), ["slow"])

    def test_low_disk(self):
        self.assertEqual(self.kinds({"type": "start", "checkpoint_bytes": 10 << 30}), [])
        self.free = (20 << 30) - 1
        saved = {"type": "checkpoint", "step": 5, "path": "x", "seconds": 1.0}
        self.assertEqual(self.take(saved), [("disk", "/: 20.00 GiB are free, a checkpoint takes 10.00 GiB")])
        self.assertEqual(self.kinds(saved), [])
        self.free = 20 << 30
        self.assertEqual(self.kinds(saved), [])
        self.free = 0
        self.assertEqual([kind for kind, _, _ in self.judge.silence(0)], ["disk"])

    def test_stalls(self):
        self.kinds(*self.steps(20, seconds=2.0))
        self.assertEqual(self.judge.silence(599), [])
        self.assertEqual(self.judge.silence(601), [("stalled", 20, "no step for 601 s after step 20")])
        self.assertEqual(self.judge.silence(700), [])
        self.kinds(step(21))
        self.assertEqual(len(self.judge.silence(601)), 1)
        self.kinds(*self.steps(20, 22, seconds=40.0))
        self.assertEqual(self.judge.silence(799), [])

    def test_ends(self):
        self.take({"type": "event", "step": 9, "kind": "stop", "text": "finished 9 steps"})
        self.assertEqual(self.take({"type": "end", "exit_code": 0, "text": ""}), [("end", "finished 9 steps")])
        self.assertEqual(self.judge.closed(), [])
        self.assertEqual(self.take({"type": "end", "exit_code": 7, "text": "no disk"}),
                         [("end", "exit code 7: no disk")])
        self.assertEqual(self.take({"type": "end", "exit_code": 6, "text": "rank 1 is gone"}),
                         [("lost", "rank 1 is gone")])
        judge = Judge()
        self.assertEqual(judge.closed(), [])   # no options: a command that only printed its help
        judge.take({"type": "options", "ranks": 2})
        judge.take(step(7))
        self.assertEqual(judge.closed(), [("lost", 7, "rank 0 ended without a word after step 7: killed, or one of the "
                                                      "2 ranks failed")])

    def test_a_burst_is_two_alerts(self):
        held, sent = Held(), []
        for i in range(100):
            sent += held.offer(("skip", i, f"step {i}"), i * 0.1)
        self.assertEqual(sent, [(("skip", 0, "step 0"), 1)])
        self.assertEqual(held.offer(("spike", 5, ""), 1)[0][0][0], "spike")
        self.assertEqual(held.due(QUIET_S - 1), [])
        self.assertEqual(held.due(QUIET_S), [(("skip", 99, "step 99"), 99)])
        self.assertEqual(held.offer(("skip", 100, ""), QUIET_S + 1), [])
        self.assertEqual(held.due(0, all_of_them=True), [(("skip", 100, ""), 1)])
        self.assertEqual([len(held.offer(("end", 1, ""), 0)) for _ in range(3)], [1, 1, 1])

    def test_hostile_records(self):
        for record in ({}, {"type": "step"}, {"type": []}, {"type": "step", "step": "x", "loss": [], "skipped": {}},
                       {"type": "event"}, {"type": "plan", "predicted_ms": "nan"}, {"type": "start"},
                       {"type": "end"}, {"type": "checkpoint", "seconds": None}, {"type": "fp8", "tensors": 3}):
            self.judge.take(record)


class Script(LogToolTest):
    """The process as the trainer starts it: records on its standard input."""
    measures_time = True   # of tests/run.py

    def hook(self, answer=200):
        hook = Webhook(answer)
        self.addCleanup(hook.close)
        return hook

    def start(self, **options):
        process = subprocess.Popen([sys.executable, ROOT / "scripts/alerts"], stdin=subprocess.PIPE,
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=self.folder, text=True)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        self.addCleanup(process.stdout.close)
        self.tell(process, {"type": "options", "host": "h", "pid": 5, "ranks": 1, "run": "train_gpt2", **options})
        return process

    def tell(self, process, *records):
        for record in records:
            process.stdin.write(json.dumps(record) + "\n")
        process.stdin.flush()

    def finish(self, process, code=0):
        process.stdin.close()
        said = process.stdout.read()
        self.assertEqual(process.wait(60), code, said)
        return said

    WARNING = {"type": "event", "step": 3, "kind": "warning", "text": "look"}
    END = {"type": "end", "exit_code": 0, "text": ""}

    def test_a_webhook_gets_json(self):
        hook = self.hook()
        process = self.start(webhook=hook.url, log="log.jsonl")
        self.tell(process, self.WARNING)
        got = hook.wait_for("warning")   # while the run goes on
        self.assertEqual((got["text"], got["content"], got["step"], got["message"], got["count"], got["host"]),
                         ("[warning] h: look", "[warning] h: look", 3, "look", 1, "h"))
        self.assertEqual(hook.got[0][:2], ("/hook/secret", "application/json"))
        self.tell(process, self.END)
        self.assertEqual(self.finish(process), "")
        self.assertEqual([data["kind"] for data in hook.alerts()], ["warning", "end"])

    def test_an_address_in_a_file(self):
        hook = self.hook()
        process = self.start(webhook=f"@{self.file('address', hook.url + chr(10))}")
        self.tell(process, self.END)
        self.assertEqual(self.finish(process), "")
        self.assertEqual(len(hook.got), 1)
        process = self.start(webhook="@none")
        self.tell(process, self.END)
        self.assertIn("the webhook cannot be reached: No such file", self.finish(process))

    def test_a_server_that_fails_for_a_moment(self):
        hook = self.hook()
        hook.answers = [503, 429]
        process = self.start(webhook=hook.url)
        self.tell(process, self.END)
        self.assertEqual(self.finish(process), "")
        self.assertEqual(len(hook.got), 3)

    def test_a_server_that_refuses(self):
        hook = self.hook(404)
        process = self.start(webhook=hook.url)
        self.tell(process, self.WARNING, self.END)
        said = self.finish(process)
        self.assertEqual(said, "[warning] of step 3: the webhook answers 404\n"
                               "[end] of step 3: the webhook answers 404\n2 alerts could not be delivered\n")
        self.assertEqual(len(hook.got), 2)

    def test_a_server_that_is_not_there(self):
        process = self.start(webhook="http://127.0.0.1:9/token")
        self.tell(process, self.END)
        said = self.finish(process)
        self.assertIn("the webhook cannot be reached: Connection refused", said)
        self.assertNotIn("token", said)

    def test_a_server_that_hangs(self):
        """It delays neither the reading of records nor, beyond its limit, the end."""
        hook = self.hook(60)
        process = self.start(webhook=hook.url)
        self.tell(process, self.WARNING)
        hook.wait_for("warning")
        begin = time.monotonic()
        for i in range(20):   # more than a pipe holds
            self.tell(process, *(step(100 * i + j) for j in range(100)))
        self.assertLess(time.monotonic() - begin, 5)
        said = self.finish(process)
        self.assertLess(time.monotonic() - begin, alerts.END_S + 15)
        self.assertIn("could not be delivered", said)

    def test_a_command_gets_text_and_json(self):
        """Text of a log is data: nothing in it is expanded or run."""
        evil = "$(touch owned) `touch owned` \"; touch owned; ' \\ $HOME \x1b[0m\nnext"
        process = self.start(command='printf %s "$ALERT_TEXT" > text; printf %s "$ALERT_KIND/$ALERT_STEP" > kind; '
                                     'cat > json; printf %s "$ALERT_JSON" > env')
        self.tell(process, {**self.WARNING, "text": evil})
        end = time.monotonic() + 30
        while not (self.folder / "env").exists():
            self.assertLess(time.monotonic(), end)
            time.sleep(0.02)
        time.sleep(0.1)
        found = {name: (self.folder / name).read_text() for name in ("text", "kind", "json", "env")}
        self.assertEqual(found["text"], "[warning] h: " + evil.replace("\x1b", "\\x1b"))
        self.assertEqual(found["kind"], "warning/3")
        self.assertEqual(json.loads(found["json"]), json.loads(found["env"]))
        self.assertEqual(json.loads(found["json"])["message"], evil.replace("\x1b", "\\x1b"))
        self.assertFalse((self.folder / "owned").exists())
        self.tell(process, self.END)
        self.finish(process)

    def test_a_command_that_fails(self):
        process = self.start(command="echo no mail here >&2; exit 3")
        self.tell(process, self.END)
        self.assertEqual(self.finish(process), "[end] of step 0: the command ended with 3: no mail here\n"
                                               "1 alert could not be delivered\n")
        process = self.start(command="nothing_of_this_name")
        self.tell(process, self.END)
        self.assertIn("the command ended with 127", self.finish(process))

    def test_a_command_that_cannot_be_started(self):
        """It must not end the thread that delivers."""
        error = BlockingIOError(11, "Resource temporarily unavailable")
        with mock.patch.object(subprocess, "Popen", side_effect=error):
            self.assertEqual(alerts.run_command("true", {"kind": "k", "step": 1, "text": "t"}),
                             "the command cannot be started: Resource temporarily unavailable")

    def test_a_command_that_reads_nothing(self):
        process = self.start(command="exec 0<&-; exit 0")
        self.tell(process, *([self.WARNING] * 3), self.END)
        self.assertEqual(self.finish(process), "")

    def test_a_slow_command_is_ended_with_what_it_started(self):
        with mock.patch.object(alerts, "COMMAND_S", 1):
            begin = time.monotonic()
            said = alerts.run_command(f"sleep 60 & echo $! > {self.folder}/pid; wait",
                                      {"kind": "k", "step": 1, "text": "t"})
            self.assertLess(time.monotonic() - begin, 10)
        self.assertEqual(said, "the command was ended after 1 s")
        pid = int((self.folder / "pid").read_text())
        end = time.monotonic() + 10
        while os.path.exists(f"/proc/{pid}") and open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "Z":
            self.assertLess(time.monotonic(), end)
            time.sleep(0.02)

    def test_a_hundred_alerts_in_a_burst(self):
        hook = self.hook()
        process = self.start(webhook=hook.url, command='echo "$ALERT_KIND" >> kinds')
        self.tell(process, *(step(i + 1, skipped=True) for i in range(100)), self.END)
        self.assertEqual(self.finish(process), "")
        self.assertEqual([(data["kind"], data["step"], data["count"]) for data in hook.alerts()],
                         [("skip", 1, 1), ("end", 100, 1), ("skip", 100, 99)])
        self.assertIn("(99 since the last one)", hook.alerts()[2]["text"])
        self.assertEqual((self.folder / "kinds").read_text().split(), ["skip", "end", "skip"])

    def test_signals_that_stop_the_run(self):
        """Slurm sends them to all processes of a job step; what comes then is what matters. A command gets them."""
        hook = self.hook()
        process = self.start(webhook=hook.url, command='kill "$$"; echo it lives; exit 3')
        self.tell(process, self.WARNING)
        hook.wait_for("warning")
        for number in STOP_SIGNALS:
            process.send_signal(number)
        self.tell(process, self.END)
        self.assertEqual(self.finish(process), "[warning] of step 3: the command ended with -15\n"
                         "[end] of step 3: the command ended with -15\n2 alerts could not be delivered\n")
        self.assertEqual([data["kind"] for data in hook.alerts()], ["warning", "end"])

    def test_a_run_that_is_gone(self):
        hook = self.hook()
        process = self.start(webhook=hook.url)
        self.tell(process, step(4))
        process.stdin.write('{"type": "step", "st')   # killed while it wrote
        self.finish(process)
        self.assertEqual([data["message"] for data in hook.alerts()],
                         ["the run ended without a word after step 4: killed, or it crashed"])

    def test_no_options_no_alert(self):
        process = subprocess.run([sys.executable, ROOT / "scripts/alerts"], input="", capture_output=True, text=True,
                                 timeout=60)
        self.assertEqual((process.returncode, process.stdout, process.stderr), (0, "", ""))

    def test_it_makes_the_report(self):
        out = self.folder / "run.html"
        process = self.start(report=str(out), log=str(LOGS / "killed.jsonl"))
        self.assertEqual(self.finish(process), "")   # the run was killed
        self.assertIn("Training report: killed", out.read_text())
        self.assertTrue(out.with_suffix(".csv").exists())
        process = self.start(report=str(self.folder / "none/run.html"), log=str(LOGS / "killed.jsonl"))
        self.assertIn("No such file or directory", self.finish(process, 2))
        process = self.start(report=str(self.folder / "no.html"), log="none.jsonl")
        self.assertEqual(self.finish(process), "")


if __name__ == "__main__":
    unittest.main()
