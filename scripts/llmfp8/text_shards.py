"""Converts text to token shards, for data/prepare_text.py and prepare_chat.py."""
import array
import hashlib
import urllib.error
import urllib.request
from pathlib import Path

from .shard_format import MAX_SHARD_TOKENS, MIN_TAIL_TOKENS, TYPECODES
from .shard_pipeline import SPLITS, Plan, report, run
from .support import InputError, replacement, whole_number
from .text_sources import Reader, find_sources
from .text_tokenizers import add_tokenizer_options, load_tokenizer

TINY_SHAKESPEARE = ("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
                    "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed")


def add_options(parser):
    """All options except those about the inputs."""
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for the shards")
    parser.add_argument("--tokenizer", required=True, metavar="NAME", help="bytes, gpt2, or a tokenizer.json")
    add_tokenizer_options(parser)
    parser.add_argument("--valid-fraction", type=float, default=0.01, metavar="F",
                        help="share of the documents for validation, 0 to below 1 (default %(default)s)")
    parser.add_argument("--shard-tokens", type=whole_number, default=100_000_000, metavar="N",
                        help="tokens per shard (default %(default)s)")
    parser.add_argument("--dataset-config", default="", metavar="NAME", help="configuration of a Hugging Face dataset")
    parser.add_argument("--dataset-split", default="train", metavar="NAME",
                        help="split of that dataset (default %(default)s)")
    parser.add_argument("--max-documents", type=whole_number, default=0, metavar="N",
                        help="stop after N documents; 0: all")
    parser.add_argument("--workers", type=whole_number, default=0, metavar="N",
                        help="processes; 0: one per core, at most 64")
    parser.add_argument("--overwrite", action="store_true", help="replace the shards in DIR")
    parser.add_argument("--quiet", action="store_true", help="print no progress")


def check_options(args):
    if not 0 <= args.valid_fraction < 1:
        raise InputError(f"--valid-fraction {args.valid_fraction}: must be at least 0 and below 1")
    most = MAX_SHARD_TOKENS - MIN_TAIL_TOKENS
    if not 1 <= args.shard_tokens <= most:
        raise InputError(f"--shard-tokens {args.shard_tokens}: must be 1 to {most}")
    for name in ("document_bytes", "max_documents", "workers"):
        if getattr(args, name) < 0:
            raise InputError(f"--{name.replace('_', '-')} {getattr(args, name)}: must not be negative")


def is_validation(document, fraction):
    """Depends only on the hash of the text, so that all copies of a document are in one split."""
    digest = hashlib.blake2b(document, digest_size=8).digest()
    return int.from_bytes(digest, "little") < fraction * 2 ** 64


class Tokenize:
    """Converts a batch of documents; returns for each split the tokens as bytes, tokens per document, and loss mask."""

    def __init__(self, tokenizer, token_bytes, valid_fraction):
        self.tokenizer, self.typecode, self.valid_fraction = tokenizer, TYPECODES[token_bytes], valid_fraction

    def __call__(self, documents):
        tokens = {split: array.array(self.typecode) for split in SPLITS}
        lengths = {split: [] for split in SPLITS}
        masks = {split: bytearray() for split in SPLITS}
        for document in documents:
            split = SPLITS[is_validation(document, self.valid_fraction)]
            out = tokens[split]
            before = len(out)
            masks[split] += self.encode_into(out, document)
            lengths[split].append(len(out) - before)
        return {split: (tokens[split].tobytes(), lengths[split], bytes(masks[split])) for split in SPLITS}

    def encode_into(self, out, document):
        """Appends the tokens of a document; returns its loss mask, one byte per token, or b""."""
        out.append(self.tokenizer.separator)
        out.extend(self.tokenizer.encode(document))
        return b""


def make_encoder(load_arguments, token_bytes, valid_fraction):
    return Tokenize(load_tokenizer(*load_arguments), token_bytes, valid_fraction)


def signature_of(args, sources, tokenizer):
    """Returns Plan.signature."""
    names = ("valid_fraction", "shard_tokens", "document_bytes", "text_field", "dataset_config", "dataset_split",
             "max_documents")
    return {"the inputs": [source.identity() for source in sources],
            "the tokenizer": [tokenizer.sha256, tokenizer.separator],
            **{"--" + name.replace("_", "-"): getattr(args, name) for name in names}}


def plan_of(args, make, **fields):
    """The plan for these options and args.inputs; make(tokenizer's arguments, bytes per token, validation share) makes
    the encoder."""
    check_options(args)
    load_arguments = (args.tokenizer, args.vocab_bpe, args.encoder_json, args.separator)
    tokenizer = load_tokenizer(*load_arguments)
    sources = find_sources(args.inputs, args.format)
    token_bytes = 2 if tokenizer.vocab_size <= 65536 else 4
    reader = Reader(sources, args.text_field, args.document_bytes, args.dataset_config, args.dataset_split)
    return Plan(folder=Path(args.out), reader=reader, make_encoder=make, token_bytes=token_bytes,
                encoder_arguments=(load_arguments, token_bytes, args.valid_fraction),
                shard_tokens=args.shard_tokens, valid_fraction=args.valid_fraction,
                meta={"vocab_size": tokenizer.vocab_size, "tokenizer": tokenizer.meta(),
                      "valid_fraction": args.valid_fraction},
                signature=signature_of(args, sources, tokenizer), max_documents=args.max_documents,
                workers=args.workers, overwrite=args.overwrite, quiet=args.quiet, **fields)


def download(url, sha256, path):
    """Downloads a small file unless it exists, and renames it to `path` once its hash has been checked."""
    path = Path(path)
    if not path.is_file():
        try:
            with urllib.request.urlopen(url, timeout=60) as reply:
                content = reply.read()
        except (urllib.error.URLError, OSError) as error:
            if isinstance(error, urllib.error.HTTPError):
                error.close()   # it holds the connection
            raise InputError(f"cannot download {url} ({getattr(error, 'reason', error)}): fetch it elsewhere and name "
                             "the file") from None
        found = hashlib.sha256(content).hexdigest()
        if found != sha256:
            raise InputError(f"{url}: SHA-256 is {found}, expected {sha256}: another file than it was; name one of "
                             "your own")
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacement(path) as temporary:
            temporary.write_bytes(content)
    return str(path)


def prepare(args):
    """args: the parsed options and `inputs`."""
    args.inputs = [download(*TINY_SHAKESPEARE, Path(args.out) / "input.txt") if name == "tinyshakespeare"
                   and not Path(name).exists() else name for name in args.inputs]
    plan = plan_of(args, make_encoder)
    report(plan, run(plan))
    return 0
