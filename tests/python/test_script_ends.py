"""How Python scripts end if their output is closed or full, if the user interrupts them, or if a path is no file."""
import errno
import os
import signal
import subprocess
import sys
import unittest

from llmfp8.support import replacement
from tests.support.folder import FolderTest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
LOG = os.path.join(ROOT, "tests", "fixtures", "logs", "bf16.jsonl")
ZERO1 = os.path.join(ROOT, "tests", "fixtures", "import", "right_zero1.json")
EXPORT, IMPORT, GENERATE, COMPARE, CHECK, INSPECT, TEXT = (
    [sys.executable, os.path.join(ROOT, *path.split("/"))] for path in (
        "scripts/export_log", "scripts/import_config", "scripts/generate", "scripts/compare", "data/check_shards.py",
        "data/inspect_shards.py", "data/prepare_text.py"))


class ScriptEnds(FolderTest):
    def run_script(self, *command, **how):
        return subprocess.run(command, cwd=self.folder, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL,
                              **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **how})

    def test_an_output_that_is_closed_ends_quietly(self):
        for command in ([*EXPORT, "--to", "csv", LOG, "--out", "-"], [*IMPORT, ZERO1], [*IMPORT, "--help"]):
            with self.subTest(command[1:]):
                reading, writing = os.pipe()
                os.close(reading)
                done = self.run_script(*command, stdout=writing)
                os.close(writing)
                self.assertEqual((done.returncode, done.stderr), (0, ""))

    @unittest.skipUnless(os.path.exists("/dev/full"), "needs /dev/full")
    def test_an_output_that_is_full_ends_with_7(self):
        with open("/dev/full", "w", encoding="utf-8") as full:
            done = self.run_script(*EXPORT, "--to", "csv", LOG, "--out", "-", stdout=full)
        self.assertEqual((done.returncode, done.stderr), (7, "error: No space left on device\n"))

        done = self.run_script(*EXPORT, "--to", "csv", LOG, "--out", "/dev/full")
        self.assertEqual((done.returncode, done.stderr), (7, "error: /dev/full: No space left on device\n"))
        with self.assertRaises(OSError) as raised, replacement(self.folder / "run.html"):
            raise OSError(errno.ENOSPC, "No space left on device")
        self.assertEqual(raised.exception.filename, str(self.folder / "run.html"))

    def test_an_interrupt_ends_with_130(self):
        os.mkfifo(self.folder / "started")
        self.file("executable", "#!/bin/sh\necho > started\nexec sleep 60 2> /dev/null\n").chmod(0o755)
        process = subprocess.Popen([*GENERATE, os.path.join(ROOT, "tests", "fixtures", "llama"), "a", "--tokenizer",
                                    "bytes", "--executable", "./executable"], cwd=self.folder, stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE, text=True,
                                   preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
        with open(self.folder / "started", encoding="utf-8"):   # waits for the executable
            process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=60)
        self.assertEqual((process.returncode, out, errors), (130, "", "interrupted\n"))

    def test_text_that_the_terminal_cannot_show_is_escaped(self):
        done = self.run_script(*IMPORT, "n\u00e4.json", env={**os.environ, "LC_ALL": "C", "PYTHONIOENCODING": "ascii",
                                                            "PYTHONUTF8": "1"})
        self.assertEqual(done.returncode, 2)
        self.assertTrue(done.stderr.startswith("error: n\\xe4.json: No such file"), done.stderr)

    def test_what_is_no_file_is_named(self):
        os.mkfifo(self.folder / "pipe")
        self.file("a.bin", b"\x18\xd8\x34\x01\1\0\0\0\x05\0\0\0" + bytes(1012 + 10))
        self.file("a.meta.json", "[" * 100_000)
        to_screen = [*EXPORT, "--to", "csv", "--out", "-"]
        for command in ([*to_screen, "pipe"], [*to_screen, "/dev/zero"],
                        [*COMPARE, "a=pipe", "b=" + LOG], [*GENERATE, "model", "a", "--tokenizer", "pipe"],
                        [*INSPECT, "pipe"], [*INSPECT, "a.bin"], [*CHECK, "pipe"], [*CHECK, "a.bin"],
                        [*TEXT, "--tokenizer", "bytes", "--out", "out", "pipe"]):
            with self.subTest(command[1:]):
                done = self.run_script(*command)
                self.assertEqual(done.returncode, 2, done.stderr[-500:])
                said = (done.stderr or done.stdout).splitlines()
                self.assertRegex(said[0], r"^(error: |DAMAGED )")
                self.assertNotIn("a bug", said[0])
                self.assertLessEqual(len(said), 2)
