"""Shared by the tests of the log's readers: logs that the trainer wrote, and calls of the scripts.
tests/fixtures/logs: killed.jsonl is the log of an FP8 run that was killed in step 9, after a checkpoint at step 5;
resumed.jsonl is the log of the resumed run; bf16.jsonl is a run in BF16, and h200.jsonl the beginning of a run on a
GPU."""
import json
import os
import sys
from pathlib import Path

from tests.support.folder import FolderTest
from tests.support.run_command import run_command

ROOT = Path(__file__).resolve().parents[2]
LOGS = ROOT / "tests" / "fixtures" / "logs"


def records(*names):   # of the fixtures, read without the code under test
    return [json.loads(line) for name in names for line in (LOGS / name).read_text().splitlines()]


class LogToolTest(FolderTest):
    def twice(self):
        """The logs of the killed and of the resumed run in one file, which has steps 6 to 8 twice."""
        return self.file("twice.jsonl", (LOGS / "killed.jsonl").read_bytes() + (LOGS / "resumed.jsonl").read_bytes())

    def blockwise(self):
        """The log of killed.jsonl as if its FP8 tensors had block scales: number i the scales 2^i, 2^(i+1), 2^(i+3)."""
        lines = (LOGS / "killed.jsonl").read_text().splitlines()
        for at, line in enumerate(lines):
            record = json.loads(line)
            for i, tensor in enumerate(record.get("tensors", [])):
                tensor["block_scales"] = {"blocks": 9, "min": 2.0 ** i, "median": 2.0 ** (i + 1), "max": 2.0 ** (i + 3),
                                          "at_ends": i / 1000, "zeros": 0.25}
            lines[at] = json.dumps(record)
        return self.file("blockwise.jsonl", "\n".join(lines) + "\n")

    def call(self, *command, packages=None, code=0):
        environment = dict(os.environ, PYTHONDONTWRITEBYTECODE="1")
        if packages:
            environment["PYTHONPATH"] = str(packages)
        run = run_command([sys.executable, *map(str, command)], code, cwd=self.folder, env=environment)
        return run.stdout + run.stderr
