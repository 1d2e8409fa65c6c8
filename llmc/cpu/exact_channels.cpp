// The choice of exact channels (--fp8-exact-channels) and the columns of their weights. CPU.
#include <numeric>

#include "llmc/cpu/cast_lines.h"

namespace cpu {

void channel_energy(Ctx&, const ChannelEnergyArgs& args) {
    const int64_t N = args.N, C = args.C, sampled = ceil_div(N, kEnergyRows);
    check_tensor("channel_energy", "energies", args.energies, Dtype::kFp32, C);
    check_tensor("channel_energy", "codes", args.x.codes, Dtype::kE4m3, N * C);
    check_tensor("channel_energy", "scale_inv", args.x.scale_inv, Dtype::kFp32,
                 scale_inv_elems(args.x.granularity, N, C));
#pragma omp parallel for schedule(static) if (sampled * C >= kParallelElems)
    for (int64_t c = 0; c < C; c++) {
        float total = 0;
        for (int64_t slice = 0; slice < kEnergySlices; slice++) {
            float sum = 0;
            for (int64_t i = slice; i < sampled; i += kEnergySlices) {
                const int64_t n = i * kEnergyRows;
                const float x = quantized_number(args.x, n * C + c, N, C, n, c);
                if (x == x) sum = __builtin_fmaf(x, x, sum);
            }
            total += sum;
        }
        args.energies.as<float>()[c] = total;
    }
}

void top_channels(Ctx&, const TopChannelsArgs& args) {
    const int64_t C = args.C, K = args.K;
    check_tensor("top_channels", "channels", args.channels, Dtype::kInt32, args.rows * K);
    check_tensor("top_channels", "energies", args.energies, Dtype::kFp32, args.rows * C);
    CHECK(K <= C, "top_channels: %lld of %lld channels", ll(K), ll(C));
    if (args.state && args.state->skip) return;
    std::vector<int32_t> order(static_cast<size_t>(C));
    for (int64_t row = 0; row < args.rows; row++) {
        const float* energies = args.energies.as<float>() + row * C;
        if (std::all_of(energies, energies + C, [](float e) { return e == 0; })) continue;
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return energies[a] > energies[b]; });
        std::sort(order.begin(), order.begin() + K);
        std::copy_n(order.begin(), K, args.channels.as<int32_t>() + row * K);
    }
}

void exact_weight_columns(Ctx&, const ExactWeightArgs& args) {
    const int64_t n = args.in.elems, R = args.R, C = args.C, K = args.channels.elems;
    if (n == 0) return;
    const char* op = "exact_weight_columns";
    check_tensor(op, "out", args.out, Dtype::kBf16, R * 2 * K);
    check_tensor(op, "codes", args.w.codes, Dtype::kE4m3, n);
    check_tensor(op, "scale_inv", args.w.scale_inv, Dtype::kFp32, scale_inv_elems(args.w.granularity, R, C));
    check_tensor(op, "channels", args.channels, Dtype::kInt32, K);
    CHECK(args.begin >= 0 && args.begin + n <= R * C, "%s: elements [%lld, +%lld) of %lld x %lld", op, ll(args.begin),
          ll(n), ll(R), ll(C));
    const bool narrow = args.in.dtype == Dtype::kBf16;
    const int64_t first = args.begin / C, last = ceil_div(args.begin + n, C);
#pragma omp parallel for schedule(static) if ((last - first) * K >= kParallelElems)
    for (int64_t r = first; r < last; r++)
        for (int64_t j = 0; j < K; j++) {
            const int64_t c = args.channels.as<int32_t>()[j], at = r * C + c - args.begin;
            if (at < 0 || at >= n) continue;
            const bf16 w = narrow ? args.in.as<bf16>()[at] : bf16(args.in.as<float>()[at]);
            const float w8 = quantized_number(args.w, at, R, C, r, c);
            args.out.as<bf16>()[r * 2 * K + j] = bf16(w8);
            args.out.as<bf16>()[r * 2 * K + K + j] = bf16(widen(w) - w8);
        }
}

}  // namespace cpu
