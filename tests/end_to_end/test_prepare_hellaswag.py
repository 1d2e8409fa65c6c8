"""data/prepare_hellaswag.py, and the trainer with its file. Standard library only."""
import array
import json
import struct
import unittest
import unittest.mock

import prepare_hellaswag
from tests.support.data_scripts import ScriptTest, has, save_tokenizer
from tests.support.folder import LFS_POINTER
from tests.support.train import LLAMA, TrainTest


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
        self.assertEqual(json.loads((self.folder / "h.meta.json").read_text())["tokenizer"]["vocabulary"], "bytes")
        self.prepare_questions("--with-separator", "--max-examples", "1")
        words = array.array("H", (self.folder / "h.bin").read_bytes()[1024:])
        self.assertEqual(list(words[:8]), [0xffff, expected[1] + 2, 0, 3, 4, 6, 256, ord("A")])
        self.assertEqual(len(words), len(expected) + 1)

    @unittest.skipUnless(has("tokenizers"), "needs tokenizers")
    def test_an_ending_has_the_tokens_of_the_whole_text(self):
        """Where a tokenizer puts a blank before a text, an ending encoded apart would have one more."""
        import tokenizers
        for kind in ("bytes", "prepend", "first"):
            path = save_tokenizer(self.folder, kind, ["<s>"])
            self.prepare_questions("--tokenizer", path, "--max-examples", "1")
            words = list(array.array("H", (self.folder / "h.bin").read_bytes()[1024:]))
            model = tokenizers.Tokenizer.from_file(str(path))
            context = model.encode("A man", add_special_tokens=False).ids
            expected = [len(context), *context]
            for ending in self.QUESTIONS[0]["endings"]:
                whole = model.encode(f"A man {ending}", add_special_tokens=False).ids
                expected += [len(whole) - len(context), *whole[len(context):]]
            self.assertEqual(words[5:], expected)
            self.assertEqual(words[1], 2 * len(words))

    def test_a_token_of_both_context_and_ending_is_refused(self):

        class Pairs:
            name, vocab_size, separator, meta = "pairs", 1000, 999, dict

            @staticmethod
            def encode(text):
                return [len(text[i:i + 2]) * text[i] for i in range(0, len(text), 2)]
        with unittest.mock.patch.object(prepare_hellaswag, "load_tokenizer", return_value=Pairs()):
            self.prepare_questions("--max-examples", "1", rows=[{**self.QUESTIONS[1], "ctx": "even"}])
            self.assertIn("h.jsonl: line 1: the tokens of 'ctx' change when the ending 'a' follows: take the blanks",
                          self.prepare_questions(rows=[{**self.QUESTIONS[1], "ctx": "odd"}], code=2))

    def test_large_vocabularies_have_32_bits(self):

        class Wide:
            name, vocab_size, separator, meta = "wide", 65536, 65535, dict

            @staticmethod
            def encode(text):
                return [65535] * len(text)
        with unittest.mock.patch.object(prepare_hellaswag, "load_tokenizer", return_value=Wide()):
            self.assertIn("32-bit", self.prepare_questions())
        words = array.array("I", (self.folder / "h.bin").read_bytes()[1024:])
        self.assertEqual(list(words[:8]), [2 ** 32 - 1, words[1], 0, 3, 4, 5, 65535, 65535])

    def test_what_is_wrong_with_a_row_is_said(self):
        good = self.QUESTIONS[1]
        self.assertIn("h.jsonl: this is a git-lfs pointer", self.prepare_questions(rows=[LFS_POINTER], code=2))
        for row, said in (("{", "line 2: not JSON"), ([1], "no field 'ctx' (there is: list)"),
                          ({**good, "ctx": ""}, "field 'ctx' is \"\", not text"),
                          ({**good, "endings": ["a"]}, "field 'endings' is not a list of at least two texts"),
                          ({**good, "endings": ["a", "\ud800"]}, "half of a surrogate pair"),
                          ({**good, "ctx": "\0"}, "zero bytes"),
                          ({**good, "label": ""}, "field 'label' is \"\", not the number of an ending (0 to 1)"),
                          ({**good, "label": 2}, "field 'label' is 2, not"),
                          ({**good, "ctx": "x" * 40000}, "does not fit into 16 bits")):
            text = self.prepare_questions(rows=[good, row], code=2)
            self.assertIn(said, text)
            self.assertEqual(text.count("\n"), 1)
        self.assertFalse((self.folder / "h.bin").exists())
        text = self.script("prepare_hellaswag.py", "--input", self.folder / "none", "--tokenizer", "bytes", code=2)
        self.assertIn("no such file", text)

    def test_the_trainer_reads_it(self):
        self.prepare_questions()
        run = TrainTest()
        run.setUp()
        self.addCleanup(run.doCleanups)
        done = run.run_train(LLAMA, "--train-iters", "1", "--vocab-size", "257", "--hellaswag-data",
                             str(self.folder / "h.bin"))
        self.assertIn("hellaswag step 1 | accuracy ", done.stdout)
        self.assertIn(" of 2 examples", done.stdout)
