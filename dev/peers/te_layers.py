#!/usr/bin/env python3
"""Llama-3-8B from Transformer Engine's layers, set as Megatron-LM sets them: milliseconds per micro-batch.

32 te.TransformerLayer, 1 sequence of 8192 tokens, forward and backward. Weights are BF16, those of FP8 matmuls are
quantized in the first micro-batch of a step and kept for the other 15. Gradients of matmul weights accumulate inside
the matmul into main_grad (fuse_wgrad_accumulation). The LM head is a te.Linear in BF16, the loss is Transformer
Engine's fused cross entropy, the embedding is PyTorch's. Random tokens; the median is over all micro-batches of at
least two steps.

The same work of ours is `train_llama --model llama3-8B --seq-length 8192 --micro-batch-size 1 --global-batch-size 16
--grad-dtype bf16 --moment-dtype bf16` on one GPU: its s/it / 16, which contains the optimizer too.

Needs PyTorch with CUDA 13, and pip install --no-build-isolation 'transformer_engine[pytorch,core_cu13]'
"""
import functools

import torch
import transformer_engine.pytorch as te
from peer import (FFN, HEAD_DIM, HEADS, HIDDEN, INIT_STD, KV_GROUPS, NORM_EPS, ROPE_THETA, VOCAB, measure,
                  parse_options, random_tokens)
from transformer_engine import __version__
from transformer_engine.common import recipe
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

RECIPES = {"bf16": None,
           "delayed": recipe.DelayedScaling(fp8_format=recipe.Format.HYBRID, amax_history_len=16),
           "tensorwise": recipe.Float8CurrentScaling(),
           "blockwise": recipe.Float8BlockScaling()}


class Llama(torch.nn.Module):
    def __init__(self, options, fp8_recipe):
        super().__init__()
        init = functools.partial(torch.nn.init.normal_, std=INIT_STD)
        common = {"bias": False, "fuse_wgrad_accumulation": True, "params_dtype": torch.bfloat16, "init_method": init}
        self.recipe = fp8_recipe
        self.embedding = torch.nn.Embedding(VOCAB, HIDDEN, device="cuda", dtype=torch.bfloat16)
        init(self.embedding.weight)
        self.layers = torch.nn.ModuleList(te.TransformerLayer(
            HIDDEN, FFN, HEADS, num_gqa_groups=KV_GROUPS, layernorm_epsilon=NORM_EPS, hidden_dropout=0,
            attention_dropout=0, fuse_qkv_params=True, normalization="RMSNorm", activation="swiglu",
            output_layer_init_method=init, **common) for _ in range(options.layers))
        self.norm = te.RMSNorm(HIDDEN, eps=NORM_EPS, dtype=torch.bfloat16)
        self.head = te.Linear(HIDDEN, VOCAB, **common)
        self.rotary = te.RotaryPositionEmbedding(HEAD_DIM, rotary_base=ROPE_THETA)(options.seq_length)
        dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[options.grad_dtype]
        for weight in [*self.layers.parameters(), *self.head.parameters()]:
            if weight.ndim == 2:
                weight.main_grad = torch.zeros_like(weight, dtype=dtype)

    def forward(self, tokens, targets, is_first):
        """tokens and targets [T, 1]; the mean loss."""
        hidden = self.embedding(tokens)
        with te.autocast(enabled=self.recipe is not None, recipe=self.recipe):
            for layer in self.layers:
                hidden = layer(hidden, rotary_pos_emb=self.rotary, is_first_microbatch=is_first)
        logits = self.head(self.norm(hidden), is_first_microbatch=is_first)
        return te.parallel_cross_entropy(logits, targets, overwrite_input=True).mean()


def build(options, precision):
    FP8GlobalStateManager.reset()   # it keeps the amax history of the model before
    model, batches = Llama(options, RECIPES[precision]), random_tokens(options)

    def micro_batch(i):
        if i == 0:
            model.zero_grad()   # of the embedding and the norms; the first micro-batch overwrites every main_grad
        tokens, targets = batches[i % 2].unsqueeze(-1)
        loss = model(tokens, targets, is_first=i == 0)
        loss.backward()
        return loss.detach()
    return micro_batch


if __name__ == "__main__":
    measure("Transformer Engine", __version__, parse_options(__doc__, list(RECIPES), ("bf16", "fp32")), build)
