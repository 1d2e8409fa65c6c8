"""Malicious input: option values, --config files, shards, sidecars, HellaSwag files, models and prompts. Each is
refused with one line and exit code 2 (5 for a model), or works as it should. tests/python/test_hostile_*.py have the
inputs of scripts."""
import json
import os
import struct
import sys

from tests.drill.corruptions import change_json, read, write
from tests.support.mistake_files import LLAMA_CONFIG
from tests.support.train import GPT2, LLAMA, ROOT, make_tokens, write_hellaswag, write_shard

TEXTS = ("", " ", "-", "--", "\x1b[31mred\x1b[0m", "a\tb\rc", "\u202egnp.exe", "x" * 100000, "%s%s%n",
         "$(touch pwned)", "`touch pwned`", "precious", "../precious", "/dev/zero", "/dev/null", "/proc/self/mem", ".",
         "nan", "inf", "-inf", "1e400", "-1", "0", "00", "1e-400", "9223372036854775808",
         "-9223372036854775809", "1.5", "0x10", "1_000", "1,5", "true", "\udcff\udcfe", "\U0001f600",
         "a" * 300, "[" * 5000, "{" * 5000, "*" * 200, "step-00000001")


def prepare(shared):
    case = shared.case("options", 0)
    code, out, error = case.run([GPT2, "--print-options"])
    if code != 0:
        raise SystemExit(f"drill: --print-options fails: {error}")
    shared.options = sorted("--" + row["name"] for row in json.loads(out)["options"])
    shared.hostile = case
    write_shard(case.path("good.bin"), make_tokens(1000, 1))
    write_hellaswag(case.path("hellaswag.bin"), 6, 12)
    write(case.path("sidecar.json"), json.dumps({"vocab_size": 61, "document_offsets": [0, 100], "tokenizer": {
        "name": "bytes", "sha256": "0" * 64, "separator": 60}}).encode())
    code, out, error = case.run([*shared.command(LLAMA), "--train-iters", "1", "--save", case.path("saved")])
    if code != 0:
        raise SystemExit(f"drill: a run fails: {out}{error}")
    shared.model = case.path("saved", "step-00000001")


def mutated(case, data):
    """Bytes with a few changes: flips, cuts, repeats, and integers at their limits."""
    draw, data = case.draw, bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 5))):
        at = draw.randrange(len(data) or 1)
        how = draw.randrange(6)
        if how == 0 and data:
            data[at] ^= 1 << draw.randrange(8)
        elif how == 1:
            del data[at:]
        elif how == 2:
            data[at:at] = draw.randbytes(draw.randrange(1, 64))
        elif how == 3:
            data[at:at + 8] = struct.pack("<q", draw.choice((-1, 0, 1, 2 ** 31 - 1, 2 ** 63 - 1, -2 ** 63, 10 ** 9)))
        elif how == 4:
            data[at // 4 * 4:at // 4 * 4 + 4] = struct.pack("<i", draw.choice((-1, 0, 1, 2 ** 31 - 1, -2 ** 31, 65536)))
        else:
            del data[at:at + draw.randrange(1, 64)]
    return bytes(data)


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
    tree = json.loads(json.dumps(tree))
    for _ in range(case.draw.choice((1, 1, 2))):
        change_json(case, tree) if tree else None
    return json.dumps(tree).encode()


def options(shared, case):
    words = []
    for _ in range(case.draw.choice((1, 1, 2))):
        words += [case.draw.choice(shared.options), case.draw.choice(TEXTS)]
    if case.draw.random() < 0.2:
        words = [case.draw.choice(TEXTS), *words]
    return [*shared.command(case.draw.choice((GPT2, LLAMA))), "--train-iters", "1", *words]


def option_file(shared, case):
    write(case.path("run.json"), tree_text(case, {"lr": 1e-3, "seed": 3, "save": "out", "train_iters": 1,
                                                  "train_data": ["a.bin", "b.bin"], "model": "gpt2-tiny"}))
    return [GPT2, "--config", case.path("run.json"), "--train-data", case.path("run.json")]


def shard(shared, case):
    write(case.path("shard.bin"), mutated(case, read(shared.hostile.path("good.bin"))))
    if case.draw.random() < 0.3:
        write(case.path("shard.meta.json"), tree_text(case, json.loads(read(shared.hostile.path("sidecar.json")))))
    if case.draw.random() < 0.3:
        return [sys.executable, os.path.join(ROOT, "data", "check_shards.py"), case.path("shard.bin")]
    return [*shared.command(GPT2), "--train-iters", "2", "--train-data", case.path("shard.bin")]


def sidecar(shared, case):
    write(case.path("shard.bin"), read(shared.hostile.path("good.bin")))
    write(case.path("shard.meta.json"), tree_text(case, json.loads(read(shared.hostile.path("sidecar.json")))))
    return [*shared.command(GPT2), "--train-iters", "1", "--train-data", case.path("shard.bin"),
            *case.draw.choice(([], ["--reset-attention-mask"]))]


def hellaswag(shared, case):
    write(case.path("hellaswag.bin"), mutated(case, read(shared.hostile.path("hellaswag.bin"))))
    return [*shared.command(GPT2), "--train-iters", "1", "--hellaswag-data", case.path("hellaswag.bin"),
            "--eval-interval", "1"]


def model(shared, case):
    os.mkdir(case.path("model"))
    weights, tree = read(os.path.join(shared.model, "model.safetensors")), dict(LLAMA_CONFIG)
    if case.draw.random() < 0.5:
        tree["rope_scaling"] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8,
                                "attention_factor": 1.5, "beta_fast": 16, "beta_slow": 2}
    config, which = json.dumps(tree).encode(), case.draw.randrange(3)
    if which == 0:
        config = tree_text(case, tree)
    elif which == 1:
        weights = mutated(case, weights)
    else:
        length = struct.unpack("<Q", weights[:8])[0]
        header = tree_text(case, json.loads(weights[8:8 + length]))
        weights = struct.pack("<Q", len(header)) + header + weights[8 + length:]
    write(case.path("model", "config.json"), config)
    write(case.path("model", "model.safetensors"), weights)
    if case.draw.random() < 0.4:
        return [LLAMA, "generate", "--load", case.path("model"), "--prompt", "1 2 3", "--sample-tokens", "2"]
    return [*shared.command(LLAMA), "--train-iters", "1", "--load", case.path("model")]


def prompt(shared, case):
    text = case.draw.choice(TEXTS).replace("\0", "")
    return [LLAMA, "generate", "--load", shared.model, "--prompt", text, "--sample-tokens", "2"]


# The weight of each kind of input.
KINDS = ((options, 8), (option_file, 4), (shard, 4), (sidecar, 3), (hellaswag, 2), (model, 5), (prompt, 2))


def trial(shared, case):
    make = case.draw.choices([kind for kind, _ in KINDS], [weight for _, weight in KINDS])[0]
    write(case.path("precious"), b"mine")
    command = make(shared, case)
    # It is a finding if an input makes a program use all memory of the machine or run for very long.
    code, _, error = case.run(command, seconds=60, limits=(("AS", 6 << 30), ("FSIZE", 1 << 28)))
    # Weights whose values are damaged give logits that are not finite. check_shards reports each shard's errors on
    # standard output.
    allowed = {0, 2, 5, 7} | ({4} if "generate" in command else set())
    case.judge(code, error, allowed, one_line="check_shards" not in command[1])
    if os.path.exists(case.path("pwned")):
        case.found("code", "a value was run as a command")
    if read(case.path("precious")) != b"mine":
        case.found("loss", "a file of the user was overwritten")
