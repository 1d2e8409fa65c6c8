// Attention backward on compute capability 9.0: delta, the fused kernel, and the rounding of dQ to bf16 or, at head dim
// 256, the kernel of dQ.
#include "llmc/cuda/attention_backward_sm90.cuh"

namespace cuda {
namespace {

constexpr int kThreads = 256;

// Math: delta = dout . out
// Source: Dao, FlashAttention-2, arXiv 2307.08691, algorithm 2.
// Traffic: dout and out read, delta written once.
// Requires: bf16, HS 64, 72 to 96 by 8, 128 or 256, 16-byte aligned.
// Parallel: dim / 8 lanes own a row (padded: 16), eight elements each.
template <int dim>
__global__ void __launch_bounds__(kThreads)
attention_delta_kernel(float* delta, const bf16* dout, const bf16* out, AttentionShape shape) {
    constexpr int kLanes = HeadPanels<dim>::kPanels * (kPanel / 8);
    const int64_t HS = HeadPanels<dim>::kPadded ? shape.HS : dim;
    const int64_t row = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kLanes;
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    const bool inside = row < shape.B * shape.T * shape.NH;
    float sum = 0;
    if (inside && (!HeadPanels<dim>::kPadded || lane * 8 < HS)) {
        float a[8], b[8];
        unpack<bf16>(load_vec(dout + row * HS + lane * 8), a);
        unpack<bf16>(load_vec(out + row * HS + lane * 8), b);
#pragma unroll
        for (int i = 0; i < 8; i++) sum = fmaf(a[i], b[i], sum);
    }
    sum = warp_sum<kLanes>(sum);
    const int64_t token = row / shape.NH;
    if (inside && lane == 0) delta[shape.stat(token / shape.T, token % shape.T, row % shape.NH)] = sum;
}

template <int dim> void launch_delta(Ctx& ctx, const AttentionBackwardArgs& args, const AttentionShape& shape) {
    const int64_t lanes = HeadPanels<dim>::kPanels * (kPanel / 8);
    const unsigned grid = grid_size(ceil_div(shape.B * shape.T * shape.NH * lanes, kThreads));
    attention_delta_kernel<dim><<<grid, kThreads, 0, stream_of(ctx)>>>(args.delta.as<float>(), args.dout.as<bf16>(),
                                                                      args.out.as<bf16>(), shape);
    CHECK_LAUNCH("attention_delta_kernel");
}

// Transposes x among every four lanes: x[k] of lane t becomes x[t] of lane k.
__device__ inline void transpose_among_four(uint32_t (&x)[4], int lane) {
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
        const bool upper = lane & step;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (i & step) continue;
            const uint32_t sent = upper ? x[i] : x[i + step];
            const uint32_t got = __shfl_xor_sync(0xffffffffu, sent, step);
            (upper ? x[i] : x[i + step]) = got;
        }
    }
}

// Math: dq = softmax_mul sums
// Source: Dao, FlashAttention-2, arXiv 2307.08691, algorithm 2.
// Traffic: sums (fp32) read, dq written once.
// Requires: as attention_delta_kernel, HS below 256.
// Parallel: a warp owns 16 rows and half of the columns of a unit, in the layout that wgmma leaves in registers
//           (wgmma.cuh).
template <int dim>
__global__ void __launch_bounds__(kThreads)
attention_round_sums_kernel(bf16* dqkv, DqSums sums, AttentionShape shape) {
    constexpr int HS = HeadPanels<dim>::kPanels * kPanel;
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int64_t number = static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + warp, part = number / 4;
    const int64_t tile = part / 2 % sums.tiles, head = part / 2 / sums.tiles;   // head: over the batch
    const int64_t row = tile * kSumRows + number % 4 * 16 + lane / 4;
    if (head >= shape.B * shape.NH) return;
    const float4* from = reinterpret_cast<const float4*>(sums.data) + part * (sum_bytes(HS) / 32) + number % 4 * 32;
    float4 in[HS / 16];
#pragma unroll
    for (int i = 0; i < HS / 16; i++) in[i] = from[128 * i + lane];
    const int64_t column = part % 2 * (HS / 2) + 8 * (lane % 4);
    bf16* to = dqkv + shape.query(head / shape.NH, row, head % shape.NH) + column;
#pragma unroll
    for (int half = 0; half < 2; half++) {        // rows half * 8 + ...
#pragma unroll
        for (int i = 0; i < HS / 16; i += 4) {    // columns from 8 i, eight per lane
            uint32_t part[4];
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const float4& x = in[i + k];
                part[k] = half == 0 ? pack_bf16x2(x.x * shape.softmax_mul, x.y * shape.softmax_mul)
                                    : pack_bf16x2(x.z * shape.softmax_mul, x.w * shape.softmax_mul);
            }
            transpose_among_four(part, lane);
            if (row + 8 * half >= shape.T) continue;
            if (HeadPanels<dim>::kPadded && column + 8 * i >= shape.HS) continue;
            *reinterpret_cast<uint4*>(to + 8 * half * shape.row() + 8 * i) = {part[0], part[1], part[2], part[3]};
        }
    }
}

template <int dim> void launch_round(Ctx& ctx, const AttentionBackwardArgs& args, const DqSums& sums,
                                     const AttentionShape& shape) {
    const int64_t warps = 4 * 2 * shape.B * shape.NH * sums.tiles;
    attention_round_sums_kernel<dim><<<grid_size(ceil_div(warps, kThreads / 32)), kThreads, 0, stream_of(ctx)>>>(
        args.dqkv.as<bf16>(), sums, shape);
    CHECK_LAUNCH("attention_round_sums_kernel");
}

}  // namespace

// Bytes of the sums of a unit, whose heads are whole panels.
static int64_t unit_bytes(int64_t HS) { return sum_bytes(static_cast<int>(ceil_div(HS, kPanel) * kPanel)); }

static int64_t sum_units(int64_t B, int64_t T, int64_t NH, int64_t HS) {
    return HS == 256 ? 0 : B * NH * ceil_div(T, kSumRows);
}

int64_t attention_sums_elems_sm90(int64_t B, int64_t T, int64_t NH, int64_t HS) {
    return sum_units(B, T, NH, HS) * (unit_bytes(HS) / 4 + 1) + 1;   // + turns + taken
}

void attention_backward_sm90(Ctx& ctx, const AttentionBackwardArgs& args, const AttentionShape& shape) {
    expect_at_least(args.sums, Dtype::kFp32, attention_sums_elems_sm90(shape.B, shape.T, shape.NH, shape.HS),
                    "attention_backward: sums");
    const int64_t tiles = ceil_div(shape.T, kSumRows), units = sum_units(shape.B, shape.T, shape.NH, shape.HS);
    const int64_t bytes = units * unit_bytes(shape.HS);
    auto* const data = args.sums.as<float>();
    auto* const taken = reinterpret_cast<uint32_t*>(data + bytes / 4);
    const DqSums sums{.data = data, .taken = taken, .turns = taken + 1, .tiles = static_cast<uint32_t>(tiles)};
    CHECK(units < (int64_t{1} << 31), "attention: %lld tiles of queries", (long long)units);
    CUDA_CHECK(cudaMemsetAsync(sums.taken, 0, static_cast<size_t>(4 + units * 4), stream_of(ctx)));
    by_head_dim(shape.HS, [&](auto dim) { launch_delta<dim.value>(ctx, args, shape); });
    attention_backward_fused_sm90(ctx, args, sums, shape);
    by_head_dim(shape.HS, [&](auto dim) {
        if constexpr (dim.value == 256) attention_backward_queries_sm90(ctx, args, shape);
        else launch_round<dim.value>(ctx, args, sums, shape);
    });
}

}  // namespace cuda
