"""Files for the tests of mistakes: valid data, and files that users name by mistake."""
import hashlib
import json
import os
import shutil
from pathlib import Path

from tests.support.folder import LFS_POINTER
from tests.support.train import make_tokens, write_hellaswag, write_shard

BYTES = hashlib.sha256(b"bytes").hexdigest()
GPT2_TOKENS = hashlib.sha256(b"gpt2").hexdigest()
LLAMA_CONFIG = {"model_type": "llama", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48,
                "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
                "max_position_embeddings": 16, "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
                "tie_word_embeddings": False}
PDF = b"%PDF-1.4\n%\xe2\xe3\xcf\xd3\n" + bytes(range(256)) * 30


def write(name, content):
    os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
    Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())


def write_sidecar(shard, name, sha256, vocab_size=61, separator=60, chat_template=""):
    write(shard + ".meta.json", json.dumps({"vocab_size": vocab_size, "tokenizer": {
        "name": name, "sha256": sha256, "separator": separator, "chat_template": chat_template},
        "document_offsets": [0]}))


def write_shards():
    write_shard("train.bin", make_tokens(3000, 1))
    write_shard("valid.bin", make_tokens(700, 3))
    write_shard("other.bin", make_tokens(3000, 5))
    write_shard("unknown.bin", make_tokens(800, 6))   # without a sidecar
    write_shard("high.bin", [1] * 500 + [61] + [2] * 500)   # one id above the vocabulary
    write_shard("broken.bin", make_tokens(800, 7))
    write_sidecar("train", "bytes", BYTES)
    write_sidecar("valid", "bytes", BYTES)
    write_shard("deep.bin", make_tokens(800, 8))
    write("deep.meta.json", '{"tokenizer": ' + "[" * 100000)
    for number in (1, 2):
        write_shard(f"chat{number}.bin", make_tokens(800, number))
        write_sidecar(f"chat{number}", "bytes", BYTES, chat_template=f"template {number}")
    write_sidecar("other", "gpt2", GPT2_TOKENS, 50257, 50256)
    write_hellaswag("questions.bin", 6, 12)
    write_sidecar("questions", "gpt2", GPT2_TOKENS, 50257, 50256)
    write("letters.json", '{"model": {"vocab": {"a": 0, "b": 1}}}')
    write("broken.meta.json", '{"tokenizer": {"name": "bytes",}}')
    write("text.bin", "hello world\n" * 100)
    write("pointer.bin", LFS_POINTER)
    write("doc.bin", PDF)
    write("packed.bin", b"\x1f\x8b\x08" + bytes(500))


def write_configurations():
    for name, content in {
            "array": "[1, 2]", "comma": '{"lr": 1e-3,\n "seed": 3,\n}', "nested": '{"optimizer": {"lr": 1e-3}}',
            "typo": '{"train_iter": 5}',
            "wrong_type": '{"lr": "fast"}', "key_of_llmc": '{"n_layer": 3}',
            "deep": '{"lr": ' + "[" * 100000 + "]" * 100000 + "}", "long_key": json.dumps({"x y " * 100000: 1}),
            "escape_key": json.dumps({"\x1b[2J\u202e": 1}, ensure_ascii=False).replace("\\u001b", "\\u001B"),
            "bom": b'\xef\xbb\xbf{"lr": 1e-3}', "windows": b'{"lr": 1e-3, // peak\r\n"seed": 3}\r\n'}.items():
        write(f"{name}.json", content)


def write_models():
    write("deep_config/config.json", '{"rope_scaling":' * 100000)
    for name, part in {"nul_part": "part.safetensors\0x", "escape_part": "\x1b[2J", "fifo_part": "fifo",
                       "deep_part": None}.items():
        write(f"{name}/config.json", json.dumps(LLAMA_CONFIG))
        write(f"{name}/model.safetensors.index.json",
              json.dumps({"weight_map": {"a": part}}) if part else '{"weight_map":' * 100000)
    os.mkfifo("fifo_part/fifo")
    write("gemma/config.json", '{"model_type": "gemma"}')
    write("pointer/config.json", json.dumps(LLAMA_CONFIG))
    write("pointer/model.safetensors", LFS_POINTER)
    write("pytorch/config.json", json.dumps(LLAMA_CONFIG))
    write("pytorch/pytorch_model.bin", b"PK\x03\x04")


def write_other():
    os.makedirs("folder")
    write("file", "x")
    write("notes.txt", "some text and more words\n" * 30)
    os.mkfifo("fifo")


def damage(root, copy, steps):
    """A copy of a folder of checkpoints, in which the weights of these steps are cut."""
    shutil.copytree(root, copy)
    for step in steps:
        write(f"{copy}/step-{step:08d}/model.safetensors", b"xx")
