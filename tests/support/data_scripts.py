"""Shared by the tests of data/*.py: folders, running a script, reading shards. Standard library only."""
import array
import contextlib
import gc
import importlib
import json
import os
import random
import struct
import subprocess
import sys
import warnings
from pathlib import Path

from tests.support.folder import FolderTest, call_main, has  # noqa: F401

DATA = Path(__file__).resolve().parents[2] / "data"


def save_tokenizer(folder, kind, special=(), plain=()):
    """Trains a small tokenizer.json and returns its path. kind: "bytes", Llama-3's; "prepend", Llama-2's, with a blank
    before every piece of text; "first", Mistral's, with one before the first. plain: added tokens that are not
    special."""
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
    if kind == "bytes":
        tokenizer = tokenizers.Tokenizer(models.BPE())
        # The splitting rule of Llama-3, https://github.com/meta-llama/llama3/blob/main/llama/tokenizer.py
        rule = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
                r"\s*[\r\n]+|\s+(?!\S)|\s+")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Split(tokenizers.Regex(rule), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
        tokenizer.decoder = decoders.ByteLevel()
        more = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    else:
        tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        if kind == "prepend":
            tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"),
                                                         normalizers.Replace(" ", "\u2581")])
        else:
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(),
                                               decoders.Fuse(), decoders.Strip(" ", 1, 0)])
        more, special = {}, ["<unk>", *special, *(f"<0x{byte:02X}>" for byte in range(256))]
    words = ["question answer user assistant system \n\n rule a trainer"] * 9
    tokenizer.train_from_iterator(words, trainers.BpeTrainer(vocab_size=400, special_tokens=list(special),
                                                             show_progress=False, **more))
    tokenizer.add_tokens(list(plain))
    path = Path(folder) / "tokenizer.json"
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if not token["content"].startswith("<0x")]
    path.write_text(json.dumps(content))
    return path


def lines(count, seed=1):
    """Text of about 60 bytes a line, no line twice."""
    generator = random.Random(seed)
    words = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta \u00e9t\u00e9", "\u4e2d\u6587"]
    return "".join(f"{i} " + " ".join(generator.choice(words) for _ in range(9)) + "\n" for i in range(count))


def tokens_of(path):
    """Ids of an llm.c shard, read without the code under test."""
    content = Path(path).read_bytes()
    magic, version, count = struct.unpack_from("<III", content)
    typecode = {(20240520, 1): "H", (20240801, 7): "I"}[magic, version]
    tokens = array.array(typecode, content[1024:])
    assert len(tokens) == count and not any(content[12:1024])
    return tokens


def documents_of(folder, split):
    """The documents of a bytes-tokenised split, over all shards."""
    stream = [token for path in sorted(Path(folder).glob(f"{split}_*.bin")) for token in tokens_of(path)]
    documents = []
    for token in stream:
        if token == 256:
            documents.append(bytearray())
        else:
            documents[-1].append(token)   # raises an error if the stream does not begin with a separator
    return [bytes(document) for document in documents]


class ScriptTest(FolderTest):
    def setUp(self):
        super().setUp()
        self.out = self.folder / "out"

    def script(self, name, *arguments, code=0, packages=None):
        """Runs a script and returns its output. packages: a folder that is searched first for imports. Only with it
        the script runs in a new process, because starting one takes longer than the test."""
        command = [str(DATA / name), *map(str, arguments)]
        if packages is None:
            with warnings.catch_warnings():
                # Warnings on files that an earlier test left open may appear now; they are not output of the script.
                warnings.simplefilter("ignore", ResourceWarning)
                done = call_main(importlib.import_module(name[:-len(".py")]).main, *command)
            status, text = done.returncode, done.stdout + done.stderr
        else:
            environment = dict(os.environ, PYTHONPATH=str(packages), PYTHONDONTWRITEBYTECODE="1")
            result = subprocess.run([sys.executable, *command], env=environment, stdout=subprocess.PIPE,
                                    stderr=subprocess.STDOUT, text=True, timeout=120)
            status, text = result.returncode, result.stdout
        self.assertEqual(status, code, text)
        self.assertNotIn("Traceback", text)
        return text

    @contextlib.contextmanager
    def nothing_left_open(self):
        """Fails the test if the block leaves open files or connections to the garbage collector."""
        gc.collect()   # objects of earlier tests
        yield
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            gc.collect()
        self.assertEqual([str(warning.message) for warning in found], [])

    def prepare(self, *arguments, **keywords):
        return self.script("prepare_text.py", "--out", self.out, *arguments, **keywords)

    def prepare_bytes(self, *arguments, **keywords):
        return self.prepare("--tokenizer", "bytes", *arguments, **keywords)

    def shard(self, tokens, name="a.bin", wide=False):
        """Writes a shard in llm.c's format; returns its path."""
        magic, version, typecode = (20240801, 7, "I") if wide else (20240520, 1, "H")
        return self.file(name, struct.pack("<III", magic, version, len(tokens)) + bytes(1012)
                         + array.array(typecode, tokens).tobytes())

    def inspect(self, *arguments, **keywords):
        return self.script("inspect_shards.py", *arguments, **keywords)

    def refused(self, parts, *arguments, **keywords):
        """The command must exit with 2, print one line that has every part, and write no shard."""
        text = self.prepare(*arguments, code=2, **keywords)
        for part in parts:
            self.assertIn(part, text)
        self.assertEqual(len(text.strip().splitlines()), 1, text)
        if self.out.is_dir():
            self.assertEqual([path.name for path in self.out.iterdir()], [])
