"""A resumed run in its folder: the checkpoints that it finds there, and the earlier part of its log."""
import os
import re
import shutil
import statistics
import subprocess

from tests.support.train import GPT2, LLAMA, TrainTest, records, write_hellaswag


class ResumeTest(TrainTest):
    measures_time = True   # of tests/run.py

    def test_a_branch_that_was_left_is_not_gone_on_from(self):
        """A run that resumes step 2 leaves step 6 in the folder, and a restart would take it for the newest one of
        this run."""
        save = ["--save", self.path("run"), "--save-interval", "2", "--lr-decay-style", "constant"]
        self.run_train(LLAMA, "--train-iters", "6", *save)
        back = ["--train-iters", "5", *save, "--resume", self.path("run", "step-00000002"), "--lr", "1e-3"]
        os.symlink("step-00000002", self.path("run", "latest"))
        for resume in (self.path("run", "step-00000002"), self.path("run", "step-00000002", ""),
                       self.path("run", "latest")):
            done = self.run_train(LLAMA, *back, "--resume", resume, expect=2)
            self.assertIn("later checkpoints than --resume " + resume + ", up to step-00000006,", done.stderr)
        self.assertEqual(self.checkpoints("run"), [f"step-{step:08d}" for step in (2, 4, 6)])
        self.run_train(LLAMA, *back, "--resume", self.path("run", "step-00000003"), expect=5)
        # It may resume into another folder, or into this one if later checkpoints are gone or cannot be resumed.
        self.run_train(LLAMA, *back, "--save", self.path("branch"))
        # A copy of the latest checkpoint under another name counts as its step, so nothing is left to train.
        shutil.copytree(self.path("run", "step-00000006"), self.path("run", "best"))
        self.run_train(LLAMA, "--train-iters", "6", *save, "--resume", self.path("run", "best"))
        self.assertFalse(os.path.exists(self.path("run", "log.jsonl.1")))   # nothing was removed from the log
        shutil.rmtree(self.path("run", "step-00000006"))
        os.unlink(self.path("run", "step-00000004", "model.safetensors"))
        done = self.run_train(LLAMA, *back)
        # The records of the abandoned branch are kept.
        self.assertIn("earlier log is kept: " + os.path.realpath(self.path("run", "log.jsonl.1")), done.stdout)
        self.assertEqual([r["step"] for r in records(self.path("run", "log.jsonl.1"), "step")], [1, 2, 3, 4, 5, 6])
        done = self.run_train(LLAMA, "--train-iters", "7", *save, "--lr", "1e-3", "--resume", "auto")
        self.assertIn("resumed " + self.path("run", "step-00000005"), done.stdout)
        self.assertEqual([r["step"] for r in records(self.path("run", "log.jsonl"), "step")], [1, 2, 3, 4, 5, 6, 7])
        done = self.run_train(LLAMA, "--train-iters", "6", *save, "--lr", "1e-3", "--resume", "auto")
        self.assertIn("note: nothing is left to train: the checkpoint is of step 7, --train-iters is 6\n", done.stdout)
        self.assertEqual(self.checkpoints("run")[-1], "step-00000007")

    def test_two_runs_never_share_a_folder(self):
        """The error of the second run names the first; a requeued job waits while its predecessor ends."""
        save = ["--save", self.path("run"), "--train-iters", "100000", "--lr-decay-style", "constant"]
        first = subprocess.Popen(self.command(GPT2, *save, "--save-interval", "20"), stdout=subprocess.PIPE, text=True)
        self.addCleanup(first.wait)
        self.addCleanup(first.kill)
        for line in first.stdout:
            if line.startswith("checkpoint step 20 "):
                break
        # In a folder without checkpoints only the lock refuses the second run.
        self.assertIn("holds checkpoints of an earlier run", self.run_train(GPT2, *save, expect=2).stderr)
        second = subprocess.Popen(self.command(GPT2, *save, "--resume", "auto", "--train-iters", "5"), text=True,
                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        line = second.stderr.readline()
        self.assertIn(f"note: --save {self.path('run')}: another run writes there (host ", line)
        self.assertIn(f", process {first.pid}, since ", line)
        self.assertIsNone(first.poll())
        first.kill()
        out, error = second.communicate(timeout=60)
        self.assertEqual((second.returncode, error), (0, ""), out)
        newest = self.checkpoints("run")[-1]
        self.assertIn(f"resumed {self.path('run', newest)} at step", out)
        self.assertNotIn(".lock", os.listdir(self.path("run")))

    def test_the_log_of_another_run_is_kept(self):
        """Two runs with the same --log-file: if the resumed one removes records of the other, they are kept in a
        copy."""
        log = ["--log-file", self.path("log.jsonl"), "--lr-decay-style", "constant"]
        self.run_train(LLAMA, "--train-iters", "2", "--save", self.path("a"), *log)
        self.run_train(LLAMA, "--train-iters", "3", "--save", self.path("b"), *log)
        self.assertEqual(len(records(self.path("log.jsonl.1"), "step")), 2)
        self.run_train(LLAMA, "--train-iters", "4", "--save", self.path("a"), "--resume", "auto", *log)
        self.assertEqual(len(records(self.path("log.jsonl.2"), "step")), 3)
        self.run_train(LLAMA, "--train-iters", "5", "--save", self.path("b"), "--resume", "auto", "--log-file",
                       self.path("b.jsonl"), "--lr-decay-style", "constant")
        self.run_train(LLAMA, "--train-iters", "6", "--save", self.path("b"), "--resume", "auto", "--log-file",
                       self.path("b.jsonl"), "--lr-decay-style", "constant")
        self.assertEqual(sorted(n for n in os.listdir(self.path()) if "jsonl" in n),
                         ["b.jsonl", "log.jsonl", "log.jsonl.1", "log.jsonl.2"])

    def test_a_run_that_diverges_ends_however_often_it_is_started(self):
        """Otherwise a job that is restarted again and again would skip ten steps each time, for ever."""
        def run(steps, spoilt, expect=0):
            faults = ",".join(f"nan@step={step}" for step in spoilt)   # counted from the start of the process
            return self.run_train(LLAMA, "--train-iters", str(steps), "--lr-decay-style", "constant",
                                  "--save", self.path("run"), "--resume", "auto", faults=faults, expect=expect)

        run(11, range(1, 11))   # an update came between
        run(21, range(1, 11))   # steps 12 to 21
        self.assertIn("step 22: loss or gradient norm not finite for 11 steps in a row", run(24, [1], expect=4).stderr)
        skipped = [r["skipped"] for r in records(self.path("run", "log.jsonl"), "step")]
        self.assertEqual(skipped, [True] * 10 + [False] + [True] * 11)
        self.assertEqual(self.checkpoints("run")[-1], "step-00000021")
        run(22, [])       # an operator has removed the cause
        run(32, range(1, 11))

    def test_a_loss_far_above_its_start_ends_the_run_and_leaves_its_checkpoints(self):
        """Also after a restart the loss is compared with that at the start of the first run, which the checkpoint
        records."""
        def run(steps, lr, expect=0, *more):
            return self.run_train(LLAMA, "--train-iters", str(steps), "--lr-decay-style", "constant", "--lr", lr,
                                  "--save", self.path("run"), "--resume", "auto", "--clip-grad", "0", *more,
                                  expect=expect)

        run(8, "0.02")
        losses = [r["loss"] for r in records(self.path("run", "log.jsonl"), "step")]
        start = min(losses[0], statistics.median(losses[:5]))
        self.assertLess(losses[-1], start)
        done = run(40, "9", 4, "--stop-on-divergence", "1.7")
        self.assertRegex(done.stderr, rf"its start of {re.escape(f'{start:.4g}')} \(--stop-on-divergence 1.7\); .* a "
                                      r"lower --lr \(now 9\), .*; the newest checkpoint is .*/run/step-00000008\n\Z")
        self.assertEqual(self.checkpoints("run"), ["step-00000008"])
        events = records(self.path("run", "log.jsonl"), "event")
        self.assertEqual((events[-1]["kind"], f"error: {events[-1]['text']}\n"), ("diverged", done.stderr))
        run(10, "0.02")   # with another learning rate it continues

    def test_a_resumed_run_may_take_less_memory_than_the_pass_that_calibrates_scales(self):
        """Here that one takes most, since heads are wide and the model is not."""
        options = ["--fp8-recipe", "delayed", "--fp8-attention", "--hidden-size", "32", "--num-attention-heads", "4",
                   "--kv-channels", "64", "--num-layers", "2", "--seq-length", "16", "--global-batch-size", "12",
                   "--micro-batch-size", "6", "--save", self.path("run"), "--resume", "auto"]
        for steps in ("1", "2"):
            self.run_train(GPT2, "--train-iters", steps, *options)
        self.assertEqual(self.checkpoints("run"), ["step-00000001", "step-00000002"])

    def test_an_evaluation_that_was_cut_short_is_made_up(self):
        """The evaluation after the last step is the only place that has its loss, so a resumed run repeats it."""
        write_hellaswag(self.path("hellaswag.bin"), 5, 16)
        options = ["--train-iters", "4", "--valid-data", self.path("valid.bin"), "--eval-interval", "2",
                   "--hellaswag-data", self.path("hellaswag.bin"), "--sample-every", "2", "--sample-tokens", "3"]
        kinds = ("eval", "hellaswag", "sample")

        def found(log):
            return [[{**r, "seconds": 0} for r in records(log, kind)] for kind in kinds]

        self.run_train(LLAMA, *options, "--log-file", self.path("straight.jsonl"))
        expected = found(self.path("straight.jsonl"))
        # Evaluations are counted from step 0 on. Each step has two: validation and HellaSwag.
        for number, steps in ((3, 2), (4, 2), (5, 4), (6, 4)):
            with self.subTest(number):
                save = ["--save", self.path(str(number)), "--save-interval", "2", "--resume", "auto"]
                done = self.run_train(LLAMA, *options, *save, faults=f"term@evaluation={number}")
                self.assertIn(f"note: step {steps}: its evaluation was cut short", done.stdout)
                self.assertEqual(self.checkpoints(str(number))[-1], f"step-{steps:08d}")
                for _ in range(2):   # twice: the checkpoint of the last step does not change
                    self.run_train(LLAMA, *options, *save)
                    log = self.path(str(number), "log.jsonl")
                    self.assertEqual(found(log)[:2], expected[:2])
                    self.assertEqual([r["step"] for r in records(log, "sample")], [0, 2, 4])
                # If the evaluation cannot be repeated, the earlier result remains.
                self.run_train(LLAMA, "--train-iters", "4", *save)
                self.assertEqual(found(log)[:2], expected[:2])
