#!/usr/bin/env python3
"""The comparison for bench_attention: the same shapes in PyTorch, by cuDNN or by plain matmuls and a softmax.

Usage: dev/bench/attention_cudnn.py [HEAD SIZE]     needs PyTorch with CUDA; the trainer does not
       dev/bench/attention_cudnn.py --plain         B 8, T 2048, the shape of a published guide; with peak memory
Prints shape | forward us | TFLOP/s | backward us | TFLOP/s, counted as bench_attention counts: half the square of
scores, 2.5 times the forward for the backward. Random data, two input sets in turn, medians over 0.2 s.
"""
import math
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

SHAPES = ((1, 32, 8, 8192, 128), (1, 32, 8, 4096, 128), (8, 16, 4, 2048, 128), (64, 12, 12, 1024, 64),
          (4, 25, 25, 1024, 64))


def median_us(run):
    for i in range(4):
        run(i)
    times, total = [], 0.0
    while total < 200000 or len(times) < 5:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run(len(times))
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000)
        total += times[-1]
    return sorted(times)[len(times) // 2]


def plain_attention(q, k, v):
    """Causal attention that stores its scores, as PyTorch's math backend does."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
    return scores.masked_fill(~mask, float("-inf")).softmax(dim=-1) @ v


def bench(B, NH, NKV, T, HS, plain=False):
    sets = []
    for _ in range(2):
        q, k, v, dout = (torch.randn(B, heads, T, HS, device="cuda", dtype=torch.bfloat16)
                         for heads in (NH, NKV, NKV, NH))
        for t in (q, k, v):
            t.requires_grad_(True)
        sets.append((q, k, v, dout))

    def forward(i):
        q, k, v, _ = sets[i % 2]
        if plain:
            return plain_attention(q, k, v)
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=NH != NKV)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        forward_us = median_us(forward)
        outs = [forward(0), forward(1)]
        backward_us = median_us(lambda i: torch.autograd.grad(outs[i % 2], sets[i % 2][:3], sets[i % 2][3],
                                                              retain_graph=True))
    memory = ""
    if plain or "--plain" in sys.argv:
        outs = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            torch.autograd.grad(forward(0), sets[0][:3], sets[0][3])
        memory = f" | {(torch.cuda.max_memory_allocated() - before) / 1e6:6.0f} MB beyond the inputs"
    mflop = 2e-6 * B * NH * T * T * HS
    print(f"{'plain' if plain else 'cudnn'} B {B:2} heads {NH:2} / {NKV:2} T {T:5} d {HS:3} | {forward_us:9.1f} | "
          f"{mflop / forward_us:7.1f} | {backward_us:9.1f} | {2.5 * mflop / backward_us:7.1f}{memory}", flush=True)


if "--plain" in sys.argv:
    for plain in (True, False):
        bench(8, 12, 12, 2048, 64, plain)
else:
    for shape in SHAPES:
        if len(sys.argv) < 2 or shape[4] == int(sys.argv[1]):
            bench(*shape)
