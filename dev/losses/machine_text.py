"""Text for training from a machine's own documentation and source, as token shards: the validation part is of files of
its own. Which files, and their order, follow from their paths and the seed. The sources of llm.fp8 are not among them,
so that a commit does not change the text."""
import hashlib
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

sys.path[:0] = [str(p / "scripts") for p in Path(__file__).resolve().parents if (p / "scripts/llmfp8").is_dir()]
from llmfp8.support import InputError  # noqa: E402
from llmfp8.text_sources import NotText, check_utf8  # noqa: E402

PREPARE = Path(__file__).resolve().parents[2] / "data" / "prepare_text.py"
ROOTS = [Path(root) for root in ("/usr/share/doc", "/usr/include", sysconfig.get_path("stdlib"),
                                 sysconfig.get_path("purelib"))]
SUFFIXES = ("", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".inl", ".md", ".py", ".pyi", ".rst", ".sh", ".txt")
LEAST_BYTES, MOST_BYTES = 500, 200_000   # of a file; longer ones are tables and generated code
BYTES_PER_TOKEN = 5   # more than source has with a vocabulary of 50 thousand


def files_under(roots, seed):
    """Paths in an order that the seed decides. Links are not followed, hidden files left out."""
    paths = set()
    for root in roots:
        for folder, folders, names in os.walk(root):
            folders[:] = [name for name in folders if not name.startswith(".")]
            paths.update(os.path.join(folder, name) for name in names
                         if not name.startswith(".") and Path(name).suffix in SUFFIXES)
    return sorted(paths, key=lambda path: hashlib.blake2b(f"{seed}:{path}".encode(errors="surrogateescape")).digest())


def texts_of(paths):
    """The texts of files that are text, each once."""
    seen = set()
    for path in paths:
        try:
            if os.path.islink(path) or not LEAST_BYTES <= os.path.getsize(path) <= MOST_BYTES:
                continue
            content = check_utf8(Path(path).read_bytes())
        except (NotText, OSError):
            continue
        digest = hashlib.blake2b(content).digest()
        if digest not in seen:
            seen.add(digest)
            yield content.decode()


def write_shards(folder, texts, most_bytes, tokenizer):
    """Takes texts until they have so many bytes; returns {"files", "bytes", "tokens", "sha256"} of the shards."""
    folder.mkdir(parents=True, exist_ok=True)
    documents, files, size = folder / "documents.jsonl", 0, 0
    with open(documents, "w", encoding="utf-8") as file:
        for text in texts:
            file.write(json.dumps({"text": text}) + "\n")
            files, size = files + 1, size + len(text.encode())
            if size >= most_bytes:
                break
    if not files:
        raise InputError(f"{folder}: no text is left for it: name more folders (--roots)")
    done = subprocess.run([sys.executable, PREPARE, "--tokenizer", tokenizer, "--valid-fraction", "0", "--quiet",
                           "--overwrite", "--out", folder, documents], capture_output=True, text=True)
    if done.returncode:
        raise InputError(f"{folder}: {done.stderr.strip().removeprefix('error: ')}")
    sidecars = [json.loads(path.read_text()) for path in sorted(folder.glob("*.meta.json"))]
    return {"files": files, "bytes": size, "tokens": sum(sidecar["tokens"] for sidecar in sidecars),
            "sha256": [sidecar["checksum"]["value"] for sidecar in sidecars]}


def prepare(work, tokenizer, valid_tokens, train_tokens, roots=ROOTS, seed=1):
    """Makes shards of at least valid_tokens, then of about train_tokens or of all that there is, in a folder of `work`
    that is named by the arguments, unless they are there. Returns {"folder", and for "valid" and "train" the facts of
    write_shards()}."""
    asked = repr([str(tokenizer), valid_tokens, train_tokens, [str(root) for root in roots], seed])
    folder = work / f"text-{hashlib.blake2b(asked.encode(), digest_size=4).hexdigest()}"
    done = folder / "facts.json"
    if not done.exists():
        texts = texts_of(files_under(roots, seed))
        valid = write_shards(folder / "valid", texts, valid_tokens * BYTES_PER_TOKEN, tokenizer)
        if valid["tokens"] < valid_tokens:
            raise InputError(f"{', '.join(map(str, roots))}: only {valid['tokens']} tokens of text, validation needs "
                             f"{valid_tokens}: name more folders (--roots) or lower --valid-tokens")
        train = write_shards(folder / "train", texts, train_tokens * valid["bytes"] // valid["tokens"], tokenizer)
        done.write_text(json.dumps({"folder": str(folder), "valid": valid, "train": train}) + "\n", encoding="utf-8")
    return json.loads(done.read_text(encoding="utf-8"))
