"""Runs scripts/import_config on files in a new folder, for its tests."""
import importlib.util
import json
import os
from pathlib import Path

from llmfp8.importer.engine import Import
from llmfp8.importer.main import main, read_input
from tests.support.folder import FolderTest, call_main
from tests.support.run_command import run_command

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("LLMC_BUILD", ROOT / "build" / "cpu"))
FIXTURES = ROOT / "tests" / "fixtures" / "import"
NO_YAML = importlib.util.find_spec("yaml") is None

MEGATRON = "torchrun pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --micro-batch-size 1 " \
           "--seq-length 32 --max-position-embeddings 32 --train-iters 10 --lr 1e-3 --bf16 "
LLAMAFACTORY = "torchrun train.py --stage pt --finetuning_type full --per_device_train_batch_size 1 --max_steps 10 "
ZERO1 = '{"zero_optimization": {"stage": 1}, '


def import_file(folder, name, text, given=None):
    """Imports one file with this text."""
    path = Path(folder) / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    run = Import()
    read_input(run, str(path), given or {})
    run.finish()
    return run


class ImportCase(FolderTest):
    @staticmethod
    def run_script(*arguments):
        return call_main(main, "import_config", *arguments, cwd=FIXTURES)

    def assert_accepted(self, options, family):
        path = self.folder / "accepted.json"
        path.write_text(json.dumps(options))
        run_command([BUILD / f"train_{family}", "--config", path, "--print-config"], cwd=self.folder)
