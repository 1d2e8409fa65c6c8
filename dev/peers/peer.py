"""What the drivers of this folder share: the shape of Llama-3-8B, their options, the timing and the row they print."""
import argparse
import csv
import gc
import re
import sys
import time

import torch

HIDDEN, FFN, HEADS, KV_GROUPS, HEAD_DIM, VOCAB = 4096, 14336, 32, 8, 128, 128256
NORM_EPS, ROPE_THETA, INIT_STD = 1e-5, 5e5, 0.02
COLUMNS = ("trainer", "version", "precision", "ms_per_micro_batch", "min", "max", "memory_gib", "gpu", "attention",
           "cudnn", "torch")


def require_gpu():
    if not torch.cuda.is_available():
        sys.exit("No GPU: torch.cuda.is_available() is false.")


def positive(text):
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 1")
    return value


def parse_options(doc, precisions, grad_dtypes):
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=positive, default=32, help="fewer for a smaller GPU (default 32)")
    parser.add_argument("--seq-length", type=positive, default=8192, help="tokens of a micro-batch (default 8192)")
    parser.add_argument("--accumulate", type=positive, default=16, help="micro-batches of a step (default 16)")
    parser.add_argument("--seconds", type=float, default=10, help="least time measured per precision (default 10)")
    parser.add_argument("--precisions", nargs="+", choices=precisions, default=precisions, metavar="NAME",
                        help=f"default: {' '.join(precisions)}")
    parser.add_argument("--grad-dtype", choices=grad_dtypes, default="bf16",
                        help="of the accumulated gradients of matmul weights (default bf16)")
    options = parser.parse_args()
    require_gpu()
    return options


def random_tokens(options):
    """Two micro-batches of inputs and targets [seq_length], which the micro-batches of a step take in turn."""
    return [torch.randint(VOCAB, (2, options.seq_length), device="cuda") for _ in range(2)]


def milliseconds(micro_batch, options):
    """The time of every micro-batch of whole steps, after one step of warm-up. The host stays two ahead of the GPU."""
    def step(events):
        for i in range(options.accumulate):
            micro_batch(i)
            events.append(torch.cuda.Event(enable_timing=True))
            events[-1].record()
            events[max(0, len(events) - 3)].synchronize()
    warm_up = []
    step(warm_up)
    events, begin = [warm_up[-1]], time.monotonic()
    while time.monotonic() - begin < options.seconds or len(events) <= 20:
        step(events)
    torch.cuda.synchronize()
    return sorted(a.elapsed_time(b) for a, b in zip(events, events[1:]))


def medians_us(*calls):
    """The median time of each call(i), where i counts its calls. They alternate, since the card is power-limited, over
    at least 0.2 s, of which the first four rounds do not count."""
    times, total = [[] for _ in calls], 0.0
    while total < 200_000 or len(times[0]) < 12:
        for call, mine in zip(calls, times):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            call(len(mine))
            end.record()
            end.synchronize()
            mine.append(begin.elapsed_time(end) * 1000)
            total += mine[-1]
    return [sorted(mine[4:])[len(mine[4:]) // 2] for mine in times]


def attention_of(micro_batch):
    """Which attention a micro-batch runs, by the names of its kernels."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        micro_batch(1)
        torch.cuda.synchronize()
    kernels = "\n".join(event.key for event in profile.key_averages())
    for pattern, name in (("cudnn.*sdpa", "cuDNN"), ("FlashAttn", "FlashAttention 3"),
                          ("flash_fwd", "FlashAttention 2")):
        if re.search(pattern, kernels):
            return name
    return "neither cuDNN nor FlashAttention"


def version_text(cudnn):
    """Text of a number as cudnnGetVersion returns it."""
    return f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}"


def measure(trainer, version, options, build):
    """Prints a row per precision. `build(options, precision)` makes the model and returns the function micro_batch(i),
    which runs forward and backward of the i-th micro-batch of a step and returns the loss."""
    rows = csv.writer(sys.stdout, lineterminator="\n")
    rows.writerow(COLUMNS)
    for precision in options.precisions:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        micro_batch = build(options, precision)
        times = milliseconds(micro_batch, options)
        memory = torch.cuda.max_memory_allocated() / 2**30
        loss = float(micro_batch(1))
        if not 10 < loss < 15:
            sys.exit(f"{precision}: the loss is {loss}, but that of random weights is about 12: nothing to time.")
        rows.writerow((trainer, version, precision, f"{times[len(times) // 2]:.2f}", f"{times[0]:.2f}",
                       f"{times[-1]:.2f}", f"{memory:.1f}", torch.cuda.get_device_name(), attention_of(micro_batch),
                       version_text(torch.backends.cudnn.version()), torch.__version__))
        sys.stdout.flush()
        del micro_batch
