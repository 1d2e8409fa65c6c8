"""Converts a Llama from llama.cpp's GGUF format, in any quantization, to a folder that train_llama --load and
transformers read: config.json, weights in FP32, tokenizer.json. (transformers 5 reads GGUF, too, but does not save it;
its weights of SmolLM2 are equal to these to the bit.)"""
import json
import re
import sys
from pathlib import Path

sys.path[:0] = [str(p / "scripts") for p in Path(__file__).resolve().parents if (p / "scripts/llmfp8").is_dir()]
from llmfp8.support import InputError, need  # noqa: E402

NAMES = {"token_embd": "embed_tokens", "output_norm": "norm", "attn_norm": "input_layernorm",
         "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
         "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj",
         "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
CONTROL = 3   # tokenizer.ggml.token_type of special tokens


def hf_name(name):
    """model.layers.0.mlp.up_proj.weight of blk.0.ffn_up.weight."""
    found = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", name)
    if name == "output.weight":
        return "lm_head.weight"
    if not found or found[2] not in NAMES:
        raise InputError(f"a tensor {name}, which a Llama does not have")
    return f"model.{f'layers.{found[1]}.' if found[1] else ''}{NAMES[found[2]]}.weight"


def in_halves(weight, heads):
    """The rows of Q or K in transformers' order: rope rotates row i of a head with row i + head_dim / 2, in llama.cpp
    with the next one."""
    return weight.reshape(heads, -1, 2, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)


def config_of(fields, tied):
    """config.json of GGUF's fields."""
    llama = {name.removeprefix("llama."): value for name, value in fields.items()}
    heads, theta = llama["attention.head_count"], llama["rope.freq_base"]
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
            "vocab_size": len(fields["tokenizer.ggml.tokens"]), "hidden_size": llama["embedding_length"],
            "intermediate_size": llama["feed_forward_length"], "num_hidden_layers": llama["block_count"],
            "num_attention_heads": heads, "num_key_value_heads": llama["attention.head_count_kv"],
            "head_dim": llama.get("rope.dimension_count", llama["embedding_length"] // heads),
            "max_position_embeddings": llama["context_length"],
            "rms_norm_eps": float(f"{llama['attention.layer_norm_rms_epsilon']:.6g}"), "rope_theta": theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": theta}, "tie_word_embeddings": tied,
            **{f"{end}_token_id": fields[f"tokenizer.ggml.{end}_token_id"] for end in ("bos", "eos")},
            "dtype": "float32"}


def tokenizer_of(fields):
    """A byte-level BPE that keeps digits apart, which is what GGUF calls smollm."""
    tokenizers = need("tokenizers", "tokenizers", "converting a tokenizer")
    if (fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]) != ("gpt2", "smollm"):
        raise InputError(f"its tokenizer is {fields['tokenizer.ggml.model']} with the splitting rule "
                         f"{fields['tokenizer.ggml.pre']}; gpt2 with smollm is known here")
    tokens, split = fields["tokenizer.ggml.tokens"], tokenizers.pre_tokenizers
    made = tokenizers.Tokenizer(tokenizers.models.BPE(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=[tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"]]))
    made.pre_tokenizer = split.Sequence([split.Digits(individual_digits=True), split.ByteLevel(add_prefix_space=False)])
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens([token for token, kind in zip(tokens, fields["tokenizer.ggml.token_type"])
                             if kind == CONTROL])
    return made


def convert(path, folder):
    """Writes the folder; InputError if the file is no Llama that this knows."""
    gguf = need("gguf", "gguf", "reading a GGUF file")
    safetensors = need("safetensors.numpy", "safetensors", "writing weights")
    try:
        reader = gguf.GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        if fields["general.architecture"] != "llama":
            raise InputError(f"it is a {fields['general.architecture']}, not a llama")
        weights = {hf_name(tensor.name): gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors}
        config, tokenizer = config_of(fields, "lm_head.weight" not in weights), tokenizer_of(fields)
    except (InputError, ValueError, KeyError, NotImplementedError) as error:
        raise InputError(f"{path}: not a Llama that can be converted: {error}") from None
    for name, weight in weights.items():
        if ".q_proj." in name or ".k_proj." in name:
            heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
            weights[name] = in_halves(weight, heads)
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")   # the last file
