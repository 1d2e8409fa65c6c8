#!/usr/bin/env python3
"""The comparison for bench_attention: the same shapes in PyTorch, by cuDNN or by plain matmuls and a softmax.

The first line says which cuDNN, PyTorch and GPU; then shape | forward us | TFLOP/s | backward us | TFLOP/s, counted
as bench_attention counts: half the square of scores, 2.5 times the forward for the backward. Random data, two input
sets in turn, medians over 0.2 s. Needs PyTorch with CUDA.
"""
import argparse
import csv
import math
import sys

import torch
from peer import version_text
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

SHAPES = ((1, 32, 8, 8192, 128), (1, 32, 8, 4096, 128), (8, 16, 4, 2048, 128), (64, 12, 12, 1024, 64),
          (4, 25, 25, 1024, 64))
PLAIN_SHAPE = (8, 12, 12, 2048, 64)
COLUMNS = ("attention", "batch", "heads", "kv_heads", "seq_length", "head_dim", "forward_us", "forward_tflops",
           "backward_us", "backward_tflops", "beyond_inputs_mb", "cudnn", "torch", "gpu")


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
    """Forward us, TFLOP/s, backward us, TFLOP/s, and peak MB beyond the inputs of both together."""
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
        outs = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(forward(0), sets[0][:3], sets[0][3])
    mflop = 2e-6 * B * NH * T * T * HS
    return (forward_us, mflop / forward_us, backward_us, 2.5 * mflop / backward_us,
            (torch.cuda.max_memory_allocated() - before) / 1e6)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head_dim", nargs="?", type=int, choices=(64, 128), help="only shapes of it (default: all)")
    parser.add_argument("--plain", action="store_true", help="B 8, T 2048, the shape of a published guide, beside a "
                        "plain implementation, with peak memory")
    parser.add_argument("--csv", action="store_true", help="the same as CSV, with a line of names first")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("No GPU: torch.cuda.is_available() is false.")
    versions = (version_text(torch.backends.cudnn.version()), torch.__version__, torch.cuda.get_device_name())
    rows = csv.writer(sys.stdout, lineterminator="\n")
    if options.csv:
        rows.writerow(COLUMNS)
    else:
        print("cuDNN {}, PyTorch {}, {}".format(*versions))
    shapes = [(PLAIN_SHAPE, True), (PLAIN_SHAPE, False)] if options.plain else \
        [(shape, False) for shape in SHAPES if options.head_dim in (None, shape[4])]
    for shape, plain in shapes:
        name, numbers = "plain" if plain else "cudnn", bench(*shape, plain)
        if options.csv:
            rows.writerow((name, *shape, *(f"{number:.1f}" for number in numbers), *versions))
        else:
            memory = " | {4:6.0f} MB beyond the inputs" if options.plain else ""
            print((name + " B {:2} heads {:2} / {:2} T {:5} d {:3} | ").format(*shape)
                  + ("{0:9.1f} | {1:7.1f} | {2:9.1f} | {3:7.1f}" + memory).format(*numbers))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
