"""Shards of data/*.py: cutting, tokenizers, data/inspect_shards.py. Standard library only; what needs an
optional package is skipped where it is missing."""
import array
import json
import math
import random
import shutil
import struct
import unittest

from inspect_shards import bigram_entropy
from llmfp8 import text_tokenizers
from llmfp8.shard_format import MIN_TAIL_TOKENS, Shard, SplitWriter
from tests.support.data_scripts import ScriptTest, documents_of, has, save_tokenizer, tokens_of


class Sharding(ScriptTest):
    def write(self, shard_tokens, lengths, chunk=1):
        self.out.mkdir(exist_ok=True)
        writer = SplitWriter(self.out, "train", 2, shard_tokens, {"tokenizer": {"separator": 7}})
        for at in range(0, len(lengths), chunk):
            part = lengths[at:at + chunk]
            tokens = array.array("H")
            for length in part:
                tokens.extend([7] + [1] * (length - 1))
            writer.write(tokens.tobytes(), part)
        writer.finish()
        writer.publish()
        return [(path, json.loads(path.with_suffix("").with_suffix(".meta.json").read_text()))
                for path in sorted(self.out.glob("*.bin"))]

    def check(self, shards, lengths):
        stream, starts = [], []
        for path, meta in shards:
            tokens = tokens_of(path)
            self.assertEqual(meta["tokens"], len(tokens))
            self.assertEqual(meta["document_offsets"], [i for i, token in enumerate(tokens) if token == 7])
            starts += [len(stream) + offset for offset in meta["document_offsets"]]
            stream += tokens
        expected = [sum(lengths[:i]) for i in range(len(lengths))]
        self.assertEqual(starts, expected)
        self.assertEqual(len(stream), sum(lengths))

    def test_documents_run_on_into_the_next_shard(self):
        for shard_tokens, lengths, chunk, sizes in [
                (10, [4, 4, 4, 4, 4, 20], 1, [10, 10, 10, 10]),
                (10, [10, 10], 2, [10, 10]),
                (10, [10, 9], 1, [19]),            # 9 tokens would be a short shard
                (10, [35], 1, [10, 10, 15]),
                (10, [1], 1, [1]),
                (10, [3] * 11, 4, [10, 10, 13])]:
            shutil.rmtree(self.out, ignore_errors=True)
            shards = self.write(shard_tokens, lengths, chunk)
            self.check(shards, lengths)
            self.assertEqual([meta["tokens"] for _, meta in shards], sizes)

    def test_tail_shorter_than_a_sample_joins_the_last_shard(self):
        lengths = [50000] * 5
        shards = self.write(100000, lengths)
        self.check(shards, lengths)
        self.assertEqual([meta["tokens"] for _, meta in shards], [100000, 150000])
        self.assertLess(50000, MIN_TAIL_TOKENS)

    def test_unpublished_shards_are_removed(self):
        self.out.mkdir()
        writer = SplitWriter(self.out, "train", 2, 10, {})
        writer.write(bytes(2 * 45), [45])
        self.assertNotEqual(list(self.out.glob("*.tmp")), [])
        self.assertEqual(list(self.out.glob("*.bin")), [])
        writer.discard()
        self.assertEqual(list(self.out.iterdir()), [])


class Tokenizers(ScriptTest):
    def test_bytes_round_trip(self):
        tokenizer = text_tokenizers.load_tokenizer("bytes")
        text = "a\u00e9\u4e2d\n"
        ids = [256, *tokenizer.encode(text.encode())]
        self.assertEqual(tokenizer.decode(ids), "<|endoftext|>" + text)
        self.assertEqual(tokenizer.decode([0xe9, 256, 300]), "\ufffd<|endoftext|><300?>")
        self.assertEqual(tokenizer.vocab_size, 257)

    def test_the_vocabulary_is_what_the_trainer_computes(self):   # tests/data/test_token_text.cpp
        self.assertEqual(text_tokenizers.vocabulary_of({"<s>": 5, "a": 0, "\u0120b": 1, "\u00e9": 3}), "a23176d6")

    @unittest.skipUnless(has("tiktoken"), "needs tiktoken")
    def test_gpt2_from_local_files(self):
        # A small vocabulary in GPT-2's files: the 256 bytes, three merges, the end-of-text token.
        printable = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
        others = [b for b in range(256) if b not in printable]
        letters = [chr(b) for b in printable] + [chr(256 + i) for i in range(len(others))]
        merges = [("a", "b"), ("ab", "c"), ("\u0120", "a")]
        names = letters + ["".join(merge) for merge in merges] + ["<|endoftext|>"]
        vocab = self.file("vocab.bpe", "#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges))
        encoder = self.file("encoder.json", json.dumps({name: i for i, name in enumerate(names)}))
        local = ["--vocab-bpe", vocab, "--encoder-json", encoder]
        text = self.file("a.txt", "abc a\n<|endoftext|>\u00e9")
        self.prepare("--tokenizer", "gpt2", *local, "--valid-fraction", "0", text)
        tokens = list(tokens_of(self.out / "train_000000.bin"))
        meta = json.loads((self.out / "train_000000.meta.json").read_text())
        self.assertEqual(meta["tokenizer"]["vocabulary"],   # as of a tokenizer.json with these tokens
                         text_tokenizers.vocabulary_of({name: i for i, name in enumerate(names)}))
        self.assertEqual(tokens[:3], [259, 257, 258])   # separator, "abc", " a"
        self.assertEqual(tokens.count(259), 1)          # a separator written out in a text is text
        ids, spans = text_tokenizers.load_tokenizer("gpt2", str(vocab), str(encoder)).spans("\u00e9abc a", False)
        self.assertEqual((ids[2:], spans), ([257, 258], [(0, 1), (0, 1), (1, 4), (4, 6)]))
        shown = self.inspect(*local, self.out / "train_000000.bin")
        self.assertIn("    | <|endoftext|>abc a", shown)
        self.assertIn("    | <|endoftext|>\u00e9", shown)
        self.file("encoder.json", json.dumps({name: i for i, name in enumerate(reversed(names))}))
        self.assertIn("not a matching GPT-2 vocabulary",
                      self.prepare("--tokenizer", "gpt2", *local, "--overwrite", text, code=2))
        self.assertIn("belong together", self.prepare("--tokenizer", "gpt2", *local[:2], "--overwrite", text, code=2))

    @unittest.skipUnless(has("tokenizers"), "needs tokenizers")
    def test_tokenizer_json(self):
        import tokenizers
        # Ids above 65535 and a gap below them: shards must be uint32, sized by the largest id.
        vocabulary = {"[UNK]": 0, "hello": 1, "world": 70000}
        model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
        model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        model.add_special_tokens(["<|begin_of_text|>"])
        path = self.folder / "tokenizer.json"
        model.save(str(path))
        start = json.loads(path.read_text())["added_tokens"][0]["id"]
        text = self.file("a.txt", "hello world <|begin_of_text|> hello\n")
        self.prepare("--tokenizer", path, "--valid-fraction", "0", text)
        shard = self.out / "train_000000.bin"
        tokens = list(tokens_of(shard))
        self.assertEqual(tokens, [start, 1, 70000, 0, 1])   # the spelled-out special token is an unknown word
        meta = json.loads((self.out / "train_000000.meta.json").read_text())
        self.assertEqual((meta["dtype"], meta["format"]), ("uint32", "llm.c v7"))
        self.assertEqual(meta["vocab_size"], max(start, 70000) + 1)
        self.assertEqual(meta["tokenizer"]["vocabulary"],
                         text_tokenizers.vocabulary_of({**vocabulary, "<|begin_of_text|>": start}))
        self.assertIn("hello world", self.inspect("--tokenizer", path, shard))
        self.assertIn("pass --tokenizer to decode (tokenizer.json)", self.inspect(shard))
        self.assertIn("no token <nope>",
                      self.prepare("--tokenizer", path, "--separator", "<nope>", "--overwrite", text, code=2))

    @unittest.skipUnless(has("tokenizers"), "needs tokenizers")
    def test_no_marker_comes_out_of_a_text(self):
        text = "a<|endoftext|> b <|im_start|>user [INST] <tool> <s> </s>"
        for kind, special, plain in (("bytes", ["<tool>"], ["<|endoftext|>", "<|im_start|>", "[INST]", "<s>", "</s>"]),
                                     ("prepend", ["<s>", "</s>", "<tool>"], ["<|im_start|>", "[INST]"])):
            path = save_tokenizer(self.folder, kind, special, plain)
            self.prepare("--tokenizer", path, "--valid-fraction", "0", "--overwrite", self.file(
                "a.jsonl", json.dumps({"text": text}) + "\n" + json.dumps({"text": "b"})))
            tokenizer = text_tokenizers.load_tokenizer(str(path))
            tokens = list(tokens_of(self.out / "train_000000.bin"))
            added = {entry["id"] for entry in json.loads(path.read_text())["added_tokens"]}
            self.assertEqual([t for t in tokens if t in added], [tokenizer.separator] * 2)
            self.assertEqual(tokenizer.decode(tokens[1:tokens.index(tokenizer.separator, 1)]), text)
            self.script("check_shards.py", self.out / "train_000000.bin")
        # Other added tokens are words of the tokenizer, as in every program that uses it.
        path = save_tokenizer(self.folder, "bytes", ["<|endoftext|>"], ["<think>"])
        self.assertEqual(len(text_tokenizers.load_tokenizer(str(path)).encode(b"<think>")), 1)

    @unittest.skipUnless(has("tokenizers"), "needs tokenizers")
    def test_a_marker_that_is_a_piece_of_text_is_refused(self):
        import tokenizers
        pieces = [("<unk>", -9.), ("</s>", 0.), ("a", -1.), ("b", -1.)]
        model = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, 0))
        path = self.folder / "tokenizer.json"
        model.save(str(path))
        self.prepare("--tokenizer", path, "--valid-fraction", "0", self.file("a.txt", "abac?"))
        self.assertIn(f"{path}: makes its token </s> of a text that spells it; take </s> out of the text 'ab</s>a'",
                      self.prepare("--tokenizer", path, "--overwrite", self.file("a.txt", "ab</s>a"), code=2))

    @unittest.skipUnless(has("pyarrow"), "needs pyarrow")
    def test_parquet(self):
        import pyarrow
        import pyarrow.parquet
        path = self.folder / "a.parquet"
        texts = [f"row {i} \u00e9" for i in range(1000)] + [None, ""]
        table = pyarrow.table({"text": texts, "id": list(range(1002))})
        pyarrow.parquet.write_table(table, path, row_group_size=300)
        self.prepare_bytes("--valid-fraction", "0", path)
        self.assertEqual(documents_of(self.out, "train"), [text.encode() for text in texts[:1000]])
        _, places, content = pyarrow.array([b"good", b"caf\xe9", b"\0", b"last"]).buffers()
        texts = pyarrow.StringArray.from_buffers(4, places, content)   # unchecked
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path := self.folder / "b.parquet")
        self.assertIn("skipped 2 documents that are not text (1 with bytes that are not UTF-8, 1 with zero bytes): "
                      f"{path}: row 2: bytes that are not UTF-8, {path}: row 3: zero bytes\n",
                      self.prepare_bytes("--valid-fraction", "0", "--overwrite", path))
        self.assertEqual(documents_of(self.out, "train"), [b"good", b"last"])
        path = self.folder / "a.parquet"
        self.assertIn("no column 'body' (there is: text, id)",
                      self.prepare_bytes("--overwrite", "--text-field", "body", path, code=2))
        self.assertIn("not a readable parquet file",
                      self.prepare_bytes("--overwrite", self.file("bad.parquet", "PAR1 nothing"), code=2))


class InspectShards(ScriptTest):
    def refused(self, parts, *arguments):
        text = self.inspect(*arguments, code=2)
        for part in parts:
            self.assertIn(part, text)

    def test_shows_every_format(self):
        ids = [256] + list(b"hello\n") + [256] + list(b"you")
        paths = [self.shard(ids), self.shard(ids, "b.bin", wide=True)]
        for path, code, typecode in ((self.folder / "c.bin", 8, "H"), (self.folder / "d.bin", 4, "I")):
            path.write_bytes(array.array(typecode, ids).tobytes())
            path.with_suffix(".idx").write_bytes(
                b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, 2, 3) + struct.pack("<ii", 7, 4)
                + struct.pack("<qq", 0, 7 * array.array(typecode).itemsize) + struct.pack("<qqq", 0, 1, 2))
            paths.append(path)
        paths.append(self.file("e.bin", array.array("H", ids).tobytes()))
        text = self.inspect("--tokenizer", "bytes", "--token-dtype", "uint16", *paths)
        for name in ("llm.c v1, uint16", "llm.c v7, uint32", "Megatron, uint16", "Megatron, uint32", "raw, uint16"):
            self.assertIn(f"format     {name}", text)
        self.assertEqual(text.count("    | <|endoftext|>hello\n    | <|endoftext|>you\n"), 5)
        self.assertEqual(text.count("11 tokens"), 5)
        self.assertEqual(text.count("ids        10 to 256"), 5)
        self.assertEqual(text.count("documents  2"), 2)
        shown = self.inspect("--tokenizer", "bytes", "--show", "8:2", paths[0])
        self.assertIn("tokens     8 to 9: 121 111\n", shown)
        self.assertIn("    | yo\n", shown)
        self.assertIn("pass --tokenizer to decode", self.inspect(paths[0]))

    def test_damaged_shards_are_refused(self):
        good = self.shard([1, 2, 3]).read_bytes()
        for content, part in [(b"", "the file is empty"), (good[:100], "truncated in the header"),
                              (good[:-1], "says 3 tokens"), (good + b"x", "says 3 tokens"),
                              (good[:4] + b"\x02" + good[5:], "byte 4: version 2"),
                              (b"ab\0cdefg", "wrong magic 0x63006261"),
                              (b"abcdefgh\n", "wrong magic: this is text; data/prepare_text.py makes"),
                              (b"PAR1" + bytes(99), "wrong magic: this is a parquet file")]:
            self.refused([part], self.file("a.bin", content))
        self.refused(["this is a gzip file"], "--token-dtype", "uint16", self.file("a.bin", b"\x1f\x8b\x08\0"))
        self.refused(["odd size"], "--token-dtype", "uint16", self.file("a.bin", b"abc"))
        self.refused(["cannot open"], self.folder / "absent.bin")
        self.file("a.bin", bytes(8))
        self.refused(["wrong magic"], self.folder / "a.bin", self.file("a.idx", b"MMIDIDX"))
        self.refused(["--show"], "--show", "5", self.folder / "a.bin")
        self.refused(["--show"], "--show", "-1:5", self.folder / "a.bin")

    def test_bigram_entropy(self):
        def entropy(*token_lists):
            paths = [self.shard(tokens, f"{i}.bin") for i, tokens in enumerate(token_lists)]
            return bigram_entropy([Shard(path) for path in paths])

        self.assertEqual(entropy([5, 5, 5, 5]), (0.0, 3))
        self.assertEqual(entropy([1, 2, 3] * 10)[0], 0.0)     # a cycle: the next token is certain
        # After 1 come 2 and 3 equally often, after 2 and 3 always 1: half of the pairs cost ln 2.
        value, pairs = entropy([1, 2, 1, 3] * 50 + [1])
        self.assertEqual(pairs, 200)
        self.assertAlmostEqual(value, 0.5 * math.log(2), places=12)
        # Pairs do not cross shards.
        self.assertEqual(entropy([1, 2], [1, 2], [3]), (0.0, 2))
        # Independent tokens: near ln 16, below it by about (cells - rows) / (2 pairs) = 240 / 2e5.
        generator = random.Random(3)
        value, _ = entropy([generator.randrange(16) for _ in range(100001)])
        self.assertAlmostEqual(value, math.log(16) - 225 / 2e5, delta=5e-4)
        text = self.inspect("--bigram-entropy", self.shard([1, 2, 1, 3] * 50 + [1]))
        self.assertEqual(text, "bigram entropy 0.346574 nats a token (200 pairs, 1 shard)\n")
        self.refused(["no two tokens"], "--bigram-entropy", self.shard([1]))
