"""dev/gpu_checks without a GPU: its output on equal logs, on different logs, and on speeds."""
import importlib.util
import json
import sys
from pathlib import Path

from tests.support.comparison import a_log, losses_of
from tests.support.folder import FolderTest
from tests.support.run_command import run_command

CHECKS = Path(__file__).resolve().parents[2] / "dev" / "gpu_checks"
SPEC = importlib.util.spec_from_file_location("gpu_check_logs", CHECKS / "logs.py")
logs = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(logs)


class GpuChecks(FolderTest):
    def log(self, name, losses, **header):
        communication = [{"collective": "all-gather", "sent_bytes": 2e9}]
        records = a_log([1.0, 1.0, 1.0, 0.5, 0.5, 0.5], losses, **{"communication": communication, **header})
        return logs.Log(self.file(f"{name}.jsonl", "".join(json.dumps(record) + "\n" for record in records)))

    def test_a_figure_that_differs_is_named(self):
        losses = losses_of(6)
        a, b = self.log("a", losses), self.log("b", losses)
        self.assertEqual(logs.differences(a, b), "")
        c = self.log("c", [*losses[:4], losses[4] * (1 + 2**-50), losses[5]])
        self.assertRegex(logs.differences(a, c), r"^c: 1 of 18 figures differ from a; step 5: loss is \S+, not \S+$")
        self.assertLess(0, max(c.far_from(a).values()))
        self.assertEqual(logs.differences(a, self.log("d", losses[:5])), "d: 15 figures, a has 18")

    def test_ranks_are_compared_with_one(self):
        losses = losses_of(6)
        head, one, two = logs.rank_table([self.log("one", losses, world=1), self.log("two", losses, world=2)])
        at = head.split().index("tokens/s")
        self.assertEqual([row.split()[at + 1] for row in (one, two)], ["100.00", "50.00"])
        self.assertIn(" 2.000 ", two)   # GB gathered

    def test_every_subject_says_what_it_does(self):
        for subject in ("kernels", "comm", "zero", "context", "resume", "watch"):
            done = run_command([sys.executable, CHECKS / "run.py", subject, "--help"], None)
            self.assertIn("After a change of ", done.stdout + done.stderr)
