"""Tokenizers of the scripts: bytes (standard library), gpt2 (tiktoken), a tokenizer.json (tokenizers).

Each has name, sha256 (of what decides the ids), vocabulary (what ids mean, see vocabulary_of), vocab_size, separator
(the id that starts a document), separator_text, encode(bytes) -> ids as a list or an array of the shard's type,
decode(ids) -> str, and spans(str, inner) -> (ids, [(first, end), ...] of each one's characters); inner: the text is not
the beginning of its document.
"""
import array
import bisect
import contextlib
import hashlib
import itertools
import os
import re
import zlib
from pathlib import Path

from .support import InputError, need, one_line, refuse_lfs_pointer

END_OF_TEXT = "<|endoftext|>"
# Tokens that start documents in known tokenizers, the most specific first.
SEPARATORS = ["<|begin_of_text|>", END_OF_TEXT, "<bos>", "<s>", "<|end_of_text|>", "<eos>", "</s>"]
# Tokens that control a model, also if their "special" is false: <|im_start|>, <\uff5cUser\uff5c>, [INST], ...
CONTROL = re.compile(r"[<\[][|\uff5c].+[|\uff5c][>\]]|<(start|end)_of_turn>|\[/?[A-Z_]+\]")
SENTINEL = "\ufdd0"   # stands inside a marker that is text; it is no character
# GPT-2's splitting rule, https://github.com/openai/gpt-2/blob/master/src/encoder.py
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def vocabulary_of(ids):
    """What the trainer compares with a model's tokenizer.json (llmc/data/token_text.h): CRC-32 of the tokens by id."""
    tokens, crc = {token: text.encode() for text, token in ids.items()}, 0
    for token in range(max(tokens) + 1):
        text = tokens.get(token, b"")
        crc = zlib.crc32(len(text).to_bytes(4, "little") + text, crc)
    return f"{crc:08x}"


class Tokenizer:
    special_ids = frozenset()   # tokens that are no text: separators, ends of turns
    separator_text, path = END_OF_TEXT, None
    markers = {}   # ids of special tokens by text; spelled finds them, cut with the blanks that belong to them
    spelled = cut = re.compile("(?!)")

    def meta(self):
        """The sidecar's entry."""
        return {"name": self.name, "sha256": self.sha256, "vocabulary": self.vocabulary, "separator": self.separator}

    def encode_marked(self, parts):
        """Returns ids and flags of one text, given as [[part, flag], ...]. A marker becomes its token unless SENTINEL
        is in it; the text between two markers is encoded whole."""
        text, ends = "".join(part for part, _ in parts), [*itertools.accumulate(len(part) for part, _ in parts)]
        ids, mask, at, number = [], bytearray(), 0, 0   # number: the part that has the character at `at`
        for found in [*self.cut.finditer(text), None]:
            end = found.start() if found else len(text)
            piece = []
            while at < end:
                number = bisect.bisect_right(ends, at, number)
                stop = min(end, ends[number])
                piece.append((text[at:stop].replace(SENTINEL, ""), parts[number][1]))
                at = stop
            for some, flag in self._encode_piece(piece, bool(ids)):
                ids += some
                mask += bytes([flag]) * len(some)
            if found:
                marker, at = self.spelled.search(text, end), found.end()
                ids.append(self.markers[marker[0]])
                mask.append(parts[bisect.bisect_right(ends, marker.start())][1])
        return ids, mask

    def _encode_piece(self, piece, inner):
        """[(ids, flag), ...] of [(text, flag), ...], which is encoded whole."""
        ids, places = self.spans("".join(text for text, _ in piece), inner)
        ends = [end for _, end in places] if len(piece) > 1 else []
        first = border = 0
        for text, flag in piece[:-1]:
            border += len(text)
            cut = bisect.bisect_right(ends, border, first)
            if cut < len(ids) and places[cut][0] < border:
                raise InputError(f"{self.name}: a token covers the end of a part that counts and the beginning of one "
                                 f"that does not, or the other way: {ascii(''.join(text for text, _ in piece))[:60]}")
            yield ids[first:cut], flag
            first = cut
        yield ids[first:], piece[-1][1] if piece else 0


class BytesTokenizer(Tokenizer):
    name, vocabulary, vocab_size, separator = "bytes", "bytes", 257, 256
    special_ids = frozenset([256])
    sha256 = hashlib.sha256(b"ids 0 to 255 are bytes, 256 starts a document").hexdigest()

    def encode(self, document):
        # Each byte becomes the low half of a uint16; a loop over the bytes is 15 times slower.
        wide = bytearray(2 * len(document))
        wide[::2] = document
        return array.array("H", bytes(wide))

    def spans(self, text, inner):
        return list(text.encode()), [(i, i + 1) for i, character in enumerate(text) for _ in character.encode()]

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
        digest, tokens = hashlib.sha256(), {END_OF_TEXT: self.separator}
        # A tokenizer.json writes printable bytes as themselves, the others as the characters from 256 on.
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        spelled = dict(zip([*printable, *sorted({*range(256)}.difference(printable))], [*printable, *range(256, 324)]))
        for token in range(self.separator):
            piece = self.encoding.decode_single_token_bytes(token)
            digest.update(len(piece).to_bytes(4, "little") + piece)
            tokens["".join(chr(spelled[byte]) for byte in piece)] = token
        self.sha256, self.vocabulary = digest.hexdigest(), vocabulary_of(tokens)

    @staticmethod
    def _local_ranks(vocab_bpe, encoder_json):
        load = need("tiktoken.load", "tiktoken", "--tokenizer gpt2")
        for path in (vocab_bpe, encoder_json):
            if not Path(path).is_file():
                raise InputError(f"{path}: no such file")
            refuse_lfs_pointer(path)
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

    def spans(self, text, inner):
        characters = [i for i, character in enumerate(text) for _ in character.encode()]
        ids = self.encoding.encode_ordinary(text)
        ends = [*itertools.accumulate(len(self.encoding.decode_single_token_bytes(token)) for token in ids)]
        return ids, [(characters[first], characters[end - 1] + 1) for first, end in zip([0, *ends], ends)]

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
    """Any tokenizer.json, Llama-3's for one. Its markers, which are the separator, special tokens and CONTROL, never
    come out of encoding a text: where one is spelled out it stays text."""

    def __init__(self, path, separator=""):
        refuse_lfs_pointer(path)
        tokenizers = need("tokenizers", "tokenizers", f"--tokenizer {path}")
        self.path = Path(path)
        with tokenizers_library(path):
            self.tokenizer = tokenizers.Tokenizer.from_file(str(path))
            self.tokenizer.encode_special_tokens = True
            self.tokenizer.no_padding()
            self.tokenizer.no_truncation()
            self.tokenizer.post_processor = None   # it adds special tokens and takes blanks out of offsets
            vocabulary = self.tokenizer.get_vocab(with_added_tokens=True)
            # Some files load, and the first text panics.
            self.decode(self.tokenizer.encode("A text: \u00e9t\u00e9 1\n", add_special_tokens=False).ids)
        self.name = Path(path).name
        self.sha256 = hashlib.sha256(Path(path).read_bytes()).hexdigest()
        self.vocabulary = vocabulary_of(vocabulary)
        self.vocab_size = max(vocabulary.values()) + 1   # ids may have gaps, so their number is not enough
        candidates = [separator] if separator else SEPARATORS
        found = [text for text in candidates if text in vocabulary]
        if not found:
            raise InputError(f"{path}: has no token {', '.join(candidates)} to start a document with; pass "
                             "--separator")
        self.separator_text, self.separator = found[0], vocabulary[found[0]]
        with tokenizers_library(path):
            added = self.tokenizer.get_added_tokens_decoder()
            for entry in added.values():
                entry.special = entry.special or bool(CONTROL.fullmatch(entry.content)) or entry.content in SEPARATORS
            self.tokenizer.add_special_tokens([tokenizers.AddedToken(found[0], normalized=False),
                                               *(entry for entry in added.values() if entry.special)])
            added = self.tokenizer.get_added_tokens_decoder()
        special = {token: entry for token, entry in added.items() if entry.special}
        self.special_ids = frozenset(special)
        self.markers = {entry.content: token for token, entry in special.items()}
        longest_first = sorted(special.values(), key=lambda entry: -len(entry.content))
        self.spelled = re.compile("|".join(re.escape(entry.content) for entry in longest_first))
        self.cut = re.compile("|".join(r"\s*" * entry.lstrip + re.escape(entry.content) + r"\s*" * entry.rstrip
                                       for entry in longest_first))
        # "first": a blank stands before the first piece of a text, not before one that follows a special token.
        self.first_blank = getattr(self.tokenizer.pre_tokenizer, "prepend_scheme", "") == "first"

    def check_marked(self, parts):
        """Requires that encode_marked gives what the library does with special tokens."""
        with tokenizers_library(self.path):
            self.tokenizer.encode_special_tokens = False
            whole = self.tokenizer.encode("".join(part for part, _ in parts), add_special_tokens=False).ids
            self.tokenizer.encode_special_tokens = True
        if self.encode_marked(parts)[0] != whole:
            raise InputError(f"{self.path}: encodes the text between special tokens otherwise when it stands alone; "
                             "take --template plain")

    def encode(self, document):
        return self._encoding(document.decode()).ids

    def spans(self, text, inner):
        found = self._encoding(text, inner)
        return found.ids, found.offsets

    def _encoding(self, text, inner=False):
        if self.first_blank:
            self.tokenizer.pre_tokenizer.prepend_scheme = "never" if inner else "first"
        with tokenizers_library(self.path):
            found = self.tokenizer.encode(text, add_special_tokens=False)
        # A unigram model has </s> as a piece of text. The token of unknown characters is no spelled marker.
        for token in self.special_ids.intersection(found.ids):
            marker = self.tokenizer.id_to_token(token)
            if marker in text:
                raise InputError(f"{self.path}: makes its token {marker} of a text that spells it; take {marker} out "
                                 f"of the text {ascii(text[max(0, text.find(marker) - 20):][:60])}")
        return found

    def decode(self, ids):
        with tokenizers_library(self.path):
            return self.tokenizer.decode(list(ids), skip_special_tokens=False)


def add_tokenizer_options(parser):
    """The options beside --tokenizer."""
    parser.add_argument("--vocab-bpe", default="", metavar="FILE", help="gpt2 without a network: its vocab.bpe ...")
    parser.add_argument("--encoder-json", default="", metavar="FILE", help="... and encoder.json")
    parser.add_argument("--separator", default="", metavar="TOKEN",
                        help="of a tokenizer.json: the token that starts a document (default: a known one)")


def load_tokenizer(name, vocab_bpe="", encoder_json="", separator=""):
    if (vocab_bpe or encoder_json) and name != "gpt2":
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
