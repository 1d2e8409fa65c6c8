#!/usr/bin/env python3
"""The comparison for bench_attention: the same shapes in PyTorch, by cuDNN or by plain matmuls and a softmax.

The first line says which cuDNN, PyTorch and GPU; then shape | forward us | TFLOP/s | backward us | TFLOP/s, counted
as bench_attention counts: half the square of scores, 2.5 times the forward for the backward. Random data, two input
sets in turn, medians over 0.2 s. Needs PyTorch with CUDA.
"""
import argparse
import csv
import math
import os
import sys

import torch
from peer import medians_us, require_gpu, version_text
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

# B, heads, KV heads, T, head dim, window (0: none).
SHAPES = ((1, 32, 8, 8192, 128, 0), (1, 32, 8, 4096, 128, 0), (8, 16, 4, 2048, 128, 0), (64, 12, 12, 1024, 64, 0),
          (4, 25, 25, 1024, 64, 0))
WINDOWS = ((1, 64, 8, 8192, 64, 1024), (1, 64, 8, 32768, 64, 1024), (1, 32, 8, 32768, 128, 4096))
PLAIN_SHAPE = (8, 12, 12, 2048, 64, 0)
COLUMNS = ("attention", "batch", "heads", "kv_heads", "seq_length", "head_dim", "forward_us", "forward_tflops",
           "backward_us", "backward_tflops", "beyond_inputs_mb", "cudnn", "torch", "gpu")


def plain_attention(q, k, v):
    """Causal attention that stores its scores, as PyTorch's math backend does."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
    return scores.masked_fill(~mask, float("-inf")).softmax(dim=-1) @ v


def windowed_attention(NH, NKV, HS, window):
    """Attention of cuDNN with a window, by Transformer Engine, as PyTorch has none, of tensors B, T, heads, HS."""
    os.environ.update(NVTE_FLASH_ATTN="0", NVTE_UNFUSED_ATTN="0")   # an error where cuDNN's cannot run
    from transformer_engine.pytorch import DotProductAttention
    module = DotProductAttention(NH, HS, num_gqa_groups=NKV, attn_mask_type="causal", window_size=(window - 1, 0),
                                 qkv_format="bshd", attention_dropout=0)
    return lambda q, k, v: module(q, k, v).view_as(q)


def bench(B, NH, NKV, T, HS, window, plain):
    """Forward us, TFLOP/s, backward us, TFLOP/s, and peak MB beyond the inputs of both together."""
    sets, with_window = [], windowed_attention(NH, NKV, HS, window) if window else None
    for _ in range(2):
        q, k, v, dout = (torch.randn(*((B, T, heads) if window else (B, heads, T)), HS, device="cuda",
                                     dtype=torch.bfloat16) for heads in (NH, NKV, NKV, NH))
        for t in (q, k, v):
            t.requires_grad_(True)
        sets.append((q, k, v, dout))

    def forward(i):
        q, k, v, _ = sets[i % 2]
        if window:
            return with_window(q, k, v)
        if plain:
            return plain_attention(q, k, v)
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=NH != NKV)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        forward_us, = medians_us(forward)
        outs = [] if window else [forward(0), forward(1)]   # Transformer Engine's graph runs once
        backward_us, = medians_us(lambda i: torch.autograd.grad(
            outs[i % 2] if outs else forward(i), sets[i % 2][:3], sets[i % 2][3], retain_graph=not window))
        if window:
            backward_us -= forward_us
        outs = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(forward(0), sets[0][:3], sets[0][3])
    pairs = T * window - window * (window - 1) / 2 if window else T * T / 2
    mflop = 4e-6 * B * NH * pairs * HS
    return (forward_us, mflop / forward_us, backward_us, 2.5 * mflop / backward_us,
            (torch.cuda.max_memory_allocated() - before) / 1e6)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head_dim", nargs="?", type=int, choices=(64, 128), help="only shapes of it (default: all)")
    parser.add_argument("--plain", action="store_true", help="B 8, T 2048, the shape of a published guide, beside a "
                        "plain implementation, with peak memory")
    parser.add_argument("--windows", action="store_true", help="windows alone, of which FLOPs count their pairs; needs "
                        "Transformer Engine")
    parser.add_argument("--csv", action="store_true", help="the same as CSV, with a line of names first")
    options = parser.parse_args()
    require_gpu()
    versions = (version_text(torch.backends.cudnn.version()), torch.__version__, torch.cuda.get_device_name())
    rows = csv.writer(sys.stdout, lineterminator="\n")
    if options.csv:
        rows.writerow(COLUMNS)
    else:
        print("cuDNN {}, PyTorch {}, {}".format(*versions))
    shapes = [(PLAIN_SHAPE, True), (PLAIN_SHAPE, False)] if options.plain else [
        (shape, False) for shape in (WINDOWS if options.windows else SHAPES) if options.head_dim in (None, shape[4])]
    for shape, plain in shapes:
        name = "plain" if plain else "cudnn" + (f" window {shape[5]}" if shape[5] else "")
        numbers = bench(*shape, plain)
        if options.csv:
            rows.writerow((name, *shape[:5], *(f"{number:.1f}" for number in numbers), *versions))
        else:
            memory = " | {4:6.0f} MB beyond the inputs" if options.plain else ""
            print((name + " B {:2} heads {:2} / {:2} T {:5} d {:3} | ").format(*shape)
                  + ("{0:9.1f} | {1:7.1f} | {2:9.1f} | {3:7.1f}" + memory).format(*numbers))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
