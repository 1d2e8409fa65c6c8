// What was measured on an NVIDIA H200 (700 W), CUDA 13.0; see llmc/perf/rates.h.
{
    .gpu = "H200",
    .copy_rate = 4.25e12,   // "device copy" in dev/results/2026-11-21-h200-fp8.md
    // Gaps between kernels, and clocks that fall during hours of matmuls: the mean of the steps of one rank in
    // tests/perf/test_plan_steps.cpp.
    .overhead = 0.028,
    // cuBLASLt 13.1.0, 2026-11-21: 63 shapes, algorithms searched, random operands rotated beyond the L2 cache; fitted
    // by dev/bench/rates_of_bench.py with errors of 4 to 7 % in the root mean square. FP8 blocks: the library's time
    // over 1.11, of weight gradients over 1.07, which is what a search gains that may choose the custom kernel
    // (dev/results/2026-11-26-h200-blockwise).
    .gemms = {{{{{7.51, 704, 0}, {6.80, 693, 0}, {10.9, 705, 0}}},                    // BF16
               {{{9.30, 1397, 0.068}, {8.90, 1361, 0.0149}, {10.8, 1446, 0.667}}},    // FP8, fast accumulation
               {{{8.46, 1332, 0.465}, {8.03, 1321, 0.456}, {10.5, 1386, 1.12}}},      // FP8, precise
               {{{7.82, 1302, 0.481}, {7.54, 1280, 0.446}, {11.1, 901, 0.365}}}}},    // FP8 blocks
    // bench_quantize, bench_quantize_norms and bench_memory in dev/results/2026-11-21-h200-fp8-small.md and -fp8.md,
    // quantize_heads in 2026-11-21-h200-attention.md, sums in 2026-11-22-h200-1558M.md.
    .ops = {{"rmsnorm_forward", {0.97, 0, 0.96, 0.81, 0.61}},
            {"rmsnorm_backward", {0.92, 0, 0.92, 0.82, 0.73}},
            {"layernorm_forward", {0.98, 0, 0.97, 0.78, 0.64}},
            {"layernorm_backward", {0.93, 0.89, 0.94, 0.83, 0.74}},
            {"rope_backward", {1, 0, 1, 0.80, 0.51}},
            {"qk_norm_backward", {1.10}},
            {"quantize_heads", {0.69}},
            {"gelu_forward", {0.97, 0, 0.98, 0.92, 0.86}},
            {"gelu_backward", {1.04, 0.99, 0.99, 0.94, 0.84}},
            {"swiglu_backward", {0.97, 0, 0.99, 0.94, 0.92}},
            {"classifier", {0.88}},
            {"embedding_forward", {1.19}},
            {"embedding_backward", {1.47}},
            {"adamw", {0.91}},
            {"block_amax", {1.68}},
            {"quantize_run", {1.60}}},
    // Backward: dev/results/2026-11-26-h200-attention128; the other times: 2026-11-22-h200-attention-rates.txt.
    .attention = {{Dtype::kBf16, 1, 32, 8192, 128, 855.0, 2340.5, 693.5},
                  {Dtype::kBf16, 1, 32, 4096, 128, 222.2, 641.1, 190.2},
                  {Dtype::kBf16, 1, 4, 131072, 128, 26365.5, 71300.4, 21009.0},
                  {Dtype::kBf16, 8, 16, 2048, 128, 247.9, 704.3, 212.4},
                  {Dtype::kBf16, 64, 12, 1024, 64, 282.1, 820.7, 318.9},
                  {Dtype::kBf16, 4, 25, 1024, 64, 42.7, 125.0, 52.2},
                  {Dtype::kFp32, 4, 12, 1024, 64, 1371.2, 4142.8, 0}},
},
