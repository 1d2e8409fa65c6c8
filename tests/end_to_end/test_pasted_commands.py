"""Every command in README.md, scripts/README.md, data/README.md and docs/ is run as written, in a folder like a user's
after `make`, or a table here says why it cannot be run. A command that is in no table fails the test."""
import glob
import importlib.util
import json
import os
import re
import shutil
import tempfile
import unittest
from pathlib import Path

from llmfp8.chat_templates import LLAMA3
from tests.support.ranks import HAVE_RANKS
from tests.support.run_command import run_command
from tests.support.train import BUILD, GPT2, LLAMA, ROOT

DOCUMENTS = ("README.md", "scripts/README.md", "data/README.md",
             *(os.path.relpath(path, ROOT) for path in sorted(glob.glob(os.path.join(ROOT, "docs", "*.md")))))
BLOCK = re.compile(r"(?ms)^ *```(\w*)\n(.*?)^ *```$")
# Inline code, and lines of blocks that are not marked as sh, are commands if they begin with one of these words and
# have more words.
COMMAND = re.compile(r"(?:\./train_|scripts/|data/)\S*\s\S|(?:make|docker|sbatch|apt-get|pip|python3|\.) \S")
COPIED = ("scripts", "data")   # scripts take the executables beside the folder that they really are in
TINY = ("--model llama-tiny --vocab-size 257 --seq-length 128 --max-position-embeddings 128 --num-layers 1 "
        "--micro-batch-size 1 --global-batch-size 4 --train-iters 1")

# The reasons why commands are not run.
CI, FULL, GPU, NETWORK = "run by .ci/run", "run by make test-full", "needs a GPU", "needs a network"
WALK = "run by tests/end_to_end/test_walkthrough.py"
NOT_RUN = {
    "data/prepare_text.py --tokenizer bytes --valid-fraction 0.1 --out shards/mine text/": WALK,
    "./train_llama --model llama-tiny --fp8-recipe delayed --train-data 'shards/mine/train*.bin' "
    "--valid-data 'shards/mine/valid*.bin' --micro-batch-size 4 --train-iters 600 --lr 4e-3 --eval-interval 300 "
    "--log-interval 100 --save runs/mine": WALK,
    "./train_llama generate --load runs/mine --prompt 'ROMEO:' --sample-tokens 120": WALK,
    "data/prepare_text.py --tokenizer bytes --out shards/mine tinyshakespeare": NETWORK,
    "data/prepare_text.py --tokenizer gpt2 --out shards/gpt2 text/": NETWORK,
    "make smoke": CI, "make test": CI, "make cuda": CI, "make lint": CI, "make test-ranks": CI,
    "make cluster-test": FULL, "make drill": FULL, "make image-test": FULL,
    "make test-full": "takes too long", "make test-gpu": GPU,
    "make bench": GPU, "make DEVICE=cuda": GPU,
    "make DEVICE=cuda benches && build/cuda/bench_attention": GPU,
    "docker build -t llm.fp8 --build-arg COMMIT=$(git describe --always --abbrev=12 --dirty) .": FULL,
    "docker run --rm --gpus all llm.fp8 && docker run --rm --gpus all llm.fp8 make test": GPU,
    "apt-get install -y git make": "changes the system", "apt-get install -y python3-venv": "changes the system",
    "scripts/launch/launch_mpi.sh --hostfile hosts -np 16 ./train_llama ...": "tests/cluster/with_ssh.py",
    "sbatch --nodes 2 scripts/launch/train.sbatch ./train_llama ...": "tests/cluster/with_slurm.py",
    "./train_llama bench": "takes minutes on a CPU; tests/end_to_end/test_bench_command.py",
    "scripts/export_fp8 --load CHECKPOINT --out DIR": "tests/end_to_end/test_export_fp8.py",
    "scripts/recipes/RECIPE.sh --dry-run": "RECIPE stands for a script; tests/python/test_recipes.py",
    "python3 -m venv .venv && . .venv/bin/activate && python3 -m pip install -r requirements.txt": NETWORK,
    ". .venv/bin/activate && python3 -m pip install 'lm_eval[hf]' torch": NETWORK,
    "lm_eval --model hf --model_args pretrained=out/step-00001000,dtype=bfloat16 --tasks hellaswag --batch_size 16":
        NETWORK,
    'scripts/generate out/step-00001000 "Once" --tokenizer gpt2': NETWORK,
    "scripts/export_log --to wandb out --out out --follow &": NETWORK,
    "data/prepare_text.py --tokenizer gpt2 --out shards --valid-fraction 0.005 openwebtext": NETWORK,
    "data/prepare_chat.py --tokenizer Meta-Llama-3-8B-Instruct/tokenizer.json --out shards/ultrachat": NETWORK,
    "data/prepare_hellaswag.py": NETWORK,
    "data/prepare_hellaswag.py --input hellaswag_val.jsonl": NETWORK,
    "data/prepare_hellaswag.py --tokenizer Meta-Llama-3-8B/tokenizer.json --with-separator --out shards/llama3_val.bin":
        NETWORK,
    "data/inspect_shards.py --show 5000:200 --tokenizer gpt2 shards/valid_000000.bin": NETWORK,
}
# The commands that are run as written, and their particulars. before: a shell line that runs first; dots: the words
# for "..."; fewer: words and others in their place, so that a CPU has less to do; more: options that avoid the need for
# a GPU; codes: other exit codes that are right; needs: Python packages.
RUN = {
    "make": {"more": "-n"}, "make train_llama": {"more": "-n"}, "make train_gpt2 train_llama": {"more": "-n"},
    "make DEVICE=cpu": {"more": "-n"}, "make help": {},
    "./train_gpt2 --help": {}, "./train_gpt2 --help-all": {}, "./train_llama plan": {},
    "./train_gpt2 plan --model gpt2-124M": {},
    "./train_llama plan --model llama3-small --fp8-recipe delayed --micro-batch-size 8 --global-batch-size 64": {},
    "./train_llama --model llama3-small --fp8-recipe delayed --micro-batch-size 8 --global-batch-size 64 "
    "--train-iters 3000 --train-data 'shards/train*.bin' --valid-data 'shards/valid*.bin' --save out --resume auto": {
        "more": "--dry-run"},
    "./train_llama plan --model llama3-8B --fp8-recipe delayed --seq-length 8192 --global-batch-size 128 --ranks 8": {},
    "scripts/launch/launch_mpi.sh -np 8 ./train_llama --model llama3-8B --fp8-recipe delayed --seq-length 8192 "
    "--global-batch-size 128 --train-iters 1000 --train-data 'shards/train*.bin' --save out --resume auto": {
        "ranks": True, "fewer": ("-np 8", "-np 2"), "more": "--dry-run"},
    "./train_llama doctor --save out": {},
    "scripts/launch/launch_mpi.sh -np 8 ./train_llama doctor --save out": {"ranks": True, "fewer": ("-np 8", "-np 2")},
    "scripts/launch/launch_mpi.sh -np 4 ./train_llama ...": {"ranks": True, "dots": f"{TINY} --synthetic-data"},
    "python3 data/prepare_text.py --help": {},
    "./train_gpt2 --model gpt2-124M --train-data 'shards/train*.bin' --valid-data 'shards/valid*.bin' "
    "--micro-batch-size 32 --global-batch-size 512 --train-iters 10000 --save out --resume auto": {"more": "--dry-run"},
    "./train_llama generate --load out --prompt '1 2 3'": {},
    'scripts/generate out "The meaning of life is"': {"more": "--tokenizer bytes"},
    'scripts/generate Llama-3.1-8B "Once" -- --sample-tokens 100 --temperature 0.7 --top-k 50': {
        "before": "cp -r out/step-* Llama-3.1-8B",
        "fewer": ('"Once" -- --sample-tokens 100', '"Once" --tokenizer bytes -- --sample-tokens 9')},
    "./train_llama ... --save out --tokenizer Meta-Llama-3-8B": {
        "before": "rm -r out", "dots": f"{TINY} --synthetic-data"},
    "scripts/recipes/train_llama3_8b_h200_fp8.sh --dry-run": {},
    "scripts/recipes/train_llama3_8b_h200_fp8.sh --synthetic-data --train-iters 20": {"more": "--dry-run"},
    "scripts/recipes/train_llama3_8b_h200_fp8.sh --save out --resume auto": {"more": "--dry-run"},
    "./train_gpt2 --model gpt2-124M --train-data 'shards/gpt2/train*.bin' --train-iters 1000": {"more": "--dry-run"},
    "scripts/watch out": {},
    "scripts/report runs/mine/log.jsonl": {"before": "mkdir runs/mine && cp out/log.jsonl runs/mine"},
    "scripts/report out/log.jsonl": {}, "scripts/report out/log.jsonl --out run.html": {},
    "scripts/report runs --out both.html": {"before": "mkdir -p runs/a && cp a.jsonl runs/a"},
    "scripts/alerts out --webhook @webhook.txt": {"before": "echo http://127.0.0.1:9 > webhook.txt", "codes": (1,)},
    "scripts/alerts out --webhook @webhook.txt &": {"before": "echo http://127.0.0.1:9 > webhook.txt"},
    "scripts/alerts out --command 'mail -s \"$ALERT_KIND\" me@example.com' &": {},
    "scripts/export_log --to tensorboard out --out board --follow": {"needs": "tensorboard"},
    "scripts/export_log --to tensorboard out --out board --follow &": {"needs": "tensorboard"},
    "scripts/export_log --to csv out/log.jsonl --out run.csv": {},
    "make && scripts/compare --table llama3-small --out runs/small -- --synthetic-data": {
        "before": "rm -r runs", "dry_run": True},
    **{f"scripts/compare --table {table} --out runs/{folder} -- --synthetic-data": {
        "before": "rm -r runs", "dry_run": True}
       for table, folder in (("llama3-8b", "8b"), ("8b-h100", "8b-h100"), ("zero", "zero"), ("context", "context"),
                             ("long", "long"), ("70b", "70b"), ("experts", "experts"), ("70b-resident", "70b-resident"),
                             ("int8-forward", "int8"), ("llama3-small", "small"),
                             ("gpt2-recipes", "recipes"), ("gpt2-1558M", "1558M"), ("gpt2", "gpt2"),
                             ("formats", "formats"), ("muon", "muon"),
                             ("modern-gpt2", "modern"), ("margins", "margins"), ("finetune", "finetune"))},
    "scripts/compare --table gpt2-recipes --train-iters 2000 --out runs/losses": {"more": "--dry-run"},
    "scripts/compare --run 'a=./train_gpt2 --model gpt2-124M ...' --run 'b=./train_gpt2 ...' --out runs/ab": {
        "dots": "--synthetic-data --seed 3", "more": "--dry-run"},
    "scripts/compare bf16=a.jsonl fp8=b.jsonl --out runs/tables": {},
    "scripts/compare runs/small": {},
    "scripts/import_config train.sh --out run.json": {"codes": (1,)},
    "scripts/import_config train.sh --all": {"codes": (1,)},
    "./train_llama --config run.json --dry-run": {"before": "scripts/import_config train.sh --out run.json || true"},
    "scripts/import_config sft.yaml ds_config.json --ranks 8": {"codes": (1,), "needs": "yaml"},
    "scripts/import_config train.sh --set DATA=shards/pile": {"codes": (1,)},
    "data/prepare_text.py --tokenizer bytes --out shards --valid-fraction 0.1 README.md llmc/": {
        "before": "rm -r shards"},
    "data/prepare_text.py --tokenizer Meta-Llama-3-8B/tokenizer.json --out shards corpus/*.jsonl.zst": {
        "before": "rm -r shards", "needs": "tokenizers zstandard", "more": "--valid-fraction 0.5"},
    "data/prepare_text.py --tokenizer gpt2 --vocab-bpe vocab.bpe --encoder-json encoder.json --out shards corpus/": {
        "before": "rm -r shards", "needs": "tiktoken zstandard", "more": "--valid-fraction 0.5"},
    "data/prepare_chat.py --tokenizer Meta-Llama-3-8B-Instruct/tokenizer.json --out shards/mine chats/*.jsonl": {
        "needs": "tokenizers jinja2", "more": "--valid-fraction 0.5"},
    "data/prepare_chat.py --tokenizer bytes --template plain --out shards/mine chats.jsonl": {},
    "data/inspect_shards.py shards/train_000000.bin": {},
    "data/inspect_shards.py --bigram-entropy shards/valid_*.bin": {}, "data/check_shards.py shards/*.bin": {},
}


def pasted(text):
    """The commands of a document as a user types them, without comments."""
    found = []
    for kind, body in BLOCK.findall(text):
        for line in body.replace("\\\n", " ").splitlines():
            command = " ".join(re.sub(r"(^|\s)#\s.*", "", line).split())
            if command and kind == "sh" or COMMAND.match(command):
                found.append(command)
    for code in re.findall(r"`([^`]+)`", BLOCK.sub("", text)):
        if COMMAND.match(code):
            found.append(" ".join(code.split()))
    return found


class Documents(unittest.TestCase):
    def test_every_command_is_run_or_has_a_reason(self):
        found = set()
        for name in DOCUMENTS:
            with open(os.path.join(ROOT, name), encoding="utf-8") as file:
                found.update(pasted(file.read()))
        self.assertEqual(found - {*RUN, *NOT_RUN}, set(), "neither run nor with a reason")
        self.assertEqual({*RUN, *NOT_RUN} - found, set(), "in no document")
        self.assertFalse(set(RUN) & set(NOT_RUN))

    def test_what_ci_is_said_to_run_is_in_it(self):
        with open(os.path.join(ROOT, ".ci", "run")) as run, \
                open(os.path.join(ROOT, "dev", "ci", "fresh_debian13.sh")) as fresh:
            ci = run.read() + fresh.read()
        lint = re.search(r"(?m)^lint:.*\n\t.*?(dev/ci/lint\.py)", Path(ROOT, "Makefile").read_text())
        for command in [command for command, reason in NOT_RUN.items() if reason == CI]:
            words = {"make smoke": "inside make smoke", "make lint": lint[1] if lint else None}.get(command, command)
            self.assertIn(words, ci)


@unittest.skipUnless(os.access(LLAMA, os.X_OK) and not os.path.basename(BUILD).startswith("cuda"),
                     "needs the executables of the CPU")
class PastedCommands(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        """A folder as a user has it: the repository, executables, shards, a checkpoint, logs, configurations."""
        cls.home = tempfile.mkdtemp(prefix="llmc-pasted-")
        cls.addClassCleanup(shutil.rmtree, cls.home, ignore_errors=True)
        for name in COPIED:
            shutil.copytree(os.path.join(ROOT, name), cls.path(name), ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("Makefile", "README.md", "requirements.txt", "llmc", "dev", "tests"):
            os.symlink(os.path.join(ROOT, name), cls.path(name))
        os.symlink(GPT2, cls.path("train_gpt2"))
        os.symlink(LLAMA, cls.path("train_llama"))
        cls.environment = {**os.environ, "LLMC_BUILD": BUILD, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1",
                           "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
                           "OMPI_MCA_rmaps_base_oversubscribe": "1",
                           "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
        for name in ("DATA", "RANKS", "MODEL", "TOKENIZER", "MAKEFLAGS", "MAKELEVEL"):
            cls.environment.pop(name, None)
        for command in ("data/prepare_text.py --quiet --tokenizer bytes --out shards --valid-fraction 0.1 llmc/train",
                        f"./train_llama {TINY} --train-data 'shards/train*.bin' --save out --log-file out/log.jsonl"):
            cls.paste(command, cls.home)
        fixtures = os.path.join(ROOT, "tests", "fixtures")
        for source, names in (("logs/bf16.jsonl", ("a.jsonl", "runs/small/bf16.1.jsonl")), ("logs/resumed.jsonl", (
                "b.jsonl", "runs/small/delayed.1.jsonl")), ("import/megatron_8b.sh", ("train.sh",)), (
                "import/wrong_sft.yaml", ("sft.yaml",)), ("import/wrong_zero1.json", ("ds_config.json",))):
            for name in names:
                os.makedirs(os.path.dirname(cls.path(name)), exist_ok=True)
                shutil.copy(os.path.join(fixtures, source), cls.path(name))
        cls.write_inputs()

    @classmethod
    def write_inputs(cls):
        chat = [{"messages": [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": f"a{i}"}]}
                for i in range(100)]
        special = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
        tokenizer = {"version": "1.0", "truncation": None, "padding": None, "normalizer": None,
                     "pre_tokenizer": {"type": "WhitespaceSplit"},
                     "post_processor": None, "decoder": None,
                     "added_tokens": [{"id": i, "content": text, "single_word": False, "lstrip": False, "rstrip": False,
                                       "normalized": False, "special": True} for i, text in enumerate(special)],
                     "model": {"type": "WordLevel", "unk_token": "?", "vocab": {
                         **{text: i for i, text in enumerate(special)}, "?": 4}}}
        printable = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
        letters = [chr(b) for b in printable] + [chr(256 + i) for i in range(256 - len(printable))]
        files = {"chats.jsonl": "".join(json.dumps(row) + "\n" for row in chat), "vocab.bpe": "#version: 0.2\na b\n",
                 "encoder.json": json.dumps({name: i for i, name in enumerate([*letters, "ab", "<|endoftext|>"])})}
        files["chats/a.jsonl"] = files["chats.jsonl"]
        for folder in ("Meta-Llama-3-8B", "Meta-Llama-3-8B-Instruct"):
            files[folder + "/tokenizer.json"] = json.dumps(tokenizer)
        files["Meta-Llama-3-8B-Instruct/chat_template.jinja"] = LLAMA3
        for name, content in files.items():
            os.makedirs(os.path.dirname(cls.path(name)), exist_ok=True)
            with open(cls.path(name), "w", encoding="utf-8") as file:
                file.write(content)
        os.makedirs(cls.path("corpus"))
        if importlib.util.find_spec("zstandard"):
            import zstandard
            rows = "".join(json.dumps({"text": f"text {i}"}) + "\n" for i in range(100)).encode()
            Path(cls.path("corpus/a.jsonl.zst")).write_bytes(zstandard.ZstdCompressor().compress(rows))

    @classmethod
    def path(cls, name):
        return os.path.join(cls.home, name)

    @classmethod
    def paste(cls, command, folder, codes=(0,)):
        done = run_command(["bash", "-c", command], None, cwd=folder, env=cls.environment, errors="replace")
        if done.returncode not in codes:
            raise AssertionError(f"exit code {done.returncode} of {command}\n{done.stdout[-2000:]}"
                                 f"{done.stderr[-2000:]}")
        return done

    def one(self, command, how):
        missing = [name for name in how.get("needs", "").split() if not importlib.util.find_spec(name)]
        if missing:
            self.skipTest("needs " + ", ".join(missing))
        if how.get("ranks") and not HAVE_RANKS:
            self.skipTest("needs OpenMPI")
        folder = tempfile.mkdtemp(prefix="pasted-", dir=os.path.dirname(self.home))
        self.addCleanup(shutil.rmtree, folder, ignore_errors=True)
        shutil.copytree(self.home, folder, symlinks=True, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*COPIED))
        for name in COPIED:
            os.symlink(self.path(name), os.path.join(folder, name))
        line = command.replace("...", how.get("dots", "...")).replace(*how.get("fewer", ("", "")))
        if how.get("more"):
            line += " " + how["more"]
        if how.get("dry_run"):
            line = line.removeprefix("make && ").replace(" -- ", " --dry-run -- ")
        if how.get("before"):
            self.paste(how["before"], folder)
        self.paste(line, folder, (0, *how.get("codes", ())))


def add_tests():
    """A test for each command."""
    for number, (command, how) in enumerate(RUN.items(), 1):
        def test(self, command=command, how=how):
            self.one(command, how)
        words = re.sub(r"\W+", "_", command).strip("_")
        setattr(PastedCommands, f"test_{number:02d}_{words[:60]}", test)


add_tests()
