"""The programs that read the log of a run while it goes on: scripts/watch, export_log, report and alerts beside a real
run. A replacement of the package tensorboard records the steps that it gets; tests/python/test_export_log.py has the
real ones."""
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.support.alerts import Webhook
from tests.support.log_tools import ROOT
from tests.support.terminal import Terminal
from tests.support.train import GPT2, TrainTest, records

TENSORBOARD = """
import os, sys, types
class EventFileWriter:
    def __init__(self, folder):
        os.makedirs(folder, exist_ok=True)
        self.file = open(folder + "/steps", "a")
        self.flush, self.close = self.file.flush, self.file.close
    def add_event(self, event):
        print(event["step"], file=self.file)
for name, value in {"summary.writer.event_file_writer": {"EventFileWriter": EventFileWriter},
                    "compat.proto.event_pb2": {"Event": dict, "SessionLog": type("", (dict,), {"START": 1})},
                    "compat.proto.summary_pb2": {"Summary": type("", (dict,), {"Value": dict})}}.items():
    sys.modules["tensorboard." + name] = types.SimpleNamespace(**value)
"""


class BesideARun(TrainTest):
    measures_time = True   # of tests/run.py

    def beside(self, name, *arguments, env=None):
        script = str(ROOT / "scripts" / name)
        short = ("import runpy, sys; from llmfp8 import run_log; run_log.QUIET_S = 0.5; "
                 f"sys.argv = {[script, *arguments, '--every', '0.1']!r}; "
                 f"runpy.run_path({script!r}, run_name='__main__')")
        env = dict(env or os.environ)
        env["PYTHONPATH"] = f"{ROOT / 'scripts'}:{env.get('PYTHONPATH', '')}"
        process = subprocess.Popen([sys.executable, "-c", short], text=True, stdout=subprocess.PIPE,
                                   stderr=subprocess.STDOUT, env=env)
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        return process

    def ended(self, process, code=0):
        said = process.communicate(timeout=60)[0]
        self.assertEqual(process.returncode, code, said)
        return said

    def start(self, *options):
        run = subprocess.Popen(self.command(GPT2, "--train-iters", "1000000", *options), stdout=subprocess.DEVNULL)
        self.addCleanup(run.wait)
        self.addCleanup(run.kill)
        return run

    def hook(self):
        hook = Webhook()
        self.addCleanup(hook.close)
        return hook

    def kinds(self, hook):
        return [data["kind"] for data in hook.alerts() if data["kind"] != "slow"]   # chance

    def test_a_run_and_its_readers(self):
        log, board, hook = self.path("out", "log.jsonl"), self.path("board"), self.hook()
        page = self.path("run.html")
        os.mkdir(self.path("packages"))
        Path(self.path("packages", "tensorboard.py")).write_text(TENSORBOARD)
        readers = [self.beside("export_log", "--to", "tensorboard", log, "--out", board, "--follow", env=dict(
                       os.environ, PYTHONPATH=self.path("packages"), PYTHONDONTWRITEBYTECODE="1")),
                   self.beside("report", log, "--out", page, "--follow"),
                   self.beside("alerts", self.path("out"), "--webhook", hook.url)]
        run = self.start("--save", self.path("out"))
        terminal = Terminal(ROOT / "scripts/watch", self.path("out"), "--every", "0.2")
        self.addCleanup(terminal.close)
        terminal.read_until(lambda text: "running" in text and "loss, last" in text)
        run.send_signal(signal.SIGTERM)
        self.assertEqual(run.wait(60), 0)
        terminal.read_until(lambda text: "ended: SIGTERM after step" in text)
        self.assertEqual(terminal.process.wait(30), 0)
        said = [self.ended(reader) for reader in readers]
        self.assertEqual((said[0], said[2]), (f"look at it with: tensorboard --logdir {board}\n", ""))
        self.assertEqual(sorted(set(map(int, Path(board, "steps").read_text().split()))),
                         [0, *(record["step"] for record in records(log, "step"))])
        self.assertIn("SIGTERM after step", Path(page).read_text())
        self.assertEqual(self.kinds(hook), ["end"])
        self.assertRegex(hook.wait_for("end")["message"], "^SIGTERM after step")

    def test_a_run_that_diverges_and_one_that_is_killed(self):
        log, hook = self.path("diverged.jsonl"), self.hook()
        reader = self.beside("alerts", log, "--webhook", hook.url)
        self.run_train(GPT2, "--train-iters", "50", "--lr", "10", "--stop-on-divergence", "2", "--log-file", log,
                       expect=4)
        self.ended(reader)
        self.assertRegex(hook.wait_for("divergence")["message"], "^diverged: step .* times its start")
        log, hook = self.path("killed.jsonl"), self.hook()
        reader = self.beside("alerts", log, "--webhook", hook.url)
        run = self.start("--log-file", log)
        end = time.monotonic() + 60
        while not os.path.exists(log) or not records(log, "step"):
            self.assertLess(time.monotonic(), end)
            time.sleep(0.02)
        run.kill()
        run.wait()
        with open(f"/proc/{reader.pid}/status") as status:   # it is beyond its imports
            while not int(status.read().split("SigCgt:")[1].split()[0], 16) >> (signal.SIGTERM - 1) & 1:
                time.sleep(0.02)
                status.seek(0)
        reader.send_signal(signal.SIGTERM)   # as a job script does
        self.ended(reader)
        self.assertEqual(self.kinds(hook), ["lost"])
        self.assertIn("it was killed", hook.alerts()[0]["message"])
