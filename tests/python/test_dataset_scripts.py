"""data/prepare_tinyshakespeare.py, ..._openwebtext.py, ..._slimpajama.py, ..._fineweb.py, without a network."""
import hashlib
import http.server
import json
import sys
import threading
import unittest
import unittest.mock

import prepare_fineweb
import prepare_slimpajama
import prepare_tinyshakespeare
from llmfp8 import text_shards
from tests.support.data_scripts import ScriptTest, documents_of, has, lines

SCRIPTS = {"openwebtext": "Skylion007/openwebtext", "slimpajama": "cerebras/SlimPajama-627B",
           "fineweb": "HuggingFaceFW/fineweb"}


class DatasetScripts(ScriptTest):
    def run_script(self, name, *arguments, code=0, **keywords):
        return self.script(f"prepare_{name}.py", "--out", self.out, "--tokenizer", "bytes", *arguments, code=code,
                           **keywords)

    def test_local_files_in_place_of_the_download(self):
        rows = "".join(json.dumps({"text": f"document {i} \u00e9"}) + "\n" for i in range(40))
        for name in (*SCRIPTS, "tinyshakespeare"):
            path = self.file(f"{name}.jsonl", rows)
            self.run_script(name, "--valid-fraction", "0", "--overwrite", "--input", path)
            self.assertEqual(documents_of(self.out, "train"), [f"document {i} \u00e9".encode() for i in range(40)])
            self.assertIn("0 damaged", self.script("check_shards.py", *self.out.glob("*.bin")))

    def test_defaults(self):
        """The options with which prepare_text is called."""
        cases = {("openwebtext",): (["openwebtext"], "gpt2", "shards/openwebtext", 0.005, ""),
                 ("slimpajama", "--tokenizer", "x"): (["slimpajama"], "x", "shards/slimpajama", 0.005, ""),
                 ("slimpajama", "--tokenizer", "x", "--sample", "6B"): (["hf:DKYoon/SlimPajama-6B"], "x",
                                                                        "shards/slimpajama", 0.005, ""),
                 ("fineweb",): (["hf:HuggingFaceFW/fineweb"], "gpt2", "shards/fineweb", 0.001, "sample-10BT"),
                 ("fineweb", "--edu", "--sample", "100BT"): (["hf:HuggingFaceFW/fineweb-edu"], "gpt2",
                                                             "shards/fineweb", 0.001, "sample-100BT"),
                 ("fineweb", "--dataset-config", "CC"): (["hf:HuggingFaceFW/fineweb"], "gpt2", "shards/fineweb", 0.001,
                                                         "CC")}
        for (name, *arguments), expected in cases.items():
            with unittest.mock.patch.object(text_shards, "prepare", return_value=0) as prepare:
                self.script(f"prepare_{name}.py", *arguments)
            args = prepare.call_args[0][0]
            got = (args.inputs, args.tokenizer, args.out, args.valid_fraction, args.dataset_config)
            self.assertEqual(got, expected)
        self.assertIn("both choose a part", self.run_script("fineweb", "--sample", "all", "--dataset-config", "CC",
                                                            code=2))
        self.assertEqual(set(prepare_fineweb.SAMPLES), {"10BT", "100BT", "350BT", "all"})
        self.assertEqual(set(prepare_slimpajama.NAMES), {"627B", "6B"})

    def test_a_missing_package_is_named_with_the_line_that_installs_it(self):
        with unittest.mock.patch.dict(sys.modules, datasets=None):
            for name, source in SCRIPTS.items():
                text = self.run_script(name, code=2)
                self.assertIn(f"error: the dataset {source} needs the Python package datasets", text)
                self.assertIn("python3 -m pip install 'datasets==", text)
                self.assertEqual(text.count("\n"), 1)
        self.assertEqual(list(self.out.iterdir()), [])

    @unittest.skipUnless(has("datasets"), "needs datasets")
    def test_without_a_network_local_files_are_proposed(self):
        with unittest.mock.patch("datasets.load_dataset", side_effect=ConnectionError("Couldn't reach\nthe hub")):
            text = self.run_script("openwebtext", code=2)
        self.assertEqual(text, "error: dataset Skylion007/openwebtext: ConnectionError: Couldn't reach the hub; files "
                         "of it that are here already: --input PATH\n")

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
        url = f"http://127.0.0.1:{server.server_port}"
        patch = unittest.mock.patch.multiple(prepare_tinyshakespeare, URL=url + "/input.txt",
                                             SHA256=hashlib.sha256(content).hexdigest())
        with patch:
            for _ in range(2):
                self.run_script("tinyshakespeare", "--overwrite")
        self.assertEqual(asked, ["/input.txt"])
        train, valid = documents_of(self.out, "train"), documents_of(self.out, "valid")
        self.assertEqual(sum(map(len, train + valid)), len(content))
        self.assertGreater(len(valid), 0)
        (self.out / "input.txt").unlink()
        with unittest.mock.patch.multiple(prepare_tinyshakespeare, URL=url + "/input.txt"):
            text = self.run_script("tinyshakespeare", "--overwrite", code=2)
        self.assertIn(f"input.txt: SHA-256 is {hashlib.sha256(content).hexdigest()}, expected 86c4e6aa", text)
        with self.nothing_left_open(), unittest.mock.patch.multiple(prepare_tinyshakespeare, URL=url + "/gone"):
            text = self.run_script("tinyshakespeare", "--overwrite", code=2)
        self.assertIn("/gone (Not Found): fetch it elsewhere and pass --input FILE", text)
        with unittest.mock.patch.multiple(prepare_tinyshakespeare, URL="http://127.0.0.1:1/input.txt"):
            self.assertIn("cannot download", self.run_script("tinyshakespeare", "--overwrite", code=2))
        self.assertEqual(list(self.out.glob("input*")), [])


if __name__ == "__main__":
    unittest.main()
