"""scripts/watch: what the screen says of a run in each state, in a terminal of any size, and beside a real run."""
import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
import unittest

from llmfp8.live_view import WatchedRun, chart, frame
from tests.support.log_tools import LOGS, LogToolTest, ROOT, records
from tests.support.train import GPT2, TrainTest

WATCH = ROOT / "scripts/watch"


class Terminal:
    """A process on a terminal of its own, of which `screen` is what it has written since the last look."""

    def __init__(self, *command, columns=80, rows=24, env=None):
        self.master, slave = pty.openpty()
        self.resize(columns, rows)
        environment = dict(os.environ, TERM="xterm", **(env or {}))
        for name in ("COLUMNS", "LINES"):
            environment.pop(name, None)
        self.process = subprocess.Popen([sys.executable, *map(str, command)], stdin=slave, stdout=slave, stderr=slave,
                                        start_new_session=True, env=environment, preexec_fn=self.take_terminal)
        os.close(slave)
        self.text = ""

    @staticmethod
    def take_terminal():
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGINT, signal.SIG_DFL)   # ignored in tests that a shell started in the background

    def resize(self, columns, rows):
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read_until(self, holds, seconds=30):
        end = time.monotonic() + seconds
        while not holds(self.text):
            if not select.select([self.master], [], [], max(0, end - time.monotonic()))[0]:
                raise AssertionError("the screen is\n" + self.text[-3000:])
            try:
                self.text += os.read(self.master, 1 << 16).decode()
            except OSError:   # the process has closed the terminal
                break
        if not holds(self.text):
            raise AssertionError("the screen is\n" + self.text[-3000:])

    def frames(self):
        return [part.replace("\x1b[K", "").split("\x1b[J")[0].split("\r\n")
                for part in self.text.split("\x1b[H")[1:] if "\x1b[J" in part]

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.master)


class Screen(LogToolTest):
    def step(self, number, **more):
        step = next(r for r in records("bf16.jsonl") if r["type"] == "step")
        return {**step, "step": number, "train_iters": 1000, "loss": 4 - number / 1000, "step_seconds": 2.0,
                "eta_seconds": 2.0 * (1000 - number), **more}

    def log(self, *more, steps=100, name="run"):
        header = next(r for r in records("bf16.jsonl") if r["type"] == "header")
        lines = [header, *(self.step(i + 1) for i in range(steps)), *more]
        return self.file(f"{name}.jsonl", "".join(json.dumps(line) + "\n" for line in lines))

    def run_of(self, path):
        run = WatchedRun(path, None, True)
        run.look()
        return run

    def screen(self, path, age=0.0, columns=80, rows=24):
        run = self.run_of(path)
        return frame([run], columns, rows, run.written + age)

    def once(self, *arguments, code=0, columns=80, rows=24):
        done = subprocess.run([sys.executable, WATCH, *map(str, arguments), "--once"], capture_output=True, text=True,
                              timeout=60, env=dict(os.environ, COLUMNS=str(columns), LINES=str(rows)))
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        return done.stdout + done.stderr

    def test_states_of_a_run(self):
        log = self.log()
        # A step takes 2 s: ten of them, but at least 30 s, are no stall.
        self.assertRegex(self.screen(log, 5)[2], r"^running  eta 0:29:55, \w+ \d\d:\d\d  last record 5 s ago$")
        self.assertIn("running", self.screen(log, 29)[2])
        self.assertEqual(self.screen(log, 31)[2],
                         "STALLED: last record 31 s ago, a step takes 2 s: hangs, or was killed")
        # As long as an evaluation or a checkpoint took is none either.
        saved = self.log({"type": "checkpoint", "step": 100, "path": "out/step-100", "seconds": 60.0})
        self.assertIn("running", self.screen(saved, 89)[2])
        self.assertIn("STALLED", self.screen(saved, 91)[2])
        self.assertIn("STALLED", self.screen(self.log(self.step(101, step_seconds=9e9)), 35)[2])
        slow = self.log(*(self.step(i + 101, step_seconds=30.0) for i in range(30)))
        self.assertIn("running", self.screen(slow, 299)[2])
        self.assertIn("STALLED", self.screen(slow, 301)[2])
        self.assertIn("starting: last record", self.screen(self.log(steps=0), 599)[2])
        self.assertIn("STALLED: last record 0:10:01 ago, no step is done yet", self.screen(self.log(steps=0), 601)[2])
        for kind, text, said in (("stop", "finished 100 steps", "ended: finished 100 steps"),
                                 ("diverged", "loss 20", "ended: diverged: loss 20"),
                                 ("failed", "no disk", "ended: failed: no disk")):
            self.assertEqual(self.screen(self.log({"type": "event", "step": 100, "kind": kind, "text": text}), 1e6)[2],
                             said)

    def test_what_the_screen_has(self):
        gpu = {"gpu_utilization": 97.4, "power_w": 651.0, "sm_clock_mhz": 1410.0, "gpu_temperature_c": 61.0,
               "gpu_memory_gib": 120.5, "joules_per_token": 0.0213, "throttled_by": "power cap",
               "exposed_comm_seconds": 0.0032}
        log = self.log({"type": "event", "step": 0, "kind": "note", "text": "ranks of host a: 0-3"},
                       self.step(101, **gpu), self.step(102, skipped=True, loss="nan"),
                       {"type": "eval", "step": 102, "loss": 3.5, "counted_tokens": 5, "seconds": 1.0},
                       {"type": "fp8", "step": 102, "tensors": [{"name": "3.down.dy", "saturated": 0.004, "flushed": 0,
                                                                 "nonfinite": 0, "format": "e5m2"}]})
        text = "\n".join(self.screen(log, rows=40))
        for part in ("GPU   97 % busy  651 W  1410 MHz  61 C  120.5 GiB used  0.0213 J/token",
                     "exposed communication 3.2 ms a step  a: 0-3",
                     "FP8   step 102: saturated at most 0.4 % (3.down.dy)",
                     "SKIPPED 1", "validation 3.5000 at step 102", "10.2 % step 102 of 1000", "gradient norm", "s/it",
                     "     102  SKIPPED: loss or gradient norm not finite"):
            self.assertIn(part, text)

    def test_a_chart_keeps_extremes_and_means(self):
        lines = chart("loss", range(1, 1001), [99.0 if i == 500 else 50.0 if i == 700 else 60.0 for i in range(1000)],
                      60, 12)
        self.assertEqual(len(lines), 12)
        self.assertTrue(all(len(line) <= 60 for line in lines))
        self.assertRegex(lines[1], r"^ +99\| {25}:")
        self.assertRegex(lines[10], r"^ +50\| {35}:")
        self.assertRegex(lines[11], r"step 1 +1000$")
        # 60 of 50 to 99 is 2 of the 9 rows above the lowest.
        self.assertRegex(lines[8], r"^ +\|\*{49,50}")
        self.assertEqual(chart("loss", [1], [float("nan")], 60, 5)[0], "loss: no value yet")
        self.assertTrue(any("*" in line for line in chart("loss", [1], [3.0], 60, 5)))

    def test_fits_any_terminal(self):
        for log in (self.log(steps=1), self.log(), LOGS / "killed.jsonl", LOGS / "h200.jsonl"):
            for columns, rows in ((20, 5), (40, 12), (80, 24), (133, 50), (400, 100)):
                lines = self.screen(log, columns=columns, rows=rows)
                self.assertLessEqual(len(lines), rows)
                self.assertLessEqual(max(map(len, lines)), columns)
                self.assertTrue(all(" " <= c <= "~" for line in lines for c in line))

    def test_text_of_a_log_does_not_control_the_terminal(self):
        evil = "\x1b]0;owned\x07\r\n\u202e"
        log = self.log({"type": "event", "step": 100, "kind": "warning", "text": evil})
        self.assertIn("warning: ?]0;owned??", "\n".join(self.screen(log)))

    def test_cut_and_damaged_lines(self):
        log = self.log()
        whole = log.read_bytes()
        log.write_bytes(whole[:-40])
        self.assertEqual(self.run_of(log).step, 99)
        self.assertIn("the last line of the log is cut off", self.screen(log, 1e4))
        log.write_bytes(whole + b"{nothing\n" + json.dumps(self.step(101)).encode() + b"\n")
        lines = self.screen(log)
        self.assertIn("step 101 of 1000", lines[1])
        self.assertIn("1 damaged lines are left out", lines)
        # What follows a cut line when it becomes whole is not lost.
        log.write_bytes(whole[:-40])
        run = self.run_of(log)
        with open(log, "ab") as file:
            file.write(whole[-40:])
        run.look()
        self.assertEqual(run.step, 100)

    def test_several_logs_in_a_folder(self):
        self.log({"type": "event", "step": 100, "kind": "stop", "text": "finished"}, name="done")
        self.log(name="goes_on")
        self.file("data.jsonl", '{"text": "no log"}\n')
        text = self.once(self.folder)
        self.assertRegex(text, r"goes_on +100/1000 +3\.9 +2 +0:(30|29):\d\d +running")
        self.assertRegex(text, r"done +100/1000 +3\.9 +2 +ended: finished")
        self.assertRegex(text, r"data +not the log of a run")
        self.assertIn("\ngoes_on: gpt2-tiny, bf16, CPU\n", text)
        self.assertLessEqual(text.count("\n"), 24)

    def test_errors_are_one_line(self):
        for name in ("none.jsonl", self.file("empty.jsonl", ""), self.file("bad.jsonl", "[]\n"), "no/folder"):
            said = self.once(name, code=2)
            self.assertEqual(said.count("\n"), 1, said)
        self.assertIn("--every", self.once(self.log(), "--every", "0", code=2))

    def on_terminal(self, *arguments, **size):
        terminal = Terminal(WATCH, *arguments, **size)
        self.addCleanup(terminal.close)
        return terminal

    def test_a_terminal_follows_a_run_to_its_end(self):
        log = self.log()
        terminal = self.on_terminal(log, "--every", "0.2")
        terminal.read_until(lambda text: "step 100 of 1000" in text)
        self.assertTrue(terminal.text.startswith("\x1b[?1049h"))   # the second screen
        with open(log, "a") as file:
            file.write(json.dumps(self.step(101)) + "\n" + json.dumps(self.step(102))[:50])
        terminal.read_until(lambda text: "step 101 of 1000" in text)
        # A new size is drawn at once and not after the long wait.
        terminal.text = ""
        terminal.resize(50, 12)
        os.killpg(terminal.process.pid, signal.SIGWINCH)
        terminal.read_until(lambda text: any(len(lines) <= 12 and max(map(len, lines)) <= 50
                                             for lines in Terminal.frames(terminal)))
        with open(log, "a") as file:
            file.write(json.dumps(self.step(102))[50:] + "\n" + json.dumps(
                {"type": "event", "step": 102, "kind": "stop", "text": "finished 102 steps"}) + "\n")
        terminal.read_until(lambda text: "\x1b[?1049l" in text and text.rstrip().endswith("finished 102 steps"))
        self.assertEqual(terminal.process.wait(30), 0)

    def test_interrupted_it_leaves_the_terminal_as_it_was(self):
        terminal = self.on_terminal(self.log(), "--every", "60")
        terminal.read_until(lambda text: "step 100 of 1000" in text)
        terminal.text = ""
        begin = time.monotonic()
        os.write(terminal.master, b"\x03")
        terminal.read_until(lambda text: "\x1b[?25h\x1b[?1049l" in text)
        self.assertEqual(terminal.process.wait(30), 0)
        self.assertLess(time.monotonic() - begin, 20)

    def test_waits_for_a_log(self):
        path = self.folder / "later.jsonl"
        terminal = self.on_terminal(path, "--every", "0.1")
        terminal.read_until(lambda text: "not there yet" in text)
        self.log(name="later")
        terminal.read_until(lambda text: "step 100 of 1000" in text)


class BesideARun(TrainTest):
    measures_time = True   # of tests/run.py

    def test_a_run_is_watched(self):
        log = self.path("out", "log.jsonl")
        run = subprocess.Popen(self.command(GPT2, "--train-iters", "100000", "--save", self.path("out")),
                               stdout=subprocess.DEVNULL)
        self.addCleanup(run.wait)
        self.addCleanup(run.kill)
        end = time.monotonic() + 60
        while not os.path.exists(log):
            self.assertLess(time.monotonic(), end)
            time.sleep(0.02)
        terminal = Terminal(WATCH, self.path("out"), "--every", "0.2")
        self.addCleanup(terminal.close)
        terminal.read_until(lambda text: "running" in text and "loss, last" in text)
        run.send_signal(signal.SIGTERM)
        self.assertEqual(run.wait(60), 0)
        terminal.read_until(lambda text: "ended: SIGTERM after step" in text)
        self.assertEqual(terminal.process.wait(30), 0)


if __name__ == "__main__":
    unittest.main()
