#include "llmc/perf/kernel_rates.h"

#include <algorithm>
#include <cmath>
#include <strings.h>

// Names and bandwidths are from NVIDIA's data sheets of H100, H200 and GH200; the link is NVLink or PCIe Gen5, with
// half of the figure for both directions. Memory is about what CUDA reports, less than the gigabytes in the name. No
// other architecture is listed, since it would run other kernels.
const std::vector<Gpu>& gpus() {
    static const std::vector<Gpu> rows = {
        {"H200", "H200", 139, 4.8, 450},
        {"H200 NVL", "H200 NVL", 139, 4.8, 64},
        {"H100 SXM", "H100 80GB HBM3", 79.1, 3.35, 450},
        {"H100 PCIe", "H100 PCIe", 79.1, 2.0, 64},
        {"H100 NVL", "H100 NVL", 93, 3.9, 64},
        {"GH200", "GH200 480GB", 94.5, 4.0, 450},
    };
    return rows;
}

const Gpu* find_gpu(const std::string& name) {
    const std::string maker = "NVIDIA ";
    std::string bare = strncasecmp(name.c_str(), maker.c_str(), maker.size()) == 0 ? name.substr(maker.size()) : name;
    std::replace_if(bare.begin(), bare.end(), [](char c) { return c == '-' || c == '_'; }, ' ');
    for (const Gpu& gpu : gpus())
        if (strcasecmp(bare.c_str(), gpu.name) == 0 || strcasecmp(bare.c_str(), gpu.device) == 0) return &gpu;
    return nullptr;
}

const Gpu& measured_gpu() { return gpus().front(); }

const Rates& measured_rates() {
    static const Rates& rates = *find_rates(measured_gpu().name);
    return rates;
}

// dev/results/2026-11-21-h200-zero.md, speed-1-no-overlap: each of two ranks sends 1.057 GB of gradients and 1.057 GB
// of weights, and its compute waits for 8.54 ms. This time includes waiting for the peer; an all-reduce alone reaches
// 304 GiB/s.
const double kLinkRate = 2 * 1.057e9 / 8.54e-3;
// Nominal: one 400 Gb/s adapter per GPU (DGX H100 and H200 data sheets).
const double kNetworkRate = 50e9;
// PCIe Gen5 x16 has 63 GB/s each way. Packet headers and traffic in both directions at once leave about this much.
const double kHostLinkRate = 50e9;

namespace {

// time = fixed + 2 M N K / rate, rate = best * K / (K + half_k) * area / (area + half_area), area = M N: a short
// contraction spends much of its time filling and draining the pipeline, and a small result does not fill the
// multiprocessors. Fitted by least squares of log time over the measured shapes; 6 % root mean square error.
struct RateModel {
    double best;           // FLOP/s
    double half_k;
    double wgrad;          // factor on the time of a weight gradient, which also reads and writes FP32 sums
};
constexpr RateModel kRates[kGemmModes] = {{726e12, 11, 1.03}, {1433e12, 99, 1.06}, {1394e12, 386, 1.05},
                                          {1178e12, 305, 1.39}};
constexpr double kHalfArea = 6e4;
constexpr double kFixedUs = 9.3;

double model_us(GemmMode mode, GemmLayout pass, int64_t M, int64_t N, int64_t K) {
    const RateModel& rate = kRates[static_cast<int>(mode)];
    const double area = real(M) * real(N);
    const double share = real(K) / (real(K) + rate.half_k) * area / (area + kHalfArea);
    return kFixedUs + 1e6 * 2 * area * real(K) / (rate.best * share) * (pass == GemmLayout::kWgrad ? rate.wgrad : 1.0);
}

// Distance to a measured mode. The nearest one replaces a missing one: plain for sums, record for copies, copies for
// blocks.
int mode_distance(OpMode wanted, OpMode row) {
    const int by = static_cast<int>(row) - static_cast<int>(wanted);
    return by > 0 ? 8 + by : -by;
}

// An activation function without rates gets those of one that moves as many bytes.
int activation_distance(Activation wanted, Activation row) {
    if (wanted == row) return 0;
    return activation_function(wanted).gated == activation_function(row).gated ? 1 : 2;
}

const MeasuredOp* nearest_op(const PlannedOp& op, const Rates& rates) {
    const MeasuredOp* best = nullptr;
    double smallest = 0;
    for (const MeasuredOp& row : rates.ops) {
        if (row.kind != op.kind) continue;
        const double bytes = std::max(real(op.bytes), 1.0);
        const double distance = 1e6 * activation_distance(op.activation, row.activation)
                                + 1e4 * mode_distance(op.mode, row.mode) + (row.dtype == op.dtype ? 0 : 1e3)
                                + std::abs(std::log(row.bytes / bytes));
        if (!best || distance < smallest) best = &row, smallest = distance;
    }
    return best;
}

// Interpolates time / (B NH T^2 HS), corrected for the share of the GPU that has work, by distance in T, in heads and,
// weighted more, in HS.
double attention_us(const PlannedOp& op, const Rates& rates) {
    // Number of tiles of 128 queries with which half of the time is spent filling and draining the multiprocessors. It
    // follows from the two rows with head dim 64, whose times per unit of work differ by a factor of 1.16, forward and
    // backward.
    constexpr double kHalfTiles = 150;
    auto work = [](double B, double NH, double T, double HS) {
        return B * NH * T * T * HS * (1 + kHalfTiles / (B * NH * std::ceil(T / 128)));
    };
    NearbyMean mean;
    const PlannedAttention& s = op.attention;
    for (const MeasuredAttention& row : rates.attention) {
        const double us = s.backward ? row.backward_us : s.fp8 ? row.fp8_forward_us : row.forward_us;
        if (us == 0 || (row.dtype == Dtype::kBf16) != (op.dtype == Dtype::kBf16)) continue;
        mean.add(us / work(real(row.B), real(row.NH), real(row.T), real(row.HS)),
                 {std::log(real(s.T) / real(row.T)), 0.5 * std::log(real(s.B * s.NH) / real(row.B * row.NH)),
                  4 * std::log(real(s.HS) / real(row.HS))});
    }
    return mean.empty() ? 0 : mean.value() * work(real(s.B), real(s.NH), real(s.T), real(s.HS));
}

double bf16_wgrad_ratio(GemmMode mode, const GemmArgs& g, const Rates& rates) {
    NearbyMean mean;
    for (const WgradRatio& row : rates.bf16_wgrads)
        mean.add(row.ratio[static_cast<int>(mode)],
                 {std::log(real(g.M) / real(row.M)), std::log(real(g.N) / real(row.N)),
                  std::log(real(g.K) / real(row.K))});
    return mean.empty() ? 1 : mean.value();
}

}  // namespace

GemmMode gemm_mode(const GemmArgs& args) {
    if (dtype_bytes(args.A.dtype) != 1) return GemmMode::kBf16;
    if (args.A_granularity != Granularity::kTensor) return GemmMode::kFp8Block;
    return args.fast_accumulation ? GemmMode::kFp8Fast : GemmMode::kFp8Precise;
}

double predicted_gemm_us(GemmMode mode, GemmLayout pass, int64_t M, int64_t N, int64_t K, const Rates& rates) {
    // Interpolates measured / model, which approaches 1 far from all measured shapes.
    constexpr double kModelWeight = 0.5;
    NearbyMean mean(kModelWeight);
    for (const MeasuredGemm& m : rates.gemms) {
        const double us = m.us[static_cast<int>(mode)];
        if (m.pass != pass || us == 0) continue;
        mean.add(us / model_us(mode, pass, m.M, m.N, m.K),
                 {std::log(real(M) / real(m.M)), std::log(real(N) / real(m.N)), std::log(real(K) / real(m.K))});
    }
    return model_us(mode, pass, M, N, K) * mean.value();
}

double predicted_op_us(const PlannedOp& op, const Rates& rates) {
    if (op.attention.HS > 0) return attention_us(op, rates);
    const MeasuredOp* row = nearest_op(op, rates);
    if (!row) return kKernelUs + 1e6 * real(op.bytes) / rates.copy_rate;
    return kKernelUs + (row->us - kKernelUs) * real(op.bytes) / row->bytes;
}

double predicted_matmul_us(const GemmArgs& args, const Rates& rates) {
    // 124M fc forward in FP32, bench_gemm at commit 3e8874e.
    constexpr double kFp32Rate = 49.4e12;
    if (args.A.dtype == Dtype::kFp32) return 1e6 * 2 * real(args.M) * real(args.N) * real(args.K) / kFp32Rate;
    const GemmMode mode = gemm_mode(args);
    double us = predicted_gemm_us(mode, args.layout, args.M, args.N, args.K, rates);
    if (args.layout == GemmLayout::kWgrad && args.D.dtype == Dtype::kBf16) us /= bf16_wgrad_ratio(mode, args, rates);
    return us;
}
