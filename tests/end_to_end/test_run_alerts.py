"""--alert-command, --alert-webhook and --report of real runs; what scripts/alerts does with records:
tests/python/test_alerts.py."""
import json
import os
import shutil
import signal
import subprocess
import time
import unittest
from unittest import mock

from tests.support.alerts import Webhook, make_certificate
from tests.support.ranks import ENVIRONMENT, HAVE_RANKS, MPIRUN, ONE_EACH, RanksTest
from tests.support.train import GPT2, ROOT, TrainTest, records


def side_processes(parent):
    """Processes that execute scripts/alerts."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/stat") as stat, open(f"/proc/{pid}/cmdline") as line:
                of = int(stat.read().rsplit(")", 1)[1].split()[1])
                if "scripts/alerts" in line.read() and of == parent:
                    found.append(int(pid))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


class AlertTest(TrainTest):
    measures_time = True   # of tests/run.py

    def setUp(self):
        super().setUp()
        self.hook = Webhook()
        self.addCleanup(self.hook.close)
        self.log = self.path("log.jsonl")

    def options(self, steps, *more):
        return ["--train-iters", str(steps), "--log-file", self.log, "--alert-webhook", self.hook.url, *more]

    def sent(self):
        return [data["kind"] for data in self.hook.alerts() if data["kind"] not in ("slow", "spike")]   # chance

    def start(self, *command):
        run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self.addCleanup(run.wait)
        self.addCleanup(run.kill)
        self.addCleanup(run.stderr.close)
        self.wait_for(lambda: os.path.exists(self.log) and len(records_so_far(self.log)) > 3)
        return run

    def wait_for(self, holds, seconds=60):
        end = time.monotonic() + seconds
        while not holds():
            self.assertLess(time.monotonic(), end)
            time.sleep(0.02)

    def said(self):
        return [r["text"] for r in records_so_far(self.log, "event") if r["kind"] == "alerts"]


def records_so_far(path, kind="step"):
    with open(path) as file:
        return [r for r in map(json.loads, file.read().split("\n")[:-1]) if r["type"] == kind]


class Alerts(AlertTest):
    def test_skip_and_end(self):
        done = self.run_train(GPT2, *self.options(12, "--inject", "nan:grad@4"))
        self.assertEqual((self.sent(), done.stderr), (["skip", "end"], ""))
        skip, end = self.hook.alerts()
        self.assertEqual((skip["step"], skip["message"]),
                         (4, "step 4: loss or gradient norm not finite, the update was skipped"))
        self.assertEqual((end["message"], end["log"]), ("finished 12 steps", self.log))
        self.assertIn("--train-iters 12", end["run"])
        with open(self.log) as file:   # which may be shown to others
            text = file.read()
        self.assertNotIn("secret", text)
        self.assertEqual(json.loads(text.split("\n")[0])["config"]["alert-webhook"],
                         self.hook.url.replace("hook/secret", "(hidden)"))

    def test_a_run_that_diverges(self):
        self.run_train(GPT2, *self.options(50, "--lr", "10", "--stop-on-divergence", "2"), expect=4)
        self.assertEqual(self.sent(), ["divergence", "end"])
        self.assertRegex(self.hook.alerts()[-1]["message"], "^exit code 4: step .* times its start")

    def test_a_run_that_fails(self):
        self.run_train(GPT2, *self.options(5, "--save", self.path("out"), "--inject", "enospc@save"), expect=7)
        self.assertEqual(self.sent(), ["end"])
        self.assertRegex(self.hook.alerts()[0]["message"], "^exit code 7: ")

    def test_an_error_before_the_first_step(self):
        self.run_train(GPT2, "--load", self.path("none"), "--alert-webhook", self.hook.url, "--train-iters", "1",
                       expect=2)
        self.assertEqual(self.sent(), [])   # of the options: said on the screen alone
        with open(self.path("valid.bin"), "wb") as file:
            file.write(b"no shard")
        self.run_train(GPT2, "--valid-data", self.path("valid.bin"), *self.options(5), expect=2)
        self.assertEqual(self.sent(), ["end"])
        self.assertRegex(self.hook.alerts()[0]["message"], "^exit code 2: .*valid.bin")

    def test_named_in_a_file_of_options(self):
        with open(self.path("run.json"), "w") as file:
            json.dump({"alert-webhook": self.hook.url, "train-iters": 3}, file)
        self.run_train(GPT2, "--config", self.path("run.json"))
        self.assertEqual(self.sent(), ["end"])

    def test_a_run_that_is_killed(self):
        run = self.start(*self.command(GPT2, *self.options(100000, "--report", self.path("run.html"))))
        run.send_signal(signal.SIGKILL)
        run.wait()
        self.assertRegex(self.hook.wait_for("lost")["message"],
                         r"^the run ended without a word after step \d+: killed, or it crashed$")
        self.wait_for(lambda: os.path.exists(self.path("run.html")))
        self.assertEqual(self.sent(), ["lost"])

    def test_a_webhook_that_hangs_blocks_no_step(self):
        self.hook.answer = 60
        begin = time.time()
        run = self.start(*self.command(GPT2, *self.options(2000, "--inject", "nan:grad@4", "--log-interval", "2000")))
        self.assertEqual(run.wait(120), 0)
        # The steps and the saved end of the log came before the wait for the side process, which is bounded.
        ended = os.stat(self.log).st_mtime
        self.assertEqual(len(records(self.log, "step")), 2000)
        self.assertLess(time.time() - ended, 35)
        self.assertGreater(time.time() - ended, 2)
        self.assertLess(ended - begin, 60)
        said = run.stderr.read()
        self.assertRegex(said, "warning: alerts: .* could not be delivered|goes on alone")

    @unittest.skipUnless(shutil.which("openssl"), "needs openssl")
    def test_a_webhook_over_https(self):
        """A certificate that is not trusted costs a line, and one that is trusted gets the alerts."""
        certificate = make_certificate(self.path("certificate.pem"))
        self.hook = Webhook(200, certificate)
        self.addCleanup(self.hook.close)
        done = self.run_train(GPT2, *self.options(12))
        self.assertEqual((len(records(self.log, "step")), self.sent()), (12, []))
        self.assertEqual(done.stderr, "warning: alerts: [end] of step 12: the certificate of the webhook is refused: "
                                      "self-signed certificate; SSL_CERT_FILE=FILE trusts those in FILE\n"
                                      "warning: alerts: 1 alert could not be delivered\n")
        os.unlink(self.log)
        with mock.patch.dict(os.environ, {"SSL_CERT_FILE": certificate}):
            done = self.run_train(GPT2, *self.options(12))
        self.assertEqual((self.sent(), done.stderr), (["end"], ""))

    def test_a_command_that_fails_is_said_in_the_log(self):
        run = self.start(*self.command(GPT2, "--train-iters", "100000", "--log-file", self.log, "--inject",
                                       "nan:grad@4", "--alert-command", "echo no mail >&2; exit 3"))
        self.wait_for(self.said)
        self.assertEqual(self.said()[0], "[skip] of step 4: the command ended with 3: no mail")
        run.send_signal(signal.SIGTERM)
        self.assertEqual(run.wait(60), 0)
        said = run.stderr.read()
        self.assertRegex(said, r"(?m)^warning: alerts: \[end\] of step \d+: the command ended with 3: no mail$")
        self.assertRegex(said, r"(?m)^warning: alerts: \d+ alerts could not be delivered\n\Z")

    def test_a_process_that_does_not_read(self):
        """It is stopped: the pipe gets full, the run goes on, and says so once."""
        run = self.start(*self.command(GPT2, *self.options(1000000, "--log-interval", "1000")))
        side, = side_processes(run.pid)
        os.kill(side, signal.SIGSTOP)
        self.wait_for(self.said, 120)
        done = len(records_so_far(self.log))
        self.wait_for(lambda: len(records_so_far(self.log)) > done + 50)
        self.assertEqual(self.said(), ["scripts/alerts does not read the records of the run: they are dropped"])
        os.kill(side, signal.SIGKILL)
        self.wait_for(lambda: len(self.said()) == 3)
        self.assertEqual(self.said()[1:], ["scripts/alerts has ended (signal 9)",
                                           "there are no more alerts; the run goes on"])
        run.send_signal(signal.SIGTERM)
        self.assertEqual(run.wait(60), 0)

    def test_no_process_without_an_option(self):
        run = self.start(*self.command(GPT2, "--train-iters", "100000", "--log-file", self.log))
        self.assertEqual(side_processes(run.pid), [])

    def test_what_cannot_work_is_refused(self):
        for words, said in ((["--alert-webhook", "example.com"], "--alert-webhook begins with http:// or https://"),
                            (["--report", "run.html"], "--report follows the log file, and there is none"),
                            (["--report", "run.pdf", "--log-file", self.log], "the page is HTML: name it .html")):
            self.assertIn(said, self.run_train(GPT2, "--train-iters", "1", *words, expect=2).stderr)


class Reports(AlertTest):
    def test_a_report_of_the_whole_run(self):
        self.run_train(GPT2, "--train-iters", "6", "--log-file", self.log, "--report", self.path("run.html"))
        with open(self.path("run.html")) as file:
            self.assertIn("finished 6 steps", file.read())
        with open(self.path("run.csv")) as file:
            self.assertEqual(len(file.readlines()), 7)

    def test_a_report_of_a_failed_run(self):
        self.run_train(GPT2, *self.options(50, "--lr", "10", "--stop-on-divergence", "2"), "--report",
                       self.path("run.html"), expect=4)
        with open(self.path("run.html")) as file:
            self.assertIn("diverged", file.read())

    def test_a_report_that_cannot_be_written(self):
        done = self.run_train(GPT2, "--train-iters", "3", "--log-file", self.log, "--report", self.path("no", "x.html"))
        self.assertRegex(done.stderr, r"^warning: alerts: error: .*: No such file or directory\n"
                                      r"warning: alerts: scripts/alerts has ended \(exit code 2\)\n$")


@unittest.skipUnless(HAVE_RANKS, "needs mpirun and a build with MPI")
class Ranks(AlertTest, RanksTest):
    def test_one_rank_tells(self):
        self.ranks(2, GPT2, *self.options(6, "--inject", "nan:grad@4"))
        self.assertEqual(self.sent(), ["skip", "end"])

    def lost(self, rank):
        command = [*MPIRUN, "-np", "2", *self.command(GPT2, *ONE_EACH, *self.options(
            100000, "--inject", f"kill:rank={rank}@step=5", "--report", self.path("run.html")))]
        subprocess.run(command, capture_output=True, timeout=120)
        found = self.hook.wait_for("lost")
        self.wait_for(lambda: os.path.exists(self.path("run.html")))
        self.assertEqual(self.sent(), ["lost"])
        return found["message"]

    def test_rank_0_is_lost(self):
        self.assertRegex(self.lost(0),
                         "^rank 0 ended without a word after step [34]: killed, or one of the 2 ranks failed$")

    def test_a_rank_that_hangs(self):
        """The hang report is what is told, also under the launch wrapper."""
        run = self.command(GPT2, *ONE_EACH, *self.options(100000, "--inject", "stall:rank=1@step=5", "--comm-timeout",
                                                          "3"))
        wrapper = [os.path.join(ROOT, "scripts/launch/launch_mpi.sh"), *MPIRUN[1:], "-np", "2"]
        for launcher in ([*MPIRUN, "-np", "2"], wrapper):
            self.hook.got.clear()
            done = subprocess.run([*launcher, *run], capture_output=True, text=True, timeout=120, env=ENVIRONMENT)
            self.assertEqual(done.returncode, 6, done.stderr[-2000:])
            self.assertRegex(self.hook.wait_for("lost")["message"], "rank 1 .*without progress for")
            self.assertEqual(self.sent(), ["lost"])
            os.unlink(self.log)

    def test_another_rank_is_lost(self):
        self.assertRegex(self.lost(1), r"rank 1 .*is gone|one of the 2 ranks failed")


if __name__ == "__main__":
    unittest.main()
