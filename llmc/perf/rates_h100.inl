// What was measured on an NVIDIA H100 80GB HBM3 (SXM, 700 W), cuBLASLt 13.1.0, 2026-11-23, commit 32d7ccd, by `bench`
// with llama3-8B (6 layers), llama3-small and GPT-2 124M in BF16 and in each recipe: medians of these runs
// (dev/results/2026-11-23-h100.md). Attention at 131,072 tokens: bench_attention, commit f9fab10
// (dev/results/2026-11-24-h100-longer). Kernels that became faster since then have these times multiplied by what an
// H200 gained: attention's backward by 0.884 at head dim 128 and T 8192, 0.864 at T 2048 and 0.897 at head dim 64, FP8
// blocks by 1.04 / 1.11, their weight gradients by 1 / 1.07 (rates_h200.inl). See llmc/perf/rates.h.
{
    .gpu = "H100 SXM",
    .copy_rate = 3.013e12,
    .overhead = -0.0048,   // launched early, kernels overlap by more than the gaps between others
    .gemms = {{{{{19.4, 750, 0}, {13.5, 713, 0}, {30.0, 754, 2.23}}},
               {{{15.1, 1489, 0.21}, {10.1, 1358, 0}, {11.9, 1408, 0.383}}},
               {{{6.56, 1330, 0.54}, {9.82, 1287, 0.381}, {12.9, 1388, 1.84}}},
               {{{8.96, 1390, 0.734}, {6.02, 1288, 0.508}, {16.5, 882, 0}}}}},
    .ops = {{"embedding_forward", {1.51}},
            {"embedding_backward", {1.54}},
            {"rmsnorm_forward", {1.04, 0, 1.01, 0.93, 0.71}},
            {"rmsnorm_backward", {0.93, 0, 0.94, 0.88, 0.79}},
            {"rope_backward", {1.03, 0, 0.99, 0.91, 0.55}},
            {"layernorm_forward", {1.01, 0, 0.97, 0.86, 0.71}},
            {"layernorm_backward", {0.92, 0.80, 0.91, 0.83, 0.74}},
            {"gelu_backward", {1, 0.95, 1.01, 0.95, 0.81}},
            {"adamw", {0.93}}},
    .attention = {{Dtype::kBf16, 1, 32, 8192, 128, 922.7, 2871.0, 0},
                  {Dtype::kBf16, 8, 16, 2048, 128, 273.9, 914.7, 0},
                  {Dtype::kBf16, 32, 12, 1024, 64, 166.2, 491.8, 0},
                  {Dtype::kBf16, 1, 4, 131072, 128, 25076.6, 71970, 20751.9}},
},
