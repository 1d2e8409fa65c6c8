"""`generate` of the real executables, scripts/generate, and data/prepare_hellaswag.py. Standard library only; tests
that need a tokenizer's package are skipped without it."""
import array
import base64
import importlib.util
import json
import os
import shutil
import struct
import subprocess
import sys
import unittest
import unittest.mock

import prepare_hellaswag
from llmfp8.text_tokenizers import BytesTokenizer
from tests.support.data_scripts import ScriptTest
from tests.support.train import GPT2, LLAMA, ROOT, TrainTest, records

SCRIPT = os.path.join(ROOT, "scripts", "generate")


class GenerateTest(TrainTest):
    # Prints bytes as text; if an option is given twice, the later one wins.
    BYTES = ["--vocab-size", "257", "--max-position-embeddings", "64", "--seq-length", "64", "--init-method-std", "0.3"]

    def save(self, binary, *options):
        shutil.rmtree(self.path("run"), ignore_errors=True)   # a run refuses the folder of another
        self.run_train(binary, "--train-iters", "2", "--save", self.path("run"), *options)
        return self.path("run")

    def generate(self, *options, binary=LLAMA, expect=0, text=True, standard_input=None):
        done = subprocess.run([binary, "generate", *options], capture_output=True, text=text, timeout=120,
                              input=standard_input)
        self.assertEqual(done.returncode, expect, done.stderr)
        if expect:
            self.assertEqual(done.stdout, "")
            self.assertEqual(done.stderr.splitlines()[-1][:7], "error: ")
        return done

    def test_the_text_is_that_of_the_run(self):
        """The sample after the last step has the same most likely tokens as `generate` with its checkpoint."""
        for binary in (GPT2, LLAMA):
            for dtype in ("bf16", "fp32"):
                options = ["--dtype", dtype, "--seed", "7", "--temperature", "0", "--sample-tokens", "9"]
                same_matmuls = ["--gemm-search", "off"]
                log = self.path(f"{dtype}.jsonl")
                folder = self.save(binary, "--sample-every", "2", "--prompt-ids", "3 1 4", "--print", "ids",
                                   "--log-file", log, "--init-method-std", "0.3", *options, *same_matmuls)
                expected = records(log, "sample")[-1]["text"]
                self.assertEqual(len(expected.split()), 12)
                done = self.generate("--load", folder, "--prompt-ids", "3 1 4", "--print", "ids", *options)
                self.assertEqual(done.stdout, expected + "\n")
                self.assertIn("weights: " + os.path.join(folder, "step-00000002"), done.stderr)

    @unittest.skipUnless(importlib.util.find_spec("tokenizers"), "needs the Python package tokenizers")
    def test_a_tokenizer_that_panics_is_one_line(self):
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
                with open(self.path("model", "tokenizer.json"), "w") as file:
                    json.dump({**plain, **change}, file)
                done = subprocess.run([sys.executable, SCRIPT, self.path("model"), "a text"], capture_output=True,
                                      text=True, timeout=60, env={**os.environ, "RUST_BACKTRACE": "1"})
                self.assertEqual((done.returncode, done.stdout), (2, ""), done.stderr)
                self.assertRegex(done.stderr, r"\Aerror: \S+/tokenizer.json: not a tokenizer.json that .*: "
                                              r"PanicException: .*\n\Z")

    def test_prompts_of_a_file_and_of_standard_input(self):
        folder = self.save(LLAMA, *self.BYTES)
        with open(self.path("prompts"), "w") as f:
            f.write("ab\ncd\n\n")
        options = ["--load", folder, "--sample-tokens", "5"]
        both = self.generate(*options, "--prompts", self.path("prompts"), text=False).stdout
        self.assertEqual(self.generate(*options, "--prompts", "-", text=False, standard_input=b"ab\ncd\n").stdout, both)
        self.assertTrue(both.startswith(b"ab"))
        ids = self.generate(*options, "--prompts", "-", "--print", "ids", standard_input="97 98\n99 100\n").stdout
        texts = [bytes(int(word) if int(word) < 256 else 10 for word in line.split()) for line in ids.splitlines()]
        self.assertEqual(b"".join(text + b"\n" for text in texts), both)
        other = self.generate(*options, "--prompt-bytes", "ab", "--seed", "99", text=False).stdout
        self.assertNotEqual(other, both[:len(other)])
        self.assertEqual(self.generate(*options, "--prompt-bytes", "ab", "--seed", "99", text=False).stdout, other)

    def test_what_cannot_be_is_said_in_a_line(self):
        folder = self.save(LLAMA)
        load = ["--load", folder]
        for options, said in ((load, "generate needs a prompt"),
                              (["--load", self.dir, "--prompt-ids", "1"], "neither a config.json nor checkpoints"),
                              ([*load, "--prompt-ids", "1 61"], "token 61 lies outside the vocabulary of 61"),
                              ([*load, "--prompt-ids", "1 2", "--sample-tokens", "15"],
                               "a prompt of 2 tokens and --sample-tokens 15 exceed the model's positions 16"),
                              ([*load, "--prompt-ids", "1", "--lr", "1"], "generate has no option --lr"),
                              (["--prompt-ids", "1"], "generate needs --load")):
            self.assertIn(said, self.generate(*options, expect=2).stderr)
        done = self.run_train(LLAMA, "--train-iters", "1", "--sample-every", "1", "--prompt-ids", "1 2",
                              "--sample-tokens", "15", expect=2)
        self.assertIn("exceed --seq-length 16", done.stderr)

    def test_a_damaged_checkpoint_is_refused(self):
        options = ["--load", self.save(LLAMA, *self.BYTES), "--prompt-bytes", "ab", "--sample-tokens", "3"]
        step = os.path.join(options[1], "step-00000002")
        text = self.generate(*options, text=False).stdout
        for name, place in (("model.safetensors", -1), ("config.json", 20), ("manifest.json", 40)):
            with open(os.path.join(step, name), "r+b") as f:
                whole = f.read()
                damaged = bytearray(whole)
                damaged[place] ^= 1
                f.seek(0)
                f.write(damaged)
            said = self.generate(*options, expect=5).stderr.splitlines()[-1]
            self.assertIn(f"no usable model at {step}: {name} is damaged", said)
            with open(os.path.join(step, name), "wb") as f:
                f.write(whole)
        self.assertEqual(self.generate(*options, text=False).stdout, text)
        shutil.rmtree(os.path.join(step, "optimizer"))   # generate does not read it
        os.remove(os.path.join(step, "state.json"))
        self.assertEqual(self.generate(*options, text=False).stdout, text)
        os.remove(os.path.join(step, "manifest.json"))
        self.assertEqual(self.generate(*options, text=False).stdout, text)

    def script(self, *arguments, expect=0, **environment):
        done = subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, timeout=120,
                              env=dict(os.environ, PYTHONDONTWRITEBYTECODE="1", **environment))
        self.assertEqual(done.returncode, expect, done.stdout + done.stderr)
        return done

    def test_script_encodes_and_decodes(self):
        folder = self.save(LLAMA, *self.BYTES)
        options = ["--executable", LLAMA, "--sample-tokens", "4", "--", "--temperature", "0"]
        text = self.script(folder, "a word", "\u00e9", *options).stdout
        self.assertTrue(text.startswith("a word"), text)
        lines = self.generate("--load", folder, "--prompts", "-", "--print", "ids", "--sample-tokens", "4",
                              "--temperature", "0", standard_input="256 97 32 119 111 114 100\n256 195 169\n").stdout
        def decode(tokens):
            return BytesTokenizer().decode([token for token in tokens if token != 256])
        ids = [[int(word) for word in line.split()][1:] for line in lines.splitlines()]
        self.assertEqual(text, decode(ids[0]) + "\n" + decode(ids[1]) + "\n")
        self.assertEqual(ids[1][:2], list("\u00e9".encode()))
        self.assertIn("no prompt", self.script(folder, expect=2).stderr)
        self.assertIn("error: the prompt 'caf\\udce9' is not text: it has half of a surrogate pair",
                      self.script(folder, b"caf\xe9", expect=2).stderr)
        for place in (self.dir, self.path("nowhere")):
            self.assertIn("config.json: No such file or directory; MODEL is a checkpoint",
                          self.script(place, "x", expect=2).stderr)
        os.makedirs(self.path("no-model"))
        with open(os.path.join(self.path("no-model"), "config.json"), "w") as file:
            file.write("{}")
        self.assertIn("no configuration of a model (KeyError: 'model_type')",
                      self.script(self.path("no-model"), "x", expect=2).stderr)
        self.assertIn("run make", self.script(folder, "x", "--executable", self.path("none"), expect=2).stderr)
        self.assertIn("error: ", self.script(folder, "x", "--executable", LLAMA, "--sample-tokens", "99",
                                             expect=2).stderr)

    def test_script_names_a_missing_tokenizer(self):
        folder = self.save(LLAMA)
        self.assertIn("pass --tokenizer", self.script(folder, "x", expect=2).stderr)
        with open(self.path("tokenizer.json"), "w") as f:
            f.write("{}")
        with open(self.path("tokenizers.py"), "w") as f:
            f.write("raise ImportError('not here')\n")
        text = self.script(folder, "x", "--tokenizer", self.path("tokenizer.json"), expect=2,
                           PYTHONPATH=self.dir).stderr
        self.assertIn("needs the Python package tokenizers", text)
        self.assertIn("python3 -m pip install 'tokenizers==", text)

    def test_a_batch_has_the_texts_of_each_prompt_alone(self):
        for binary, options in ((LLAMA, ["--num-query-groups", "2", "--qk-layernorm"]), (GPT2, [])):
            folder = self.save(binary, *self.BYTES, *options)
            prompts = ["ab", "c", "a much longer prompt", "d", "ef", "gh"]
            for dtype in ("fp32", "bf16"):
                common = ["--load", folder, "--dtype", dtype, "--sample-tokens", "30", "--print", "ids"]
                lines = ["".join(f"{byte} " for byte in prompt.encode()) for prompt in prompts]
                runs = [self.generate(*common, "--prompts", "-", "--inference-max-requests", most, binary=binary,
                                      standard_input="\n".join(lines) + "\n") for most in ("1", "4", "100")]
                self.assertEqual(runs[1].stdout, runs[0].stdout)
                self.assertEqual(runs[2].stdout, runs[0].stdout)
                texts = [[int(word) for word in line.split()] for line in runs[0].stdout.splitlines()]
                for text, prompt in zip(texts, prompts):
                    self.assertEqual(text[:len(prompt)], list(prompt.encode()))
                    self.assertEqual(len(text), len(prompt) + 30)
                count = sum(map(len, prompts))
                self.assertRegex(runs[0].stderr, rf"\nprefill: {count} tokens in \S+ s, \S+ tokens/s\n"
                                 r"decode: 174 tokens in \S+ s, \S+ tokens/s, \S+ ms per token of a text\n\Z")
                alone = self.generate(*common, "--prompt-ids", lines[0], binary=binary).stdout
                self.assertEqual(alone, runs[0].stdout.splitlines(True)[0])

    def test_a_text_ends_at_an_eos_token_or_a_stop_id(self):
        folder = self.save(LLAMA, "--vocab-size", "300", "--max-position-embeddings", "64", "--seq-length", "64",
                           "--init-method-std", "0.3")
        step = os.path.join(folder, "step-00000002")
        os.remove(os.path.join(step, "manifest.json"))   # the files are changed on purpose
        options = ["--load", folder, "--prompt-ids", "7 8", "--sample-tokens", "20"]

        def text(*more, **how):
            return self.generate(*options, *more, **how).stdout.split()
        whole = text()
        self.assertEqual(len(whole), 22)
        first = {token: whole.index(token, 2) + 1 for token in whole[2:]}   # the length of a text that ends there
        self.assertEqual(text("--stop-ids", whole[9]), whole[:first[whole[9]]])
        for name, value, expected in (("generation_config.json", [int(whole[5]), 299], first[whole[5]]),
                                      ("generation_config.json", int(whole[12]), first[whole[12]]),
                                      ("config.json", int(whole[7]), first[whole[7]])):
            path = os.path.join(step, name)
            saved = open(path).read() if os.path.exists(path) else None
            with open(path, "w") as file:
                json.dump({**(json.loads(saved) if saved else {}), "eos_token_id": value}, file)
            self.assertEqual(text(), whole[:expected])
            self.assertEqual(text("--ignore-eos"), whole)
            self.assertEqual(text("--ignore-eos", "--stop-ids", whole[9]), whole[:first[whole[9]]])
            os.remove(path)
            if saved:
                with open(path, "w") as file:
                    file.write(saved)
        for ids, said in (("300", "token 300 lies outside the vocabulary of 300"), ("x", 'is not a token id')):
            self.assertIn("--stop-ids: ", self.generate(*options, "--stop-ids", ids, expect=2).stderr)
            self.assertIn(said, self.generate(*options, "--stop-ids", ids, expect=2).stderr)

    def test_top_p(self):
        options = ["--load", self.save(LLAMA, *self.BYTES), "--prompt-ids", "7 8", "--sample-tokens", "30", "--print",
                   "ids"]
        likeliest = self.generate(*options, "--temperature", "0").stdout
        self.assertEqual(self.generate(*options, "--temperature", "1.5", "--top-p", "1e-6").stdout, likeliest)
        self.assertNotEqual(self.generate(*options, "--temperature", "1.5").stdout, likeliest)
        for value, said in (("0", "must be a number in (0, 1]"), ("1.1", "must be a number in (0, 1]")):
            self.assertIn(said, self.generate(*options, "--top-p", value, expect=2).stderr)

    def test_what_does_not_fit_into_memory_is_one_line(self):
        """A cache for as many texts as there are prompts would take 16 TB."""
        config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64,
                  "num_hidden_layers": 64, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 256,
                  "intermediate_size": 64, "vocab_size": 300, "max_position_embeddings": 1 << 20, "rms_norm_eps": 1e-5,
                  "hidden_act": "silu", "tie_word_embeddings": True}
        os.mkdir(self.path("large"))
        with open(self.path("large", "config.json"), "w") as file:
            json.dump(config, file)
        said = self.generate("--load", self.path("large"), "--prompts", "-", "--sample-tokens", "1000000",
                             "--inference-max-requests", "64", standard_input="1\n" * 64, expect=2).stderr
        self.assertRegex(said, r"\Aerror: generate needs \d+\.\d\d GiB of device memory for 64 texts of 1000001 tokens "
                               r"at once, and \d+\.\d\d GiB are free: lower --inference-max-requests or "
                               r"--sample-tokens\n\Z")

    # Writes its arguments to a file, and answers each prompt with three tokens and the token that ends a turn.
    ANSWERS = """#!/usr/bin/env python3
import json, sys
prompts = sys.stdin.read().splitlines()
json.dump([sys.argv[1:], prompts], open(sys.argv[0] + ".json", "w"))
for prompt in prompts:
    print(prompt, "21 22 23 13")
"""

    def chat_model(self):
        """A model's folder with a tokenizer of words, and an executable that answers."""
        import tokenizers
        special = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|im_end|>"]
        words = ["user", "assistant", "system", "\n\n", "why", "Be", "brief", "?", " ", "x"]
        vocabulary = dict(zip(words, range(10))) | {f"w{i}": i for i in range(15, 30)} | {"<unk>": 99}
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(
            vocabulary | dict(zip(special, range(10, 15))), unk_token="<unk>"))
        tokenizer.add_special_tokens(special)
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"\n\n|[?]| |\w+"), "isolated")
        tokenizer.decoder = tokenizers.decoders.Fuse()
        folder = self.path("chat")
        os.mkdir(folder)
        tokenizer.save(os.path.join(folder, "tokenizer.json"))
        shutil.copy(os.path.join(ROOT, "tests", "fixtures", "llama", "config.json"), folder)
        executable = self.path("answers")
        with open(executable, "w") as file:
            file.write(self.ANSWERS)
        os.chmod(executable, 0o755)
        return folder, executable

    def chat(self, folder, executable, *options, expect=0, **environment):
        done = self.script(folder, *options, "--chat", "--executable", executable, expect=expect, **environment)
        if expect:
            return done.stderr
        with open(executable + ".json") as file:
            return done.stdout, *json.load(file)

    @unittest.skipUnless(importlib.util.find_spec("tokenizers"), "needs the Python package tokenizers")
    def test_chat_with_the_template_of_our_shards(self):
        folder, executable = self.chat_model()
        text, words, prompts = self.chat(folder, executable, " why ? ", "x")
        self.assertEqual(text, "w21w22w23\n" * 2)
        self.assertEqual(words[words.index("--stop-ids") + 1], "13")
        self.assertEqual(prompts, ["10 11 0 12 3 4 8 7 13 11 1 12 3", "10 11 0 12 3 9 13 11 1 12 3"])
        text, words, prompts = self.chat(folder, executable, "x", "--system", "Be brief", "--template", "llama3")
        self.assertEqual(prompts, ["10 11 2 12 3 5 8 6 13 11 0 12 3 9 13 11 1 12 3"])
        text, words, prompts = self.chat(folder, executable, "x", "--template", "plain")
        self.assertNotIn("--stop-ids", words)
        self.assertIn("--template has no effect without --chat",
                      self.script(folder, "x", "--template", "plain", expect=2).stderr)
        self.assertIn("has no chat template", self.chat(folder, executable, "x", "--template", "model", expect=2))

    @unittest.skipUnless(importlib.util.find_spec("tokenizers") and importlib.util.find_spec("jinja2"),
                         "needs the Python packages tokenizers and jinja2")
    def test_chat_with_the_template_of_the_model(self):
        folder, executable = self.chat_model()
        template = ("{{ bos_token }}{% for m in messages %}{{ m.role }} {{ m.content | trim }}<|im_end|>{% endfor %}\n"
                    "{% if add_generation_prompt %}assistant {% endif %}")
        config = os.path.join(folder, "tokenizer_config.json")
        tokens = {"bos_token": {"content": "<|begin_of_text|>"}, "eos_token": "<|im_end|>"}
        for stored in (template, [{"name": "tool", "template": "x"}, {"name": "default", "template": template}]):
            with open(config, "w") as file:
                json.dump({**tokens, "chat_template": stored}, file)
            _, words, prompts = self.chat(folder, executable, "why ?")
            self.assertEqual(prompts, ["10 0 8 4 8 7 14 1 8"])   # trim_blocks: no newline behind a block
            self.assertEqual(words[words.index("--stop-ids") + 1], "14")
        with open(os.path.join(folder, "chat_template.jinja"), "w") as file:   # transformers prefers it
            file.write("{{ raise_exception('no ' + messages[0].role) }}")
        self.assertIn("chat_template.jinja: the chat template refuses these messages: no user",
                      self.chat(folder, executable, "x", expect=2))
        for broken, said in (("{% if %}", "not a chat template"), ("{{ messages.x.y }}", "the chat template fails"),
                             ("{{ ''.__class__.__mro__ }}", "the chat template fails")):
            with open(os.path.join(folder, "chat_template.jinja"), "w") as file:
                file.write(broken)
            self.assertIn(said, self.chat(folder, executable, "x", expect=2))

    @unittest.skipUnless(importlib.util.find_spec("tokenizers"), "needs tokenizers")
    def test_script_takes_the_tokenizer_beside_the_model(self):
        import tokenizers
        vocabulary = {f"<{i}>": i for i in range(200)} | {" a": 200, "b": 201, "<|endoftext|>": 202}
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<0>"))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(" ?[a-z]"), "isolated")
        tokenizer.decoder = tokenizers.decoders.Fuse()
        tokenizer.save(self.path("tokenizer.json"))
        folder = self.save(LLAMA, *self.BYTES, "--vocab-size", "300", "--tokenizer", self.path("tokenizer.json"))
        options = ["--executable", LLAMA, "--sample-tokens", "3", "--", "--temperature", "0"]
        text = self.script(folder, "b a", *options).stdout
        self.assertTrue(text.startswith("b a"), text)
        ids = self.generate("--load", folder, "--prompt-ids", "202 201 200", "--sample-tokens", "3", "--temperature",
                            "0").stdout.split()
        self.assertEqual(text, tokenizer.decode([int(i) for i in ids[1:]], skip_special_tokens=False) + "\n")


class PrepareHellaswag(ScriptTest):
    QUESTIONS = [{"ctx": "A man", "endings": ["sits.", "is b\u00e9.", "x", "runs"], "label": 3},
                 {"ctx": "It", "endings": ["a", "b"], "label": "0"}]

    def prepare_questions(self, *arguments, rows=None, code=0):
        content = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows or self.QUESTIONS)
        path = self.file("h.jsonl", content)
        return self.script("prepare_hellaswag.py", "--input", path, "--out", self.folder / "h.bin", "--tokenizer",
                           "bytes", *arguments, code=code)

    def test_words_of_the_file(self):
        self.assertIn("2 examples of bytes, 16-bit", self.prepare_questions())
        content = (self.folder / "h.bin").read_bytes()
        words = array.array("H", content[1024:])
        expected = [0xffff, 0, 0, 3, 4, 5, *b"A man"]
        for ending in (" sits.", " is b\u00e9.", " x", " runs"):
            expected += [len(ending.encode()), *ending.encode()]
        expected[1] = 2 * len(expected)
        second = [0xffff, 0, 1, 0, 2, 2, *b"It", 2, *b" a", 2, *b" b"]
        second[1] = 2 * len(second)
        self.assertEqual(list(words), expected + second)
        self.assertEqual(struct.unpack_from("<5i", content), (20240522, 1, 2, expected[1], 0))
        self.prepare_questions("--with-separator", "--max-examples", "1")
        words = array.array("H", (self.folder / "h.bin").read_bytes()[1024:])
        self.assertEqual(list(words[:8]), [0xffff, expected[1] + 2, 0, 3, 4, 6, 256, ord("A")])
        self.assertEqual(len(words), len(expected) + 1)

    def test_large_vocabularies_have_32_bits(self):

        class Wide:
            name, vocab_size, separator = "wide", 65536, 65535

            @staticmethod
            def encode(text):
                return [65535] * len(text)
        with unittest.mock.patch.object(prepare_hellaswag, "load_tokenizer", return_value=Wide()):
            self.assertIn("32-bit", self.prepare_questions())
        words = array.array("I", (self.folder / "h.bin").read_bytes()[1024:])
        self.assertEqual(list(words[:8]), [2 ** 32 - 1, words[1], 0, 3, 4, 5, 65535, 65535])

    def test_what_is_wrong_with_a_row_is_said(self):
        good = self.QUESTIONS[1]
        for row, said in (("{", "line 2: not JSON"), ([1], "list, not an object"),
                          ({**good, "ctx": ""}, "field 'ctx' is \"\", not text"),
                          ({**good, "endings": ["a"]}, "field 'endings' is not a list of at least two texts"),
                          ({**good, "endings": ["a", "\ud800"]}, "line 2: not text: half of a surrogate pair"),
                          ({**good, "ctx": "\0"}, "line 2: not text: zero bytes"),
                          ({**good, "label": ""}, "field 'label' is \"\", not the number of an ending (0 to 1)"),
                          ({**good, "label": 2}, "field 'label' is 2, not"),
                          ({**good, "ctx": "x" * 40000}, "does not fit into 16 bits")):
            text = self.prepare_questions(rows=[good, row], code=2)
            self.assertIn(said, text)
            self.assertEqual(text.count("\n"), 1)
        self.assertFalse((self.folder / "h.bin").exists())
        text = self.script("prepare_hellaswag.py", "--input", self.folder / "none", "--tokenizer", "bytes", code=2)
        self.assertIn("cannot read: No such file", text)

    def test_the_trainer_reads_it(self):
        self.prepare_questions()
        run = TrainTest()
        run.setUp()
        self.addCleanup(run.doCleanups)
        done = run.run_train(LLAMA, "--train-iters", "1", "--vocab-size", "257", "--hellaswag-data",
                             str(self.folder / "h.bin"))
        self.assertIn("hellaswag step 1 | accuracy ", done.stdout)
        self.assertIn(" of 2 examples", done.stdout)


if __name__ == "__main__":
    unittest.main()
