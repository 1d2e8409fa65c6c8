"""`train_llama doctor` and `train_gpt2 doctor` as users call them: lines, JSON, exit codes, ranks. CPU device."""
import json
import os
import shutil
import tempfile
import unittest

from tests.support.ranks import ENVIRONMENT, HAVE_RANKS, MPIRUN
from tests.support.run_command import run_command
from tests.support.train import BUILD, GPT2, LLAMA, ROOT

ON_CPU = not os.path.basename(BUILD).startswith("cuda")
VERDICTS = ("ok", "warning", "failed", "not checked")
CLEAN = {name: value for name, value in ENVIRONMENT.items() if not name.startswith(("NCCL_", "NVTE_", "LLMFP8_"))}


@unittest.skipUnless(ON_CPU, "what it says without a GPU")
class DoctorTest(unittest.TestCase):
    def doctor(self, *options, expect=0, binary=LLAMA, ranks=0, **environment):
        start = [*MPIRUN, "-np", str(ranks)] if ranks else []
        return run_command([*start, binary, "doctor", *options], expect, env=dict(CLEAN, **environment))

    def items(self, *options, **others):
        report = json.loads(self.doctor("--json", *options, **others).stdout)
        self.assertEqual(report["verdict"] == "failed", report["counts"]["failed"] > 0)
        self.assertNotEqual(report["verdict"], "ok")   # a CPU has no GPU to check
        self.assertEqual(sum(report["counts"].values()), len(report["items"]))
        self.assertEqual(tuple(report["counts"]), VERDICTS)
        for item in report["items"]:
            self.assertIn(item["verdict"], VERDICTS)
            self.assertTrue(item["text"] and item["checks"], item)
            self.assertNotIn("\n", item["text"])
        self.assertEqual(report["ranks"], others.get("ranks", 1) or 1)
        return {item["name"]: item for item in report["items"]}

    def test_lines_and_json_tell_the_same(self):
        for binary in (LLAMA, GPT2):
            items = self.items(binary=binary)
            lines = self.doctor(binary=binary).stdout.splitlines()
            self.assertEqual(len(lines), len(items) + 1)   # every item once, and the summary
            for line, item in zip(lines, items.values()):
                if item["name"] not in ("links", "disk", "shared memory"):
                    self.assertTrue(line.startswith(f"{item['verdict']:11}  {item['name']:17}  {item['text']}"), line)
            self.assertRegex(lines[-1], r"^doctor: [\w, ]+: \d+ ok, \d+ warnings, 0 failed, \d+ not checked$")

    def test_bad_options_are_refused_in_one_line(self):
        for options, text in ((["--jsn"], "doctor has no option --jsn: did you mean --json?"),
                              (["--json=1"], "--json takes no value"), (["--save", "--json"], "--save needs a value"),
                              (["--save"], "--save needs a value"), (["--model", "x"], "no option --model"),
                              (["here"], "doctor has no option here")):
            done = self.doctor(*options, expect=2)
            self.assertEqual(done.stdout, "")
            self.assertEqual(len(done.stderr.splitlines()), 1, done.stderr)
            self.assertIn(text, done.stderr)

    def test_help_lists_the_items(self):
        text = self.doctor("--help").stdout
        for name in ("--save DIR", "--json", "FP8 recipe", "shared memory", "Exit codes: 0"):
            self.assertIn(name, text)
        done = run_command([LLAMA, "--help"], None, env=CLEAN)
        self.assertIn("train_llama doctor", done.stdout)

    def test_the_folder_for_checkpoints(self):
        folder = tempfile.mkdtemp(prefix="llmc-doctor-")
        self.addCleanup(shutil.rmtree, folder, ignore_errors=True)
        deep = os.path.join(folder, "a", "b")
        disk = self.items("--save", deep)["disk"]
        self.assertIn(disk["verdict"], ("ok", "warning"))
        self.assertIn("free for " + deep, disk["text"])
        self.assertFalse(os.path.exists(os.path.join(folder, "a")))   # doctor creates no folder
        file = os.path.join(folder, "file")
        with open(file, "w"):
            pass
        for wrong in (file, os.path.join(file, "below")):
            self.assertEqual(self.items("--save", wrong, expect=1)["disk"]["verdict"], "failed")

    def test_the_environment_is_judged_as_the_banner_does(self):
        items = self.items(NVTE_FP8_ALLREDUCE="1", NCCL_DEBUG="INFO")
        self.assertEqual(items["environment NVTE_FP8_ALLREDUCE"]["verdict"], "warning")
        self.assertEqual(items["environment NCCL_DEBUG"]["verdict"], "ok")
        unknown = self.items(LLMFP8_HEARTBEAT="1", expect=1)["environment"]
        self.assertEqual(unknown["verdict"], "failed")
        self.assertIn("did you mean LLMFP8_HEARTBEATS?", unknown["text"])

    @unittest.skipUnless(HAVE_RANKS, "needs OpenMPI")
    def test_several_ranks_check_their_collectives(self):
        for ranks in (2, 3):
            items = self.items(ranks=ranks)
            for name in ("ranks", "collectives", "links", "FP8 blockwise"):
                self.assertEqual(items[name]["verdict"], "ok", items[name])
            self.assertIn(f"{ranks} ranks on 1 host", items["ranks"]["text"])

    @unittest.skipUnless(HAVE_RANKS, "needs OpenMPI")
    def test_the_launch_wrapper_passes_the_exit_code_on(self):
        launch = [os.path.join(ROOT, "scripts", "launch", "launch_mpi.sh"), *MPIRUN[1:], "-np", "2", LLAMA, "doctor"]
        for options, code in (([], 0), (["--save", LLAMA], 1)):
            done = run_command(launch + options, code, env=CLEAN)
            self.assertEqual("doctor: failed: " in done.stdout, code == 1, done.stdout)
