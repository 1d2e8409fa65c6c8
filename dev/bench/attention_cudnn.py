#!/usr/bin/env python3
"""What bench_attention is measured against: the same shapes through PyTorch's cuDNN attention.

Usage: dev/bench/attention_cudnn.py [HEAD SIZE]     needs PyTorch with CUDA; the trainer does not
Prints shape | forward us | TFLOP/s | backward us | TFLOP/s, counted as bench_attention counts: half the square of
scores, 2.5 times the forward for the backward. Random data, two input sets in turn, medians over 0.2 s.
"""
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


def bench(B, NH, NKV, T, HS):
    sets = []
    for _ in range(2):
        q, k, v, dout = (torch.randn(B, heads, T, HS, device="cuda", dtype=torch.bfloat16)
                         for heads in (NH, NKV, NKV, NH))
        for t in (q, k, v):
            t.requires_grad_(True)
        sets.append((q, k, v, dout))

    def forward(i):
        q, k, v, _ = sets[i % 2]
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=NH != NKV)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        forward_us = median_us(forward)
        outs = [forward(0), forward(1)]
        backward_us = median_us(lambda i: torch.autograd.grad(outs[i % 2], sets[i % 2][:3], sets[i % 2][3],
                                                              retain_graph=True))
    mflop = 2e-6 * B * NH * T * T * HS
    print(f"cudnn B {B:2} heads {NH:2} / {NKV:2} T {T:5} d {HS:3} | {forward_us:9.1f} | {mflop / forward_us:7.1f} | "
          f"{backward_us:9.1f} | {2.5 * mflop / backward_us:7.1f}", flush=True)


for shape in SHAPES:
    if len(sys.argv) < 2 or shape[4] == int(sys.argv[1]):
        bench(*shape)
