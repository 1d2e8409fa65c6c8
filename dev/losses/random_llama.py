#!/usr/bin/env python3
"""Makes a replacement for the downloads of fine-tuning: a model of Llama-3.1-8B's shape with random weights, the
special tokens of its tokenizer, and conversations. A step takes as long as with the real model; the losses mean
nothing.

  dev/losses/random_llama.py OUT                 config.json, 16 GB of weights, a byte-level tokenizer.json
  dev/losses/random_llama.py OUT --layers 2      a smaller one
  dev/losses/random_llama.py OUT --conversations docs README.md   OUT/conversations.jsonl too: headings of Markdown as
                                                 questions, what follows as answers

transformers makes and writes the model, so that it comes from another program than ours. Needs torch, transformers,
tokenizers.
"""
import argparse
import json
import re
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig

# Of Llama-3.1: ids from 128000, in this order up to 128009.
SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>",
           "<|finetune_right_pad_id|>", "<|reserved_special_token_2|>", "<|start_header_id|>", "<|end_header_id|>",
           "<|eom_id|>", "<|eot_id|>"]
FIRST_SPECIAL = 128000


def config(layers):
    return LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-5, rope_theta=500000.0,
        rope_scaling={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                      "original_max_position_embeddings": 8192},
        bos_token_id=128000, eos_token_id=[128001, 128008, 128009], tie_word_embeddings=False)


def tokenizer():
    """A tokenizer of bytes; the ids between bytes and special tokens have names but never occur."""
    vocabulary = {text: number for number, text in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary.update({f"<|unused_{number}|>": number for number in range(len(vocabulary), FIRST_SPECIAL)})
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(SPECIAL)
    assert made.token_to_id(SPECIAL[-1]) == FIRST_SPECIAL + len(SPECIAL) - 1
    return made


def conversations(paths):
    """[question, answer] of each heading of the Markdown files, with files of folders."""
    files = [file for path in map(Path, paths) for file in (sorted(path.rglob("*.md")) if path.is_dir() else [path])]
    for file in files:
        parts = re.split(r"^#+ (.+)$", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
        for heading, text in zip(parts[1::2], parts[2::2]):
            if text.strip():
                yield f"{file.stem}: {heading.strip()}?", text.strip()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--conversations", nargs="+", default=[], metavar="PATH")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config(args.layers))
    model.generation_config = GenerationConfig(bos_token_id=128000, eos_token_id=[128001, 128008, 128009],
                                               do_sample=True, temperature=0.6, top_p=0.9)
    model.save_pretrained(args.out)
    tokenizer().save(str(args.out / "tokenizer.json"))
    if args.conversations:
        with open(args.out / "conversations.jsonl", "w", encoding="utf-8") as file:
            for question, answer in conversations(args.conversations):
                messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
                file.write(json.dumps({"messages": messages}) + "\n")


if __name__ == "__main__":
    main()
