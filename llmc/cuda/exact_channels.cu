// Exact channels (--fp8-exact-channels): their choice, and the columns of x and w of the second matmul.
#include "llmc/cuda/fp8.cuh"
#include "llmc/cuda/norm.cuh"

namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kSelectThreads = 1024;

// A QuantizedMatrix in the kernels' form.
struct Numbers {
    const uint8_t* codes;
    const float* scale_inv;
    Granularity granularity;
    int64_t R, C;

    Numbers(const QuantizedMatrix& q, int64_t elems, int64_t R_, int64_t C_, const char* op)
        : codes(static_cast<const uint8_t*>(q.codes.data)), scale_inv(q.scale_inv.as<float>()),
          granularity(q.granularity), R(R_), C(C_) {
        expect(q.codes, Dtype::kE4m3, elems, op);
        expect(q.scale_inv, Dtype::kFp32, scale_inv_elems(granularity, R, C), op);
    }
    // The number of element (r, c), whose code is the `at`-th.
    __device__ float number(int64_t at, int64_t r, int64_t c) const {
        const float code = __half2float(__half(__nv_cvt_fp8_to_halfraw(codes[at], __NV_E4M3)));
        return __fmul_rn(code, scale_inv[index_of_scale_inv(granularity, R, C, r, c)]);
    }
};

// Math: ChannelEnergyArgs.
// Source: dev/results/2026-11-27-emulation.
// Traffic: every kEnergyRows-th row of the codes read, 4 bytes per channel written.
// Requires: nothing.
// Parallel: a block owns 32 channels; warp y adds up slice y, then the first warp adds the slices.
__global__ void __launch_bounds__(32 * kEnergySlices)
    channel_energy_kernel(float* energies, const __grid_constant__ Numbers x) {
    __shared__ float sums[kEnergySlices][32];
    wait_for_previous_kernels();
    const int64_t c = int64_t{blockIdx.x} * 32 + threadIdx.x;
    float sum = 0.0f;
    if (c < x.C) {
#pragma unroll 4
        for (int64_t n = threadIdx.y * kEnergyRows; n < x.R; n += kEnergySlices * kEnergyRows) {
            const float value = x.number(n * x.C + c, n, c);
            if (value == value) sum = __fmaf_rn(value, value, sum);
        }
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y != 0 || c >= x.C) return;
    float total = 0.0f;
    for (int slice = 0; slice < kEnergySlices; slice++) total = __fadd_rn(total, sums[slice][threadIdx.x]);
    energies[c] = total;
}

// Math: TopChannelsArgs. Bits of energies, which are not negative, order like the numbers.
// Source: a binary search for the bits of the K-th largest energy.
// Traffic: the energies read 32 times (L1), the channels written.
// Requires: energies that are not negative.
// Parallel: a block owns a linear; its first warp writes the channels in order.
__global__ void __launch_bounds__(kSelectThreads)
    top_channels_kernel(int32_t* channels, const uint32_t* energies, int C, int K, const StepState* state) {
    wait_for_previous_kernels();
    if (state != nullptr && state->skip) return;
    energies += int64_t{blockIdx.x} * C;
    channels += int64_t{blockIdx.x} * K;
    auto at_least = [&](uint32_t bits) {   // the number of such energies
        int count = 0;
        for (int first = 0; first < C; first += kSelectThreads) {
            const int c = first + static_cast<int>(threadIdx.x);
            count += __syncthreads_count(c < C && energies[c] >= bits);
        }
        return count;
    };
    if (at_least(1) == 0) return;
    uint32_t least = 0;   // the largest bits that at least K energies reach
    for (uint32_t bit = 1u << 30; bit != 0; bit >>= 1) {
        if (at_least(least | bit) >= K) least |= bit;
    }
    int ties = K - at_least(least + 1);   // channels to choose among those with exactly these bits
    if (threadIdx.x >= 32) return;
    const uint32_t below = (1u << threadIdx.x) - 1;
    for (int first = 0, written = 0; first < C; first += 32) {
        const int c = first + static_cast<int>(threadIdx.x);
        const uint32_t bits = c < C ? energies[c] : 0;
        const uint32_t equal = __ballot_sync(0xffffffffu, c < C && bits == least);
        const bool chosen = c < C && (bits > least || (bits == least && __popc(equal & below) < ties));
        const uint32_t all = __ballot_sync(0xffffffffu, chosen);
        if (chosen) channels[written + __popc(all & below)] = c;
        written += __popc(all);
        ties = max(0, ties - __popc(equal));
    }
}

// Math: ExactWeightArgs.
// Source: ops.h.
// Traffic: a sector of in and of the codes read per element, 4 bytes written.
// Requires: nothing.
// Parallel: a thread owns a channel of a row.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    exact_weight_kernel(bf16* out, const T* in, const __grid_constant__ Numbers w, const int32_t* channels, int K,
                        int64_t begin, int64_t elems, int64_t last_row) {
    wait_for_previous_kernels();
    const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x, r = begin / w.C + i / K;
    const int j = static_cast<int>(i % K);
    if (r > last_row) return;
    const int64_t c = channels[j], at = r * w.C + c - begin;
    if (at < 0 || at >= elems) return;
    const float w8 = w.number(at, r, c);
    out[r * 2 * K + j] = from_float<bf16>(w8);
    out[r * 2 * K + K + j] = from_float<bf16>(__fsub_rn(rounded<bf16>(to_float(in[at])), w8));
}

// Math: ExactNormArgs.
// Source: norm_value, as the norm computes it.
// Traffic: a sector of in and of the codes read per element, 4 bytes written.
// Requires: nothing.
// Parallel: a thread owns a channel of a row.
template <bool kLayer>
__global__ void __launch_bounds__(kThreads)
    exact_norm_kernel(bf16* out, const bf16* in, const float* mean, const float* rstd, const bf16* weight,
                      const bf16* bias, const __grid_constant__ Numbers x, const int32_t* channels, int K) {
    wait_for_previous_kernels();
    const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x, n = i / K;
    const int j = static_cast<int>(i % K);
    if (n >= x.R) return;
    const int64_t c = channels[j];
    const float2 statistics = make_float2(kLayer ? mean[n] : 0.0f, rstd[n]);
    const float offset = kLayer && bias ? to_float(bias[c]) : 0.0f;
    const float value = rounded<bf16>(norm_value<kLayer>(to_float(in[n * x.C + c]), statistics, to_float(weight[c]),
                                                         offset));
    out[n * 2 * K + j] = from_float<bf16>(__fsub_rn(value, x.number(n * x.C + c, n, c)));
    out[n * 2 * K + K + j] = from_float<bf16>(value);
}

}  // namespace

void channel_energy(Ctx& ctx, const ChannelEnergyArgs& args) {
    expect(args.energies, Dtype::kFp32, args.C, "channel_energy: energies");
    launch_early(ctx, channel_energy_kernel, grid_size(ceil_div(args.C, 32)), dim3(32, kEnergySlices), 0,
                 args.energies.as<float>(), Numbers(args.x, args.N * args.C, args.N, args.C, "channel_energy: x"));
    CHECK_LAUNCH("channel_energy_kernel");
}

void top_channels(Ctx& ctx, const TopChannelsArgs& args) {
    expect(args.channels, Dtype::kInt32, args.rows * args.K, "top_channels: channels");
    expect(args.energies, Dtype::kFp32, args.rows * args.C, "top_channels: energies");
    CHECK(args.K > 0 && args.K <= args.C && args.C < (1 << 30), "top_channels: %lld of %lld channels", ll(args.K),
          ll(args.C));
    launch_early(ctx, top_channels_kernel, grid_size(args.rows), kSelectThreads, 0, args.channels.as<int32_t>(),
                 static_cast<const uint32_t*>(args.energies.data), args.C, args.K, args.state);
    CHECK_LAUNCH("top_channels_kernel");
}

void exact_weight_columns(Ctx& ctx, const ExactWeightArgs& args) {
    const int64_t n = args.in.elems, K = args.channels.elems, C = args.C;
    if (n == 0) return;
    expect(args.in, args.in.dtype, n, "exact_weight_columns: in");
    expect(args.out, Dtype::kBf16, args.R * 2 * K, "exact_weight_columns: out");
    expect(args.channels, Dtype::kInt32, K, "exact_weight_columns: channels");
    CHECK(args.begin >= 0 && args.begin + n <= args.R * C,
          "exact_weight_columns: elements [%lld, +%lld) of %lld x %lld", ll(args.begin), ll(n), ll(args.R), ll(C));
    const int64_t last_row = (args.begin + n - 1) / C, rows = last_row - args.begin / C + 1;
    dispatch(args.in.dtype, "exact_weight_columns: in", [&](auto type) {
        using T = decltype(type);
        launch_early(ctx, exact_weight_kernel<T>, grid_size(ceil_div(rows * K, kThreads)), kThreads, 0,
                     args.out.as<bf16>(), args.in.as<T>(), Numbers(args.w, n, args.R, C, "exact_weight_columns: w"),
                     args.channels.as<int32_t>(), K, args.begin, n, last_row);
        CHECK_LAUNCH("exact_weight_kernel");
    });
}

void exact_norm_columns(Ctx& ctx, const ExactNormArgs& args) {
    const int64_t N = args.N, C = args.C, K = args.channels.elems;
    expect(args.out, Dtype::kBf16, N * 2 * K, "exact_norm_columns: out");
    expect(args.in, Dtype::kBf16, N * C, "exact_norm_columns: in");
    expect(args.rstd, Dtype::kFp32, N, "exact_norm_columns: rstd");
    expect(args.weight, Dtype::kBf16, C, "exact_norm_columns: weight");
    expect(args.channels, Dtype::kInt32, K, "exact_norm_columns: channels");
    if (args.mean) expect(args.mean, Dtype::kFp32, N, "exact_norm_columns: mean");
    if (args.bias) expect(args.bias, Dtype::kBf16, C, "exact_norm_columns: bias");
    launch_early(ctx, args.mean ? exact_norm_kernel<true> : exact_norm_kernel<false>,
                 grid_size(ceil_div(N * K, kThreads)), kThreads, 0, args.out.as<bf16>(), args.in.as<bf16>(),
                 args.mean.as<float>(), args.rstd.as<float>(), args.weight.as<bf16>(), args.bias.as<bf16>(),
                 Numbers(args.x, N * C, N, C, "exact_norm_columns: x"), args.channels.as<int32_t>(), K);
    CHECK_LAUNCH("exact_norm_kernel");
}

}  // namespace cuda
