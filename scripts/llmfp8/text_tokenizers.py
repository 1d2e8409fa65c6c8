"""Tokenizers of the scripts: bytes (standard library), gpt2 (tiktoken), a tokenizer.json (tokenizers).

Each has name, sha256 (of what decides the ids), vocab_size, separator (the id that starts a document),
encode(bytes) -> ids as a list or an array of the shard's type, decode(ids) -> str.
"""
import array
import contextlib
import hashlib
import os
import sys
from pathlib import Path

from .support import InputError, need, one_line

END_OF_TEXT = "<|endoftext|>"
# Tokens that start documents in known tokenizers, the most specific first.
SEPARATORS = ["<|begin_of_text|>", END_OF_TEXT, "<bos>", "<s>", "<|end_of_text|>", "<eos>", "</s>"]
# GPT-2's splitting rule, https://github.com/openai/gpt-2/blob/master/src/encoder.py
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


class Tokenizer:
    special_ids = frozenset()   # tokens that are no text: separators, ends of turns

    def meta(self):
        """The sidecar's entry."""
        return {"name": self.name, "sha256": self.sha256, "separator": self.separator}

    def token_id(self, text):
        """Id of a special token, None if there is none."""
        return None


class BytesTokenizer(Tokenizer):
    name, vocab_size, separator = "bytes", 257, 256
    special_ids = frozenset([256])
    sha256 = hashlib.sha256(b"ids 0 to 255 are bytes, 256 starts a document").hexdigest()

    def encode(self, document):
        # Each byte becomes the low half of a uint16; a loop over the bytes is 15 times slower.
        wide = bytearray(2 * len(document))
        wide[0 if sys.byteorder == "little" else 1::2] = document
        return array.array("H", bytes(wide))

    def decode(self, ids):
        parts, text = [], bytearray()
        for token in ids:
            if token < 256:
                text.append(token)
            else:
                parts += [text.decode("utf-8", "replace"), END_OF_TEXT if token == 256 else f"<{token}?>"]
                text.clear()
        return "".join(parts) + text.decode("utf-8", "replace")


class Gpt2Tokenizer(Tokenizer):
    """GPT-2's vocabulary: downloaded by tiktoken, or from local vocab.bpe and encoder.json."""
    name = "gpt2"

    def __init__(self, vocab_bpe="", encoder_json=""):
        tiktoken = need("tiktoken", "tiktoken", "--tokenizer gpt2")
        if bool(vocab_bpe) != bool(encoder_json):
            raise InputError("--vocab-bpe and --encoder-json belong together")
        if vocab_bpe:
            ranks = self._local_ranks(vocab_bpe, encoder_json)
            self.encoding = tiktoken.Encoding(name="gpt2", pat_str=GPT2_PATTERN, mergeable_ranks=ranks,
                                              special_tokens={END_OF_TEXT: len(ranks)})
        else:
            try:
                self.encoding = tiktoken.get_encoding("gpt2")
            except Exception as error:   # whatever the HTTP client raises
                raise InputError("tiktoken cannot fetch the gpt2 vocabulary "
                                 f"({one_line(error)}); without a network pass "
                                 "--vocab-bpe FILE --encoder-json FILE") from None
        self.vocab_size = self.encoding.n_vocab
        self.separator = self.encoding.eot_token
        self.special_ids = frozenset([self.separator])
        digest = hashlib.sha256()
        for token in range(self.separator):
            piece = self.encoding.decode_single_token_bytes(token)
            digest.update(len(piece).to_bytes(4, "little") + piece)
        self.sha256 = digest.hexdigest()

    @staticmethod
    def _local_ranks(vocab_bpe, encoder_json):
        load = need("tiktoken.load", "tiktoken", "--tokenizer gpt2")
        for path in (vocab_bpe, encoder_json):
            if not Path(path).is_file():
                raise InputError(f"{path}: no such file")
        # tiktoken caches by name, local files too: a changed file would not be seen.
        saved = os.environ.get("TIKTOKEN_CACHE_DIR")
        os.environ["TIKTOKEN_CACHE_DIR"] = ""
        try:
            return load.data_gym_to_mergeable_bpe_ranks(vocab_bpe, encoder_json)
        except (AssertionError, ValueError, KeyError) as error:
            raise InputError(f"{vocab_bpe} and {encoder_json} are not a matching GPT-2 vocabulary "
                             f"({type(error).__name__} {error})") from None
        finally:
            del os.environ["TIKTOKEN_CACHE_DIR"]
            if saved is not None:
                os.environ["TIKTOKEN_CACHE_DIR"] = saved

    def encode(self, document):
        return self.encoding.encode_ordinary(document.decode())

    def decode(self, ids):
        known = [token for token in ids if token < self.vocab_size]
        return self.encoding.decode(known)


@contextlib.contextmanager
def tokenizers_library(path):
    """Converts the library's exceptions in this block to an InputError: a plain Exception, or, if its Rust code
    panics, a BaseException that is no Exception."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise InputError(f"{path}: not a tokenizer.json that the library can use: {one_line(error)}") from None


class JsonTokenizer(Tokenizer):
    """Any tokenizer.json, Llama-3's for one. Special tokens spelled out in a text stay text."""

    def __init__(self, path, separator=""):
        tokenizers = need("tokenizers", "tokenizers", f"--tokenizer {path}")
        self.path = path
        with tokenizers_library(path):
            self.tokenizer = tokenizers.Tokenizer.from_file(str(path))
            self.tokenizer.encode_special_tokens = True
            self.tokenizer.no_padding()
            self.tokenizer.no_truncation()
            vocabulary = self.tokenizer.get_vocab(with_added_tokens=True)
            # Some files load, and the first text panics.
            self.decode(self.tokenizer.encode("A text: \u00e9t\u00e9 1\n", add_special_tokens=False).ids)
        self.name = Path(path).name
        self.sha256 = hashlib.sha256(Path(path).read_bytes()).hexdigest()
        self.vocab_size = max(vocabulary.values()) + 1   # ids may have gaps, so their number is not enough
        candidates = [separator] if separator else SEPARATORS
        found = [text for text in candidates if text in vocabulary]
        if not found:
            raise InputError(f"{path}: has no token {', '.join(candidates)} to start a document with; pass "
                             "--separator")
        self.separator = vocabulary[found[0]]
        with tokenizers_library(path):
            added = self.tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token for token, entry in added.items() if entry.special)

    def token_id(self, text):
        return self.tokenizer.token_to_id(text)

    def encode(self, document):
        text = document.decode()
        with tokenizers_library(self.path):
            return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids):
        with tokenizers_library(self.path):
            return self.tokenizer.decode(list(ids), skip_special_tokens=False)


def add_tokenizer_options(parser, separator=True):
    """The options beside --tokenizer."""
    parser.add_argument("--vocab-bpe", default="", metavar="FILE", help="gpt2 without a network: its vocab.bpe ...")
    parser.add_argument("--encoder-json", default="", metavar="FILE", help="... and encoder.json")
    if separator:
        parser.add_argument("--separator", default="", metavar="TOKEN",
                            help="of a tokenizer.json: the token that starts a document (default: a known one)")


def load_tokenizer(name, vocab_bpe="", encoder_json="", separator=""):
    if vocab_bpe or encoder_json:
        if name != "gpt2":
            raise InputError("--vocab-bpe and --encoder-json only go with --tokenizer gpt2")
    if separator and name in ("bytes", "gpt2"):
        raise InputError(f"--separator has no effect with --tokenizer {name}, which has its own")
    if name == "bytes":
        return BytesTokenizer()
    if name == "gpt2":
        return Gpt2Tokenizer(vocab_bpe, encoder_json)
    path = Path(name)
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.is_file():
        raise InputError(f"--tokenizer {name}: not bytes, gpt2 or an existing tokenizer.json")
    return JsonTokenizer(path, separator)
