"""Runs scripts/import_config on files in a new folder, for its tests."""
import contextlib
import importlib.util
import io
import json
import os
import subprocess
import tempfile
import unittest
from pathlib import Path

from llmfp8.importer.engine import Import
from llmfp8.importer.main import main, read_input
from llmfp8.support import run_main

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("LLMC_BUILD", ROOT / "build" / "cpu"))
FIXTURES = ROOT / "tests" / "fixtures" / "import"
NO_YAML = importlib.util.find_spec("yaml") is None

MEGATRON = "torchrun pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --micro-batch-size 1 " \
           "--seq-length 32 --max-position-embeddings 32 --train-iters 10 --lr 1e-3 --bf16 "
LLAMAFACTORY = "torchrun train.py --stage pt --finetuning_type full --per_device_train_batch_size 1 --max_steps 10 "
LLMC = "mpirun -np 4 ./train_gpt2cu -i a.bin -b 4 "
ZERO1 = '{"zero_optimization": {"stage": 1}, '


def import_file(folder, name, text, given=None):
    """Imports one file with this text."""
    path = Path(folder) / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    run = Import()
    read_input(run, str(path), given or {})
    run.finish()
    return run


class ImportCase(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="llmc-import-")
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def run_script(self, *arguments):
        """Calls the script in this process, since starting Python takes longer than an import."""
        before, out, err = os.getcwd(), io.StringIO(), io.StringIO()
        os.chdir(FIXTURES)
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), self.assertRaises(SystemExit) as end:
                run_main(lambda: main(list(map(str, arguments))))
        finally:
            os.chdir(before)
        return subprocess.CompletedProcess(arguments, end.exception.code, out.getvalue(), err.getvalue())

    def assert_accepted(self, options, family):
        path = self.folder / "accepted.json"
        path.write_text(json.dumps(options))
        done = subprocess.run([BUILD / f"train_{family}", "--config", path, "--print-config"], cwd=self.folder,
                              capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, f"{options}\n{done.stderr}")
