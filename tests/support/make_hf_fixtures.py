#!/usr/bin/env python3
"""Make tests/fixtures: tiny models of transformers and what transformers computes with them.

    python3 tests/support/make_hf_fixtures.py [OUTPUT_DIRECTORY [NAME...]]

Needs torch, transformers and safetensors; the files it made are committed, so that tests need none of them.
Each model is saved by save_pretrained, in one directory, with reference.safetensors beside it:

    input_ids  (B, T) int32
    targets    (B, T) int32; -1 is ignored
    logits     (B, T, V)
    loss       (1)    mean over the counted targets
    aux_loss   (1)    the auxiliary loss of a mixture of one layer, where the class has one
    grad.NAME  like the parameter NAME, gradient of the loss

Everything is computed in float64 and stored as float32. Weights, norms and biases are random and far from
their neutral values, so that leaving one out or swapping two shows.
"""

import contextlib
import json
import pathlib
import shutil
import sys
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from transformers import (AutoModelForCausalLM, Dots1Config, Gemma2Config, Gemma3TextConfig, GPT2Config, GptOssConfig,
                          GraniteConfig, LlamaConfig, MinistralConfig, MistralConfig, MixtralConfig, Olmo2Config,
                          Olmo3Config, OlmoeConfig, Phi3Config, Qwen2Config, Qwen3Config, Qwen3MoeConfig,
                          SolarOpenConfig)
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

BATCH, LENGTH, VOCAB = 2, 16, 97


def rope(theta, rope_type="default", **more):
    return dict(rope_type=rope_type, rope_theta=theta, **more)


def yarn(original_positions, **more):
    return rope(1000.0, "yarn", factor=4.0, original_max_position_embeddings=original_positions, **more)


SHAPE = dict(vocab_size=VOCAB, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
             intermediate_size=96, max_position_embeddings=128, bos_token_id=None, eos_token_id=None,
             attn_implementation="eager", experts_implementation="eager")
# Unusual: odd vocabularies, one key/value head, head_dim is not hidden_size / heads, windows of less than LENGTH.
SMALL = SHAPE | dict(hidden_size=40, num_hidden_layers=2, num_key_value_heads=1, intermediate_size=56,
                     rope_parameters=rope(1000.0))
WINDOW_THEN_FULL = ["sliding_attention", "full_attention"]


def small(without=None, **fields):
    """SMALL with these fields, and without one that the class does not have."""
    return {name: value for name, value in (SMALL | fields).items() if name != without}


def gpt_oss(experts, **fields):
    return small(num_local_experts=experts, num_experts_per_tok=experts // 2 + 1, sliding_window=5,
                 rope_parameters=yarn(32, truncate=False), **fields)


class Model(NamedTuple):
    config_class: type
    fields: dict
    dtype: torch.dtype = torch.float32   # of the saved weights
    part_size: str = "1GB"


# The reading of each dtype, of one file and of several is covered by a file that transformers wrote. The place of a
# model decides its seed.
MODELS = {
    "gpt2": Model(GPT2Config, dict(
        vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=4, n_positions=32, n_inner=128, bos_token_id=None,
        eos_token_id=None, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation="eager")),
    # Wavelengths 6.3, 19.9, 62.8 ...: with 32 original positions one frequency stays, one lies in the smooth
    # band, the others are divided by the factor.
    "llama": Model(LlamaConfig, SHAPE | dict(
        num_hidden_layers=2, rms_norm_eps=1e-5, tie_word_embeddings=False, rope_parameters=rope(
            10000.0, "llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
            original_max_position_embeddings=32)), part_size="120KB"),
    "llama_tied": Model(LlamaConfig, SHAPE | dict(
        num_hidden_layers=1, rope_parameters=rope(500.0), rms_norm_eps=1e-6, tie_word_embeddings=True), torch.bfloat16),
    "qwen3": Model(Qwen3Config, SHAPE | dict(
        num_hidden_layers=2, rope_parameters=rope(10000.0), rms_norm_eps=1e-6, tie_word_embeddings=False),
        torch.float16),
    "llama_attention_bias": Model(LlamaConfig, small(attention_bias=True)),
    "llama_mlp_bias": Model(LlamaConfig, small(mlp_bias=True, vocab_size=131, num_key_value_heads=4)),
    "mistral": Model(MistralConfig, small(sliding_window=None, hidden_size=56, num_attention_heads=3)),
    "mistral_window": Model(MistralConfig, small(sliding_window=5, vocab_size=131)),
    "qwen2": Model(Qwen2Config, small(
        without="head_dim", tie_word_embeddings=True, use_sliding_window=False, sliding_window=5, max_window_layers=1,
        hidden_size=48, num_attention_heads=6), torch.bfloat16),
    "qwen2_window": Model(Qwen2Config, small(use_sliding_window=True, sliding_window=7, max_window_layers=0)),
    "qwen3_bias_window": Model(Qwen3Config, small(
        attention_bias=True, use_sliding_window=True, sliding_window=3, max_window_layers=0, vocab_size=101)),
    # Of 8 pairs, pair 0 turns often within 64 positions and stays, 1 and 2 are interpolated, the others are divided.
    "qwen3_yarn": Model(Qwen3Config, small(
        vocab_size=101, num_hidden_layers=1, rope_parameters=yarn(64), max_position_embeddings=256)),
    "qwen3_moe": Model(Qwen3MoeConfig, small(
        num_experts=5, num_experts_per_tok=3, moe_intermediate_size=24, norm_topk_prob=True, use_sliding_window=True,
        sliding_window=5, attention_bias=True)),
    "olmoe": Model(OlmoeConfig, small(
        without="head_dim", num_experts=6, num_experts_per_tok=4, pad_token_id=None, hidden_size=32,
        num_key_value_heads=4, intermediate_size=24, num_hidden_layers=1)),
    "mixtral": Model(MixtralConfig, small(
        num_local_experts=4, num_experts_per_tok=2, intermediate_size=24, num_hidden_layers=1)),
    "dots1": Model(Dots1Config, small(
        n_routed_experts=5, num_experts_per_tok=2, moe_intermediate_size=24, n_shared_experts=2, norm_topk_prob=True,
        routed_scaling_factor=2.5, sliding_window=None, attention_bias=True)),
    "solar_open": Model(SolarOpenConfig, small(
        without="intermediate_size", n_routed_experts=6, num_experts_per_tok=4, moe_intermediate_size=16,
        norm_topk_prob=False, num_hidden_layers=1)),
    "olmo2": Model(Olmo2Config, small(
        attention_bias=True, pad_token_id=None, num_attention_heads=5, num_key_value_heads=5, head_dim=8)),
    "granite": Model(GraniteConfig, small(
        attention_bias=True, mlp_bias=True, tie_word_embeddings=True, embedding_multiplier=5.5, logits_scaling=3.0,
        residual_multiplier=0.37, attention_multiplier=0.11)),
    # The scale of scores is not that of the head dim.
    "gemma3": Model(Gemma3TextConfig, small(
        attention_bias=True, pad_token_id=None, query_pre_attn_scalar=21, sliding_window=5,
        layer_types=WINDOW_THEN_FULL, rope_parameters=dict(
            full_attention=rope(1000.0, "linear", factor=4.0), sliding_attention=rope(100.0)))),
    "phi3": Model(Phi3Config, small(
        sliding_window=9, pad_token_id=None, original_max_position_embeddings=128, num_key_value_heads=2,
        rope_parameters=rope(1000.0, partial_rotary_factor=0.625))),   # 10 of 16 elements
    "olmo3": Model(Olmo3Config, small(
        pad_token_id=None, sliding_window=5, layer_types=WINDOW_THEN_FULL, num_attention_heads=5, num_key_value_heads=5,
        head_dim=8, rope_parameters=dict(full_attention=yarn(32), sliding_attention=rope(1000.0)))),
    "ministral": Model(MinistralConfig, small(
        sliding_window=5, layer_types=WINDOW_THEN_FULL, intermediate_size=24)),
    # transformers writes the layer_types that follow: full_attention, sliding_attention.
    "qwen3_layers": Model(Qwen3Config, small(
        use_sliding_window=True, sliding_window=4, max_window_layers=1, intermediate_size=24), torch.bfloat16),
    # The first layer has no experts.
    "dots1_dense": Model(Dots1Config, small(
        n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, n_shared_experts=1, norm_topk_prob=True,
        first_k_dense_replace=1, sliding_window=None)),
    "qwen3_moe_dense": Model(Qwen3MoeConfig, small(
        num_experts=3, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True, mlp_only_layers=[0]),
        torch.bfloat16),
    # Caps that bend most scores and logits; the windows are those that follow without layer_types.
    "gemma2": Model(Gemma2Config, small(
        attention_bias=True, pad_token_id=None, query_pre_attn_scalar=11, sliding_window=5, attn_logit_softcapping=1.5,
        final_logit_softcapping=2.5, num_attention_heads=5, head_dim=24)),
    # Sequences of LENGTH are longer than the original ones.
    "phi3_longrope": Model(Phi3Config, small(
        pad_token_id=None, original_max_position_embeddings=12, hidden_size=48, num_attention_heads=3,
        intermediate_size=24, rope_parameters=rope(
            1000.0, "longrope", partial_rotary_factor=0.5, short_factor=[1.0, 1.1, 1.3, 1.5],
            long_factor=[1.25, 1.75, 3.5, 9.0], original_max_position_embeddings=12)), torch.bfloat16),
    "olmo2_grouped": Model(Olmo2Config, small(
        pad_token_id=None, num_attention_heads=5, head_dim=8, intermediate_size=24), torch.bfloat16),
    "gpt_oss": Model(GptOssConfig, gpt_oss(5, intermediate_size=24)),
    "gpt_oss_mxfp4": Model(GptOssConfig, gpt_oss(
        3, hidden_size=64, intermediate_size=32, attention_bias=False), torch.bfloat16),   # blocks of 32
}
# Experts as transformers 5 has them in memory; the others are saved one by one, as transformers 4 does.
STACKED = ["mixtral"]


def randomise(model, dtype, seed):
    """Random values that `dtype` holds exactly."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        is_norm = any(part.startswith(("ln_", "norm")) or part.endswith("norm") for part in name.split("."))
        if name.endswith(".bias"):
            value = 0.3 * noise
        elif model.config.model_type == "gpt_oss" and ".experts." in name:
            # Some gates and ups are beyond the limit of 7.
            value = (0.8 if "gate_up" in name else 0.05) * noise
        elif is_norm or "layernorm" in name:
            value = 1 + 0.3 * noise
        elif any(part in name for part in ("wte", "wpe", "embed_tokens", "lm_head")):
            value = 0.3 * noise
        else:
            value = 0.15 * noise
        parameter.data = value.to(dtype).to(torch.float64)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):   # as large as differences of sigmoids, so that it decides
            value = 0.3 * torch.randn(buffer.shape, generator=generator, dtype=torch.float64)
            buffer.copy_(value.to(dtype))


MAGNITUDES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)


def quantize_experts(model, seed):
    """Replace the weights of experts by random ones that MXFP4 has; return blocks and scales by name."""
    generator = torch.Generator().manual_seed(seed)
    packed = {}
    for name, parameter in model.named_parameters():
        if not name.endswith(("gate_up_proj", "down_proj")):
            continue
        experts, width, rows = parameter.shape
        codes = torch.randint(16, (experts, rows, width // 32, 32), generator=generator)
        scales = torch.randint(125, 128, (experts, rows, width // 32), generator=generator)
        values = MAGNITUDES[codes % 8] * (1 - codes // 8 * 2) * 2.0 ** (scales - 128)[..., None]
        parameter.data = values.flatten(2).transpose(1, 2).contiguous()
        packed[name + "_blocks"] = (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8)
        packed[name + "_scales"] = (scales - 1).to(torch.uint8)
        theirs = convert_moe_packed_tensors(packed[name + "_blocks"], packed[name + "_scales"])
        assert torch.equal(theirs.double(), parameter.data)
    return packed


def save_quantized(directory, packed):
    """Store blocks and scales instead of the weights of experts, as the files of gpt-oss do."""
    path = directory / "model.safetensors"
    tensors = {n: t for n, t in load_file(path).items() if n + "_blocks" not in packed}
    save_file(tensors | packed, path, metadata={"format": "pt"})
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    path.write_text(json.dumps(config))


@contextlib.contextmanager
def everything_in_double():
    """transformers upcasts norms and rope to float32 whatever the model's dtype is; here to float64."""
    single, to_single = torch.float32, torch.Tensor.float
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double
    try:
        yield
    finally:
        torch.float32 = torch.float = single
        torch.Tensor.float = to_single


def run(model, ids, targets):
    """Logits, loss and gradients in the model's dtype."""
    model.zero_grad()
    logits = model(input_ids=ids, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
    loss.backward()
    return logits.detach(), loss.detach(), {n: p.grad.detach().clone() for n, p in model.named_parameters()}


def check_against_single(model, ids, targets, logits, loss):
    """The unpatched model in float32 must agree, or the patch above changed the arithmetic."""
    logits32, loss32, _ = run(model.float(), ids, targets)
    assert logits.dtype == torch.float64 and logits32.dtype == torch.float32
    error = (logits32 - logits).abs().max().item()
    assert 0 < error < 1e-4 and abs(loss32.item() - loss.item()) < 1e-5, (error, loss32, loss)


def model_of(name):
    return AutoModelForCausalLM.from_config(MODELS[name].config_class(**MODELS[name].fields)).double()


def make(name, directory, seed):
    _, _, dtype, part_size = MODELS[name]
    model = model_of(name).eval()
    randomise(model, dtype, seed)
    packed = quantize_experts(model, seed + 2) if name == "gpt_oss_mxfp4" else None
    generator = torch.Generator().manual_seed(seed + 1)
    vocab = model.config.vocab_size
    ids = torch.randint(vocab, (BATCH, LENGTH), generator=generator)
    targets = torch.randint(vocab, (BATCH, LENGTH), generator=generator)
    targets[0, 3] = targets[1, 0] = targets[1, LENGTH - 1] = -1
    with everything_in_double():
        logits, loss, grads = run(model, ids, targets)
        auxiliary = None
        if model.config.num_hidden_layers == 1 and hasattr(model, "router_aux_loss_coef"):
            auxiliary = model(input_ids=ids, use_cache=False, output_router_logits=True).aux_loss
    check_against_single(model, ids, targets, logits, loss)

    shutil.rmtree(directory, ignore_errors=True)
    model.to(dtype).save_pretrained(directory, max_shard_size=part_size, save_original_format=name not in STACKED)
    (directory / "generation_config.json").unlink(missing_ok=True)
    if packed:
        save_quantized(directory, packed)
    tensors = {"input_ids": ids.int(), "targets": targets.int(), "logits": logits.float(),
               "loss": loss.float().reshape(1)}
    if auxiliary is not None:
        tensors["aux_loss"] = auxiliary.float().reshape(1)
    if name == "mixtral":   # the router's name in transformers 4
        grads = {n.replace(".mlp.gate.", ".block_sparse_moe.gate."): g for n, g in grads.items()}
    tensors |= {"grad." + n: g.float().contiguous() for n, g in grads.items()}
    without = [n for n, g in grads.items() if g.abs().max() <= 1e-6]
    assert not without, f"parameters without effect: {without}"
    save_file(tensors, directory / "reference.safetensors")
    for path in directory.iterdir():
        path.chmod(0o644)
        if path.suffix == ".json":
            path.write_text(json.dumps(json.loads(path.read_text())) + "\n")   # data, in one line
    size = sum(path.stat().st_size for path in directory.iterdir())
    print(f"{directory}: loss {loss.item():.6f}, largest logit {logits.abs().max().item():.2f}, {size} bytes")


def main():
    output = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parents[1] / "fixtures")
    for seed, name in enumerate(MODELS):
        if name in sys.argv[2:] or len(sys.argv) <= 2:
            make(name, output / name, 100 * (seed + 1))


if __name__ == "__main__":
    main()
