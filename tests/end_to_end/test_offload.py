"""--offload in the real executables: losses and checkpoint files are equal to those of a run
without offload, and each run can resume a checkpoint of the other. test_offload.cpp has every recipe, and ranks."""
import shutil

from tests.support.train import GPT2, LLAMA, TrainTest, records, state_of

DEEP = ["--num-layers", "5", "--train-iters", "6", "--save-interval", "3"]
AWAY = ["--offload", "moments,masters,activations"]
LAST = "step-00000006"


class OffloadTest(TrainTest):
    def figures(self, name):
        return [(r["step"], r["loss"], r["grad_norm"]) for r in records(self.path(name, "log.jsonl"), "step")]

    def test_losses_and_checkpoints_are_the_same_and_resume_in_each_other(self):
        cases = [(GPT2, ["--moment-dtype", "bf16", "--recompute", "block"]),
                 (LLAMA, ["--fp8-recipe", "delayed", "--grad-dtype", "bf16", "--sample-every", "2",
                          "--valid-data", self.path("valid.bin"), "--eval-interval", "2"]),
                 (LLAMA, ["--fp8-recipe", "blockwise", "--recompute", "norm-act"])]
        for number, (binary, options) in enumerate(cases):
            with self.subTest(options=options):
                here, away, some = (f"{number}-{name}" for name in ("here", "away", "some"))
                common = [binary, *DEEP, *options]
                self.run_train(*common, "--save", self.path(here))
                done = self.run_train(*common, *AWAY, "--save", self.path(away))
                self.assertIn("pinned in host memory", done.stdout)
                self.run_train(*common, "--offload", "masters", "--offload-fraction", "0.3", "--save", self.path(some))
                expected = state_of(self.path(here, LAST))
                for name in (away, some):
                    self.assertEqual(self.figures(name), self.figures(here))
                    self.assertEqual(state_of(self.path(name, LAST)), expected)
                middle = "step-00000003"
                for source, offload in ((here, AWAY), (away, [])):
                    resumed = self.path(f"{number}-resumed")
                    self.run_train(*common, *offload, "--save", resumed, "--resume", self.path(source, middle))
                    self.assertEqual(state_of(f"{resumed}/{LAST}"), expected)
                    shutil.rmtree(resumed)

    def test_activations_of_few_layers_are_not_offloaded(self):
        error = self.run_train(GPT2, "--train-iters", "2", "--offload", "activations", expect=2).stderr
        self.assertIn("--offload activations: those of 3 layers stay on the GPU, and the model has 2", error)
        error = self.run_train(GPT2, "--train-iters", "2", "--offload", "weights", expect=2).stderr
        self.assertIn("moments, masters and activations", error)
