#!/usr/bin/env python3
"""The comparison for the matmuls of experts of bench_gemm_bf16: the same shapes by PyTorch's grouped matmuls, in BF16,
and in FP8 with one scale a row.

Prints shape | us, TFLOP/s of a dense matmul with as many products | us, TFLOP/s of the grouped one | ratio. Balanced
loads, random data; both in turns, medians over 0.2 s. Gradients of weights overwrite. FP8 is without its quantization,
as in the bench. Needs PyTorch with CUDA, 2.11 or newer for the calls made here.
"""
import argparse
import csv

import torch
from peer import medians_us, require_gpu

# Name, experts, rows, N and K of the forward pass.
SHAPES = (("Qwen3-30B-A3B up", 128, 65536, 1536, 2048), ("Qwen3-30B-A3B down", 128, 65536, 2048, 768),
          ("OLMoE up", 64, 65536, 2048, 2048), ("OLMoE down", 64, 65536, 2048, 1024))
COLUMNS = ("shape", "pass", "dtype", "dense_us", "dense_tflops", "grouped_us", "grouped_tflops", "torch", "gpu")


def random(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(dtype)


def bf16_calls(experts, rows, n, k, offsets):
    """{pass: (dense, grouped)}"""
    x, y, w = random(rows, k), random(rows, n), random(experts, n, k)
    of_one = w[0].contiguous()
    return {"forward": (lambda _: x @ of_one.t(), lambda _: torch._grouped_mm(x, w.transpose(1, 2), offs=offsets)),
            "dgrad": (lambda _: y @ of_one, lambda _: torch._grouped_mm(y, w, offs=offsets)),
            "wgrad": (lambda _: y.t() @ x, lambda _: torch._grouped_mm(y.t(), x, offs=offsets))}


def fp8_calls(experts, rows, n, k, offsets):
    """The same with one scale a row of x and dy, and one a row of each expert's weights or their transpose."""
    code, bf16 = torch.float8_e4m3fn, torch.bfloat16
    x, y, w = random(rows, k, dtype=code), random(rows, n, dtype=code), random(experts, n, k, dtype=code)
    wt, xt, yt = w.transpose(1, 2).contiguous(), x.t().contiguous(), y.t().contiguous()

    def ones(*shape):
        return torch.ones(shape, device="cuda")

    def pair(a, weights):   # a [rows, depth], weights [experts, columns, depth]
        columns = weights.shape[1]
        return (lambda _, scales=(ones(rows, 1), ones(1, columns)): torch._scaled_mm(
                    a, weights[0].t(), *scales, out_dtype=bf16),
                lambda _, scales=(ones(rows), ones(experts, columns)): torch._scaled_grouped_mm(
                    a, weights.transpose(1, 2), *scales, offs=offsets, out_dtype=bf16))

    return {"forward": pair(x, w), "dgrad": pair(y, wt),
            "wgrad": (lambda _, scales=(ones(n, 1), ones(1, k)): torch._scaled_mm(
                          yt, xt.t(), *scales, out_dtype=bf16),
                      lambda _, scales=(ones(n * experts), ones(k * experts)): torch._scaled_grouped_mm(
                          yt, xt.t(), *scales, offs=offsets, out_dtype=bf16))}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="shapes with this in their name")
    parser.add_argument("--csv", help="file for the numbers, too")
    options = parser.parse_args()
    require_gpu()
    gpu = torch.cuda.get_device_name()
    print(f"PyTorch {torch.__version__}, {gpu}", flush=True)
    rows_out = []
    for name, experts, rows, n, k in SHAPES:
        if options.only not in name:
            continue
        offsets = torch.arange(1, experts + 1, device="cuda", dtype=torch.int32) * (rows // experts)
        for dtype, calls in (("bf16", bf16_calls), ("fp8-rowwise", fp8_calls)):
            for which, pair in calls(experts, rows, n, k, offsets).items():
                try:
                    us = medians_us(*pair)
                except RuntimeError as error:
                    print(f"{name} {dtype} {which}: {str(error).splitlines()[0]}", flush=True)
                    continue
                rates = [2e-6 * rows * n * k / time for time in us]
                print(f"{f'{name} {dtype} {which}':40} | {us[0]:8.1f} {rates[0]:7.1f} | {us[1]:8.1f} {rates[1]:7.1f} | "
                      f"{us[0] / us[1]:5.3f}", flush=True)
                rows_out.append((name, which, dtype, us[0], rates[0], us[1], rates[1], torch.__version__, gpu))
    if options.csv:
        with open(options.csv, "w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows_out])


if __name__ == "__main__":
    main()
