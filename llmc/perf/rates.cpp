#include "llmc/perf/rates.h"

#include <cmath>

namespace {

const std::vector<Rates> kRates = {
#include "llmc/perf/rates_h100.inl"
#include "llmc/perf/rates_h200.inl"
};

GemmMode gemm_mode(const GemmArgs& args) {
    if (dtype_bytes(args.A.dtype) != 1) return GemmMode::kBf16;
    if (args.A.dtype == Dtype::kInt8) return GemmMode::kFp8Fast;   // one rate; not promoted either
    if (args.A_granularity != Granularity::kTensor) return GemmMode::kFp8Block;
    return args.fast_accumulation ? GemmMode::kFp8Fast : GemmMode::kFp8Precise;
}

double log_ratio(int64_t a, int64_t b) { return std::log(real(a) / real(b)); }

// Kernels compute whole tiles of this many keys: those that a window cuts in two, too.
constexpr double kTile = 128;

// What the time of attention is proportional to, corrected for the share of the GPU that has work: with 150 tiles of
// 128 queries, half of the time is spent filling and draining the multiprocessors. That follows from two rows with head
// dim 64, whose times per unit of work differ by a factor of 1.16, forward and backward.
double attention_work(int64_t B, int64_t NH, int64_t T, int64_t HS) {
    const double tiles = real(B * NH) * std::ceil(real(T) / kTile);
    return real(B * NH) * real(T) * real(T) * real(HS) * (1 + 150 / tiles);
}

// Scales the time of the nearest shape, by distance in T, in heads and, weighted more, in HS.
double attention_us(const std::vector<MeasuredAttention>& measured, const PlannedOp& op) {
    const PlannedAttention& s = op.attention;
    double nearest = HUGE_VAL, time_us = 0;
    for (const MeasuredAttention& row : measured) {
        const double us = s.backward ? row.backward_us : s.fp8 ? row.fp8_forward_us : row.forward_us;
        if (us == 0 || (row.dtype == Dtype::kBf16) != (op.dtype == Dtype::kBf16)) continue;
        const double distance = std::hypot(log_ratio(s.T, row.T), 0.5 * log_ratio(s.B * s.NH, row.B * row.NH),
                                           4 * log_ratio(s.HS, row.HS));
        if (distance >= nearest) continue;
        nearest = distance;
        time_us = us * s.share(kTile) * attention_work(s.B, s.NH, s.T, s.HS)
                  / attention_work(row.B, row.NH, row.T, row.HS);
    }
    return time_us;
}

}  // namespace

double Rates::gemm_us(GemmMode mode, GemmLayout pass, int64_t M, int64_t N, int64_t K) const {
    const GemmRate& rate = gemms[static_cast<size_t>(mode)][static_cast<size_t>(pass)];
    const double outputs = real(M) * real(N);
    return rate.fixed_us + 2e-6 * outputs * real(K) / rate.tflops + 1e-6 * outputs * rate.output_us;
}

double Rates::matmul_us(const GemmArgs& g) const {
    // 124M fc forward in FP32, bench_gemm at commit 3e8874e.
    constexpr double kFp32Rate = 49.4e12;
    // The rates are those of weight gradients that accumulate in FP32. In BF16 they move fewer bytes: the mean of the
    // rows "wgrad" of bench_gemm_fp8 in dev/results/2026-11-21-h200-fp8.md.
    constexpr double kBf16WgradSpeed = 1.045;
    const int64_t rows = g.count() * g.M;   // of several matrices, those of all
    if (g.A.dtype == Dtype::kFp32) return 1e6 * 2 * real(rows) * real(g.N) * real(g.K) / kFp32Rate;
    // Of G groups of 256 rows G (G - 1) / 2 tiles of 256 x 256 and 3 G / 4 as long, of G^2 (SymmetricTiles).
    const bool half = g.symmetric && g.A.dtype == Dtype::kBf16
                      && (g.matrices > 0 || g.N >= GemmArgs::kLeastSymmetric);
    const double share = half ? 0.5 + 0.25 / std::ceil(real(g.N) / 256) : 1;
    const double us = gemm_us(gemm_mode(g), g.layout, std::lround(share * real(rows)), g.N, g.K);
    return g.layout == GemmLayout::kWgrad && g.D.dtype == Dtype::kBf16 ? us / kBf16WgradSpeed : us;
}

// Beside one matmul of all rows: the share of its rate that matmuls with weights reach, and what the results of weight
// gradients take, elements per us. Of Qwen3-30B-A3B with equal loads, the mean of BF16 and FP8, from the result
// 2026-11-28-h200-attention; added to FP32: 2026-11-28-h100-experts. Written in FP32 is not measured: half of BF16.
double Rates::expert_matmul_us(const GemmArgs& g, int64_t experts) const {
    constexpr double kForwardShare = 0.895, kDgradShare = 0.91;
    constexpr double kWritten16 = 3.0e6, kAdded16 = 1.45e6, kWritten32 = 1.5e6, kAdded32 = 0.31e6;
    const double us = matmul_us(g);
    if (g.layout != GemmLayout::kWgrad) return us / (g.layout == GemmLayout::kForward ? kForwardShare : kDgradShare);
    const bool wide = g.D.dtype == Dtype::kFp32;
    return us + real(experts) * real(g.M) * real(g.N)
                    / (g.accumulate ? (wide ? kAdded32 : kAdded16) : wide ? kWritten32 : kWritten16);
}

double Rates::op_us(const PlannedOp& op) const {
    constexpr double kKernelUs = 3;   // launch, first loads and last stores of a kernel; an estimate
    if (op.attention.HS > 0) return attention_us(attention, op);
    const auto row = ops.find(rate_name(op.kind, op.activation));
    double share = 0;
    if (row != ops.end()) share = row->second[static_cast<size_t>(op.mode)];
    if (row != ops.end() && share == 0) share = row->second[static_cast<size_t>(OpMode::kPlain)];
    return kKernelUs + 1e6 * real(op.bytes) / (copy_rate * (share > 0 ? share : 1));
}

const Rates* find_rates(const std::string& gpu) {
    for (const Rates& rates : kRates)
        if (rates.gpu == gpu) return &rates;
    return nullptr;
}

const Gpu& measured_gpu() { return planned_gpus().front(); }
const Rates& measured_rates() { return *find_rates(measured_gpu().name); }
