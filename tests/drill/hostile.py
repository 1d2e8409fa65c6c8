"""Malicious input: option values, --config files, sidecars and HellaSwag files. Each is refused with one line and exit
code 2 (5 for a checkpoint), or works as it should. tests/fuzz/ has shards, models and manifests, and
tests/python/test_hostile_*.py the inputs of scripts."""
import json
import os
from pathlib import Path

from tests.python.test_hostile_imports import mutated
from tests.python.test_hostile_logs import with_other_fields
from tests.support.train import GPT2, LLAMA, make_tokens, write_hellaswag, write_shard

TEXTS = ("", " ", "-", "--", "\x1b[31mred\x1b[0m", "a\tb\rc", "\u202egnp.exe", "x" * 100000, "%s%s%n",
         "$(touch pwned)", "`touch pwned`", "precious", "../precious", "/dev/zero", "/dev/null", "/proc/self/mem", ".",
         "nan", "inf", "-inf", "1e400", "-1", "0", "00", "1e-400", "9223372036854775808",
         "-9223372036854775809", "1.5", "0x10", "1_000", "1,5", "true", "\udcff\udcfe", "\U0001f600",
         "a" * 300, "[" * 5000, "{" * 5000, "*" * 200, "step-00000001")


def read(case, name):
    return Path(case.path(name)).read_bytes()


def write(case, name, content):
    Path(case.path(name)).write_bytes(content)


def prepare(shared):
    case = shared.case("options", 0)
    code, out, error = case.run([GPT2, "--print-options"])
    if code != 0:
        raise SystemExit(f"drill: --print-options fails: {error}")
    shared.options = sorted("--" + row["name"] for row in json.loads(out)["options"])
    shared.hostile = case
    write_shard(case.path("good.bin"), make_tokens(1000, 1))
    write_hellaswag(case.path("hellaswag.bin"), 6, 12)


def deep(case):
    """JSON that is too deep, too long, has repeated keys, or is no JSON."""
    depth = case.draw.choice((10, 100, 5000, 100000))
    return case.draw.choice((b"[" * depth, b'{"a":' * depth, b"[" * depth + b"]" * depth, b'{"lr": 1, "lr": 2}',
                             b"\xff\xfe{\x00", b"\0" * 500, b'{"lr": ' + b"9" * 50000 + b"}", b"",
                             b'"' + b"\\u0000" * 99 + b'"', b'{"' + b"k" * 70000 + b'": 1}', b"nul",
                             b'{"lr": 1e-3}' + b" " * 90000 + b"x"))


def tree_text(case, tree):
    if case.draw.random() < 0.4:
        return deep(case)
    return with_other_fields(case.draw, json.dumps(tree).encode())


def options(shared, case):
    words = []
    for _ in range(case.draw.choice((1, 1, 2))):
        words += [case.draw.choice(shared.options), case.draw.choice(TEXTS)]
    if case.draw.random() < 0.2:
        words = [case.draw.choice(TEXTS), *words]
    return [*shared.command(case.draw.choice((GPT2, LLAMA))), "--train-iters", "1", *words]


def option_file(shared, case):
    write(case, "run.json", tree_text(case, {"lr": 1e-3, "seed": 3, "save": "out", "train_iters": 1,
                                             "train_data": ["a.bin", "b.bin"], "model": "gpt2-tiny"}))
    return [GPT2, "--config", case.path("run.json"), "--train-data", case.path("run.json")]


def sidecar(shared, case):
    write(case, "shard.bin", read(shared.hostile, "good.bin"))
    write(case, "shard.meta.json", tree_text(case, {
        "vocab_size": 61, "document_offsets": [0, 100],
        "tokenizer": {"name": "bytes", "sha256": "0" * 64, "separator": 60}}))
    return [*shared.command(GPT2), "--train-iters", "1", "--train-data", case.path("shard.bin"),
            *case.draw.choice(([], ["--reset-attention-mask"]))]


def hellaswag(shared, case):
    seed = read(shared.hostile, "hellaswag.bin")
    write(case, "hellaswag.bin", mutated(case.draw, seed, [seed]))
    return [*shared.command(GPT2), "--train-iters", "1", "--hellaswag-data", case.path("hellaswag.bin"),
            "--eval-interval", "1"]


# The weight of each kind of input.
KINDS = ((options, 8), (option_file, 4), (sidecar, 3), (hellaswag, 2))


def trial(shared, case):
    make = case.draw.choices([kind for kind, _ in KINDS], [weight for _, weight in KINDS])[0]
    write(case, "precious", b"mine")
    command = make(shared, case)
    # It is a finding if an input makes a program use all memory of the machine or run for very long.
    code, _, error = case.run(command, seconds=60, limits=(("AS", 6 << 30), ("FSIZE", 1 << 28)))
    case.judge(code, error, {0, 2, 5, 7})
    if os.path.exists(case.path("pwned")):
        case.found("code", "a value was run as a command")
    if read(case, "precious") != b"mine":
        case.found("loss", "a file of the user was overwritten")
