"""Standard output or error is closed, full or not read by anyone: a run continues, and other commands end quietly."""
import fcntl
import os
import shutil
import subprocess
import unittest

from tests.support.ranks import ENVIRONMENT
from tests.support.run_command import run_command
from tests.support.train import GPT2, ROOT, TrainTest, records, state_of

STEPS = 40


class StreamsTest(TrainTest):
    measures_time = True   # of tests/run.py

    def shell(self, redirection, *words, expect=0):
        """Runs the words in a shell, with redirections. Returns their exit status, not that of a reader."""
        script = f'set -o pipefail; "$@" {redirection}'
        return run_command(["bash", "-c", script, "bash", *words], expect)

    def cut_off(self, *words, both=False):
        """Runs the words and stops reading their output after its first line. The pipe holds 4 KiB, less than they
        write, so that none of them is done before that line is read, however late this is."""
        reader, writer = os.pipe()
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
        with subprocess.Popen(words, stdout=writer, stderr=writer if both else subprocess.PIPE, text=True,
                              env=ENVIRONMENT) as process:
            os.close(writer)
            while os.read(reader, 1) not in (b"\n", b""):
                pass
            os.close(reader)
            _, error = process.communicate(timeout=120)
        self.assertEqual(process.returncode, 0, error)
        return error or ""

    def training(self, name, *options):
        return self.command(GPT2, "--train-iters", str(STEPS), "--log-interval", "1", "--save", self.path(name),
                            "--log-file", self.path(name + ".jsonl"), *options)

    def said(self, name):
        return [r["text"] for r in records(self.path(name + ".jsonl"), "event") if "standard " in r["text"]]

    def test_a_run_goes_on_whatever_becomes_of_its_streams(self):
        self.shell("", *self.training("whole"))
        expected = state_of(self.path("whole", f"step-{STEPS:08d}"))
        self.assertEqual(self.said("whole"), [])
        full = "standard output is gone (No space left on device)"
        pipe = "standard output is gone (Broken pipe)"
        for name, redirection, said in (
                ("head", "", pipe), ("both", "2>&1", pipe), ("full", "> /dev/full", full),
                ("output", ">&-", "standard output was closed"), ("error", "2>&-", "standard error was closed"),
                ("none", "<&- >&- 2>&-", "standard output was closed"), ("full2", "2> /dev/full", "")):
            with self.subTest(name):
                if said == pipe:
                    error = self.cut_off(*self.training(name), both=name == "both")
                else:
                    error = self.shell(redirection, *self.training(name)).stderr
                logged = self.said(name)
                self.assertEqual([text for text in logged if said and text.startswith(said)], logged[:1])
                self.assertEqual(len(logged), 0 if not said else 2 if name == "none" else 1, logged)
                if said in (full, pipe) and name != "both":
                    self.assertEqual(error.count("\n"), 1, error)
                    self.assertTrue(error.startswith("warning: " + said), error)
                steps = [r["step"] for r in records(self.path(name + ".jsonl"), "step")]   # every line is JSON
                self.assertEqual(steps, list(range(1, STEPS + 1)))
                self.assertEqual(state_of(self.path(name, f"step-{STEPS:08d}")), expected)

    def test_a_log_file_that_is_a_pipe(self):
        pipe = self.path("pipe")
        os.mkfifo(pipe)
        training = [*self.training("piped"), "--log-file", pipe]
        done = self.shell("", *training, expect=2)
        self.assertEqual(done.stderr, f"error: --log-file {pipe}: cannot be opened: nobody reads this pipe\n")
        with subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE, text=True) as reader:
            self.shell("", *training)
            steps = [line for line in reader.stdout if line.startswith('{"type":"step"')]
        self.assertEqual(len(steps), STEPS)

    def test_an_error_goes_to_the_other_stream(self):
        done = self.shell("2> /dev/full", *self.training("x", "--lr", "-1"), expect=2)
        self.assertRegex(done.stdout, r"^error: .*--lr.*\n$")

    def test_other_commands_end_quietly(self):
        self.shell("", *self.training("model"))
        model = self.path("model", f"step-{STEPS:08d}")
        for words in (["--help-all"], ["--print-options"], ["plan", *self.training("plan")[1:]],
                      ["doctor", "--save", self.path("d")],
                      ["generate", "--load", model, "--prompt", "1 2", "--sample-tokens", "4"]):
            with self.subTest(words[0]):
                shown = run_command([GPT2, *words], None)
                done = self.shell("| true", GPT2, *words, expect=shown.returncode)
                self.assertNotIn("error", done.stderr)
                self.shell(">&-", GPT2, *words, expect=shown.returncode)
                done = self.shell("> /dev/full", GPT2, *words, expect=7 if shown.returncode == 0 else shown.returncode)
                if shown.returncode == 0:
                    self.assertTrue(done.stderr.endswith("error: standard output cannot be written: No space left on "
                                                         "device\n"), done.stderr)


@unittest.skipUnless(shutil.which("bash"), "bash is needed")
class LauncherStreams(unittest.TestCase):
    """The launcher with a script in place of mpirun, which would end if its output could not be written."""
    measures_time = True   # of tests/run.py

    def test_codes_and_lines_are_those_of_mpirun(self):
        launcher = os.path.join(ROOT, "scripts", "launch", "launch_mpi.sh")
        # 200 kB of output, more than a pipe holds before its reader is gone.
        talk = "for i in {1..2000}; do printf 'out %096d\\n' $i || exit 9; echo err $i >&2 || exit 8; done; exit 3"
        note = "launch_mpi.sh: standard output could not be written to the end; the run went on without it\n"
        # A line on standard error says that no rank has named the reason for exit code 3.
        for redirection, lines, notes in (("", 4001, 0), ("2>&1 | head -1", 1, 0), ("| head -1", 2002, 1),
                                          (">&-", 2001, 0), ("2>&-", 2000, 0), ("> /dev/full", 2001, 1),
                                          (">&- 2>&-", 0, 0)):
            with self.subTest(redirection):
                done = run_command(["bash", "-c", f'"$0" -c "$1" {redirection}; exit ${{PIPESTATUS[0]}}', launcher,
                                    talk], 3, env=dict(os.environ, MPIRUN="bash"))
                self.assertEqual(done.stderr.count(note), notes)
                self.assertEqual((done.stdout + done.stderr).count("\n"), lines + notes)
