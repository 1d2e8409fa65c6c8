"""data/prepare_text.py after an interruption: the same command continues, and the shards are equal to the byte."""
import functools
import gzip
import json
import os
import signal
import subprocess
import sys
import time
import unittest
import unittest.mock

from llmfp8 import shard_format, shard_pipeline, support, text_shards
from tests.support.data_scripts import DATA, ScriptTest, has, lines


class InterruptedRuns(ScriptTest):
    measures_time = True   # of tests/run.py

    def setUp(self):
        super().setUp()
        for name, value in (("BATCH_BYTES", 20000), ("CHECKPOINT_SECONDS", 0)):
            patch = unittest.mock.patch.object(shard_pipeline, name, value)
            patch.start()
            self.addCleanup(patch.stop)

    def inputs(self):
        documents = [f"document {i} " + "x" * (i % 97) for i in range(1500)]
        rows = "".join(json.dumps({"text": text}) + "\n" + "\n" * (i % 3 == 0) for i, text in enumerate(documents))
        self.file("folder/picture.png", b"\x89PNG\0\0")
        self.file("folder/z.txt", lines(500, seed=3))
        self.file("folder/y.txt", lines(900).encode() + b"caf\xe9\n")   # one of its documents is no UTF-8
        return [self.file("a.txt", lines(1500)), self.file("b.jsonl", rows + '{"text": ""}\n'),
                self.file("c.jsonl.gz", gzip.compress(rows.upper().replace("TEXT", "text").encode())),
                self.folder / "folder"]

    def run_once(self, *arguments, stop_at=0, code=0):
        """Runs the command and stops it while batch number `stop_at` is encoded; 0: does not stop it."""
        calls, encode = [], text_shards.Tokenize.__call__

        def counting(self, documents):
            calls.append(len(documents))
            if len(calls) == stop_at:
                raise KeyboardInterrupt
            return encode(self, documents)
        with unittest.mock.patch.object(text_shards.Tokenize, "__call__", counting):
            text = self.prepare_bytes("--valid-fraction", "0.2", "--shard-tokens", "70000", "--workers", "1",
                                      *arguments, code=code)
        return text, calls

    def contents(self):
        files = {path.name: path.read_bytes() for path in self.out.iterdir()}
        for name in files:
            self.assertRegex(name, r"^(train|valid)_\d{6}\.(bin|meta\.json)$")
        return files

    def straight(self, *arguments):
        text, calls = self.run_once(*arguments)
        expected = self.contents()
        for path in self.out.iterdir():
            path.unlink()
        return text, calls, expected

    def check(self, *inputs):
        text, calls, expected = self.straight(*inputs)
        self.assertGreater(len(calls), 8)
        self.assertGreater(len(expected), 3)
        for stop_at in (2, 3, len(calls) // 2, len(calls) - 1, len(calls)):
            stopped, _ = self.run_once(*inputs, stop_at=stop_at, code=130)
            self.assertIn("the same command continues", stopped)
            self.assertEqual([path for path in self.out.glob("*") if path.suffix in (".bin", ".json")],
                             [self.out / shard_pipeline.STATE_NAME])
            resumed, rest = self.run_once(*inputs)
            self.assertIn(f"continuing after {sum(calls[:stop_at - 1])} documents", resumed)
            self.assertEqual(rest, calls[stop_at - 1:])
            self.assertEqual(self.contents(), expected, f"stopped at batch {stop_at}")
            self.assertEqual(resumed.splitlines()[1:], text.splitlines())   # totals, empty and binary ones included
            for path in self.out.iterdir():
                path.unlink()

    def test_stopped_at_any_batch(self):
        self.check(*self.inputs())
        self.check("--max-documents", "1700", "--overwrite", *self.inputs())

    @unittest.skipUnless(has("pyarrow"), "needs pyarrow")
    def test_parquet(self):
        import pyarrow
        import pyarrow.parquet
        path = self.folder / "a.parquet"
        table = pyarrow.table({"text": [f"row {i} " + "y" * 200 for i in range(2500)]})
        pyarrow.parquet.write_table(table, path, row_group_size=300)
        self.check(path, self.file("b.txt", lines(1000)))

    @unittest.skipUnless(has("datasets"), "needs datasets")
    def test_dataset(self):
        for shard in range(3):
            rows = "".join(json.dumps({"text": f"shard {shard} row {i} " + "z" * 200}) + "\n" for i in range(900))
            self.file(f"hub/train-{shard}.jsonl", rows)
        self.check(f"hf:{self.folder / 'hub'}", self.file("b.txt", lines(1000)))

    def test_stopped_while_files_get_their_names(self):
        inputs = self.inputs()
        _, calls, expected = self.straight(*inputs)
        old = {path: path.read_bytes() for path in (self.file("out/train_000000.bin", "old"),
                                                    self.file("out/train_000099.bin", "old"))}
        rename = os.replace
        for stop_at in range(1, len(expected) + 1):
            renamed = []

            def replace(source, target):
                if not str(target).endswith(shard_pipeline.STATE_NAME):
                    renamed.append(target)
                    if len(renamed) == stop_at:
                        raise KeyboardInterrupt
                rename(source, target)
            with unittest.mock.patch.object(shard_format.os, "replace", replace):
                self.run_once("--overwrite", *inputs, code=130)
            again = ["--overwrite"] if stop_at % 2 else []   # --overwrite discards what was written
            self.assertEqual(self.run_once(*again, *inputs)[1], [])
            self.assertEqual(self.contents(), expected)
            for path, content in old.items():
                path.write_bytes(content)

    def slow_command(self, workers, inputs):
        """The command of a run that waits before each batch that it writes, and saves its state after each."""
        program = ("import sys, time; sys.path.insert(0, sys.argv.pop(1)); "
                   "import prepare_text as t; from llmfp8 import shard_pipeline as p; "
                   "p.BATCH_BYTES, p.CHECKPOINT_SECONDS = 20000, 0; "
                   "write = p.SplitWriter.write; "
                   "p.SplitWriter.write = lambda *a: (time.sleep(0.02), write(*a)); sys.exit(t.main())")
        return [sys.executable, "-c", program, str(DATA), "--tokenizer", "bytes", "--out", str(self.out),
                "--valid-fraction", "0.2", "--shard-tokens", "70000", "--workers", str(workers), *map(str, inputs)]

    def start_slow(self, workers, inputs):
        process = subprocess.Popen(self.slow_command(workers, inputs), stdout=subprocess.DEVNULL,
                                   stderr=subprocess.DEVNULL)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        self.wait_for(lambda: (self.out / shard_pipeline.STATE_NAME).exists())
        return process

    def wait_for(self, holds):
        end = time.monotonic() + 60
        while not holds():
            self.assertLess(time.monotonic(), end)
            time.sleep(0.01)

    def test_a_second_run_in_the_folder_is_refused(self):
        inputs = self.inputs()
        _, _, expected = self.straight(*inputs)
        first = self.start_slow(1, inputs)
        os.kill(first.pid, signal.SIGSTOP)   # so that it does not end before the others begin
        soon = functools.partial(support.only_user_of, seconds=0.1)
        for arguments in ((), ("--overwrite",)):
            with unittest.mock.patch.object(shard_pipeline, "only_user_of", soon):
                text, _ = self.run_once(*arguments, *inputs, code=2)
            self.assertEqual(text, f"error: --out {self.out}: another run is writing shards there: wait for its end, "
                                   "or name another folder\n")
        os.kill(first.pid, signal.SIGCONT)
        self.assertEqual(first.wait(120), 0)
        self.assertEqual(self.contents(), expected)

    def test_workers_end_with_a_run_that_is_killed(self):
        inputs = self.inputs()
        _, _, expected = self.straight(*inputs)
        process = self.start_slow(2, inputs)
        with open(f"/proc/{process.pid}/task/{process.pid}/children") as file:
            workers = file.read().split()
        self.assertEqual(len(workers), 2)
        process.kill()   # the workers are not told
        self.run_once(*inputs)   # at once: they may live for a moment, and have inherited the lock
        self.assertEqual(self.contents(), expected)
        self.wait_for(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in workers))

    def test_another_run_is_not_gone_on_with(self):
        inputs = self.inputs()
        _, _, expected = self.straight(*inputs)
        self.run_once(*inputs, stop_at=9, code=130)
        for arguments, part in ((["--valid-fraction", "0.3", *inputs], "--valid-fraction"),
                                (["--shard-tokens", "80000", *inputs], "--shard-tokens"),
                                (["--document-bytes", "100", *inputs], "--document-bytes"),
                                (["--max-documents", "100", *inputs], "--max-documents"), (inputs[1:], "the inputs")):
            text, _ = self.run_once(*arguments, code=2)
            self.assertIn(f"holds an interrupted run that differs in {part}: repeat its command", text)
        os.utime(inputs[0], (1, 1))   # the file was changed meanwhile
        self.assertIn("differs in the inputs", self.run_once(*inputs, code=2)[0])
        text, _ = self.run_once("--overwrite", *inputs)
        self.assertNotIn("going on", text)
        self.assertEqual(self.contents(), expected)

    def test_state_that_is_damaged_or_files_that_are_gone(self):
        inputs = self.inputs()
        self.run_once(*inputs, stop_at=9, code=130)
        state = self.out / shard_pipeline.STATE_NAME
        good = state.read_text()
        state.write_text(good[:100])
        self.assertIn("an interrupted run whose state is not readable, choose", self.run_once(*inputs, code=2)[0])
        for change in (lambda all: all.pop("writers"), lambda all: all["writers"]["train"].pop("first"),
                       lambda all: all["position"].pop("not_text"), lambda all: all.update(position=[])):
            damaged = json.loads(good)
            change(damaged)
            state.write_text(json.dumps(damaged))
            self.assertIn("is damaged (", self.run_once(*inputs, code=2)[0])
        state.write_text(good)
        for path in list(self.out.glob("train_000000.bin.tmp")) + list(self.out.glob("valid_000000.bin.tmp")):
            content = path.read_bytes()
            path.unlink()
            with self.nothing_left_open():
                self.assertIn("of the interrupted run is gone", self.run_once(*inputs, code=2)[0])
            path.write_bytes(content)
        open_shard = sorted(self.out.glob("train_*.bin.tmp"))[-1]
        content = open_shard.read_bytes()
        open_shard.write_bytes(content[:1030])
        self.assertIn("is gone or short", self.run_once(*inputs, code=2)[0])
        open_shard.write_bytes(content + b"written after the state was saved")
        self.run_once(*inputs)
        self.assertEqual(self.contents(), self.straight_again(inputs))

    def straight_again(self, inputs):
        for path in self.out.iterdir():
            path.unlink()
        return self.straight(*inputs)[2]

    def test_stopped_before_there_is_a_state(self):
        inputs = self.inputs()
        with unittest.mock.patch.object(shard_pipeline, "CHECKPOINT_SECONDS", 60):
            text, _ = self.run_once(*inputs, stop_at=5, code=130)
        self.assertEqual(text, "interrupted\n")
        self.assertEqual(list(self.out.iterdir()), [])

    def test_bad_input_later_on_keeps_what_was_done(self):
        inputs = [*self.inputs(), self.file("zz.jsonl", '{"text": "a"}\n{')]
        text, _ = self.run_once(*inputs, code=2)
        self.assertIn("zz.jsonl: line 2: not JSON", text)
        self.assertIn("; the same command continues from there\n", text)
        self.assertTrue((self.out / shard_pipeline.STATE_NAME).exists())
