"""data/prepare_text.py: its inputs, its shards and its errors. Standard library only."""
import gzip
import hashlib
import http.server
import json
import math
import os
import shutil
import sys
import threading
import types
import unittest
import unittest.mock
import zlib

from llmfp8 import support, text_shards
from llmfp8.text_shards import is_validation
from tests.support.data_scripts import DATA, ScriptTest, documents_of, has, lines, tokens_of
from tests.support.folder import LFS_POINTER
from tests.support.run_command import run_command

try:
    import zstandard
except ImportError:
    zstandard = None


def pieces_of(text, size=8192):
    """Text cut into documents as --document-bytes does, at ends of lines."""
    while text:
        end = text.find(b"\n", size) + 1 or len(text)
        yield text[:end]
        text = text[end:]


class PrepareText(ScriptTest):
    def test_text_becomes_both_splits_and_nothing_is_lost(self):
        text = lines(3000)
        path = self.file("a.txt", text)
        summary = self.prepare_bytes("--valid-fraction", "0.1", path)
        train, valid = documents_of(self.out, "train"), documents_of(self.out, "valid")
        size = len(text.encode())
        self.assertEqual(sum(map(len, train + valid)), size)
        self.assertIn(f"valid: {sum(map(len, valid)) + len(valid)} tokens in {len(valid)} documents", summary)
        # Documents end at ends of lines, and together they are the text.
        for document in train + valid:
            self.assertTrue(document.endswith(b"\n"))
            self.assertLess(len(document), 8192 + 200)
        self.assertEqual(sorted(b"".join(train + valid).splitlines()), sorted(text.encode().splitlines()))
        # 3000 lines give about 26 documents; 0.1 of them is 2.6, and 13 would be far off.
        self.assertTrue(0 < len(valid) < 13, len(valid))
        for document in train:
            self.assertFalse(is_validation(document, 0.1))
        for document in valid:
            self.assertTrue(is_validation(document, 0.1))

    def test_split_depends_on_the_text_only(self):
        one = self.file("one.txt", lines(2000, seed=1))
        two = self.file("two.txt", lines(2000, seed=2))
        self.prepare_bytes("--valid-fraction", "0.2", one, two)
        first = set(documents_of(self.out, "valid"))
        self.prepare_bytes("--valid-fraction", "0.2", "--overwrite", two, one)
        self.assertEqual(first, set(documents_of(self.out, "valid")))
        # The validation split of a larger fraction contains that of a smaller one.
        self.prepare_bytes("--valid-fraction", "0.5", "--overwrite", two, one)
        self.assertLess(first, set(documents_of(self.out, "valid")))

    def test_fraction_is_met(self):
        documents = [f"document {i}".encode() for i in range(20000)]
        share = sum(is_validation(document, 0.1) for document in documents) / len(documents)
        self.assertLess(abs(share - 0.1), 5 * math.sqrt(0.1 * 0.9 / 20000))

    def test_workers_do_not_change_a_byte(self):
        path = self.file("a.txt", lines(40000))   # several batches
        contents = []
        for workers in ("1", "3"):
            self.prepare_bytes("--workers", workers, "--overwrite", "--shard-tokens", "500000", path,
                               packages=self.folder)
            contents.append({file.name: file.read_bytes() for file in self.out.iterdir()})
        self.assertEqual(contents[0], contents[1])
        self.assertGreater(len(contents[0]), 6)

    def test_folders_skip_hidden_and_binary_files(self):
        self.file("in/b/z.md", "last\n")
        self.file("in/a.txt", "first\n")
        self.file("in/.git/config", "hidden\n")
        self.file("in/picture.png", b"\x89PNG\0\0")
        self.file("in/empty.txt", "")
        summary = self.prepare_bytes("--valid-fraction", "0", self.folder / "in")
        self.assertEqual(documents_of(self.out, "train"), [b"first\n", b"last\n"])
        self.assertEqual(list(self.out.glob("valid*")), [])
        self.assertIn(f"skipped 1 file that is not text, the first is {self.folder}/in/picture.png: not text (byte 4 "
                      "is zero)\n", summary)

    @unittest.skipUnless(shutil.which("setpriv"), "needs setpriv of util-linux")
    def test_a_folder_that_cannot_be_read_is_refused(self):
        self.file("in/a.txt", "text")
        closed = self.folder / "in" / "closed"
        closed.mkdir(mode=0)
        # root may read every folder unless it gives up the right to.
        drop = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
        result = run_command([*drop, sys.executable, DATA / "prepare_text.py", "--tokenizer", "bytes", "--out",
                              self.out, self.folder / "in"], None)
        closed.chmod(0o700)
        self.assertEqual((result.returncode, result.stderr), (2, f"error: {closed}: cannot read: Permission denied\n"))
        self.assertFalse(self.out.exists())

    def test_json_lines_and_compression(self):
        rows = [{"text": "one \u00e9"}, {"text": ""}, {"text": None}, {"text": "two\nlines", "id": 3}]
        content = "\n".join(map(json.dumps, rows)) + "\n\n"
        self.file("a.jsonl", content)
        with gzip.open(self.folder / "b.jsonl.gz", "wb") as file:
            file.write(content.encode())
        with gzip.open(self.folder / "c.txt.gz", "wb") as file:
            file.write(b"plain")
        inputs = [self.folder / "a.jsonl", self.folder / "b.jsonl.gz", self.folder / "c.txt.gz"]
        if has("zstandard"):
            import zstandard
            frame = zstandard.ZstdCompressor().compress
            # Two zstd frames, as tools write that compress in parallel.
            frames = frame(content[:20].encode()) + frame(content[20:].encode())
            inputs.append(self.file("d.jsonl.zst", frames))
        summary = self.prepare_bytes("--valid-fraction", "0", *inputs)
        both = ["one \u00e9".encode(), b"two\nlines"]
        expected = both + both + [b"plain"] + (both if has("zstandard") else [])
        self.assertEqual(documents_of(self.out, "train"), expected)
        self.assertIn("documents without text", summary)

    def test_what_is_not_utf8_text_is_skipped_counted_and_named(self):
        text = lines(400).encode()   # 24 KB, so that there are documents before and after the damaged ones
        latin = text[:9000] + b"caf\xe9 \xe9\n" + text[9000:]
        zero = text[:20000] + b"\0" + text[20000:]
        first = b'{"text": "good"}\n\n'
        rows = [b'{"text": "half \\ud800 pair"}\n', b'{"text": "caf\xe9"}\n', b'{"text": "zero \\u0000"}\n',
                b'{"text": "\xed\xa0\x80"}\n', b'{"text": "whole \\ud83d\\ude00"}\n']
        rows_at = [len(first + b"".join(rows[:i])) for i in range(5)]
        files = [self.file("latin.txt", latin), self.file("zero.txt", zero),
                 self.file("b.jsonl", first + b"".join(rows))]
        places = [f"{files[0]}: byte {latin.index(0xe9, 9000)}: bytes that are not UTF-8",
                  f"{files[1]}: byte 20000: zero bytes",
                  f"{files[2]}: line 3 (from byte {rows_at[0]}): half of a surrogate pair",
                  f"{files[2]}: line 4 (byte {rows_at[1] + rows[1].index(0xe9)}): bytes that are not UTF-8",
                  f"{files[2]}: line 5 (from byte {rows_at[2]}): zero bytes"]
        summary = self.prepare_bytes("--valid-fraction", "0", *files)
        self.assertIn("skipped 6 documents that are not text (2 with bytes that are not UTF-8, 2 with half of a "
                      "surrogate pair, 2 with zero bytes), the first ones are: " + ", ".join(places) + "\n", summary)
        documents = documents_of(self.out, "train")
        self.assertEqual(documents[-2:], [b"good", "whole \U0001f600".encode()])
        kept = [piece for content in (latin, zero) for piece in pieces_of(content)
                if b"\xe9 \xe9" not in piece and b"\0" not in piece]
        self.assertEqual(documents[:-2], kept)
        self.assertGreater(len(kept), 3)
        for shard in self.out.iterdir():
            shard.unlink()
        for path in files[:2]:   # no other input
            self.refused(["the inputs hold no text (skipped 1 document that is not text (1 with", str(path)],
                         "--tokenizer", "bytes", "--document-bytes", "0", path)

    def test_files_that_are_not_text(self):
        array = json.dumps([{"text": "a"}, {"text": "b"}], indent=1).encode()
        for name, content, part in (
                ("a.pdf", b"%PDF-1.7\nwords", "this is a PDF; pdftotext"), ("a.txt", b"PAR1" * 9, "a parquet file"),
                ("b.txt", b"\xff\xfea\0", "UTF-16; iconv"), ("c.txt", gzip.compress(b"x"), "must end in .gz"),
                ("d.docx", b"PK\x03\x04", "a zip archive"), ("e.txt", b"ab\0", "not text (byte 2 is zero)"),
                ("f.json", b"\xef\xbb\xbf " + array, "a JSON array; one document per line is read: jq -c '.[]' FILE"),
                ("g.jsonl", array, "g.jsonl: this is a JSON array"), ("h.jsonl.gz", gzip.compress(array), "JSON array"),
                ("i.jsonl", b"%PDF-", "a PDF"), ("k.txt", LFS_POINTER.encode(), "a git-lfs pointer in place of the"),
                ("l.jsonl", LFS_POINTER.encode(), "git lfs pull fetches that")):
            path = self.file(name, content)
            self.refused([str(path), part], "--tokenizer", "bytes", path)
            if ".jsonl" not in name:
                folder = self.file(f"in{name}/{name}", content).parent
                self.file(f"in{name}/z.txt", "text\n")
                summary = self.prepare_bytes("--valid-fraction", "0", "--overwrite", folder)
                self.assertIn("skipped 1 file that is not text, the first is ", summary)
                self.assertIn(part.replace("this is ", ""), summary)
                self.assertEqual(documents_of(self.out, "train"), [b"text\n"])
                for shard in self.out.iterdir():
                    shard.unlink()
        # With --format text the file counts as text.
        self.prepare_bytes("--valid-fraction", "0", "--format", "text", self.folder / "f.json")
        self.prepare_bytes("--valid-fraction", "0", "--overwrite", self.file("j.json", '{"a": 1}'))

    def test_a_byte_order_mark_is_no_text(self):
        mark, text = b"\xef\xbb\xbf", lines(300).encode()
        files = [self.file("a.txt", mark + text), self.file("b.txt.gz", gzip.compress(mark + text)),
                 self.file("c.jsonl", mark + b'{"text": "row"}\n'), self.file("d.txt", mark)]
        self.prepare_bytes("--valid-fraction", "0", *files)
        documents = documents_of(self.out, "train")
        self.assertEqual(b"".join(documents), text + text + b"row")
        self.prepare_bytes("--valid-fraction", "0", "--overwrite", self.file("e.txt", b"a" + mark))
        self.assertEqual(documents_of(self.out, "train"), [b"a" + mark])   # elsewhere it is a character

    def test_truncated_zstd_is_refused(self):
        """With the package zstandard, if installed, and with zlib instead, whose objects have the same members."""
        text = lines(4000).encode()
        zlib_instead = types.SimpleNamespace(ZstdDecompressor=lambda **_: types.SimpleNamespace(
            decompressobj=zlib.decompressobj))
        for module, compress in [(zlib_instead, zlib.compress)] + ([(
                zstandard, zstandard.ZstdCompressor().compress)] if zstandard else []):
            frames = [compress(text[:100000]), compress(text[100000:])]
            whole = b"".join(frames)
            with self.subTest(module=module), unittest.mock.patch.dict(sys.modules, zstandard=module):
                path = self.file("a.txt.zst", whole)
                self.prepare_bytes("--valid-fraction", "0", path)
                self.assertEqual(b"".join(documents_of(self.out, "train")), text)
                for shard in self.out.iterdir():
                    shard.unlink()
                for length in (len(whole) - 1, len(whole) - 4, len(whole) // 2, len(frames[0]) + 3, 5):
                    self.refused([f"{path}: the compressed file is truncated"], "--tokenizer", "bytes",
                                 self.file("a.txt.zst", whole[:length]))
                self.file("a.txt.zst", frames[0] + b"no frame")
                self.refused([f"{path}: "], "--tokenizer", "bytes", path)

    def test_document_bytes(self):
        # One line without an end is cut near 16 bytes, but never within a character of 3 bytes.
        path = self.file("a.txt", "\u4e2d" * 40)
        self.prepare_bytes("--valid-fraction", "0", "--document-bytes", "16", path)
        documents = documents_of(self.out, "train")
        self.assertGreater(len(documents), 2)
        self.assertEqual(b"".join(documents).decode(), "\u4e2d" * 40)
        for document in documents:
            document.decode()
        self.prepare_bytes("--valid-fraction", "0", "--document-bytes", "0", "--overwrite", path)
        self.assertEqual(len(documents_of(self.out, "train")), 1)

    def test_max_documents(self):
        path = self.file("a.jsonl", "".join(json.dumps({"body": str(i)}) + "\n" for i in range(10)))
        self.prepare_bytes("--valid-fraction", "0", "--text-field", "body", "--max-documents", "4", path)
        self.assertEqual(documents_of(self.out, "train"), [b"0", b"1", b"2", b"3"])

    def test_sidecar(self):
        self.prepare_bytes("--valid-fraction", "0.3", self.file("a.txt", lines(2000)))
        for split in ("train", "valid"):
            path = self.out / f"{split}_000000.bin"
            meta = json.loads((self.out / f"{split}_000000.meta.json").read_text())
            tokens = tokens_of(path)
            self.assertEqual(meta["tokens"], len(tokens))
            self.assertEqual((meta["split"], meta["dtype"], meta["vocab_size"]), (split, "uint16", 257))
            self.assertEqual(meta["tokenizer"]["separator"], 256)
            self.assertEqual(meta["document_offsets"], [i for i, token in enumerate(tokens) if token == 256])
            self.assertEqual(meta["documents"], len(meta["document_offsets"]))
            self.assertEqual(meta["checksum"]["value"], hashlib.sha256(path.read_bytes()).hexdigest())
        self.assertEqual(list(self.out.glob("*.tmp")), [])

    def test_a_worker_that_dies_is_one_line(self):
        self.file("packages/tokenizers.py", """
import os
AddedToken = lambda *_, **__: None
class Tokenizer:
    pre_tokenizer = None
    from_file = classmethod(lambda cls, path: cls())
    no_padding = no_truncation = add_special_tokens = lambda self, *_: None
    get_vocab = lambda self, **_: {"<s>": 0}
    get_added_tokens_decoder = lambda self: {}
    decode = lambda self, ids, **_: ""
    def encode(self, text, **_):
        if "abort" in text:
            os.abort()
        self.ids = []
        return self
""")
        said = self.prepare("--tokenizer", self.file("tokenizer.json", "{}"), "--workers", "2", self.file(
            "a.txt", "abort\n"), packages=self.folder / "packages", code=2)
        self.assertRegex(said, r"\Aerror: a worker process died: .*\n\Z")
        self.assertEqual(list(self.out.iterdir()), [])

    def test_bad_input_is_refused(self):
        good = self.file("good.txt", "text\n")
        bytes_of = ["--tokenizer", "bytes"]
        self.refused(["nowhere.txt: no such file", "hf:OWNER/NAME, or one of openwebtext, "],
                     *bytes_of, "nowhere.txt")
        self.refused(["b.txt: this is not text (byte 1 is zero)"], *bytes_of, self.file("b.txt", b"a\0b"))
        self.refused(["bad.jsonl: line 2: not JSON"], *bytes_of, self.file("bad.jsonl", '{"text": "a"}\n{"te'))
        self.refused(["deep.jsonl: line 1: not JSON: it is nested too deep"], *bytes_of,
                     self.file("deep.jsonl", '{"text":' * 100000 + "\n"))
        self.refused(["no.jsonl: line 1: no field 'text' (there is: body, id)", "--text-field"], *bytes_of,
                     self.file("no.jsonl", '{"id": 1, "body": "a"}\n'))
        self.refused(["number.jsonl: line 1: field 'text' is int"], *bytes_of,
                     self.file("number.jsonl", '{"text": 1}\n'))
        self.refused(["list.jsonl: line 2: no field"], *bytes_of, self.file("list.jsonl", '{"text": "a"}\n[1, 2]\n'))
        self.refused(["bad.txt.gz: "], *bytes_of, self.file("bad.txt.gz", b"\x1f\x8b\x08 not gzip at all"))
        self.refused(["cut.txt.gz: ", "truncated"], *bytes_of,
                     self.file("cut.txt.gz", gzip.compress(lines(100).encode())[:-20]))
        self.refused(["hold no text"], *bytes_of, self.file("empty.txt", ""))
        self.refused(["none of the documents (1) falls into the valid split", "--document-bytes"], *bytes_of, good)
        self.refused(["--valid-fraction 1.0"], *bytes_of, "--valid-fraction", "1", good)
        self.refused(["--valid-fraction nan"], *bytes_of, "--valid-fraction", "nan", good)
        self.refused(["--shard-tokens 0"], *bytes_of, "--shard-tokens", "0", good)
        self.refused(["--shard-tokens 2147483648"], *bytes_of, "--shard-tokens", 2 ** 31, good)
        self.refused(["--workers -1"], *bytes_of, "--workers", "-1", good)
        self.refused(["--tokenizer nothing: not bytes, gpt2 or"], "--tokenizer", "nothing", good)
        for options in (["--tokenizer", self.file("tokenizer.json", LFS_POINTER), good],
                        [*bytes_of, self.file("a.parquet", LFS_POINTER)]):
            self.refused([": this is a git-lfs pointer in place of the file; git lfs pull"], *options)
        self.refused(["--separator has no effect"], *bytes_of, "--separator", "<s>", good)
        self.refused(["only go with --tokenizer gpt2"], *bytes_of, "--vocab-bpe", "x", good)

    def test_existing_shards_are_kept_unless_told(self):
        path = self.file("a.txt", lines(1000))
        other = self.file("out/notes.txt", "mine")
        stale = self.file("out/train_000007.bin.tmp", "of a killed run")
        self.prepare_bytes("--valid-fraction", "0.2", "--shard-tokens", "20000", path)
        self.assertFalse(stale.exists())
        before = {file.name: file.read_bytes() for file in self.out.iterdir()}
        self.assertIn("already has train_000000.bin", self.prepare_bytes(path, code=2))
        # A run that fails does not change the old shards either.
        self.prepare_bytes("--overwrite", self.file("bad.jsonl", "{"), code=2)
        self.assertEqual(before, {file.name: file.read_bytes() for file in self.out.iterdir()})
        self.prepare_bytes("--valid-fraction", "0", "--overwrite", path)
        self.assertEqual(sorted(file.name for file in self.out.iterdir()),
                         ["notes.txt", "train_000000.bin", "train_000000.meta.json"])
        self.assertEqual(other.read_text(), "mine")

    def test_missing_package_is_named(self):
        path = self.file("a.txt", "text\n")
        for package in ("tiktoken", "tokenizers", "zstandard", "pyarrow", "datasets"):
            self.file(f"none/{package}.py", f"raise ImportError('no {package} here')\n")
        packages = self.folder / "none"
        cases = [("tiktoken", "gpt2", path), ("tokenizers", self.file("tokenizer.json", "{}"), path),
                 ("zstandard", "bytes", self.file("a.txt.zst", "x")),
                 ("pyarrow", "bytes", self.file("a.parquet", "x")), ("datasets", "bytes", "openwebtext")]
        requirements = (DATA.parent / "requirements.txt").read_text().splitlines()
        for package, tokenizer, source in cases:
            pin = next(line for line in requirements if line.startswith(package + "=="))
            self.refused([f"python3 -m pip install '{pin}'"], "--tokenizer", tokenizer, source, packages=packages)

    def test_the_line_that_installs_works_where_pip_refuses(self):
        plain = "python3 -m pip install 'tiktoken==0.14.0'"
        venv = "python3 -m venv .venv && . .venv/bin/activate && "
        for marker, prefix, line in ((False, "/usr", plain), (True, "/usr", venv + plain), (True, "/venv", plain)):
            path = self.file("lib/EXTERNALLY-MANAGED", "")
            if not marker:
                path.unlink()
            with unittest.mock.patch.multiple(sys, prefix=prefix, base_prefix="/usr"), \
                    unittest.mock.patch.object(support.sysconfig, "get_path", return_value=str(path.parent)):
                self.assertEqual(support.install_line("tiktoken"), line)
        readmes = [(DATA.parent / name).read_text() for name in ("requirements.txt", "data/README.md",
                                                                 "scripts/README.md")]
        for text in readmes:
            self.assertIn(f"{venv}python3 -m pip install -r requirements.txt\n", text)

    def test_progress(self):
        shown = support.Progress(200_000_000)
        shown.begin -= 2
        shown.update(100_000_000, 1, 5)
        self.assertRegex(shown.line(100_000_000), r"^50\.0% \| 100\.0 MB, (50\.0|49\.\d) MB/s \| 1 document \| "
                                                  r"5 tokens \| eta 00:00:0[12]$")

    def test_hugging_face_dataset(self):
        # A replacement for the package: it streams, and like the real one refuses a dataset that is a script.
        self.file("fake/datasets.py", """
def load_dataset(path, split, streaming, name=None, revision=None):
    assert streaming
    if path == "owner/absent":
        raise FileNotFoundError("no such dataset")
    if path == "Skylion007/openwebtext" and revision is None:
        raise RuntimeError("Dataset scripts are no longer supported, but found openwebtext.py")
    return ({"text": f"{path} {split} {name} {revision} {i}"} for i in range(10 ** 9))
""")
        fake = self.folder / "fake"

        def documents(*arguments):
            self.prepare_bytes("--valid-fraction", "0", "--max-documents", "2", "--overwrite", *arguments,
                               packages=fake)
            return [document.decode() for document in documents_of(self.out, "train")]

        self.assertEqual(documents("slimpajama"), [f"cerebras/SlimPajama-627B train None None {i}" for i in (0, 1)])
        self.assertEqual(documents("hf:owner/name", "--dataset-config", "en", "--dataset-split", "test")[1],
                         "owner/name test en None 1")
        self.assertEqual(documents("fineweb-edu")[0], "HuggingFaceFW/fineweb-edu train sample-10BT None 0")
        self.assertEqual(documents("fineweb", "--dataset-config", "CC")[0], "HuggingFaceFW/fineweb train CC None 0")
        self.assertEqual(documents("openwebtext")[0], "Skylion007/openwebtext train None refs/convert/parquet 0")
        self.assertIn("dataset owner/absent: FileNotFoundError: no such dataset; files of it that are here already",
                      self.prepare_bytes("--overwrite", "hf:owner/absent", packages=fake, code=2))
        self.assertIn("row 1: no field 'body'",
                      self.prepare_bytes("--overwrite", "--text-field", "body", "slimpajama", packages=fake, code=2))

    def test_tiny_shakespeare_is_downloaded_once_and_checked(self):
        content = lines(3000).encode()
        asked = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):   # noqa: N802, the name that the library calls
                asked.append(self.path)
                self.send_response(200 if "input" in self.path else 404)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_):
                pass
        server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.addCleanup(server.server_close)
        self.addCleanup(server.shutdown)
        url, sha256 = f"http://127.0.0.1:{server.server_port}", hashlib.sha256(content).hexdigest()

        def prepare(*place, code=0):
            with unittest.mock.patch.object(text_shards, "TINY_SHAKESPEARE", place):
                return self.prepare_bytes("--overwrite", "--valid-fraction", "0", "tinyshakespeare", code=code)
        for _ in range(2):
            prepare(url + "/input.txt", sha256)
        self.assertEqual(asked, ["/input.txt"])
        documents = documents_of(self.out, "train")
        self.assertEqual(sum(map(len, documents)), len(content))
        (self.out / "input.txt").unlink()
        self.assertIn(f"input.txt: SHA-256 is {sha256}, expected 86c4", prepare(url + "/input.txt", "86c4", code=2))
        with self.nothing_left_open():
            self.assertIn("/gone (Not Found): fetch it elsewhere and name the file",
                          prepare(url + "/gone", sha256, code=2))
        self.assertIn("cannot download", prepare("http://127.0.0.1:1/input.txt", sha256, code=2))
        self.assertEqual(list(self.out.glob("input*")), [])
