"""--optimizer muon on the CPU device: a change of the optimizer. tests/composition has resumes,
test_checkpoint_zero.cpp those on other numbers of ranks."""
import os

from tests.end_to_end.test_course import tensors_of
from tests.support.train import GPT2, TrainTest, records, state_of

MUON = ["--optimizer", "muon"]


class MuonTest(TrainTest):
    def losses(self, name):
        return [r["loss"] for r in records(self.path(name), "step")]

    def test_a_checkpoint_goes_to_the_other_optimizer_and_back(self):
        for dtype in ("fp32", "fp8"):
            moments = ["--moment-dtype", dtype]
            self.run_train(GPT2, "--train-iters", "2", *moments, "--save", self.path(dtype, "adamw"))
            self.run_train(GPT2, "--train-iters", "2", *moments, *MUON, "--save", self.path(dtype, "muon"))
            for first, second, zero in (("adamw", "muon", "momentum of 8 matrices"),
                                        ("muon", "adamw", "exp_avg of 8 matrices, exp_avg_sq of 8 matrices")):
                done = self.run_train(GPT2, "--train-iters", "4", "--optimizer", second, *moments, "--save",
                                      self.path(dtype, first + "2"), "--resume",
                                      self.path(dtype, first, "step-00000002"), "--log-file",
                                      self.path(dtype + first + ".jsonl"))
                self.assertIn(f"the checkpoint is of another optimizer: these start from 0: {zero}\n", done.stdout)
                self.assertIn(f"--optimizer: {first} in the checkpoint, {second} now", done.stdout)
                self.assertEqual(len(self.losses(dtype + first + ".jsonl")), 2)
                names = state_of(self.path(dtype, first + "2", "step-00000004"))
                self.assertEqual("optimizer/momentum.safetensors" in names, second == "muon")
                self.assertEqual("optimizer/momentum_scale_inv.safetensors" in names,
                                 second == "muon" and dtype == "fp8")

    def test_moments_that_start_late_have_their_own_bias_corrections(self):
        """In the first update of its moments AdamW moves each weight by the rate, later runs go on from there."""
        matrices, rate = ("qkv.weight", "proj.weight", "up.weight", "down.weight"), 1e-3
        for dtype in ("fp32", "bf16", "fp8"):
            same = ["--moment-dtype", dtype, "--adam-beta2", "0.999", "--lr", str(rate), "--lr-decay-style", "constant",
                    "--weight-decay", "0"]
            folder = {name: self.path(dtype, name) for name in ("muon", "first", "parts", "whole")}
            self.run_train(GPT2, "--train-iters", "2", *same, *MUON, "--save", folder["muon"])
            for name, begin, steps in (("first", "muon/step-00000002", "3"), ("whole", "muon/step-00000002", "5"),
                                       ("parts", "first/step-00000003", "5")):
                self.run_train(GPT2, "--train-iters", steps, *same, "--optimizer", "adamw", "--save", folder[name],
                               "--resume", self.path(dtype, begin))
            old, new = (tensors_of(os.path.join(folder[name], step, "optimizer", "master.safetensors"))
                        for name, step in (("muon", "step-00000002"), ("first", "step-00000003")))
            for name in filter(lambda name: name.endswith(matrices), old):
                moved = sorted(abs(a - b) for a, b in zip(old[name], new[name], strict=True))
                self.assertLess(moved[-1], 1.001 * rate, name)
                self.assertGreater(moved[len(moved) // 2], 0.99 * rate, name)
            whole, parts = (state_of(os.path.join(folder[name], "step-00000005")) for name in ("whole", "parts"))
            self.assertEqual(whole["state.json"]["moments_begin"], 2)
            self.assertEqual(whole, parts)
            self.run_train(GPT2, "--train-iters", "6", *same, *MUON, "--save", folder["whole"], "--resume", "auto")
            self.assertNotIn("moments_begin", state_of(os.path.join(folder["whole"], "step-00000006"))["state.json"])

    def test_second_moments_of_rows_start_later_and_end(self):
        self.run_train(GPT2, "--train-iters", "2", *MUON, "--save", self.path("plain"))
        for step, beta2, note in ((3, "0.95", "row_exp_avg_sq of 8 matrices"), (4, None, None), (5, "0", None)):
            options = [*MUON, "--muon-beta2", beta2] if beta2 else []
            done = self.run_train(GPT2, "--train-iters", str(step), *options, "--save", self.path("plain"),
                                  "--resume", "auto")
            self.assertEqual("these start from 0: " + (note or "") in done.stdout, note is not None)
            names = state_of(self.path("plain", f"step-{step:08}"))
            self.assertEqual("optimizer/row_v.safetensors" in names, beta2 != "0")
