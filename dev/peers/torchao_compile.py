#!/usr/bin/env python3
"""Llama-3-8B in plain PyTorch with torch.compile and torchao's float8 training: milliseconds per micro-batch.

32 layers, each compiled, 1 sequence of 8192 tokens, forward and backward. torchao quantizes weights in every
micro-batch; the LM head stays in BF16 and is compiled with the cross entropy. Q, K and V are one linear, gate and up
another. Attention is cuDNN's through scaled_dot_product_attention, FlashAttention where cuDNN refuses. Gradients
accumulate in BF16. Random tokens; the median is over all micro-batches of at least two steps.

The same work of ours is `train_llama --model llama3-8B --seq-length 8192 --micro-batch-size 1 --global-batch-size 16
--grad-dtype bf16 --moment-dtype bf16` on one GPU: its s/it / 16, which contains the optimizer too.

Needs PyTorch with CUDA, and pip install torchao
"""
import functools

import torch
import torchao
from peer import (FFN, HEAD_DIM, HEADS, HIDDEN, INIT_STD, KV_GROUPS, NORM_EPS, ROPE_THETA, VOCAB, measure,
                  parse_options, random_tokens)
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

Linear = functools.partial(nn.Linear, bias=False)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(HIDDEN, NORM_EPS), nn.RMSNorm(HIDDEN, NORM_EPS)
        self.qkv = Linear(HIDDEN, (HEADS + 2 * KV_GROUPS) * HEAD_DIM)
        self.projection = Linear(HIDDEN, HIDDEN)
        self.gate_up, self.down = Linear(HIDDEN, 2 * FFN), Linear(FFN, HIDDEN)

    def forward(self, hidden, cos, sin):
        """hidden [1, T, HIDDEN], cos and sin [T, HEAD_DIM / 2]."""
        batch, length, _ = hidden.shape
        heads = self.qkv(self.attention_norm(hidden)).view(batch, length, -1, HEAD_DIM).transpose(1, 2)
        q, k, v = heads.split((HEADS, KV_GROUPS, KV_GROUPS), dim=1)
        attention = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True,
                                                   enable_gqa=True)
        hidden = hidden + self.projection(attention.transpose(1, 2).reshape(batch, length, HIDDEN))
        gate, up = self.gate_up(self.mlp_norm(hidden)).chunk(2, dim=-1)
        return hidden + self.down(F.silu(gate) * up)


def rotate(x, cos, sin):
    """Rotary embedding of x [1, heads, T, HEAD_DIM]."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.output = nn.RMSNorm(HIDDEN, NORM_EPS), Linear(HIDDEN, VOCAB)

    def forward(self, hidden, targets):
        return F.cross_entropy(self.output(self.norm(hidden)).flatten(0, 1).float(), targets.flatten())


class Llama(nn.Module):
    def __init__(self, options):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(options.layers))
        self.head = Head()
        for weight in self.parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=INIT_STD)
        angles = torch.outer(torch.arange(options.seq_length).float(),
                             ROPE_THETA ** (-torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM))
        self.cos, self.sin = angles.cos(), angles.sin()

    def forward(self, tokens, targets):
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden, self.cos, self.sin)
        return self.head(hidden, targets)


def build(options, precision):
    torch._dynamo.reset()
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = Llama(options)
    torch.set_default_dtype(default)
    if precision != "bf16":
        convert_to_float8_training(model.layers, config=Float8LinearConfig.from_recipe_name(precision))
    for part in (*model.layers, model.head):
        part.compile(fullgraph=True)
    batches = random_tokens(options)

    def micro_batch(i):
        if i == 0:
            model.zero_grad()
        tokens, targets = batches[i % 2].unsqueeze(1)
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
            loss = model(tokens, targets)
            loss.backward()
        return loss.detach()
    return micro_batch


if __name__ == "__main__":
    measure("torchao + torch.compile", torchao.__version__,
            parse_options(__doc__, ["bf16", "tensorwise", "rowwise"], ("bf16",)), build)
