"""The log's reader, and how a log is followed."""
import io
import json
import math
import os
import signal
import unittest
import unittest.mock

from llmfp8 import run_export, run_log
from llmfp8.run_log import InputError, RunLog, follow, named_logs, read_log
from tests.support.log_tools import LOGS, LogToolTest, ROOT, records
from tests.support.run_command import run_command
from tests.support.train import GPT2, SHAPE, make_tokens, write_shard


class Reading(LogToolTest):
    def test_records_by_step(self):
        run = read_log(LOGS / "killed.jsonl")
        expected = [r for r in records("killed.jsonl") if r["type"] == "step"]
        self.assertEqual([r["loss"] for r in run.step_list()], [r["loss"] for r in expected])
        self.assertTrue(math.isnan(run.steps[4]["grad_norm"]))   # "nan" in the file
        self.assertEqual(sorted(run.evals), [0, 4, 8])
        self.assertEqual(sorted(run.fp8), [3, 6])
        self.assertEqual(run.fp8[3]["0.qkv.x"]["amax"], 2.984375)
        self.assertFalse(run.finished)
        self.assertTrue(read_log(LOGS / "bf16.jsonl").finished)

    def test_of_steps_done_twice_the_later_count(self):
        lines = self.twice().read_text().splitlines()
        # Step 7 of the killed run must be recognisable.
        old = next(i for i, line in enumerate(lines) if '"type":"step","step":7,' in line)
        lines[old] = json.dumps(dict(json.loads(lines[old]), loss=99.0))
        run = read_log(self.file("changed.jsonl", "\n".join(lines) + "\n"))
        self.assertEqual(sorted(run.steps), list(range(1, 13)))
        self.assertEqual(run.steps[7]["loss"], read_log(LOGS / "resumed.jsonl").steps[7]["loss"])
        self.assertEqual((run.redone, run.resumed_at), (3, [5]))
        self.assertIn("3 steps were done again", run.warnings()[0])
        # Records of the killed run after the checkpoint are gone, although the resumed run has none of this kind.
        run = read_log(self.file("cut.jsonl", (LOGS / "killed.jsonl").read_text() + lines[21] + "\n"))
        self.assertEqual((sorted(run.steps), sorted(run.evals), sorted(run.fp8)), ([1, 2, 3, 4, 5], [0, 4], [3]))
        self.assertEqual([event["step"] for event in run.events if event["kind"] == "fp8"], [3])

    def test_any_cut_of_the_last_line_is_no_damage(self):
        whole = (LOGS / "bf16.jsonl").read_bytes()
        lines = whole.split(b"\n")
        begin = len(whole) - len(lines[-2]) - len(lines[-3]) - 2
        for end in range(begin + 1, len(whole), 7):
            run = read_log(self.file("cut.jsonl", whole[:end]))
            self.assertEqual(run.torn, whole[end - 1:end] != b"\n")
            self.assertEqual(len(run.steps), 12)

    def test_damaged_lines_are_named(self):
        lines = (LOGS / "bf16.jsonl").read_text().splitlines()
        for damage in ("", lines[6][:40], lines[6] + "}", "[1]", "\0" * 50, '{"type":"step","step":5}',
                       lines[6].replace('"step":4', '"step":"4"')):
            path = self.file("bad.jsonl", "\n".join(lines[:6] + [damage] + lines[7:]) + "\n")
            with self.assertRaisesRegex(InputError, r"bad\.jsonl:7: damaged line"):
                read_log(path)
            run = read_log(path, skip_damaged=True)
            self.assertEqual(sorted(run.steps), [step for step in range(1, 13) if step != 4])
            self.assertIn("bad.jsonl:7", run.warnings()[0])

    def test_what_is_no_log_is_refused(self):
        for content in ("text\n", "{}\n", '{"type":"step"}\n', "\n".join((LOGS / "bf16.jsonl").read_text()
                                                                          .splitlines()[1:]) + "\n"):
            with self.assertRaisesRegex(InputError, "other:1: not the log of a run"):
                read_log(self.file("other", content), skip_damaged=True)
        with self.assertRaisesRegex(InputError, "no line is complete"):
            read_log(self.file("empty", ""))
        with self.assertRaisesRegex(InputError, "format 2"):
            read_log(self.file("new", (LOGS / "bf16.jsonl").read_text().replace('"format":1', '"format":2')))
        with self.assertRaisesRegex(InputError, "No such file"):
            read_log(self.folder / "absent")

    def test_following_gives_what_reading_gives(self):
        whole = self.twice().read_bytes()
        expected = read_log(self.folder / "twice.jsonl")
        for piece in (1, 700, 4096):
            path = self.file("grows.jsonl", b"")
            run = RunLog(path)
            with open(path, "ab", buffering=0) as file:
                for begin in range(0, len(whole), piece):
                    file.write(whole[begin:begin + piece])
                    if piece > 1 or begin % 50 == 0:
                        run.poll()
            run.poll()
            self.assertFalse(run.poll())
            for field in ("steps", "evals", "fp8", "events", "checkpoints", "headers", "redone", "torn"):
                self.assertEqual(repr(getattr(run, field)), repr(getattr(expected, field)), field)

    def test_a_new_run_in_the_same_file_is_read_anew(self):
        killed, bf16 = (LOGS / "killed.jsonl").read_bytes(), (LOGS / "bf16.jsonl").read_bytes()
        for old, new in ((killed, bf16), (bf16, killed)):   # shorter than what was read, and longer
            path = self.file("log.jsonl", old)
            run = RunLog(path)
            run.poll()
            path.write_bytes(new)   # the same inode
            self.assertTrue(run.poll())
            self.assertEqual(repr(run.steps), repr(read_log(path).steps))
            self.assertEqual(len(run.headers), 1)

    def test_tokens(self):
        run = read_log(LOGS / "resumed.jsonl")
        self.assertEqual([run.tokens_at(step) for step in (0, 3, 5, 6, 12)], [0, None, 320, 384, 768])


class Names(LogToolTest):
    def test_names(self):
        path = self.file("a=b.jsonl", "")
        self.assertEqual(named_logs(["one/log.jsonl", "two/log.jsonl", "fp8=x.jsonl", str(path)]),
                         [("one/log.jsonl", "one"), ("two/log.jsonl", "two"), ("x.jsonl", "fp8"), (str(path), "a=b")])
        self.assertEqual([name for _, name in named_logs(["a/x/log.jsonl", "b/x/log.jsonl", "b/x/2.jsonl", "y.jsonl"])],
                         ["a/x", "b/x", "2", "y"])
        self.assertEqual(read_log(self.file("out/log.jsonl", (LOGS / "bf16.jsonl").read_bytes())).name, "out")

    def test_a_folder_is_its_logs(self):
        export = [ROOT / "scripts" / "export_log", "--to", "csv", "--out", "-"]
        for name in ("two/b.jsonl", "two/a.jsonl", "two/b.gpu.csv", "one/log.jsonl", "one/log.jsonl.1", "none/x.json"):
            self.file(name, (LOGS / "bf16.jsonl").read_bytes())
        one, two, none = (f"{self.folder}/{name}" for name in ("one", "two", "none"))
        self.assertEqual([name for _, name in named_logs([str(self.folder)])], ["one", "a", "b"])   # a folder of runs
        self.assertEqual(named_logs([two, "x=" + one]),
                         [(two + "/a.jsonl", "a"), (two + "/b.jsonl", "b"), (one + "/log.jsonl", "x")])
        self.assertEqual(self.call(*export, one), self.call(*export, LOGS / "bf16.jsonl"))
        for folder, said in ((none, "no log (*.jsonl) in this folder"), (two, "2 logs in this folder")):
            self.assertIn(f"error: {folder}: {said}", self.call(*export, folder, code=2))
        with self.assertRaisesRegex(InputError, "x=.*/two: one name for 2 logs in this folder"):
            named_logs([f"x={two}"])


class Following(LogToolTest):
    def follow(self, *looks, path="run.jsonl"):
        """Follows a log; looks: functions called at each look, the first one before it. Returns what follow() returned
        and the number of steps at each look that found something new."""
        run, found, looks = RunLog(self.folder / path), [], list(looks)

        def look(changed):
            if changed:
                found.append(len(run.steps))
            if looks:
                looks.pop(0)()
        before = signal.getsignal(signal.SIGTERM)
        self.addCleanup(signal.signal, signal.SIGTERM, before)
        with unittest.mock.patch.object(run_log, "QUIET_S", 0.1):
            return follow([run], 0.01, look), found

    def grow(self, name, begin=0, end=None):
        def grow():
            with open(self.folder / "run.jsonl", "ab") as file:
                file.write((LOGS / name).read_bytes()[begin:end])
        return grow

    def test_from_before_the_log_is_there_until_the_run_ends(self):
        self.assertEqual(self.follow(lambda: None, self.grow("killed.jsonl", end=-30), self.grow("killed.jsonl", -30),
                                     self.grow("resumed.jsonl")), (True, [8, 8, 12]))

    def test_an_old_end_is_not_that_of_the_run_that_follows(self):
        path = self.file("run.jsonl", (LOGS / "bf16.jsonl").read_bytes())
        self.assertEqual(self.follow(), (True, [12]))   # it has ended just now
        os.utime(path, (1e9, 1e9))
        with unittest.mock.patch("sys.stderr", io.StringIO()) as said:
            self.assertEqual(self.follow(lambda: None, lambda: None, self.grow("resumed.jsonl")), (True, [12, 12]))
        self.assertIn("this run had ended; waiting until it is resumed", said.getvalue())

    def test_sigterm_and_ctrl_c(self):
        self.file("run.jsonl", (LOGS / "killed.jsonl").read_bytes())
        self.assertEqual(self.follow(lambda: os.kill(os.getpid(), signal.SIGTERM), self.grow("bf16.jsonl", end=3000)),
                         (True, [8, 1]))   # of another run

        def interrupt():
            raise KeyboardInterrupt
        self.assertEqual(self.follow(interrupt), (False, [1]))


class Trainer(LogToolTest):
    @unittest.skipUnless(os.path.exists(GPT2), "train_gpt2 is not built")
    def test_a_log_written_now(self):
        """The fixtures are from an earlier trainer; the readers must read the log of the present one in the same
        way."""
        for seed, name in enumerate(("train.bin", "valid.bin")):
            write_shard(self.folder / name, make_tokens(500, seed))
        run = ("--train-data train.bin --valid-data valid.bin --eval-iters 2 --train-iters 4 --fp8-recipe delayed "
               "--fp8-stats-interval 2 --log-file log.jsonl")
        run_command([GPT2, "--model", "gpt2-tiny", *SHAPE, *run.split()], cwd=self.folder)
        run = read_log(self.folder / "log.jsonl")
        self.assertEqual((sorted(run.steps), sorted(run.fp8), run.finished), ([1, 2, 3, 4], [2, 4], True))
        since = {"forward_seconds", "backward_seconds", "norm_skips", "norm_skipped", "norm_limit", "z_loss",
                 "max_logit", "clipped_heads", "router_loss", "router_entropy", "expert_load", "rank_load",
                 "dead_experts"}   # new
        self.assertEqual(set(run.steps[1]), set(read_log(LOGS / "bf16.jsonl").steps[1]) | since)
        self.assertEqual(set(run.fp8[2]["0.qkv.x"]), set(read_log(LOGS / "killed.jsonl").fp8[3]["0.qkv.x"]))
        self.assertEqual((len(run.fp8[2]), run.fp8[2]["1.up.dy"]["format"]), (2 * 4 * 3, "e5m2"))
        for tensor in run.fp8[2].values():
            self.assertTrue(tensor["amax"] > 0 and tensor["nonfinite"] == 0, tensor)
        for step in run.steps.values():
            self.assertTrue(0 < step["forward_seconds"] < step["step_seconds"], step)
            self.assertTrue(0 < step["backward_seconds"] < step["step_seconds"], step)
        for write in run_export.TEXT_FORMATS.values():
            write(run, io.StringIO())
