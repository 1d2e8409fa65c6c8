"""`generate` of the real executables, and scripts/generate. Standard library only; tests that need a tokenizer's
package are skipped without it."""
import base64
import importlib.util
import json
import os
import shutil
import sys
import unittest
from pathlib import Path

from llmfp8.text_tokenizers import BytesTokenizer
from tests.support.run_command import run_command
from tests.support.train import GPT2, LLAMA, ROOT, TrainTest, records

SCRIPT = os.path.join(ROOT, "scripts", "generate")
TOKENIZERS = importlib.util.find_spec("tokenizers")


class GenerateTest(TrainTest):
    # Prints bytes as text; if an option is given twice, the later one wins.
    BYTES = ["--vocab-size", "257", "--max-position-embeddings", "64", "--seq-length", "64", "--init-method-std", "0.3"]

    def save(self, binary, *options):
        shutil.rmtree(self.path("run"), ignore_errors=True)   # a run refuses the folder of another
        self.run_train(binary, "--train-iters", "2", "--save", self.path("run"), *options)
        return self.path("run")

    def generate(self, *options, binary=LLAMA, expect=0, text=True):
        done = run_command([binary, "generate", *options], expect, text=text)
        if expect:
            self.assertEqual(done.stdout, "")
            self.assertEqual(done.stderr.splitlines()[-1][:7], "error: ")
        return done

    def test_the_text_is_that_of_the_run(self):
        """The sample after the last step has the same most likely tokens as `generate` with its checkpoint."""
        for binary, more in ((GPT2, []), (LLAMA, ["--num-query-groups", "2", "--qk-layernorm"])):
            for dtype in ("bf16", "fp32"):
                options = ["--dtype", dtype, "--seed", "7", "--temperature", "0", "--sample-tokens", "9"]
                log = self.path(f"{dtype}.jsonl")
                folder = self.save(binary, "--sample-every", "2", "--prompt", "3 1 4", "--log-file", log,
                                   "--init-method-std", "0.3", "--gemm-search", "off", *options, *more)
                expected = records(log, "sample")[-1]["text"]
                self.assertEqual(len(expected.split()), 12)
                done = self.generate("--load", folder, "--prompt", "3 1 4", *options, binary=binary)
                self.assertEqual(done.stdout, expected + "\n")
                self.assertRegex(done.stderr, "weights: " + os.path.join(folder, "step-00000002")
                                 + r"\ngenerated: 9 tokens in \S+ s, \S+ tokens/s\n\Z")

    def test_ids_and_bytes_are_the_same_text(self):
        options = ["--load", self.save(LLAMA, *self.BYTES), "--sample-tokens", "9"]
        text = self.generate(*options, "--prompt", "ab", text=False).stdout
        self.assertTrue(text.startswith(b"ab"))
        ids = self.generate(*options, "--prompt", "97 98").stdout.split()
        self.assertEqual(bytes(int(word) if int(word) < 256 else 10 for word in ids) + b"\n", text)
        other = self.generate(*options, "--prompt", "ab", "--seed", "99", text=False).stdout
        self.assertNotEqual(other, text)
        self.assertEqual(self.generate(*options, "--prompt", "ab", "--seed", "99", text=False).stdout, other)

    def test_a_text_ends_at_an_eos_token(self):
        folder = self.save(LLAMA, "--vocab-size", "300", "--max-position-embeddings", "64", "--seq-length", "64",
                           "--init-method-std", "0.3")
        step = os.path.join(folder, "step-00000002")
        os.remove(os.path.join(step, "manifest.json"))   # the files are changed on purpose
        options = ["--load", folder, "--prompt", "7 8", "--sample-tokens", "20"]

        def text():
            return self.generate(*options).stdout.split()
        whole = text()
        self.assertEqual(len(whole), 22)
        # test_hf_tokens.cpp has the forms of both files.
        Path(step, "generation_config.json").write_text(json.dumps({"eos_token_id": [int(whole[5]), 299]}))
        self.assertEqual(text(), whole[:whole.index(whole[5], 2) + 1])

    def test_weights_that_are_not_finite_are_named(self):
        folder = self.save(LLAMA, *self.BYTES)
        step = os.path.join(folder, "step-00000002")
        os.remove(os.path.join(step, "manifest.json"))
        with open(os.path.join(step, "model.safetensors"), "r+b") as file:
            file.seek(-64, os.SEEK_END)
            file.write(b"\xff" * 64)
        said = self.generate("--load", folder, "--prompt", "ab", "--sample-tokens", "4", expect=4)
        self.assertRegex(said.stderr, r"error: token 3 of the text: the model's logits are not finite")
        self.assertEqual(said.stdout, "")

    def test_what_does_not_fit_into_memory_is_one_line(self):
        """The activations of a million tokens would take a terabyte."""
        config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64,
                  "num_hidden_layers": 64, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 256,
                  "intermediate_size": 1 << 18, "vocab_size": 300, "max_position_embeddings": 1 << 20,
                  "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": True}
        os.mkdir(self.path("large"))
        Path(self.path("large", "config.json")).write_text(json.dumps(config))
        said = self.generate("--load", self.path("large"), "--prompt", "1", "--sample-tokens", "1000000",
                             expect=2).stderr
        self.assertRegex(said, r"\Aerror: generate needs \d+\.\d\d GiB of device memory for a text of 1000001 tokens, "
                               r"and \d+\.\d\d GiB are free: lower --sample-tokens\n\Z")

    def script(self, *arguments, expect=0, **environment):
        return run_command([sys.executable, SCRIPT, *arguments], expect,
                           env=dict(os.environ, PYTHONDONTWRITEBYTECODE="1", **environment))

    def test_script_encodes_and_decodes(self):
        folder = self.save(LLAMA, *self.BYTES)
        options = ["--sample-tokens", "4", "--temperature", "0"]
        script = [folder, "--tokenizer", "bytes", "--executable", LLAMA]
        text = self.script(*script, "\u00e9", "--", *options).stdout
        ids = self.generate("--load", folder, "--prompt", "256 195 169", *options).stdout.split()
        self.assertEqual(text, BytesTokenizer().decode([int(i) for i in ids if i != "256"]) + "\n")
        self.assertIn("error: the prompt 'caf\\udce9' is not text: it has half of a surrogate pair",
                      self.script(*script, b"caf\xe9", expect=2).stderr)
        self.assertIn("run make", self.script(*script, "x", "--executable", self.path("none"), expect=2).stderr)
        self.assertIn("error: ", self.script(*script, "x", "--", "--sample-tokens", "99", expect=2).stderr)

    def test_script_names_a_missing_tokenizer(self):
        folder = self.save(LLAMA)
        self.assertIn("pass --tokenizer", self.script(folder, "x", expect=2).stderr)
        Path(self.path("tokenizer.json")).write_text("{}")
        Path(self.path("tokenizers.py")).write_text("raise ImportError('not here')\n")
        text = self.script(folder, "x", "--tokenizer", self.path("tokenizer.json"), expect=2,
                           PYTHONPATH=self.dir).stderr
        self.assertIn("needs the Python package tokenizers", text)
        self.assertIn("python3 -m pip install 'tokenizers==", text)

    @unittest.skipUnless(TOKENIZERS, "needs the Python package tokenizers")
    def test_a_tokenizer_that_panics_is_named_in_the_last_line(self):
        """The library's Rust code panics on these, in reading or in the first text."""
        plain = {"version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": None,
                 "post_processor": None, "decoder": None,
                 "model": {"type": "WordLevel", "vocab": {"<s>": 0, "a": 1}, "unk_token": "<s>"}}
        pieces = {"type": "BPE", "vocab": {"<s>": 0, "a": 1, "##b": 2}, "merges": [["a", "##b"]],
                  "continuing_subword_prefix": "##########"}
        tables = ["YWJj", base64.b64encode(b"\x08\0\0\0" + b"\xff" * 8 + b"x").decode()]
        broken = [{"model": pieces}, *({"normalizer": {"type": "Precompiled", "precompiled_charsmap": table}}
                                       for table in tables)]
        os.mkdir(self.path("model"))
        shutil.copy(os.path.join(ROOT, "tests", "fixtures", "llama", "config.json"), self.path("model"))
        for change in broken:
            with self.subTest(change):
                Path(self.path("model", "tokenizer.json")).write_text(json.dumps({**plain, **change}))
                done = run_command([sys.executable, SCRIPT, self.path("model"), "a text"], None)
                self.assertEqual((done.returncode, done.stdout), (2, ""), done.stderr)
                self.assertRegex(done.stderr.splitlines()[-1],
                                 r"\Aerror: \S+/tokenizer.json: not a tokenizer.json that .*: PanicException: ")

    @unittest.skipUnless(TOKENIZERS, "needs tokenizers")
    def test_script_takes_the_tokenizer_beside_the_model(self):
        import tokenizers
        vocabulary = {f"<{i}>": i for i in range(200)} | {" a": 200, "b": 201, "<|endoftext|>": 202}
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<0>"))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(" ?[a-z]"), "isolated")
        tokenizer.decoder = tokenizers.decoders.Fuse()
        tokenizer.save(self.path("tokenizer.json"))
        folder = self.save(LLAMA, *self.BYTES, "--vocab-size", "300", "--tokenizer", self.path("tokenizer.json"))
        options = ["--executable", LLAMA, "--", "--sample-tokens", "3", "--temperature", "0"]
        text = self.script(folder, "b a", *options).stdout
        self.assertTrue(text.startswith("b a"), text)
        ids = self.generate("--load", folder, "--prompt", "202 201 200", "--sample-tokens", "3", "--temperature",
                            "0").stdout.split()
        self.assertEqual(text, tokenizer.decode([int(i) for i in ids[1:]], skip_special_tokens=False) + "\n")
