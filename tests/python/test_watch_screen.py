"""scripts/watch: what the screen says of a run in each state, in a terminal of any size."""
import json
import os
import sys

from llmfp8.live_view import WatchedRun, chart, frame
from tests.support.log_tools import LOGS, LogToolTest, ROOT, records
from tests.support.run_command import run_command
from tests.support.terminal import Terminal

WATCH = ROOT / "scripts/watch"
HEADER, STEP = (next(r for r in records("bf16.jsonl") if r["type"] == kind) for kind in ("header", "step"))


class Screen(LogToolTest):
    def step(self, number, **more):
        return {**STEP, "step": number, "train_iters": 1000, "loss": 4 - number / 1000, "step_seconds": 2.0,
                "eta_seconds": 2.0 * (1000 - number), **more}

    def log(self, *more, steps=100, name="run"):
        lines = [HEADER, *(self.step(i + 1) for i in range(steps)), *more]
        return self.file(f"{name}.jsonl", "".join(json.dumps(line) + "\n" for line in lines))

    def screen(self, path, age=0.0, columns=80, rows=24):
        run = WatchedRun(path, None, True)
        run.look()
        return frame([run], columns, rows, run.written + age)

    def once(self, *arguments, code=0):
        done = run_command([sys.executable, WATCH, *map(str, arguments), "--once"], code,
                           env=dict(os.environ, COLUMNS="80", LINES="24"))
        return done.stdout + done.stderr

    def test_states_of_a_run(self):
        saved = {"type": "checkpoint", "step": 100, "path": "out/step-100", "seconds": 60.0}
        slow = [self.step(i + 101, step_seconds=30.0) for i in range(30)]
        for more, age, said in (
                # A step takes 2 s: ten of them, but at least 30 s, are no stall.
                ([], 5, "running, eta 0:29:55: last record 5 s ago"), ([], 29, "running"),
                ([], 31, "STALLED: last record 31 s ago, a step takes 2 s: hangs, or was killed"),
                # As long as an evaluation or a checkpoint took is none either.
                ([saved], 89, "running"), ([saved], 91, "STALLED"), ([self.step(101, step_seconds=9e9)], 35, "STALLED"),
                (slow, 299, "running"), (slow, 301, "STALLED"),
                ([{**HEADER, "step": 100}], 599, "starting: last record"),
                ([{**HEADER, "step": 100}], 601, "STALLED: last record 0:10:01 ago, no step is done yet"),
                ([{"type": "event", "step": 100, "kind": "stop", "text": "finished"}], 1e6, "ended: finished"),
                ([{"type": "event", "step": 100, "kind": "failed", "text": "no disk"}], 1e6, "ended: failed: no disk")):
            state = self.screen(self.log(*more), age)[2]
            self.assertTrue(state.startswith(said), (state, said))

    def test_what_the_screen_has(self):
        gpu = {"gpu_utilization": 97.4, "power_w": 651.0, "sm_clock_mhz": 1410.0, "gpu_temperature_c": 61.0,
               "gpu_memory_gib": 120.5, "joules_per_token": 0.0213, "throttled_by": "power cap",
               "exposed_comm_seconds": 0.0032}
        log = self.log(self.step(101, skipped=True, loss="nan"), self.step(102, **gpu),
                       {"type": "eval", "step": 102, "loss": 3.5, "counted_tokens": 5, "seconds": 1.0,
                        "loss_bf16": 3.25},
                       {"type": "fp8", "step": 102, "tensors": [{"name": "3.down.dy", "saturated": 0.004, "flushed": 0,
                                                                 "nonfinite": 0, "format": "e5m2"}]})
        text = "\n".join(self.screen(log, rows=40))
        for part in ("GPU    97 % busy  651 W  1410 MHz  61 C  120.5 GiB used  0.0213 J/token",
                     "throttled by power cap", "exposed communication 0.0032 s a step", "loss 3.8980", "2 s/it",
                     "FP8   step 102: saturated at most 0.4 % (3.down.dy)", "1 x CPU",
                     "SKIPPED 1", "validation 3.5000, in BF16 3.2500 at step 102", "validation loss 3.5, in BF16 3.25",
                     "10.2 % step 102 of 1000", "loss, last 50 steps",
                     "     101  SKIPPED: loss or gradient norm not finite"):
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
        evil = {"type": "event", "step": 100, "kind": "warning", "text": "\x1b]0;owned\x07\r\n\u202e"}
        for log in (self.log(evil), self.log(steps=1, name="short"), LOGS / "killed.jsonl", LOGS / "h200.jsonl"):
            for columns, rows in ((20, 5), (40, 12), (80, 24), (133, 50), (400, 100)):
                lines = self.screen(log, columns=columns, rows=rows)
                self.assertLessEqual(len(lines), rows)
                self.assertLessEqual(max(map(len, lines)), columns)
                self.assertTrue(all(" " <= c <= "~" for line in lines for c in line))
        self.assertIn("warning: ?]0;owned??", "\n".join(self.screen(self.log(evil))))

    def test_cut_and_damaged_lines(self):
        log = self.log()
        whole = log.read_bytes()
        log.write_bytes(whole[:-40])
        lines = self.screen(log, 1e4)
        self.assertIn("step 99 of 1000", lines[1])
        self.assertIn("the last line of the log is cut off", lines)
        log.write_bytes(whole + b"{nothing\n" + json.dumps(self.step(101)).encode() + b"\n")
        lines = self.screen(log)
        self.assertIn("step 101 of 1000", lines[1])
        self.assertIn("1 damaged lines are left out", lines)

    def test_several_logs_in_a_folder(self):
        self.log({"type": "event", "step": 100, "kind": "stop", "text": "finished"}, name="done")
        self.log(name="goes_on")
        self.file("data.jsonl", '{"text": "no log"}\n')
        text = self.once(self.folder)
        self.assertRegex(text, r"goes_on +100/1000  3\.9  2 s/it  running, eta 0:(30|29):\d\d")
        self.assertRegex(text, r"done +100/1000  3\.9  2 s/it  ended: finished")
        self.assertRegex(text, r"data +not the log of a run")
        self.assertIn("\ngoes_on: gpt2-tiny, bf16, 1 x CPU\n", text)
        self.assertLessEqual(text.count("\n"), 24)

    def test_errors_are_one_line(self):
        for name in ("none.jsonl", self.file("empty.jsonl", ""), self.file("bad.jsonl", "[]\n"), "no/folder"):
            said = self.once(name, code=2)
            self.assertEqual(said.count("\n"), 1, said)
        self.assertIn("--every", self.once(self.log(), "--every", "0", code=2))

    def test_on_a_terminal(self):
        """From before there is a log, until Ctrl-C, after which the terminal is as it was."""
        terminal = Terminal(WATCH, self.folder / "run.jsonl", "--every", "0.1", columns=50, rows=12)
        self.addCleanup(terminal.close)
        terminal.read_until(lambda text: "not there yet" in text)
        self.assertTrue(terminal.text.startswith("\x1b[?1049h"))   # the second screen
        log = self.log()
        terminal.read_until(lambda text: "step 100 of 1000" in text)
        with open(log, "a") as file:
            file.write(json.dumps(self.step(101)) + "\n" + json.dumps(self.step(102))[:50])
        terminal.read_until(lambda text: "step 101 of 1000" in text)
        self.assertTrue(all(len(lines) <= 12 and max(map(len, lines)) <= 50 for lines in terminal.frames()))
        terminal.text = ""
        os.write(terminal.master, b"\x03")
        terminal.read_until(lambda text: "\x1b[?25h\x1b[?1049l" in text)
        self.assertEqual(terminal.process.wait(30), 0)
