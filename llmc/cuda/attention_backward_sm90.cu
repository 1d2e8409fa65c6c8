// Attention backward on compute capability 9.0: row sums, then the two kernels.
#include "llmc/cuda/attention_backward_sm90.cuh"

namespace cuda {
namespace {

constexpr int kThreads = 256;

// Math: delta = dout . out
// Source: Dao, FlashAttention-2, arXiv 2307.08691, algorithm 2.
// Traffic: dout and out read, delta written once.
// Requires: bf16, HS 64 or 128, 16-byte aligned.
// Parallel: HS / 8 lanes own a row, eight elements each.
template <int HS>
__global__ void __launch_bounds__(kThreads)
attention_delta_kernel(float* delta, const bf16* dout, const bf16* out, AttentionShape shape) {
    constexpr int kLanes = HS / 8;
    const int64_t row = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kLanes;
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    const bool inside = row < shape.B * shape.T * shape.NH;
    float sum = 0;
    if (inside) {
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

template <int HS> void launch_delta(Ctx& ctx, const AttentionBackwardArgs& args, const AttentionShape& shape) {
    const unsigned grid = grid_size(ceil_div(shape.B * shape.T * shape.NH * (HS / 8), kThreads));
    attention_delta_kernel<HS><<<grid, kThreads, 0, stream_of(ctx)>>>(args.delta.as<float>(), args.dout.as<bf16>(),
                                                                      args.out.as<bf16>(), shape);
    CHECK_LAUNCH("attention_delta_kernel");
}

}  // namespace

void attention_backward_sm90(Ctx& ctx, const AttentionBackwardArgs& args, const AttentionShape& shape) {
    CHECK(shape.HS == 64 || shape.HS == 128, "attention_backward_sm90: head size %lld", (long long)shape.HS);
    (shape.HS == 64 ? launch_delta<64> : launch_delta<128>)(ctx, args, shape);
    attention_backward_query_sm90(ctx, args, shape);
    attention_backward_key_sm90(ctx, args, shape);
}

}  // namespace cuda
