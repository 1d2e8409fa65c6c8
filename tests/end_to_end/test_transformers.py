"""Runs in FP32 against transformers and torch.optim, which compute the same in double: the loss of every model type, on
one rank and under each way of sharding, and 20 steps of AdamW with clipping."""
import tempfile
import unittest
from pathlib import Path

from tests.support.ranks import ENVIRONMENT, HAVE_RANKS, MPIRUN
from tests.support.run_command import run_command
from tests.support.train import LLAMA, TrainTest, records, write_shard

try:
    import torch
    from safetensors.torch import load_file

    from tests.support import make_hf_fixtures as hf
    MISSING = None
except ImportError as error:
    MISSING = error.name
    hf = None

# The errors of single tokens, 1e-7 of the loss each, mostly cancel in the mean over 2048.
LENGTH, SAMPLES = 32, 64
# The number of ranks, and their options.
LAYOUTS = {"one rank": (1, []), "zero 2": (2, ["--zero", "2"]), "context 4": (4, ["--context-parallel", "4"]),
           "context 2 and zero 3": (4, ["--context-parallel", "2", "--zero", "3"])}


@unittest.skipIf(MISSING, f"needs {MISSING}")
@unittest.skipUnless(HAVE_RANKS, "needs OpenMPI and the CPU device")
class TransformersTest(TrainTest):
    def setUp(self):
        super().setUp()
        torch.set_num_threads(1)

    def model(self, name, seed=1):
        """A random model in double, saved in FP32; its folder; and a shard of as many samples as a step has."""
        model = hf.model_of(name).train()
        hf.randomise(model, torch.float32, seed)
        folder = self.path(name)
        model.float().save_pretrained(folder)
        tokens = torch.randint(model.config.vocab_size, (SAMPLES * LENGTH + 1,),
                               generator=torch.Generator().manual_seed(seed)).tolist()
        write_shard(folder + ".bin", tokens)
        parts = [tokens[i * LENGTH:(i + 1) * LENGTH + 1] for i in range(SAMPLES)]
        return model.double(), folder, torch.tensor(parts)

    def train(self, folder, layout, *options):
        """The step records of a run."""
        ranks, sharding = LAYOUTS[layout]
        with tempfile.TemporaryDirectory(dir=self.dir) as place:
            command = [LLAMA, "--load", folder, "--train-data", folder + ".bin", "--dtype", "fp32", "--seq-length",
                       str(LENGTH), "--micro-batch-size", "16", "--global-batch-size", str(SAMPLES), "--log-file",
                       place + "/log.jsonl", "--lr-warmup-iters", "0", *sharding, *options]
            launcher = [*MPIRUN, "-np", str(ranks)] if ranks > 1 else []
            run_command([*launcher, *command], env=ENVIRONMENT)
            return records(place + "/log.jsonl", "step")

    def test_losses_of_every_model_type(self):
        for name in hf.MODELS:
            model, folder, tokens = self.model(name)
            with hf.everything_in_double():
                _, loss, grads = hf.run(model, tokens[:, :-1], tokens[:, 1:])
            norm = torch.stack([g.norm() for g in grads.values()]).norm().item()
            for layout, (_, options) in LAYOUTS.items():
                parts = int(options[1]) if "--context-parallel" in options else 1
                if model.config.num_attention_heads % parts:
                    continue
                with self.subTest(model=name, layout=layout):
                    step, = self.train(folder, layout, "--train-iters", "1")
                    self.assertLess(abs(step["loss"] / loss.item() - 1), 2e-8)
                    self.assertLess(abs(step["grad_norm"] / norm - 1), 2e-7)

    def test_z_loss(self):
        for name, weight in (("gpt2", 1e-2), ("qwen3", 0.5)):
            model, folder, tokens = self.model(name)
            with hf.everything_in_double():
                logits = model(input_ids=tokens[:, :-1], use_cache=False).logits.flatten(0, 1)
                loss = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
                z = weight * logits.logsumexp(-1).square().mean()
                (loss + z).backward()
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm().item()
            for layout in LAYOUTS:
                with self.subTest(model=name, layout=layout):
                    step, = self.train(folder, layout, "--train-iters", "1", "--z-loss", str(weight))
                    self.assertLess(abs(step["loss"] / loss.item() - 1), 2e-8)
                    self.assertLess(abs(step["z_loss"] / z.item() - 1), 2e-7)
                    self.assertLess(abs(step["grad_norm"] / norm - 1), 2e-7)

    def test_twenty_steps_of_adamw_with_clipping(self):
        for name in ("gpt2", "qwen3"):
            model, folder, tokens = self.model(name)
            steps = self.train(folder, "context 2 and zero 3", "--train-iters", "20", "--lr-decay-style",
                               "constant", "--lr", "1e-4", "--clip-grad", "0.5", "--save", folder + "-out")
            groups = [{"params": [p for p in model.parameters() if (p.dim() > 1) == matrix], "weight_decay": decay}
                      for matrix, decay in ((True, 0.1), (False, 0.0))]
            optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), eps=1e-8)
            for step in steps:
                with hf.everything_in_double():
                    _, loss, _ = hf.run(model, tokens[:, :-1], tokens[:, 1:])
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()
                optimizer.step()
                self.assertGreater(norm, 1)   # all steps are clipped
                self.assertLess(abs(step["loss"] / loss.item() - 1), 1e-7)
                self.assertLess(abs(step["grad_norm"] / norm - 1), 3e-7)
            saved = load_file(Path(folder + "-out", "step-00000020", "model.safetensors"))
            for key, value in model.named_parameters():
                # The gradient of a bias of keys is 0 up to rounding, which Adam scales up.
                if "c_attn.bias" not in key:
                    self.assertLess((saved[key].double() - value).norm() / value.norm(), 1e-6, key)
