"""The command export-fp8: its options, files and errors; transformers reads its output, if installed.
tests/commands/test_export_fp8.cpp checks the bits."""
import importlib.util
import json
import os
import subprocess
import unittest

from tests.support.train import LLAMA, TrainTest

READERS = all(importlib.util.find_spec(name) for name in ("torch", "transformers", "compressed_tensors", "safetensors"))


class ExportFp8(TrainTest):
    SHAPE = ["--num-layers", "2", "--hidden-size", "128", "--ffn-hidden-size", "256", "--num-attention-heads", "4",
             "--kv-channels", "64", "--vocab-size", "61", "--seq-length", "16", "--micro-batch-size", "2",
             "--global-batch-size", "4", "--untie-embeddings-and-output-weights"]

    def train(self, recipe, *more):
        self.run_train(LLAMA, "--train-iters", "2", "--save", self.path(recipe), "--fp8-recipe", recipe, *more)
        return self.path(recipe)

    def export(self, *words, expect=0):
        done = subprocess.run([LLAMA, "export-fp8", *words], capture_output=True, text=True, timeout=300)
        self.assertEqual(done.returncode, expect, done.stdout + done.stderr)
        return done.stdout if expect == 0 else done.stderr

    def test_files_and_mistakes(self):
        with open(self.path("tokenizer.json"), "w") as file:
            file.write("{}")
        run, out = self.train("blockwise", "--tokenizer", self.path("tokenizer.json")), self.path("out")
        said = self.export("--load", run, f"--out={out}/")
        self.assertIn("8 linears of 9 in FP8 (blockwise)", said)
        self.assertEqual(sorted(os.listdir(out)), ["config.json", "manifest.json", "model.safetensors",
                                                   "tokenizer.json"])
        with open(os.path.join(out, "config.json")) as file:
            config = json.load(file)
        self.assertEqual(config["quantization_config"], {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head"], "ignored_layers": ["lm_head"]})
        self.assertEqual(config["architectures"], ["LlamaForCausalLM"])
        for words, text in ((["--load", run, "--out", out], "exists already: name a new folder"),
                            (["--load", run], "export-fp8 needs --load CHECKPOINT and --out DIR"),
                            (["--laod", run], "export-fp8 has no option --laod: did you mean --load?"),
                            (["--load", "--out"], "--load needs a value"),
                            (["--load", out, "--out", self.path("x")], "has no state.json"),
                            (["--load", self.path("none"), "--out", self.path("x")], "none")):
            said = self.export(*words, expect=2)
            self.assertIn(text, said)
            self.assertEqual(said.count("\n"), 1)
        self.assertIn("--load PATH", self.export("--help"))
        # Training starts from the checkpoint, not from the export.
        done = self.run_train(LLAMA, "--train-iters", "1", "--load", out, expect=2)
        self.assertIn('"quantization_config"', done.stderr)

    @unittest.skipUnless(READERS, "torch, transformers and compressed-tensors are not installed")
    def test_transformers_reads_the_same_weights(self):
        import torch
        from safetensors.torch import load_file
        from transformers import AutoModelForCausalLM, FineGrainedFP8Config
        for recipe in ("blockwise", "delayed", "tensorwise"):
            out = self.path(recipe + "-fp8")
            self.export("--load", self.train(recipe, "--bf16-linears", "1.down"), "--out", out)
            blocks = recipe == "blockwise"
            more = {"quantization_config": FineGrainedFP8Config(dequantize=True)} if blocks else {}
            model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16 if blocks else torch.float32, **more)
            self.assertTrue(model(torch.arange(16)[None]).logits.isfinite().all())   # decompresses the weights
            weights, files = model.state_dict(), load_file(os.path.join(out, "model.safetensors"))
            compared = 0
            for name, codes in files.items():
                if codes.dtype != torch.float8_e4m3fn:
                    continue
                scale = files[name + ("_scale_inv" if blocks else "_scale")]
                if blocks:
                    scale = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
                self.assertTrue(torch.equal(weights[name].float(), codes.float() * scale), name)
                compared += 1
            self.assertEqual(compared, 13)


if __name__ == "__main__":
    unittest.main()
