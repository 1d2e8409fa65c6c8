"""Shared by the prepare_DATASET.py scripts: run prepare_text.py on a data set by name, or on local files of it."""
import argparse
import hashlib
import urllib.error
import urllib.request
from pathlib import Path

from . import text_shards
from .support import InputError, Parser, replacement


def download(url, path, sha256):
    """Downloads a small file unless it exists, and renames it to `path` once its hash has been checked."""
    path = Path(path)
    if not path.is_file():
        try:
            with urllib.request.urlopen(url, timeout=60) as reply:
                content = reply.read()
        except (urllib.error.URLError, OSError) as error:
            if isinstance(error, urllib.error.HTTPError):
                error.close()   # it holds the connection
            raise InputError(f"cannot download {url} ({getattr(error, 'reason', error)}): fetch it elsewhere and pass "
                             "--input FILE") from None
        if hashlib.sha256(content).hexdigest() != sha256:
            raise InputError(f"{url}: SHA-256 is {hashlib.sha256(content).hexdigest()}, expected {sha256}: another "
                             "file than it was; pass --input FILE to use one of your own")
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacement(path) as temporary:
            temporary.write_bytes(content)
    return path


def run_dataset(doc, choose, add_options=None, **defaults):
    """choose(args) sets args.inputs to the data set; it is not called with --input. defaults: for
    text_shards.add_options."""
    parser = Parser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", nargs="+", default=[], metavar="PATH",
                        help="files or folders of the data set that are here already; nothing is downloaded")
    if add_options:
        add_options(parser)
    text_shards.add_options(parser, **defaults)
    text_shards.add_text_options(parser)
    args = parser.parse_args()
    args.inputs = args.input
    if not args.inputs:
        choose(args)
    try:
        return text_shards.prepare(args)
    except InputError as error:
        if args.input or not str(error).startswith("dataset "):
            raise
        raise InputError(f"{error}; files of it that are here already: --input PATH") from None
