"""data/prepare_chat.py: templates, loss masks of the shards, and the output of the other scripts on them."""
import json
import struct
import sys
import unittest
import unittest.mock

import prepare_chat
from llmfp8 import shard_pipeline
from llmfp8.shard_format import pack_bits, unpack_bits
from llmfp8.text_shards import is_validation
from tests.support.data_scripts import ScriptTest, has, tokens_of

# For --template plain: the text before a message's content, and whether the content counts, by role.
HEADS = {"system": ("System: ", 0), "user": ("User: ", 0), "assistant": ("Assistant: ", 1)}


def conversations(count):
    """A conversation of one to five messages, with characters of two bytes."""
    return [[("system", f"rule {i}")] * (i % 3 == 0) + [("user", f"question {i} " + "\u00e9" * (i % 11)),
            ("assistant", f"answer {i} " + "y" * (i % 23))] * (1 + i % 2) for i in range(count)]


def expected_of(turns):
    """Tokens and mask of a conversation, computed without the code under test."""
    tokens, mask = [256], [0]
    for role, content in turns:
        head, counts = HEADS[role]
        for text, flag in ((head, 0), (content.strip() + "\n\n", counts)):
            tokens += text.encode()
            mask += [flag] * len(text.encode())
    return tokens, mask


def mask_of(shard):
    """Flags of a shard's mask, read without the code under test."""
    content = shard.with_suffix(".mask").read_bytes()
    magic, version, tokens, counted = struct.unpack_from("<8sQQQ", content)
    assert (magic, version) == (b"LOSSMASK", 1) and len(content) == 32 + (tokens + 7) // 8
    flags = [content[32 + i // 8] >> (i % 8) & 1 for i in range(tokens)]
    assert sum(flags) == counted
    return flags


class PrepareChat(ScriptTest):
    def rows(self, all_turns, name="a.jsonl", field="messages", keys=("role", "content"), roles=None):
        rows = [{field: [dict(zip(keys, ((roles or {}).get(role, role), text))) for role, text in turns]}
                for turns in all_turns]
        return self.file(name, "".join(json.dumps(row) + "\n" for row in rows))

    def chat(self, *arguments, **keywords):
        return self.script("prepare_chat.py", "--out", self.out, "--template", "plain", "--tokenizer", "bytes",
                           *arguments, **keywords)

    def stream(self, split):
        tokens, mask = [], []
        for path in sorted(self.out.glob(f"{split}_*.bin")):
            tokens += tokens_of(path)
            mask += mask_of(path)
        self.assertEqual(len(tokens), len(mask))
        return tokens, mask

    def test_tokens_and_masks_over_several_shards(self):
        all_turns = conversations(400)
        text = self.chat("--valid-fraction", "0.2", "--shard-tokens", "5001", self.rows(all_turns))
        self.assertGreater(len(list(self.out.glob("train_*.mask"))), 3)
        for split in ("train", "valid"):
            tokens, mask = [], []
            for turns in all_turns:
                key = json.dumps([[role, content.strip()] for role, content in turns], ensure_ascii=False).encode()
                if is_validation(key, 0.2) == (split == "valid"):
                    more = expected_of(turns)
                    tokens += more[0]
                    mask += more[1]
            self.assertEqual(self.stream(split), (tokens, mask))
            self.assertIn(f"{split}: {len(tokens)} tokens in {tokens.count(256)} documents, {sum(mask)} count as "
                          "targets", text)
        shards = sorted(self.out.glob("*.bin"))
        meta = json.loads(shards[0].with_suffix(".meta.json").read_text())
        self.assertEqual(meta["loss_mask"]["file"], shards[0].with_suffix(".mask").name)
        self.assertEqual(meta["chat_template"], "plain")
        text = self.script("check_shards.py", *shards)
        self.assertIn(f" {meta['loss_mask']['counted']} count as targets, ids to 256\n", text)

    def test_share_gpt_and_another_field(self):
        all_turns = conversations(30)
        self.chat("--valid-fraction", "0", self.rows(all_turns))
        expected = self.stream("train")
        roles = {"user": "human", "assistant": "gpt"}
        path = self.rows(all_turns, "b.jsonl", "conversations", ("from", "value"), roles)
        self.chat("--valid-fraction", "0", "--overwrite", "--messages-field", "conversations", path)
        self.assertEqual(self.stream("train"), expected)

    def test_conversations_without_an_answer_are_passed_over(self):
        good = conversations(3)
        path = self.rows([[("user", "alone")], good[0], [], [("user", "q"), ("assistant", "  ")], *good[1:]])
        text = self.chat("--valid-fraction", "0", path)
        self.assertIn("skipped 3 conversations without an answer", text)
        self.assertEqual(self.stream("train"), tuple(map(list, zip(*[
            pair for turns in good for pair in zip(*expected_of(turns))]))))

    def test_what_is_no_conversation_is_refused(self):
        for row, part in (({"text": "x"}, "line 1: no field 'messages' (there is: text); pass --messages-field"),
                          ({"messages": "x"}, "field 'messages' is str, not a list of messages"),
                          ({"messages": ["x"]}, "message 1 is str, not an object"),
                          ({"messages": [{"role": "user"}]}, "message 1 has no text in role and content, or in from"),
                          ({"messages": [{"role": "user", "content": [1]}]}, "(there is: content, role)")):
            text = self.chat(self.file("a.jsonl", json.dumps(row) + "\n"), code=2)
            self.assertIn(part, text)
            self.assertEqual(text.count("\n"), 1)
        self.assertIn("read from .jsonl and .parquet files", self.chat(self.file("a.txt", "x"), code=2))
        text = self.script("prepare_chat.py", "--out", self.out, "--tokenizer", "bytes",
                           self.rows(conversations(3)), code=2)
        self.assertIn("llama3: the tokenizer bytes has no token <|begin_of_text|>, <|start_header_id|>", text)

    def test_an_unknown_role_is_named(self):
        good = conversations(3)
        path = self.rows([*good, [("user", "q"), ("asistant", "a\u00e9")]])
        text = self.chat(path, code=2)
        self.assertIn(f"{path}: line 4: field 'messages' is a list whose message 2 has the unknown role \"asistant\" "
                      "(known: system, developer, user, assistant, tool, ipython, human, gpt, bing, chatgpt); pass "
                      "--role asistant=assistant if its contents are targets, else =user\n", text)
        self.chat("--valid-fraction", "0", "--role", "asistant=gpt", path)
        tokens, mask = self.stream("train")
        self.assertEqual(bytes(t for t, flag in zip(tokens, mask) if flag)[-5:], "a\u00e9\n\n".encode())
        for word in ("asistant", "asistant=helper"):
            self.assertIn(f"error: --role {word}: must be NAME=ROLE, with one of the roles system, ",
                          self.chat("--role", word, path, code=2))

    def test_what_is_no_text_is_skipped_and_named(self):
        good = conversations(3)
        path = self.rows([good[0], [("user", "\ud800"), ("assistant", "a")], [("user", "\0"), ("assistant", "a")],
                          *good[1:]])
        text = self.chat("--valid-fraction", "0", path)
        self.assertIn("skipped 2 documents that are not text (1 with half of a surrogate pair, 1 with zero bytes): "
                      f"{path}: line 2 (from byte ", text)
        self.assertEqual(self.stream("train")[0], [t for turns in good for t in expected_of(turns)[0]])
        self.assertIn("a.json: this is a JSON array; one document per line is read", self.chat(
            "--overwrite", "--format", "jsonl", self.file("a.json", json.dumps([{"messages": []}])), code=2))

    def test_ultrachat_is_the_default(self):
        with unittest.mock.patch.dict(sys.modules, datasets=None):
            self.assertIn("the dataset HuggingFaceH4/ultrachat_200k needs the Python package datasets",
                          self.chat(code=2))
        with unittest.mock.patch.object(sys, "argv", ["x", "--out", "o", "--tokenizer", "t"]):
            self.assertEqual(prepare_chat.parse_arguments().dataset_split, "train_sft")

    def test_interrupted_runs_keep_their_masks(self):
        path = self.rows(conversations(2000))
        options = ["--valid-fraction", "0.2", "--shard-tokens", "20001", "--workers", "1", path]
        with unittest.mock.patch.multiple(shard_pipeline, BATCH_BYTES=9000, CHECKPOINT_SECONDS=0):
            self.chat(*options)
            expected = {path.name: path.read_bytes() for path in self.out.iterdir()}
            encode = prepare_chat.TokenizeChat.__call__
            for stop_at in (2, 7, 12):
                calls = []

                def stopping(tokenize, documents):
                    calls.append(0)
                    if len(calls) == stop_at:
                        raise KeyboardInterrupt
                    return encode(tokenize, documents)
                for file in self.out.iterdir():
                    file.unlink()
                with unittest.mock.patch.object(prepare_chat.TokenizeChat, "__call__", stopping):
                    self.chat(*options, code=130)
                self.assertIn("continuing after", self.chat(*options))
                self.assertEqual({path.name: path.read_bytes() for path in self.out.iterdir()}, expected)

    @unittest.skipUnless(has("tokenizers"), "needs tokenizers")
    def test_llama3_is_the_template_of_the_model(self):
        """Compares with the rendered text, tokenized as a whole including its special tokens."""
        import tokenizers
        specials = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        # The splitting rule of Llama-3, https://github.com/meta-llama/llama3/blob/main/llama/tokenizer.py
        rule = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
                r"\s*[\r\n]+|\s+(?!\S)|\s+")
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(rule), "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, special_tokens=specials, show_progress=False,
                                                 initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())
        tokenizer.train_from_iterator(["question answer user assistant system \n\n rule"] * 9, trainer)
        path = self.folder / "tokenizer.json"
        tokenizer.save(str(path))
        all_turns = conversations(40)
        all_turns.append([("user", "  <|eot_id|> spelled out\n"), ("assistant", "\n\n  two\n\nparts \n")])
        self.script("prepare_chat.py", "--out", self.out, "--tokenizer", path, "--valid-fraction", "0",
                    self.rows(all_turns))
        eot, begin = tokenizer.token_to_id("<|eot_id|>"), tokenizer.token_to_id("<|begin_of_text|>")
        tokens, mask = self.stream("train")
        starts = [i for i, token in enumerate(tokens) if token == begin] + [len(tokens)]
        self.assertEqual(len(starts), len(all_turns) + 1)
        for turns, first, end in zip(all_turns[:-1], starts, starts[1:]):
            text = "<|begin_of_text|>" + "".join(
                f"<|start_header_id|>{role}<|end_header_id|>\n\n{content.strip()}<|eot_id|>" for role, content in turns)
            self.assertEqual(tokens[first:end], tokenizer.encode(text, add_special_tokens=False).ids)
        # Exactly the answers count, each with the token that ends it.
        counted = tokenizer.decode([t for t, flag in zip(tokens, mask) if flag], skip_special_tokens=False)
        self.assertEqual(counted, "".join(content.strip() + "<|eot_id|>" for turns in all_turns
                                          for role, content in turns if role == "assistant"))
        self.assertEqual(tokens.count(eot), sum(map(len, all_turns)))   # a special token written out in a text is text
        self.assertIn("leave --separator out", self.script(
            "prepare_chat.py", "--out", self.out, "--tokenizer", path, "--separator", "<|eot_id|>", "--overwrite",
            self.folder / "a.jsonl", code=2))


class Masks(ScriptTest):
    def setUp(self):
        super().setUp()
        rows = [{"messages": [{"role": role, "content": text} for role, text in turns]} for turns in conversations(9)]
        path = self.file("a.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        self.script("prepare_chat.py", "--out", self.out, "--template", "plain", "--tokenizer", "bytes",
                    "--valid-fraction", "0", path)
        self.shard = self.out / "train_000000.bin"
        self.mask = self.out / "train_000000.mask"

    def test_bits(self):
        for count in (0, 1, 7, 8, 9, 64, 65, 1000):
            flags = bytes((i * i + i // 3) % 5 % 2 for i in range(count))
            packed = pack_bits(flags)
            self.assertEqual(packed, bytes(sum(flags[i + j] << j for j in range(min(8, count - i)))
                                           for i in range(0, count, 8)))
            self.assertEqual(unpack_bits(packed, count), flags)
            self.assertEqual(pack_bits(bytearray(flags)), packed)

    def test_damage_of_any_kind_is_found(self):
        good = self.mask.read_bytes()
        for at in (*range(0, 33), len(good) // 2, len(good) - 1):
            for bit in (0, 5):
                bad = bytearray(good)
                bad[at] ^= 1 << bit
                self.mask.write_bytes(bad)
                self.assertIn(f"DAMAGED {self.mask}: ", self.script("check_shards.py", self.shard, code=2))
        for bad in (good[:31], good[:-1], good + b"\0", b""):
            self.mask.write_bytes(bad)
            self.assertIn(f"DAMAGED {self.mask}: ", self.script("check_shards.py", self.shard, code=2))
        # The same number of bits at other places, which only the checksum detects.
        bad = bytearray(good)
        bad[36], bad[37] = bad[37], bad[36]
        self.assertNotEqual(bad, good)
        self.mask.write_bytes(bad)
        self.assertIn("sha256 is", self.script("check_shards.py", self.shard, code=2))
        self.mask.unlink()
        self.assertIn("is missing, but the .meta.json names it", self.script("check_shards.py", self.shard, code=2))

    def test_inspect_shows_what_counts(self):
        text = self.inspect("--show", "0:60", self.shard)
        meta = json.loads((self.out / "train_000000.meta.json").read_text())
        self.assertIn(f"  loss mask  {meta['loss_mask']['counted']} targets of {meta['tokens']} tokens\n", text)
        self.assertIn("    | <|endoftext|>System: rule 0\n    | \n    | User: question 0\n", text)
        self.assertIn("    | Assistant: \n    > answer 0\n    > \n    > \n", text)

    def test_overwriting_with_text_leaves_no_mask(self):
        self.prepare_bytes("--valid-fraction", "0", "--overwrite", self.file("b.txt", "text\n"))
        self.assertFalse(self.mask.exists())
