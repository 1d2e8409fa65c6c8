#include "llmc/perf/kernel_rates.h"

#include <algorithm>
#include <cmath>
#include <strings.h>

// Names and bandwidths are those of NVIDIA's data sheets (H100, H200, GH200: memory bandwidth; NVLink or PCIe Gen5,
// half of what they print for both ways). Memory is about what CUDA reports, which is not the gigabytes of the name.
// GPUs of other architectures run other kernels, for which the rates of these say nothing.
const std::vector<Gpu>& gpus() {
    static const std::vector<Gpu> rows = {
        {"H200", "H200", 139, 4.8, 450, true},
        {"H200 NVL", "H200 NVL", 139, 4.8, 64, false},
        {"H100 SXM", "H100 80GB HBM3", 79.1, 3.35, 450, false},
        {"H100 PCIe", "H100 PCIe", 79.1, 2.0, 64, false},
        {"H100 NVL", "H100 NVL", 93, 3.9, 64, false},
        {"GH200", "GH200 480GB", 94.5, 4.0, 450, false},
    };
    return rows;
}

const Gpu* find_gpu(const std::string& name) {
    const std::string maker = "NVIDIA ";
    const std::string bare = strncasecmp(name.c_str(), maker.c_str(), maker.size()) == 0 ? name.substr(maker.size())
                                                                                         : name;
    for (const Gpu& gpu : gpus())
        if (strcasecmp(bare.c_str(), gpu.name) == 0 || strcasecmp(bare.c_str(), gpu.device) == 0) return &gpu;
    return nullptr;
}

const Gpu& measured_gpu() { return gpus().front(); }

// dev/results/2026-11-21-h200-fp8.md: "device copy".
const double kCopyRate = 4.25e12;
// dev/results/2026-11-21-h200-zero.md, speed-1-no-overlap: a rank of two sends 1.057 GB of gradients and 1.057 GB of
// weights, and stands still for 8.54 ms. (All-reduce alone: 304 GiB/s; waiting for the other rank is in this one.)
const double kLinkRate = 2 * 1.057e9 / 8.54e-3;
// Not measured: nominal, one 400 Gb/s adapter for each GPU (DGX H100 and H200 data sheets).
const double kNetworkRate = 50e9;

// NVIDIA H200, CUDA 13.0, 2026-11-21: the kernels at commit abe0ad9 in dev/results/2026-11-21-h200-fp8-small.md
// (bench_quantize, bench_quantize_norms, bench_memory); bench_memory at ded97ca in 2026-11-21-h200-fp8.md for those
// that have not changed since; bench_wire in 2026-11-21-h200-zero.md; quantize_heads in 2026-11-21-h200-attention.md;
// kSums in 2026-11-22-h200-1558M.md.
const std::vector<MeasuredOp>& measured_ops() {
    using K = OpKind;
    constexpr OpMode kPlain = OpMode::kPlain, kSums = OpMode::kSums, kRecord = OpMode::kRecord,
                     kCopies = OpMode::kCopies, kBlocks = OpMode::kBlocks;
    constexpr Dtype kB = Dtype::kBf16, kF = Dtype::kFp32;
    // Millions of elements: activations of 8B (8192 tokens) and 124M (65536), FP32 masters, 128 Mi for the optimizer.
    constexpr double kX8 = 33.554432, kQkv8 = 50.331648, kUp8 = 117.440512, kX124 = 50.331648, kUp124 = 201.326592,
                     kW8 = 58.720256, kWqkv = 25.165824, kState = 134.217728, kGrids = 2 * 4 / 128.0;
    static const std::vector<MeasuredOp> rows = {
        {K::rmsnorm_forward, kPlain, kB, kX8, 8, 68.4},        {K::rmsnorm_forward, kRecord, kB, kX8, 8, 68.5},
        {K::rmsnorm_forward, kCopies, kB, kX8, 8, 80.8},
        {K::rmsnorm_forward, kBlocks, kB, kX8, 8 + kGrids, 106.9},
        {K::rmsnorm_backward, kPlain, kB, kX8, 8, 71.3},       {K::rmsnorm_backward, kRecord, kB, kX8, 8, 71.5},
        {K::rmsnorm_backward, kCopies, kB, kX8, 10, 99.3},
        {K::rmsnorm_backward, kBlocks, kB, kX8, 10 + kGrids, 111.8},
        {K::layernorm_forward, kPlain, kB, kX124, 8, 99.8},    {K::layernorm_forward, kRecord, kB, kX124, 8, 100.3},
        {K::layernorm_forward, kCopies, kB, kX124, 8, 124.2},
        {K::layernorm_forward, kBlocks, kB, kX124, 8 + kGrids, 152.6},
        {K::layernorm_backward, kPlain, kB, kX124, 8, 104.7},  {K::layernorm_backward, kRecord, kB, kX124, 8, 104.0},
        {K::layernorm_backward, kSums, kB, kX124, 8, 109.8},   {K::layernorm_backward, kCopies, kB, kX124, 10, 145.9},
        {K::layernorm_backward, kBlocks, kB, kX124, 10 + kGrids, 165.1},
        // Heads that turn are 5/6 of qkv, the table 4 bytes for each of 128 channels of 48 heads.
        {K::rope_forward, kPlain, kB, kQkv8, 4 * 5 / 6.0 + 4 / 48.0, 43.5},
        {K::rope_backward, kPlain, kB, kQkv8, 4 * 5 / 6.0 + 4 / 48.0, 43.5},
        {K::rope_backward, kRecord, kB, kQkv8, 2 + 2 * 5 / 6.0 + 4 / 48.0, 47.3},
        {K::rope_backward, kCopies, kB, kQkv8, 4 + 4 / 48.0, 63.1},
        {K::rope_backward, kBlocks, kB, kQkv8, 4 + 4 / 48.0 + kGrids, 99.6},
        {K::qk_norm_forward, kPlain, kB, kQkv8, 4, 53.9},      {K::qk_norm_backward, kPlain, kB, kQkv8, 6, 67.5},
        {K::quantize_heads, kPlain, kB, kQkv8, 5, 88.9},
        {K::gelu_forward, kPlain, kB, kUp124, 4, 197.4},       {K::gelu_forward, kRecord, kB, kUp124, 4, 196.3},
        {K::gelu_forward, kCopies, kB, kUp124, 4, 209.4},
        {K::gelu_forward, kBlocks, kB, kUp124, 4 + kGrids, 226.8},
        {K::gelu_backward, kPlain, kB, kUp124, 6, 277.0},      {K::gelu_backward, kRecord, kB, kUp124, 6, 289.6},
        {K::gelu_backward, kSums, kB, kUp124, 6, 289.0},       {K::gelu_backward, kCopies, kB, kUp124, 6, 306.3},
        {K::gelu_backward, kBlocks, kB, kUp124, 6 + kGrids, 343.2},
        {K::swiglu_forward, kPlain, kB, kUp8, 6, 174.0},       {K::swiglu_forward, kRecord, kB, kUp8, 6, 168.2},
        {K::swiglu_forward, kCopies, kB, kUp8, 6, 175.1},
        {K::swiglu_forward, kBlocks, kB, kUp8, 6 + kGrids, 180.9},
        {K::swiglu_backward, kPlain, kB, kUp8, 10, 289.3},     {K::swiglu_backward, kRecord, kB, kUp8, 10, 282.2},
        {K::swiglu_backward, kCopies, kB, kUp8, 10, 296.8},
        {K::swiglu_backward, kBlocks, kB, kUp8, 10 + 2 * kGrids, 306.8},
        {K::quantize, kCopies, kB, kX8, 4, 38.0},              {K::quantize, kCopies, kB, kUp8, 4, 123.8},
        {K::quantize, kCopies, kB, kX124, 4, 54.7},            {K::quantize, kCopies, kB, kUp124, 4, 208.6},
        {K::quantize, kBlocks, kB, kUp8, 4 + kGrids, 126.2},   {K::amax, kPlain, kB, kX8, 2, 18.4},
        {K::quantize, kCopies, kF, kW8, 6, 89.1},              {K::quantize, kCopies, kF, kWqkv, 6, 40.3},
        {K::quantize, kBlocks, kF, kW8, 6, 89.1},              {K::quantize, kBlocks, kF, kWqkv, 6, 40.4},
        {K::bias_backward, kPlain, kB, kUp124, 2, 96.4},
        {K::classifier, kPlain, kB, 8192 * 0.128256, 4, 1131.3},
        {K::classifier, kPlain, kB, 65536 * 0.050304, 4, 3490.9},
        {K::embedding_forward, kPlain, kB, kX8, 4, 29.6},      {K::embedding_forward, kPlain, kB, kX124, 6, 37.8},
        {K::embedding_backward, kPlain, kB, kX8, 10, 56.7},    {K::embedding_backward, kPlain, kB, kX124, 10, 68.6},
        {K::adamw, kPlain, kF, kState, 30, 1008.9},            {K::adamw, kPlain, kB, kState, 20, 732.7},
        {K::adamw, kPlain, kB, kState, 22, 745.7},             {K::adamw, kPlain, kB, kW8, 20, 317.2},
        {K::sum_squares, kPlain, kF, kState, 4, 125.0},        {K::sum_squares, kPlain, kB, kState, 2, 67.1},
        {K::cast, kPlain, kF, kState, 6, 186.5},               {K::cast, kPlain, kB, kState, 6, 203.6},
        // 64 Mi values, but for the matrices of 8B.
        {K::quantize_chunks, kPlain, kF, kState / 2, 5 + 4 / 128.0, 80.1},
        {K::quantize_chunks, kPlain, kB, kState / 2, 3 + 4 / 128.0, 53.2},
        {K::sum_ranks, kPlain, Dtype::kE4m3, kState / 2, 2 + 4 + 2 * 4 / 128.0, 106.7},
        {K::sum_ranks, kPlain, kB, kState / 2, 2 * 2 + 4, 132.2},
        {K::sum_ranks, kPlain, kF, 8.388608, 8 * 4 + 4, 71.6},
        {K::compare_sums, kPlain, kF, kState / 2, 8, 126.5},   {K::block_amax, kPlain, kF, kW8, 4, 35.9},
        {K::quantize_run, kPlain, kF, kW8, 5, 46.1},           {K::transpose_bytes, kPlain, Dtype::kE4m3, kW8, 2, 33.4},
    };
    return rows;
}

// dev/results/2026-11-22-h200-attention-rates.txt; backward: the kernels whose sums have a fixed order.
const AttentionTable& measured_attention() {
    static const AttentionTable rows = {
        {Dtype::kBf16, 1, 32, 8192, 128, 855.0, 2647.5, 693.5}, {Dtype::kBf16, 1, 32, 4096, 128, 222.2, 717.3, 190.2},
        {Dtype::kBf16, 8, 16, 2048, 128, 247.9, 814.7, 212.4},  {Dtype::kBf16, 64, 12, 1024, 64, 282.1, 914.7, 318.9},
        {Dtype::kBf16, 4, 25, 1024, 64, 42.7, 138.0, 52.2},     {Dtype::kFp32, 4, 12, 1024, 64, 1371.2, 4142.8, 0},
    };
    return rows;
}

// bench_attention at commit 3e8874e, dev/results/2026-11-21-h200-bf16.md.
const AttentionTable& earlier_attention() {
    static const AttentionTable rows = {
        {Dtype::kBf16, 1, 32, 8192, 128, 1383.7, 5260.0, 0}, {Dtype::kBf16, 1, 32, 4096, 128, 369.5, 1352.9, 0},
        {Dtype::kBf16, 8, 16, 2048, 128, 390.9, 1476.2, 0},  {Dtype::kBf16, 64, 12, 1024, 64, 405.5, 1302.1, 0},
        {Dtype::kBf16, 4, 25, 1024, 64, 57.3, 170.6, 0},     {Dtype::kFp32, 4, 12, 1024, 64, 1369.4, 4190.3, 0},
    };
    return rows;
}

namespace {

double d(int64_t x) { return static_cast<double>(x); }

// A kernel's share that does not grow with its bytes: launch, first loads and last stores; an estimate, as in gain.cpp.
constexpr double kKernelUs = 3;

// Of what is missing in the table the nearest stands in: plain for sums, record for copies, copies for blocks.
int mode_distance(OpMode wanted, OpMode row) {
    const int by = static_cast<int>(row) - static_cast<int>(wanted);
    return by > 0 ? 8 + by : -by;
}

const MeasuredOp* nearest_op(const PlannedOp& op) {
    const MeasuredOp* best = nullptr;
    double smallest = 0;
    for (const MeasuredOp& row : measured_ops()) {
        if (row.kind != op.kind) continue;
        const double bytes = std::max(d(op.bytes), 1.0);
        const double distance = 1e4 * mode_distance(op.mode, row.mode) + (row.dtype == op.dtype ? 0 : 1e3)
                                + std::abs(std::log(1e6 * row.mega_elems * row.elem_bytes / bytes));
        if (!best || distance < smallest) best = &row, smallest = distance;
    }
    return best;
}

// Time over B NH T^2 HS and over the share of the GPU that has work, as a mean of logarithms weighted by 1 / distance^2
// in T, in heads and, farther, in HS. A shape that is there decides alone.
double attention_us(const PlannedOp& op, const AttentionTable& table) {
    constexpr double kSame = 1e-9;
    // Tiles of 128 queries with which half of the time would be lost to filling and emptying the multiprocessors: the
    // two rows of 64 channels differ by 1.16 in both directions.
    constexpr double kHalfTiles = 150;
    auto work = [](double B, double NH, double T, double HS) {
        return B * NH * T * T * HS * (1 + kHalfTiles / (B * NH * std::ceil(T / 128)));
    };
    double sum = 0, weights = 0;
    const AttentionShape& s = op.attention;
    for (const MeasuredAttention& row : table) {
        const double us = s.backward ? row.backward_us : s.fp8 ? row.fp8_forward_us : row.forward_us;
        if (us == 0 || (row.dtype == Dtype::kBf16) != (op.dtype == Dtype::kBf16)) continue;
        const double t = std::log(d(s.T) / d(row.T)), heads = std::log(d(s.B * s.NH) / d(row.B * row.NH));
        const double channels = 4 * std::log(d(s.HS) / d(row.HS));
        const double weight = 1 / (t * t + 0.25 * heads * heads + channels * channels + kSame);
        sum += weight * std::log(us / work(d(row.B), d(row.NH), d(row.T), d(row.HS)));
        weights += weight;
    }
    return weights == 0 ? 0 : std::exp(sum / weights) * work(d(s.B), d(s.NH), d(s.T), d(s.HS));
}

// Speed of a weight gradient that is added to BF16 over one that is added to FP32: rows "wgrad" of bench_gemm_fp8 in
// dev/results/2026-11-21-h200-fp8.md. {BF16, FP8 fast, precise, block}
struct WgradRatio {
    int64_t M, N, K;
    double ratio[kGemmModes];
};
constexpr WgradRatio kWgradRatios[] = {
    {6144, 4096, 8192, {768 / 740.0, 1411 / 1330.0, 1359 / 1273.0, 928 / 906.0}},
    {4096, 4096, 8192, {711 / 686.0, 1360 / 1282.0, 1292 / 1155.0, 864 / 802.0}},
    {28672, 4096, 8192, {692 / 666.0, 1371 / 1314.0, 1294 / 1177.0, 823 / 772.0}},
    {4096, 14336, 8192, {695 / 683.0, 1406 / 1376.0, 1299 / 1240.0, 842 / 822.0}},
    {128256, 4096, 8192, {685 / 677.0, 1368 / 1363.0, 1288 / 1202.0, 813 / 789.0}},
    {2304, 768, 65536, {635 / 636.0, 1260 / 1259.0, 1275 / 1282.0, 739 / 751.0}},
    {768, 768, 65536, {650 / 648.0, 1105 / 1103.0, 1071 / 1076.0, 750 / 752.0}},
    {3072, 768, 65536, {712 / 684.0, 1304 / 1276.0, 1259 / 1211.0, 763 / 746.0}},
    {768, 3072, 65536, {729 / 683.0, 1418 / 1341.0, 1425 / 1358.0, 770 / 733.0}},
};

double bf16_wgrad_ratio(GemmMode mode, const GemmArgs& g) {
    double sum = 0, weights = 0;
    for (const WgradRatio& row : kWgradRatios) {
        const double m = std::log(d(g.M) / d(row.M)), n = std::log(d(g.N) / d(row.N)), k = std::log(d(g.K) / d(row.K));
        const double weight = 1 / (m * m + n * n + k * k + 1e-9);
        sum += weight * std::log(row.ratio[static_cast<int>(mode)]);
        weights += weight;
    }
    return std::exp(sum / weights);
}

GemmMode mode_of(const GemmArgs& args) {
    if (dtype_bytes(args.A.dtype) != 1) return GemmMode::kBf16;
    if (args.A_granularity != Granularity::kTensor) return GemmMode::kFp8Block;
    return args.fast_accumulation ? GemmMode::kFp8Fast : GemmMode::kFp8Precise;
}

}  // namespace

double predicted_op_us(const PlannedOp& op, const AttentionTable& attention) {
    if (op.attention.HS > 0) return attention_us(op, attention);
    const MeasuredOp* row = nearest_op(op);
    if (!row) return kKernelUs + 1e6 * d(op.bytes) / kCopyRate;
    return kKernelUs + (row->us - kKernelUs) * d(op.bytes) / (1e6 * row->mega_elems * row->elem_bytes);
}

double predicted_matmul_us(const GemmArgs& args) {
    // 124M fc forward in FP32, bench_gemm at commit 3e8874e.
    constexpr double kFp32Rate = 49.4e12;
    if (args.A.dtype == Dtype::kFp32) return 1e6 * 2 * d(args.M) * d(args.N) * d(args.K) / kFp32Rate;
    const GemmMode mode = mode_of(args);
    double us = predicted_gemm_us(mode, args.layout, args.M, args.N, args.K);
    if (args.layout == GemmLayout::kWgrad && args.D.dtype == Dtype::kBf16) us /= bf16_wgrad_ratio(mode, args);
    // gelu in the epilogue costs what gelu by itself does: 628.6 us for 65536 x 3072 x 768 with it (bench_gemm at
    // 3e8874e), 426 without, and 197 for gelu_forward.
    if (args.epilogue == GemmEpilogue::kBiasGelu) {
        us += predicted_op_us({.kind = OpKind::gelu_forward, .dtype = args.D.dtype,
                               .bytes = args.D.bytes() + args.pre.bytes(), .attention = {}});
    }
    return us;
}
