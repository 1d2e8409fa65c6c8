"""scripts/export_fp8: its bits against casts that are written in another way, its files and errors; transformers reads
its output, if installed. Needs numpy."""
import importlib.machinery
import importlib.util
import json
import os
import re
import struct
import sys
import unittest
from pathlib import Path

from tests.support.run_command import run_command
from tests.support.train import LLAMA, ROOT, TrainTest

SCRIPT = os.path.join(ROOT, "scripts", "export_fp8")
NUMPY = importlib.util.find_spec("numpy")
# E4M3, from its definition: code -> number; the last one stands for NaN.
TABLE = [(1 + m / 8) * 2.0 ** (e - 7) if e else m * 2.0 ** -9 for e in range(16) for m in range(8)]
MODULES = {"qkv": "q|k|v", "proj": "o", "up": "gate|up", "down": "down"}
READERS = all(importlib.util.find_spec(name) for name in ("torch", "transformers", "compressed_tensors", "safetensors"))


def tensors_of(folder):
    """{name: (dtype, shape, bytes)} of a model, in order."""
    found = {}
    for name in sorted(os.listdir(folder)):
        if name.endswith(".safetensors"):
            with open(os.path.join(folder, name), "rb") as file:
                header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
                data = file.read()
            for key, entry in header.items():
                if key != "__metadata__":
                    begin, end = entry["data_offsets"]
                    found[key] = (entry["dtype"], entry["shape"], data[begin:end])
    return found


@unittest.skipUnless(NUMPY, "needs the Python package numpy")
class ExportFp8(TrainTest):
    SHAPE = ["--num-layers", "2", "--hidden-size", "128", "--ffn-hidden-size", "256", "--num-attention-heads", "4",
             "--kv-channels", "64", "--vocab-size", "61", "--seq-length", "16", "--micro-batch-size", "2",
             "--global-batch-size", "4", "--untie-embeddings-and-output-weights"]

    def train(self, recipe, *more):
        self.run_train(LLAMA, "--train-iters", "2", "--save", self.path(recipe), "--fp8-recipe", recipe, *more)
        return self.path(recipe)

    def export(self, *words, expect=0):
        done = run_command([sys.executable, SCRIPT, *words], expect)
        return done.stdout if expect == 0 else done.stderr

    def test_every_bf16_number_becomes_the_nearest_in_the_table(self):
        import numpy as np
        script = importlib.machinery.SourceFileLoader("export_fp8", SCRIPT).load_module()
        script.np = np
        values = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
        values = values[np.isfinite(values)]
        for scale in np.float32([1, 0.375, 77]):
            scaled = np.minimum(np.abs((values * scale).astype(np.float64)), 448)
            above = np.searchsorted(TABLE[:127], scaled).clip(1)
            low, high = scaled - np.take(TABLE, above - 1), np.take(TABLE, above) - scaled
            nearest = np.where((low < high) | ((low == high) & (above % 2 == 1)), above - 1, above)   # ties to even
            codes = script.codes_of(script.rounded(values * scale))
            self.assertTrue((codes == nearest + 128 * np.signbit(values)).all())

    def values(self, tensor):
        """A tensor as float32."""
        import numpy as np
        dtype, shape, data = tensor
        if dtype == "F8_E4M3":
            return np.take(np.float32(TABLE + [-x for x in TABLE]), np.frombuffer(data, "u1")).reshape(shape)
        bits = np.frombuffer(data, "<u2").astype(np.uint32) << 16 if dtype == "BF16" else np.frombuffer(data, "<u4")
        return bits.view(np.float32).reshape(shape)

    def test_the_weights_are_those_of_the_run(self):
        """The scales follow from the checkpoint, and a number is within half a step of the scaled weight."""
        import numpy as np
        for recipe in ("blockwise", "delayed", "tensorwise"):
            run = self.train(recipe, "--bf16-linears", "1.down", "--ffn-hidden-size", "144", "--fp8-lm-head")
            out, step = self.path(recipe + "-fp8"), os.path.join(run, "step-00000002")
            said = self.export("--load", run, "--out", out)
            blocks = recipe == "blockwise"
            count = 4 if blocks else 7   # the sides of the MLPs are no multiples of 128
            self.assertIn(f"{count} linears of 9 in FP8 ({recipe})\nnote: linears that ran in FP8 and are exported in "
                          f"BF16: {8 - count}, ", said)
            before, after = tensors_of(step), tensors_of(out)
            state = json.loads(Path(step, "state.json").read_text())["fp8"]
            for layer, kind in ((0, "qkv"), (0, "proj"), (0, "up"), (0, "down"), (1, "qkv"), (1, "proj"), (1, "up")):
                names = [name for name in before if re.search(rf"layers\.{layer}\.\S+\.({MODULES[kind]})_proj\.weight",
                                                              name)]
                weights = np.concatenate([self.values(before.pop(name)) for name in names])
                tiles = [[np.abs(weights[r:r + 128, c:c + 128]).max() for c in range(0, weights.shape[1], 128)]
                         for r in range(0, len(weights), 128)]
                scale = np.float32(448) / (np.float32(tiles) if blocks else np.abs(weights).max())
                if blocks:   # the power of two below
                    scale = 2 ** np.floor(np.log2(scale))
                elif recipe == "delayed":
                    scale = np.uint32(state["tensors"][f"{layer}.{kind}.weight"]["quant_mul_bits"]).view(np.float32)
                of_elements = scale.repeat(128, 0).repeat(128, 1)[:len(weights), :weights.shape[1]] if blocks else scale
                numbers = np.concatenate([self.values(tensor) for tensor in map(after.pop, names)])
                if blocks and kind in ("up", "down"):
                    numbers = numbers * of_elements   # in BF16, which has them exactly
                else:
                    found = [self.values(after.pop(name + ("_scale_inv" if blocks else "_scale"))) for name in names]
                    for scale_inv in [np.concatenate(found)] if blocks else found:
                        self.assertTrue((scale_inv == np.float32(1) / scale).all())
                away = np.abs(numbers - np.clip(weights * of_elements, -448, 448))
                self.assertTrue((away <= np.maximum(np.abs(numbers) / 16, 2.0 ** -10)).all())
                self.assertGreater(away.max(), 0)   # the weights were rounded
            self.assertEqual(after, before)   # embeddings, norms, the head, and 1.down

    def test_files_and_mistakes(self):
        Path(self.path("tokenizer.json")).write_text("{}")
        run, out = self.train("blockwise", "--tokenizer", self.path("tokenizer.json")), self.path("out")
        said = self.export("--load", run, f"--out={out}/")
        self.assertIn("8 linears of 9 in FP8 (blockwise)", said)
        self.assertEqual(sorted(os.listdir(out)), ["config.json", "model.safetensors", "tokenizer.json"])
        config = json.loads(Path(out, "config.json").read_text())
        self.assertEqual(config["quantization_config"], {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head"], "ignored_layers": ["lm_head"]})
        self.assertEqual(config["architectures"], ["LlamaForCausalLM"])
        for words, text in ((["--load", run, "--out", out], "exists already: name a new folder"),
                            (["--load", run], "the following arguments are required: --out"),
                            (["--laod", run], "unknown option --laod: did you mean --load?"),
                            (["--load", self.train("none"), "--out", self.path("x")], "its run was not in FP8"),
                            (["--load", self.train("int8-forward"), "--out",
                              self.path("x")], "its forward pass was in INT8 (--fp8-recipe int8-forward)"),
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
