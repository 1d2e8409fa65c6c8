"""Mistakes of users: each ends with one line that has the remedy, and with the right exit code.

A row has the command, its exit code and parts of the line. Commands run in a folder with the files of
tests/support/mistake_files.py. `gpt2` and `llama` are the executables, RUN is a small run of two steps, SHAPE the same
without data and length. MISTAKES=print shows every line.
"""
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import unittest
from concurrent.futures import ThreadPoolExecutor

from tests.support.run_command import run_command
from tests.support import mistake_files
from tests.support.train import BUILD, GPT2, LLAMA, ROOT, TrainTest

SHAPE = " ".join(TrainTest.SHAPE)
GPT2_SHAPE = f"--model gpt2-tiny {SHAPE} --num-query-groups 4"
LLAMA_SHAPE = f"--model llama-tiny {SHAPE} --num-query-groups 2"
DATA = "--train-data train.bin --train-iters 2"
WITH = "gpt2 SHAPE --train-iters 2 --train-data"
GENERATE = "gpt2 generate --load ck"
TEXT = "data/prepare_text.py --tokenizer bytes --out out"
# Words that occur only in messages of libraries, and beginnings of the output of a crash.
FOREIGN = re.compile(r"json\.exception|basic_filebuf|basic_string|filesystem error|what\(\)|terminate called|std::|"
                     r"Traceback|Error: |errno|\bException\b|argparse")

OPTIONS = [
    ("gpt2", 2, "--train-data is missing", "--train-iters or --epochs is missing"),
    ("gpt2 RUN --learning_rate 1e-3", 2, "unknown option --learning_rate (", "use --lr"),
    ("gpt2 RUN --xyzzy 3", 2, "unknown option --xyzzy", "--help-all lists all"),
    ("gpt2 RUN \u2013\u2013lr 3", 2, "typographic dash", "--lr"),
    ("gpt2 RUN lr=1e-3", 2, 'unexpected word "lr=1e-3": write --lr=1e-3'),
    ("gpt2 RUN --lr = 1e-3", 2, "--lr =: write --lr VALUE or --lr=VALUE"),
    ("gpt2 RUN --lr 1e-3 2e-3", 2, 'unexpected word "2e-3"', "a value follows its option"),
    ("gpt2 RUN --save ''", 2, "--save '' is empty: leave it out, or set the shell variable"),
    ("gpt2 train --lr 1", 2, "no command train", "plan, bench, doctor and generate"),
    ("gpt2 Plan", 2, "no command Plan: did you mean plan?"),
    ("gpt2 array.json", 2, "no command array.json", "--config array.json"),
    ("llama --model meta-llama/Meta-Llama-3-8B", 2, "not a preset", "download it and name its folder with --load"),
    ("gpt2 RUN '--lr 1e-3'", 2, 'unknown option "--lr 1e-3"', "leave the quotes around both out"),
]

VALUES = [
    ("gpt2 RUN --lr 0,001", 2, "--lr 0,001: must be a number", "without commas, with a point before decimals"),
    ("gpt2 RUN --weight-decay 10%", 2, "--weight-decay 10%: must be", "write it as a share, 0.1"),
    ("gpt2 RUN --train-iters 0", 2, "a run of 0 steps has no length"),
    ("gpt2 RUN --train-iters 5k", 2, "units are not read: write 5000, or 5120 for 5 x 1024"),
    ("gpt2 RUN --dtype bfloat16", 2, "must be one of bf16, fp32; did you mean bf16?"),
    ("gpt2 RUN --dtype float16", 2, "there is no FP16; bf16 has FP32's range"),
    ("gpt2 RUN --dtype fp8", 2, "FP8 is --fp8-recipe int8-forward, delayed, tensorwise or blockwise"),
    ("gpt2 RUN --fp8-recipe mxfp8", 2, "must be one of none, delayed", "blockwise has the finest scaling factors"),
    ("gpt2 RUN --qk-layernorm --qk-clip 100", 2, "normalises queries and keys (--qk-layernorm)", "leave it out"),
    ("gpt2 RUN --offload activations", 2, "those of 3 layers stay on the GPU, and the model has 2"),
    ("gpt2 RUN --offload weights", 2, "moments, masters and activations, separated by commas"),
    ("gpt2 RUN --global-batch-size 5", 2, "a multiple of --micro-batch-size 2 x 1 rank: 4 or 6 would be one, or take "
     "--micro-batch-size 1"),
    ("gpt2 RUN --global-batch-size 1000", 2, "187 samples of 16; needs 1000", "lower that to 187"),
    ("gpt2 SHAPE --train-data train.bin --epochs 0.0001", 2, "187 samples is less than one step of 4; lower"),
    ("gpt2 SHAPE --train-data train.bin --epochs 1 --lr-warmup-iters 47", 2, "47 exceeds the 46 steps of --epochs 1"),
    ("gpt2 RUN --ranks 4", 2, "--ranks 4, and 1 was started: scripts/launch/launch_mpi.sh -np 4 starts them"),
    ("gpt2 RUN --fp8-recipe delayed --ffn-hidden-size 40", 2, "multiples of 16", "up of layers 0-1", "--bf16-linears"),
    ("gpt2 RUN --lr '\x1b[2J\u202ex'", 2, r"--lr \x1b[2J\u202ex: must be a number"),
    ("gpt2 RUN --lr '1\n2'", 2, r"--lr 1\x0a2: must be a number"),
    (f"gpt2 RUN --lr '{'1 ' * 9999}'", 2, "--lr 1 1 1", "1 1...", ": must be a number in (0, 10]"),
    (f"gpt2 RUN --config /begin/{'x' * 5000}/end.json", 2, "read /begin/xxx", "xxx...xxx", "xxx/end.json: File "),
]

OTHER_TRAINERS = [   # test_foreign_options.cpp has every name
    ("gpt2 RUN -h 1", 2, "unknown option -h (llm.c): use --hellaswag-data FILE", "-h alone prints the help"),
]

SHARDS = [
    (f"{WITH} none*.bin", 2, "matches no file; data/prepare_text.py makes shards"),
    (f"{WITH} \"'train*.bin'\"", 2, "the quotes are a part of it: leave the inner"),
    (f"{WITH} train.bin,valid.bin", 2, "separated by spaces, not by commas"),
    (f"{WITH} 'train.bin valid.bin'", 2, "every pattern is a separate word"),
    (f"{WITH} '$DATA/*.bin'", 2, "a variable in single quotes"),
    (f"{WITH} text.bin", 2, "byte 0", "this is text; data/prepare_text.py makes"),
    (f"{WITH} pointer.bin", 2, "'pointer.bin': a git-lfs pointer in place of the file; git lfs pull fetches that"),
    (f"{WITH} doc.bin", 2, "byte 0", "this is a PDF; pdftotext makes text of it"),
    (f"{WITH} packed.bin", 2, "byte 0", "this is a gzip file; unpack it"),
    (f"{WITH} train.bin chat1.bin chat2.bin", 2, "'chat2.bin' has another chat template than 'chat1.bin'"),
    (f"{WITH} deep.bin", 2, 'deep.meta.json: "tokenizer" is nested deeper than 64 levels'),
    (f"{WITH} broken.bin", 2, "broken.meta.json: not JSON: parse error at line 1, column 32"),
    ("gpt2 RUN --valid-data other.bin", 2, "--valid-data and --train-data", "'other.bin' was made with the tokenizer"),
    ("gpt2 RUN --valid-data train.bin", 2, "name the same tokens ('train.bin')", "or leave --valid-data out"),
    ("gpt2 RUN --val-data valid.bin", 2, "did you mean --valid-data?"),
    ("gpt2 RUN --valid-data valid.bin --eval-iters 100", 2, "700 tokens = 43 samples of 16; needs 200",
     "lower that to 43, or add shards"),
    ("gpt2 RUN --valid-data high.bin --eval-iters 1", 2, "high.bin': byte ", "id 61 is not below the vocabulary"),
    ("gpt2 RUN --token-dtype uint16", 2, "--token-dtype uint16 has no effect: every shard has a header"),
    ("gpt2 RUN --vocab-size 20", 2, "'train.bin': byte 1028 (token 2): id 48 is not below the vocabulary size 20",
     "another tokenizer"),
    ("gpt2 RUN --hellaswag-data train.bin", 2, "a token shard, not HellaSwag"),
    ("gpt2 RUN --hellaswag-data questions.bin", 2, "--hellaswag-data and --train-data: 'questions.bin' was made with "
     "the tokenizer gpt2, 'train.bin' with the tokenizer bytes"),
    ("gpt2 RUN --hellaswag-data none.bin", 2, "no such file; data/prepare_hellaswag.py makes it"),
]

CONFIGURATIONS = [
    ("gpt2 RUN --config none.json", 2, "cannot read none.json: No such file"),
    ("gpt2 RUN --config array.json", 2, 'array.json: not a JSON object {"name": value, ...}'),
    ("gpt2 RUN --config comma.json", 2, "comma.json: not JSON: parse error at line 3, column 1: ", "unexpected '}'"),
    ("gpt2 RUN --config typo.json", 2, 'unknown option "train_iter": did you mean "train-iters"?'),
    ("llama --train-data train.bin --train-iters 2 --config wrong_type.json", 2, "wrong_type.json: lr fast: must be"),
    ("gpt2 RUN --config key_of_llmc.json", 2, '"n_layer"', "--num-layers"),
    ("gpt2 RUN --config nested.json", 2, "scripts/import_config nested.json --out run.json"),
    ("gpt2 RUN --config train.bin", 2, "train.bin: not JSON"),
    ("gpt2 RUN --config fifo", 2, "cannot read fifo: a FIFO (pipe), not a file"),
    ("gpt2 RUN --config /dev/zero", 2, "cannot read /dev/zero: a device, not a file"),
    ("gpt2 RUN --config deep.json", 2, 'deep.json: "lr" is nested deeper than 64 levels'),
    ("gpt2 RUN --config long_key.json", 2, 'unknown option "x y x y', "x y...y x", "--help-all lists all"),
    ("gpt2 RUN --config escape_key.json", 2, r'unknown option "\x1b[2J\u202e"'),
]

MODELS = [
    ("gpt2 RUN --load deep_config", 2, 'deep_config/config.json: "rope_scaling" is nested deeper than 64 levels'),
    (f"llama {DATA} --load nul_part", 2, r'"part.safetensors\x00x" is not a file name in this directory'),
    (f"llama {DATA} --load escape_part", 2, r'"\x1b[2J" is not a file name in this directory'),
    (f"llama {DATA} --load fifo_part", 2, "cannot read fifo_part/fifo: a FIFO (pipe), not a file"),
    (f"llama {DATA} --load deep_part", 2, 'index.json: "weight_map" is nested deeper than 64 levels'),
    (f"llama {DATA} --load gemma", 2, '"model_type" is "gemma": only gpt2, llama, mistral, ministral, qwen2'),
    (f"llama {DATA} --load pointer", 2, "pointer/model.safetensors: a git-lfs pointer in place of the file"),
    (f"llama {DATA} --load pytorch", 2, "save the model again in the safetensors format"),
    (f"llama {DATA} --load lk", 2, "lk has no config.json, but checkpoints", "lk/step-00000002 is the newest"),
    (f"llama {DATA} --load lk/step-00000002 --model llama3-8B", 2, "--num-layers is 32", "leave out --model"),
    (f"llama {DATA} --load lk/step-00000002 --untie-embeddings-and-output-weights=false", 2,
     "has true: leave out --model and the shape"),
    (f"llama {DATA} --load file", 2, "file is a file: name the folder in which config.json and the weights are"),
]

CHECKPOINTS = [
    ("gpt2 RUN --save file", 2, "--save file: a file, not a folder"),
    ("gpt2 RUN --save file/run", 2, "--save file/run: ", "file is not a folder"),
    ("gpt2 RUN --log-file file/run.jsonl", 2, "--log-file file/run.jsonl: ", "file is not a folder"),
    ("gpt2 RUN --save new --tokenizer folder", 2, "no tokenizer.json, tokenizer.model or vocab.json in it"),
    ("gpt2 RUN --save /proc/run", 7, "--save /proc/run cannot be used: cannot mkdir /proc/run"),
    ("gpt2 RUN --save ck", 2, "holds checkpoints of an earlier run", "--resume auto continues it"),
    ("gpt2 RUN --save new --tokenizer none.json", 2, "--tokenizer none.json: no such file or directory"),
    ("gpt2 RUN --save new --tokenizer gpt2", 2, "directory: name the tokenizer.json of openai-community/gpt2"),
    ("gpt2 RUN --save new --tokenizer letters.json", 2, "--tokenizer letters.json has another tokenizer than data "
     "shard 'train.bin', which was made with bytes: make shards", "or name the tokenizer of the shards"),
    ("gpt2 RUN --resume auto", 2, "--resume auto looks under --save, which is missing"),
    ("gpt2 RUN --save taken --resume auto", 2, "--save taken: step-00000009 is a file", "move it away"),
    ("gpt2 RUN --save dangling --resume auto", 2, "--save dangling: step-00000009 is a file or", "move it away"),
    ("gpt2 RUN --load no_shape/step-00000002", 5, "no usable model at no_shape/step-00000002: config.json is missing"),
    ("gpt2 RUN --resume no_shape/step-00000001", 5, "state.json is not a regular file"),
    ("gpt2 RUN --load bare_state", 5, "no usable model at bare_state: config.json is missing"),
    ("gpt2 RUN --resume no_shape/step-00000002", 5, "config.json is missing", "--resume auto takes"),
    ("gpt2 RUN --resume damaged/step-00000002", 5, "model.safetensors has 2 bytes instead of", "--resume auto takes"),
    ("gpt2 RUN --save lost --resume auto", 5, "no usable checkpoint under lost", "step-00000001"),
    ("gpt2 RUN --save ck --resume auto --train-data unknown.bin", 2, "training data changed since the checkpoint"),
    ("gpt2 RUN --save ck --resume auto --num-layers 3", 2, "--num-layers: 2 in the checkpoint, 3 now",
     "leave these options, --model and --load out", "with --load in the place of --resume"),
    ("gpt2 RUN --save ck --resume auto --seed 6 --num-layers 3", 2, "--num-layers: 2 in the", "; --seed: 5 in the"),
    ("gpt2 RUN --resume fp8/step-00000002", 2, "a run with --fp8-recipe delayed", "repeat the option, or give --fp8-r"),
    ("llama RUN --save ck --resume auto", 2, "was made by another run"),
    ("gpt2 RUN --log-file ../nowhere/logs/run.jsonl", 2, "no folder ../nowhere/logs: mkdir -p ../nowhere/logs"),
    ("gpt2 RUN --save new --log-file /nowhere/run.jsonl", 2, "there is no folder /nowhere: mkdir -p /nowhere"),
    ("gpt2 RUN --log-file folder", 2, "--log-file folder: a folder: name a file, folder/log.jsonl"),
    ("gpt2 RUN --log-file /dev/full", 7, "--log-file /dev/full: cannot be written: No space left on device"),
    ("gpt2 RUN --train-iters 30 --lr 5 --clip-grad 0 --stop-on-divergence 2", 4, "times its start of",
     "a lower --lr (now 5), a longer --lr-warmup-iters (now 0), --clip-grad 1 (now 0)", "nothing was saved (--save)"),
]

# Rules between options whose messages name one.
RULES = [
    ("gpt2 RUN --dtype fp32 --grad-dtype bf16", 2, "--grad-dtype bf16 needs --dtype bf16"),
    ("gpt2 SHAPE --synthetic-data --epochs 1", 2, "--synthetic-data has no end: set --train-iters"),
    ("llama --dry-run --hidden-size 1000", 2, "is not a multiple of --num-attention-heads 16: set --kv-channels"),
]

COMMANDS = [
    ("gpt2 plan --ranks 0", 2, "--ranks has no effect: 0 means as many as were started"),
    ("gpt2 plan --ranks 3 --micro-batch-size 2 --global-batch-size 8", 2, "2 x 3 ranks: 6 or 12 would be one"),
    ("gpt2 bench --save out", 2, "--save has no effect: bench only times steps"),
    ("gpt2 generate", 2, "generate needs --load DIR"),
    ("gpt2 generate ck --prompt '1 2'", 2, 'unexpected word "ck"'),
    ("gpt2 generate --load folder --prompt 1", 2, "neither a config.json nor checkpoints", "the --save of a run"),
    ("gpt2 generate --load ck", 2, "generate needs a prompt: --prompt '1 2 3', token ids, or text"),
    (f"{GENERATE} --prompt hello", 2, "token 104 lies outside the vocabulary of 61"),
    (f"{GENERATE} --prompt ''", 2, "--prompt '': an empty prompt"),
    (f"{GENERATE} --prompt 1 --sample-tokens 99", 2, "1 token and --sample-tokens 99 exceed the model"),
    ("gpt2 generate --load lost --prompt 1", 5, "no usable model at lost/step-00000002: model.safetensors has 2 "
     "bytes", "lost/step-00000001", "take another checkpoint"),
    ("gpt2 RUN --sample-every 1 --prompt ''", 2, "--prompt '': an empty prompt"),
]

TOOLS = [
    ("data/prepare_text.py", 2, "the following arguments are required: INPUT, --out, --tokenizer", "--help lists"),
    (f"{TEXT} --valid-fraction 10% notes.txt", 2, "--valid-fraction", "10%"),
    (f"{TEXT} --shard-tokens 1k notes.txt", 2, "1k is not a whole number"),
    ("data/prepare_text.py --tokenizer bytes --out file notes.txt", 2, "file: cannot write: File exists"),
    (f"{TEXT} --format json notes.txt", 2, "--format", "'jsonl'"),
    ("data/check_shards.py", 2, "the following arguments are required: SHARD"),
    ("scripts/report", 2, "the following arguments are required", "LOG"),
    ("scripts/report run.jsonl --folow", 2, "unknown option --folow: did you mean --follow?"),
    ("scripts/export_log --to xml ck --out -", 2, "invalid choice: 'xml'", "'csv'"),
    ("scripts/generate", 2, "the following arguments are required: MODEL"),
    ("scripts/generate ck --tokenizer bytes", 2, "the following arguments are required: PROMPT"),
    ("scripts/generate nowhere x", 2, "nowhere: there is no such folder"),
    ("scripts/generate ck x", 2, "ck: has no tokenizer.json; pass --tokenizer (bytes, gpt2 or a tokenizer.json)"),
    ("scripts/import_config", 2, "the following arguments are required: FILE"),
]

ROWS = [*OPTIONS, *VALUES, *OTHER_TRAINERS, *SHARDS, *CONFIGURATIONS, *MODELS, *CHECKPOINTS, *RULES, *COMMANDS,
        *TOOLS]

# Commands that follow the advice of a line, for each line that names an option that its command has not.
ADVICE = {
    "gpt2": ["gpt2 RUN", "gpt2 --dry-run", "gpt2 SHAPE --synthetic-data --train-iters 2",
             "gpt2 SHAPE --train-data train.bin --epochs 0.1"],
    "gpt2 RUN --learning_rate 1e-3": ["gpt2 RUN --lr 1e-3"],
    "gpt2 RUN \u2013\u2013lr 3": ["gpt2 RUN --lr 3"],
    "gpt2 RUN lr=1e-3": ["gpt2 RUN --lr=1e-3"],
    "gpt2 array.json": ["gpt2 RUN --config bom.json --print-config"],
    "llama --model meta-llama/Meta-Llama-3-8B": [f"llama {DATA} --load lk/step-00000002"],
    "gpt2 RUN --dtype fp8": [f"gpt2 RUN --dtype bf16 --fp8-recipe {recipe}" for recipe in ("delayed", "tensorwise")],
    "gpt2 RUN --global-batch-size 5": ["gpt2 RUN --global-batch-size 6",
                                       "gpt2 RUN --global-batch-size 5 --micro-batch-size 1"],
    "gpt2 RUN --global-batch-size 1000": ["gpt2 RUN --global-batch-size 186"],
    "gpt2 SHAPE --train-data train.bin --epochs 0.0001": [
        "gpt2 SHAPE --train-data train.bin --epochs 0.0108 --global-batch-size 2"],
    "gpt2 RUN --fp8-recipe delayed --ffn-hidden-size 40": [
        "gpt2 RUN --fp8-recipe delayed --ffn-hidden-size 40 --bf16-linears '*.up,*.down'"],
    "gpt2 RUN -h 1": ["gpt2 -h"],
    "gpt2 RUN --valid-data valid.bin --eval-iters 100": ["gpt2 RUN --valid-data valid.bin --eval-iters 21"],
    "gpt2 RUN --valid-data train.bin": ["gpt2 RUN", "gpt2 RUN --valid-data valid.bin --eval-iters 1"],
    "gpt2 RUN --val-data valid.bin": ["gpt2 RUN --valid-data valid.bin --eval-iters 1"],
    f"llama {DATA} --load lk/step-00000002 --model llama3-8B": [f"llama {DATA} --load lk/step-00000002"],
    f"llama {DATA} --load lk/step-00000002 --untie-embeddings-and-output-weights=false": [
        f"llama {DATA} --load lk/step-00000002"],
    "gpt2 RUN --save ck": ["gpt2 RUN --save ck --resume auto"],
    "gpt2 RUN --resume auto": ["gpt2 RUN --resume auto --save ck"],
    "gpt2 RUN --resume no_shape/step-00000001": ["gpt2 RUN --resume auto --save ck"],
    "gpt2 RUN --hellaswag-data train.bin": ["gpt2 RUN --valid-data valid.bin --eval-iters 1"],
    "llama RUN --save ck --resume auto": [f"gpt2 {DATA} --save ck --resume auto"],
    "gpt2 RUN --save ck --resume auto --seed 6 --num-layers 3": [f"gpt2 {DATA} --save ck --resume auto"],
    "gpt2 RUN --save ck --resume auto --num-layers 3": [
        f"gpt2 {DATA} --save ck --resume auto", f"gpt2 {DATA} --resume ck/step-00000001",
        f"gpt2 {DATA} --load ck/step-00000002"],
    "gpt2 RUN --train-iters 30 --lr 5 --clip-grad 0 --stop-on-divergence 2": [
        "gpt2 RUN --train-iters 30 --lr 1e-3 --lr-warmup-iters 9 --clip-grad 1 --stop-on-divergence 2"],
    "gpt2 RUN --resume fp8/step-00000002": [f"gpt2 RUN --resume fp8/step-00000002 --fp8-recipe {recipe}"
                                            for recipe in ("delayed", "none")],
    "gpt2 SHAPE --synthetic-data --epochs 1": ["gpt2 SHAPE --synthetic-data --train-iters 1"],
    "llama --dry-run --hidden-size 1000": ["llama --dry-run --hidden-size 1000 --kv-channels 64"],
    "gpt2 generate": ["gpt2 generate --load ck --prompt 1 --sample-tokens 2"],
    "gpt2 generate --load ck": ["gpt2 generate --load ck --prompt '1 2' --sample-tokens 2"],
    "gpt2 generate --load folder --prompt 1": ["gpt2 generate --load ck --prompt 1 --sample-tokens 2"],
}
# Options that a line names without advice to set them.
NO_ADVICE = {"--help-all", "--option", "--out", "--template", "--train-data", "--valid-fraction"}


def words_of(command):
    program, *words = shlex.split(command)
    if program not in ("gpt2", "llama"):
        return [sys.executable, os.path.join(ROOT, program), *words]
    shape = GPT2_SHAPE if program == "gpt2" else LLAMA_SHAPE
    short = {"RUN": shlex.split(f"{shape} {DATA}"), "SHAPE": shlex.split(shape)}
    return [GPT2 if program == "gpt2" else LLAMA, *(part for word in words for part in short.get(word, [word]))]


@unittest.skipIf(os.path.basename(BUILD).startswith("cuda"), "needs the CPU device")
class MistakesTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.dir = tempfile.mkdtemp(prefix="llmc-mistakes-")
        cls.addClassCleanup(shutil.rmtree, cls.dir, ignore_errors=True)
        before = os.getcwd()
        os.chdir(cls.dir)
        try:
            for write in (mistake_files.write_shards, mistake_files.write_configurations, mistake_files.write_models,
                          mistake_files.write_other):
                write()
            for program, save, options in (("gpt2", "ck", ""), ("llama", "lk", ""),
                                           ("gpt2", "fp8", "--fp8-recipe delayed")):
                done = cls.run_command(f"{program} RUN {options} --save {save} --save-interval 1")
                assert done.returncode == 0, done.stderr
            mistake_files.damage("ck", "damaged", [2])
            mistake_files.damage("ck", "lost", [1, 2])
            mistake_files.damage("ck", "no_shape", [])
            os.remove("no_shape/step-00000002/config.json")
            mistake_files.write("bare_state/state.json", "{}")
            os.remove("no_shape/step-00000001/state.json")
            os.mkfifo("no_shape/step-00000001/state.json")
            mistake_files.damage("ck", "taken", [])
            mistake_files.write("taken/step-00000009", "x")
            mistake_files.damage("ck", "dangling", [])
            os.symlink("nowhere", "dangling/step-00000009")
        finally:
            os.chdir(before)

    @classmethod
    def run_command(cls, command):
        environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1", COLUMNS="100")
        return run_command(words_of(command), None, cwd=cls.dir, env=environment, stdin=subprocess.DEVNULL,
                           errors="replace")

    def test_a_mistake_gets_one_line_with_the_way_out(self):
        self.assertGreaterEqual(len(ROWS), 120)
        self.assertEqual(len({row[0] for row in ROWS}), len(ROWS), "a row is there twice")
        with ThreadPoolExecutor(2 * len(os.sched_getaffinity(0))) as pool:
            outcomes = list(pool.map(self.run_command, (row[0] for row in ROWS)))
        for (command, code, *parts), done in zip(ROWS, outcomes):
            if os.environ.get("MISTAKES") == "print":
                print(f"$ {command}\n{done.returncode} {done.stderr}")
            with self.subTest(command=command):
                self.assertEqual(done.returncode, code, done.stderr)
                self.assertRegex(done.stderr, r"\Aerror: [^\n]*\n\Z", "one line on standard error")
                self.assertNotRegex(done.stderr, FOREIGN)
                self.assertTrue(parts, "a row says what the line has")
                if command.split()[0] in ("gpt2", "llama") and code == 2:
                    named = set(re.findall(r"--[a-z][a-z0-9-]+", done.stderr)) - set(words_of(command)) - NO_ADVICE
                    self.assertTrue(command in ADVICE or not named, f"ADVICE does not follow {named}: {done.stderr}")
                for part in parts:
                    self.assertIn(part, done.stderr)

    def test_the_advice_of_a_line_is_accepted(self):
        self.assertLessEqual(set(ADVICE), {row[0] for row in ROWS})
        for command, followed in ADVICE.items():
            for again in followed:
                with self.subTest(mistake=command, advice=again):
                    done = self.run_command(again)
                    self.assertEqual(done.returncode, 0, done.stderr)

    def test_what_is_no_mistake(self):
        for command in ("gpt2 RUN --config bom.json --print-config", "gpt2 RUN --config windows.json --print-config",
                        "gpt2 RUN --train-iters 2e0 --print-config", "gpt2 RUN --profile 1:2 --print-config",
                        "gpt2 RUN --valid-data train.bin --train-iters 1", f"{WITH} unknown.bin valid.bin",
                        "gpt2 RUN --log-file new_logs/run.jsonl",
                        "gpt2 RUN --save logs --log-file logs/deep/run.jsonl", "gpt2 plan --gpu h100-pcie"):
            with self.subTest(command=command):
                done = self.run_command(command)
                self.assertEqual(done.returncode, 0, done.stderr)
                self.assertEqual(done.stderr, "")

    def test_what_is_said_and_goes_on(self):
        for command, said in (
                ("gpt2 RUN --lr 1e-3 --lr 2e-3", "note: --lr is there twice: 0.002 counts, 0.001 does not"),
                ("gpt2 RUN --valid-data train.bin valid.bin --eval-iters 2",
                 "VALIDATION ON TRAINING DATA: 1 shard of --valid-data is also in --train-data, the first is 'train"),
                ("gpt2 RUN --train-iters 30 --lr 5 --clip-grad 0",
                 r"warning: step \d+: loss [\d.]+ \(median of 3 steps\) is [\d.]+ times its start of 4\.\d+; "
                 r"what usually helps: a lower --lr \(now 5\)")):
            with self.subTest(command=command):
                done = self.run_command(command)
                self.assertEqual(done.returncode, 0, done.stderr)
                self.assertEqual(len(re.findall(said, done.stdout)), 1, done.stdout)

    def test_the_checkpoint_before_a_damaged_one_is_taken(self):
        options = "--prompt '1 2' --sample-tokens 5 --temperature 0"
        expected = self.run_command(f"gpt2 generate --load ck/step-00000001 {options}").stdout
        done = self.run_command(f"gpt2 generate --load damaged {options}")
        self.assertEqual((done.returncode, done.stdout), (0, expected), done.stderr)
        self.assertRegex(done.stderr, r"\Anote: skipped checkpoint: damaged/step-00000002: model\.safetensors has 2 "
                                      r"bytes instead of \d+\nweights: damaged/step-00000001\ngenerated: 5 tokens")
        mistake_files.damage(f"{self.dir}/ck", f"{self.dir}/resumed", [2])
        done = self.run_command("gpt2 RUN --save resumed --resume auto")
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertIn("note: skipped checkpoint: resumed/step-00000002: ", done.stdout)
        self.assertIn("note: resumed resumed/step-00000001 at step 1", done.stdout)
