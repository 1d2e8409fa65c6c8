"""data/prepare_chat.py: templates, loss masks of the shards, and the output of the other scripts on them."""
import json
import struct
import sys
import unittest
import unittest.mock

import prepare_chat
from llmfp8 import chat_templates, shard_pipeline
from llmfp8.text_shards import is_validation
from llmfp8.text_tokenizers import load_tokenizer
from tests.support.data_scripts import ScriptTest, has, save_tokenizer, tokens_of

# For --template plain: the text before a message's content, and whether the content counts, by role.
HEADS = {"system": ("System:", 0), "user": ("User:", 0), "assistant": ("Assistant:", 1)}


def conversations(count):
    """A conversation of one to five messages, with characters of two bytes."""
    return [[("system", f"rule {i}")] * (i % 3 == 0) + [("user", f"question {i} " + "\u00e9" * (i % 11)),
            ("assistant", f"answer {i} " + "y" * (i % 23))] * (1 + i % 2) for i in range(count)]


def expected_of(turns):
    """Tokens and mask of a conversation, computed without the code under test."""
    tokens, mask = [256], [0]
    for role, content in turns:
        head, counts = HEADS[role]
        for text, flag in ((head, 0), (f" {content.strip()}\n\n", counts)):
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
                parts = [part for role, content in turns for part in (
                    [HEADS[role][0], 0], [f" {content.strip()}\n\n", HEADS[role][1]])]
                more = expected_of(turns)
                if is_validation(json.dumps(parts, ensure_ascii=False).encode(), 0.2) == (split == "valid"):
                    tokens += more[0]
                    mask += more[1]
            self.assertEqual(self.stream(split), (tokens, mask))
            self.assertIn(f"{split}: {len(tokens)} tokens in {tokens.count(256)} documents, {sum(mask)} count as "
                          "targets", text)
        shards = sorted(self.out.glob("*.bin"))
        meta = json.loads(shards[0].with_suffix(".meta.json").read_text())
        self.assertEqual(meta["loss_mask"]["file"], shards[0].with_suffix(".mask").name)
        self.assertIn("'Assistant:'", meta["tokenizer"]["chat_template"])
        self.assertNotIn("end_of_turn", meta["tokenizer"])   # an answer ends with text
        text = self.script("check_shards.py", *shards)
        self.assertIn(f" {meta['loss_mask']['counted']} count as targets, ids to 256\n", text)

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
        for options, part in ((["--template", "llama3"], "the tokenizer bytes has no token <|begin_of_text|>, <|st"),
                              ([], "--template model: there is no chat_template.jinja, and no chat_template in a ")):
            self.assertIn(part, self.script("prepare_chat.py", "--out", self.out, "--tokenizer", "bytes", *options,
                                            self.rows(conversations(3)), code=2))

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

    def test_no_field_is_dropped(self):
        """A field of a row or message is in the text, or it is named and left out by name."""
        call = [{"function": {"name": "f", "arguments": {"city": "Rome"}}}]
        ask, answer = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
        for more, last, said, name in (
                ({"tools": call}, {}, "line 2: tools, which --template plain does not render: take --template model, "
                 "or pass --ignore-fields tools if", "tools"),
                ({}, {"tool_calls": call}, "line 2: message 2 has tool_calls, which --template plain", "tool_calls"),
                ({}, {"content": None, "tool_calls": call}, "message 2 has tool_calls, which", "tool_calls"),
                ({}, {"reasoning_content": "r"}, "message 2 has reasoning_content, which", "reasoning_content"),
                ({"chosen": [ask], "score": 2}, {}, "line 2: the fields chosen, score are not read: pass "
                 "--ignore-fields chosen,score if", "chosen,score"),
                ({"prompt": "another"}, {}, "the fields prompt are not read", "prompt")):
            path = self.file("a.jsonl", json.dumps({"messages": [ask, answer, ask, answer]}) + "\n" + json.dumps(
                {"messages": [ask, {**answer, **last}, ask, answer], **more}))
            self.assertIn(said, self.chat("--overwrite", path, code=2))
            self.chat("--valid-fraction", "0", "--overwrite", "--ignore-fields", name, path)
            counted = bytes(t for t, flag in zip(*self.stream("train")) if flag)
            self.assertEqual(counted, b" a\n\n" * (3 if "content" in last else 4))   # one without words is no target
        neutral = {"id": 7, "prompt_id": "x", "prompt": "q", "tools": [], "system": None}
        self.chat("--valid-fraction", "0", "--overwrite", self.file("a.jsonl", json.dumps(
            {"messages": [{**ask, "tool_calls": None}, answer], **neutral})))

    def test_system_and_weight_are_read(self):
        turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "draft", "weight": 0},
                 {"from": "human", "value": "q"}, {"from": "gpt", "value": "a", "weight": 1}]

        def chat(row, code=0):
            return self.chat("--valid-fraction", "0", "--overwrite", "--messages-field", "conversations", self.file(
                "a.jsonl", json.dumps({"conversations": turns, **row})), code=code)
        chat({"system": "You are a pirate."})
        tokens, mask = self.stream("train")
        self.assertEqual(bytes(tokens[1:]), b"System: You are a pirate.\n\nUser: q\n\nAssistant: draft\n\nUser: q\n\n"
                                            b"Assistant: a\n\n")
        self.assertEqual(bytes(t for t, flag in zip(tokens, mask) if flag), b" a\n\n")
        self.assertIn("field 'system' is not text, or there is a system message, too",
                      chat({"system": "x", "conversations": [{"from": "system", "value": "y"}, *turns]}, 2))
        for weight, turn in ((0.5, turns[3]), (1, turns[0])):
            self.assertIn(f"message 1 has the weight {weight}: a loss mask has 0 and 1, for answers",
                          chat({"conversations": [{**turn, "weight": weight}]}, 2))
        self.assertIn("field 'tools' is not a list, or JSON of one", chat({"tools": "["}, 2))

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

    @unittest.skipUnless(has("tokenizers") and has("jinja2"), "needs tokenizers and jinja2")
    def test_llama3_is_the_template_of_the_model(self):
        """Compares with the rendered text, tokenized as a whole including its special tokens."""
        import tokenizers
        specials = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
        path = save_tokenizer(self.folder, "bytes", specials)
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
        all_turns = conversations(40)
        all_turns.append([("user", "  <|eot_id|> spelled out\n"), ("assistant", "\n\n  two\n\nparts \n")])
        self.script("prepare_chat.py", "--out", self.out, "--tokenizer", path, "--template", "llama3",
                    "--valid-fraction", "0", self.rows(all_turns))
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
            "--template", "llama3", self.folder / "a.jsonl", code=2))


CHATML = """
{%- for tool in tools or [] %}{{- '<|im_start|>system\\n' + (tool | tojson) + '<|im_end|>\\n' }}{%- endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- generation %}{{- message.content }}
    {%- for call in message.tool_calls or [] %}{{- '<tool_call>' + (call.function | tojson) }}{%- endfor %}
    {%- endgeneration %}{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
MISTRAL = ("{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}"
           "{{ '[INST] ' + m['content'] + ' [/INST]' }}{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}"
           "{% endfor %}")


@unittest.skipUnless(has("tokenizers") and has("jinja2"), "needs tokenizers and jinja2")
class ModelTemplates(ScriptTest):
    CHATML_TOKENS = ("bytes", ["<|endoftext|>", "<|im_end|>"], ["<|im_start|>", "<tool_call>"])
    MISTRAL_TOKENS = ("first", ["<s>", "</s>", "[INST]", "[/INST]"], [])

    def chat(self, jinja, tokens, messages, *options, code=0, **fields):
        self.path = save_tokenizer(self.folder, *tokens)
        self.file("tokenizer_config.json", json.dumps({
            "chat_template": [{"name": "tool", "template": "x"}, {"name": "default", "template": jinja}],
            "bos_token": {"content": "<s>"}, "eos_token": "</s>"}))
        rows = self.file("a.jsonl", json.dumps({"messages": messages, **fields}))
        return self.script("prepare_chat.py", "--out", self.out, "--tokenizer", self.path, "--valid-fraction", "0",
                           "--overwrite", *options, rows, code=code)

    def trained(self):
        """(tokens, text of the targets) of the shard, decoded by the library."""
        import tokenizers
        tokenizer = tokenizers.Tokenizer.from_file(str(self.path))
        shard = self.out / "train_000000.bin"
        tokens = list(tokens_of(shard))
        counted = [token for token, flag in zip(tokens, mask_of(shard)) if flag]
        return tokens, tokenizer.decode(counted, skip_special_tokens=False), tokenizer

    MESSAGES = [{"role": "user", "content": " What?  "}, {"role": "assistant", "content": "A trainer.\n\nIt \u4e2d."},
                {"role": "user", "content": "Thanks"}, {"role": "assistant", "content": "Bye"}]

    def test_tokens_are_those_of_the_rendered_text(self):
        """Compares with the library, which finds the special tokens in the text."""
        chatml = ("<|im_start|>user\n What?  <|im_end|>\n<|im_start|>assistant\nA trainer.\n\nIt \u4e2d.<|im_end|>\n"
                  "<|im_start|>user\nThanks<|im_end|>\n<|im_start|>assistant\nBye<|im_end|>\n")
        for jinja, tokens, text, targets in (
                (CHATML, self.CHATML_TOKENS, "<|endoftext|>" + chatml,
                 "A trainer.\n\nIt \u4e2d.<|im_end|>Bye<|im_end|>"),
                (CHATML, ("first", ["<s>", "<|im_end|>"], ["<|im_start|>"]), "<s>" + chatml,
                 "A trainer.\n\nIt \u4e2d.<|im_end|>Bye<|im_end|>"),
                *((MISTRAL, (kind, *self.MISTRAL_TOKENS[1:]), "<s>[INST]  What?   [/INST] A trainer.\n\nIt \u4e2d.</s>"
                   "[INST] Thanks [/INST] Bye</s>", None) for kind in ("prepend", "first"))):
            self.chat(jinja, tokens, self.MESSAGES)
            ids, counted, tokenizer = self.trained()
            self.assertEqual(ids, tokenizer.encode(text, add_special_tokens=False).ids)
            if targets:
                self.assertEqual(counted, targets)
            else:
                self.assertEqual(counted.replace("\u2581", " ").count("</s>"), 2)
            self.script("check_shards.py", self.out / "train_000000.bin")
            meta = json.loads((self.out / "train_000000.meta.json").read_text())
            self.assertEqual(meta["tokenizer"]["chat_template"], jinja)
            self.assertEqual(tokenizer.id_to_token(meta["tokenizer"]["end_of_turn"]),
                             "</s>" if jinja == MISTRAL else "<|im_end|>")
        self.assertIn("note: this is not the chat template beside", self.chat(
            MISTRAL, self.MISTRAL_TOKENS, self.MESSAGES, "--template", "plain"))

    def test_tools_and_calls_are_rendered(self):
        tool, call = {"name": "f"}, [{"function": {"name": "f", "arguments": {"x": "\u4e2d<|im_end|>"}}}]
        messages = [self.MESSAGES[0], {"role": "assistant", "content": None, "tool_calls": call},
                    {"role": "tool", "content": "9 <|endoftext|>", "tool_call_id": "c"}, self.MESSAGES[3]]
        self.chat(CHATML, self.CHATML_TOKENS, messages, tools=json.dumps([tool]))
        tokens, counted, tokenizer = self.trained()
        self.assertEqual(counted, '<tool_call>{"name": "f", "arguments": {"x": "\u4e2d<|im_end|>"}}<|im_end|>'
                                  'Bye<|im_end|>')
        self.assertIn('system\n{"name": "f"}', tokenizer.decode(tokens))
        # Of the markers spelled in contents no token is made: five turns with tools, four without.
        self.assertEqual(tokens.count(tokenizer.token_to_id("<|im_end|>")), 5)
        self.assertEqual(tokens.count(tokenizer.token_to_id("<|endoftext|>")), 1)

    def test_what_is_not_exact_is_refused(self):
        last = ("{% for m in messages %}{{ m.role + m.content + ('!' if loop.last and m.role == 'assistant' else '') }}"
                "{% endfor %}{{ 'assistant' if add_generation_prompt }}")
        calls = [{**message, "reasoning_content": "so"} for message in self.MESSAGES]
        for jinja, messages, fields, part in (
                (CHATML, calls, {}, "line 1: message 1 has reasoning_content, which --template model does not render: "
                 "pass --ignore-fields reasoning_content if"),
                (CHATML.replace("message.tool_calls or []", "(message.tool_calls or [])[:1]"), [self.MESSAGES[0], {
                    "role": "assistant", "tool_calls": [{"function": {"name": name}} for name in "fg"]}], {},
                 "line 1: message 2 has tool_calls, which --template model"),
                (MISTRAL, self.MESSAGES, {"tools": [1]}, "line 1: tools, which --template model does not render"),
                (last.replace("m.content", "' '"), self.MESSAGES, {}, "message 1 has content, which --template model"),
                (last, self.MESSAGES, {}, "line 1: the chat template does not continue message 2 where"),
                ("{{ raise_exception('no') }}", self.MESSAGES, {}, "chat template refuses 4 messages: ValueError: no"),
                ("{% for %}", self.MESSAGES, {}, "not a chat template: TemplateSyntaxError: "),
                (CHATML.replace("<|im_end|>", "<|endoftext|>"), self.MESSAGES, {}, "writes <|endoftext|>, which starts "
                 "a document, inside of a conversation; pass --separator with")):
            text = self.chat(jinja, self.CHATML_TOKENS, messages, code=2, **fields)
            self.assertIn(part, text)
            self.assertEqual(text.count("\n"), 1)
        joined = ("bytes", ["<|endoftext|>"], [])   # "answer" is a token, half of which would count
        self.assertIn("a token covers the end of a part that counts", self.chat(
            "{% for m in messages %}{{ m.role + ':' if m.role == 'user' else 'ans' }}{{ m.content }}{% endfor %}"
            "{{ 'ans' if add_generation_prompt }}", joined, [{"role": "user", "content": "q "}, {
                "role": "assistant", "content": "wer"}], code=2))

    def test_the_exported_plain_template_renders_the_trained_text(self):
        messages = [{"role": role, "content": text} for role, text in conversations(1)[0]]
        tokenizer = load_tokenizer(str(save_tokenizer(self.folder, "bytes", ["<|endoftext|>"])))
        plain = chat_templates.PlainTemplate(tokenizer)
        self.file("chat_template.jinja", plain.jinja)
        expected, rendered = (template.parts(messages, None, [2]) for template in (
            plain, chat_templates.ModelTemplate(tokenizer)))
        self.assertEqual("".join(text for text, _ in rendered), "<|endoftext|>" + "".join(text for text, _ in expected))
        self.assertEqual(*([text for text, counts in parts if counts] for parts in (expected, rendered)))


class Masks(ScriptTest):
    def setUp(self):
        super().setUp()
        rows = [{"messages": [{"role": role, "content": text} for role, text in turns]} for turns in conversations(9)]
        path = self.file("a.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        self.script("prepare_chat.py", "--out", self.out, "--template", "plain", "--tokenizer", "bytes",
                    "--valid-fraction", "0", path)
        self.shard = self.out / "train_000000.bin"
        self.mask = self.out / "train_000000.mask"

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
        self.assertIn("    | Assistant:\n    >  answer 0\n    > \n    > \n", text)

    def test_overwriting_with_text_leaves_no_mask(self):
        self.prepare_bytes("--valid-fraction", "0", "--overwrite", self.file("b.txt", "text\n"))
        self.assertFalse(self.mask.exists())
