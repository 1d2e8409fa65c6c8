// Rotary position embedding, in place on the packed projections.
#include "llmc/cuda/common.cuh"

namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kHeads = 4;   // heads that a thread rotates by the same angles

// Math: (x, y) -> (x cos - y sin, y cos + x sin) for the pairs (i, i + HS/2) of every query and key head;
// direction -1 rotates back.
// Source: Su et al., arXiv 2104.09864, in the rotate-half pairing.
// Traffic: query and key heads read and written once; the table (fp32, shared by all heads) mostly from L1.
// Requires: kWidth > 1 needs HS/2 a multiple of it and 16-byte alignment.
// Parallel: blockDim.x threads own a row, blockDim.y rows a block; a thread kWidth pairs of kHeads heads.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    rope_kernel(T* qkv, const float* cos_sin, int64_t N, int64_t period, int heads, int64_t row_elems, int HS,
                float direction) {
    const int64_t n = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
    if (n >= N) return;
    const int half = HS / 2, lanes = half / kWidth;       // lanes threads rotate a head
    const int groups = (heads + kHeads - 1) / kHeads;     // the heads of a thread are `groups` apart
    for (int u = threadIdx.x; u < groups * lanes; u += blockDim.x) {
        const int i = u % lanes * kWidth, first_head = u / lanes;
        T* at = qkv + n * row_elems + int64_t{first_head} * HS + i;
        const int apart = groups * HS;
        Packed<T, kWidth> x[kHeads], y[kHeads];
#pragma unroll
        for (int k = 0; k < kHeads; k++) {
            if (first_head + k * groups >= heads) continue;
            x[k].load(at + k * apart);
            y[k].load(at + k * apart + half);
        }
        float cosine[kWidth], sine[kWidth];
        const float* table = cos_sin + (n % period * half + i) * 2;
#pragma unroll
        for (int j = 0; j < kWidth; j++) {
            if constexpr (kWidth % 2 == 0) {
                if (j % 2 == 1) continue;
                float pair[4];
                load_floats<float, 4>(table + 2 * j, pair);
                cosine[j] = pair[0], cosine[j + 1] = pair[2];
                sine[j] = pair[1] * direction, sine[j + 1] = pair[3] * direction;
            } else {
                cosine[j] = table[2 * j];
                sine[j] = table[2 * j + 1] * direction;
            }
        }
#pragma unroll
        for (int k = 0; k < kHeads; k++) {
            if (first_head + k * groups >= heads) continue;
            float a[kWidth], b[kWidth];
            x[k].unpack_to(a);
            y[k].unpack_to(b);
#pragma unroll
            for (int j = 0; j < kWidth; j++) {
                const float x_value = a[j];
                a[j] = x_value * cosine[j] - b[j] * sine[j];
                b[j] = b[j] * cosine[j] + x_value * sine[j];
            }
            store_floats<T, kWidth>(at + k * apart, a);
            store_floats<T, kWidth>(at + k * apart + half, b);
        }
    }
}

void rope(Ctx& ctx, const RopeArgs& args, float direction, const char* op) {
    CHECK(args.HS % 2 == 0, "%s: head size %lld is odd", op, (long long)args.HS);
    const int64_t row_elems = (args.NH + 2 * args.NKV) * args.HS;
    expect(args.qkv, args.qkv.dtype, args.N * row_elems, op);
    expect_at_least(args.cos_sin, Dtype::kFp32, std::min(args.T, args.N) * args.HS, op);
    dispatch(args.qkv.dtype, op, [&](auto type) {
        using T = decltype(type);
        T* qkv = args.qkv.as<T>();
        const float* cos_sin = args.cos_sin.as<float>();
        with_width<T>(vectorizable<T>(args.HS / 2, {qkv, cos_sin}), [&](auto width) {
            constexpr int kWidth = decltype(width)::value;
            const int64_t heads = args.NH + args.NKV;
            const int64_t per_row = ceil_div(heads, kHeads) * (args.HS / 2 / kWidth);
            const unsigned x = static_cast<unsigned>(std::min<int64_t>(per_row, kThreads));
            const dim3 block(x, kThreads / x);
            rope_kernel<T, kWidth><<<grid_size(ceil_div(args.N, block.y)), block, 0, stream_of(ctx)>>>(
                qkv, cos_sin, args.N, args.T, static_cast<int>(heads), row_elems, static_cast<int>(args.HS),
                direction);
            CHECK_LAUNCH("rope_kernel");
        });
    });
}

}  // namespace

void rope_forward(Ctx& ctx, const RopeArgs& args) { rope(ctx, args, 1.0f, "rope_forward"); }
void rope_backward(Ctx& ctx, const RopeArgs& args) { rope(ctx, args, -1.0f, "rope_backward"); }

}  // namespace cuda
