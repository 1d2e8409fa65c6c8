// rmsnorm of every query and key head (Qwen3), or of all heads of Q and of K together (OLMoE), on the packed
// projections.
#include "llmc/cuda/norm.cuh"

namespace cuda {
namespace {

constexpr int kLanes = 32;
constexpr int kThreads = 256;
constexpr int kHeadsPerThread = 4;   // heads in flight per thread in the forward
constexpr int kBackwardHeads = 3;    // and in the backward, if a head takes 16 lanes or more (else 2)
constexpr int kBackwardBlocksPerSm = 3;
constexpr int kSecondWave = 32;      // the second wave of blocks gets 1 / kSecondWave of the heads

// Heads of a usual size (a power of two of 16-byte vectors) use one vector per lane, kGroup lanes per head; other sizes
// use the kernels of rmsnorm if Q and K are one head each, else the loop kernels below, one warp per head.

// Math: out = x rstd weight for query and key heads, rstd = 1 / sqrt(mean(x^2) + eps); values are copied.
// Source: Zhang, Sennrich 2019; per head as in Qwen3 (arXiv 2505.09388).
// Traffic: in read, out written, once.
// Requires: HS = kGroup vectors of 16 bytes, aligned; head numbers fit an int.
// Parallel: kGroup lanes own a head at a time, with kHeadsPerThread heads in flight, a block's heads apart.
template <typename T, int kGroup>
__global__ void __launch_bounds__(kThreads)
    qk_norm_forward_kernel(T* out, float* rstd_out, const T* in, const T* q_weight, const T* k_weight,
                           int64_t N, int NH, int NKV, float eps) {
    constexpr int kWidth = kVec<T>, HS = kGroup * kWidth, kHeadsPerBlock = kThreads / kGroup;
    const int lane = threadIdx.x % kGroup, heads = NH + 2 * NKV;
    const int64_t all = N * heads;
    const int64_t first = int64_t{blockIdx.x} * kHeadsPerBlock * kHeadsPerThread + threadIdx.x / kGroup;
    uint4 raw[kHeadsPerThread] = {};
#pragma unroll
    for (int k = 0; k < kHeadsPerThread; k++) {
        const int64_t head = first + k * kHeadsPerBlock;
        if (head < all) raw[k] = load_vec(in + head * HS + lane * kWidth);
    }
#pragma unroll
    for (int k = 0; k < kHeadsPerThread; k++) {
        const int64_t head = first + k * kHeadsPerBlock;
        const int n = static_cast<int>(head) / heads, h = static_cast<int>(head) % heads;
        float x[kWidth], w[kWidth], sum = 0.0f;
        unpack<T>(raw[k], x);
#pragma unroll
        for (int i = 0; i < kWidth; i++) sum += x[i] * x[i];
        const float rstd = 1.0f / sqrtf(warp_sum<kGroup>(sum) / HS + eps);
        if (head >= all) continue;
        if (h < NH + NKV) {
            unpack<T>(load_vec((h < NH ? q_weight : k_weight) + lane * kWidth), w);
#pragma unroll
            for (int i = 0; i < kWidth; i++) x[i] = x[i] * rstd * w[i];
            raw[k] = pack<T>(x);
            if (lane == 0) rstd_out[int64_t{n} * (NH + NKV) + h] = rstd;
        }
        store_vec(out + head * HS + lane * kWidth, raw[k]);
    }
}

__device__ inline uint4 select(bool first, uint4 a, uint4 b) {
    return make_uint4(first ? a.x : b.x, first ? a.y : b.y, first ? a.z : b.z, first ? a.w : b.w);
}

// Math: xhat = x rstd, g = dout weight; dx = rstd (g - xhat mean(g xhat)); partial sums of dout xhat over the heads of
// partition p, in partial_q for query heads and partial_k for key heads.
// Source: derivative of the forward.
// Traffic: query and key heads of in and dqkv read, dqkv written, once.
// Requires: as qk_norm_forward_kernel.
// Parallel: first_blocks blocks (one wave) share the heads before first_heads, a second wave the rest,
// because multiprocessors get unequal shares of the bandwidth. kGroup lanes own every (blocks kThreads / kGroup)-th
// head of their share, with kBackwardHeads in flight, and sum their columns in registers; then the groups of a block
// are added in order through shared memory.
template <typename T, int kGroup>
__global__ void __launch_bounds__(kThreads, kBackwardBlocksPerSm)
    qk_norm_backward_kernel(T* dqkv, float* partial_q, float* partial_k, const T* in, const float* rstd_in,
                            const T* q_weight, const T* k_weight, int64_t N, int NH, int NKV,
                            int first_blocks, int64_t first_heads) {
    constexpr int kWidth = kVec<T>, HS = kGroup * kWidth, kGroups = kThreads / kGroup;
    constexpr int kTogether = kGroup >= 16 ? kBackwardHeads : 2;
    __shared__ float shared[kGroups][HS];
    const int lane = threadIdx.x % kGroup, group = threadIdx.x / kGroup, heads = NH + NKV;
    const int64_t row_elems = int64_t{NH + 2 * NKV} * HS;
    const bool first_wave = static_cast<int>(blockIdx.x) < first_blocks;
    const int block = static_cast<int>(blockIdx.x) - (first_wave ? 0 : first_blocks);
    const int blocks = first_wave ? first_blocks : static_cast<int>(gridDim.x) - first_blocks;
    const int64_t begin = first_wave ? 0 : first_heads, end = first_wave ? first_heads : N * heads;
    uint4 weight_q = load_vec(q_weight + lane * kWidth), weight_k = load_vec(k_weight + lane * kWidth);
    float sum_q[kWidth] = {}, sum_k[kWidth] = {};
    // All lanes of a warp iterate equally often: the shuffles below need all of them.
    const int64_t step = int64_t{blocks} * kGroups;
    for (int64_t base = begin + int64_t{block} * kGroups; base < end; base += step * kTogether) {
        uint4 raw_x[kTogether] = {}, raw_d[kTogether] = {};
        float rstd[kTogether] = {};
        int64_t at[kTogether];
        bool is_q[kTogether];
#pragma unroll
        for (int k = 0; k < kTogether; k++) {
            const int64_t head = base + group + k * step;
            const int n = static_cast<int>(head) / heads, h = static_cast<int>(head) % heads;
            at[k] = head < end ? n * row_elems + int64_t{h} * HS + lane * kWidth : -1;
            is_q[k] = h < NH;
            if (at[k] < 0) continue;
            raw_x[k] = load_vec(in + at[k]);
            raw_d[k] = load_vec(dqkv + at[k]);
            rstd[k] = rstd_in[head];
        }
#pragma unroll
        for (int k = 0; k < kTogether; k++) {
            float x[kWidth], d[kWidth], w[kWidth], sum = 0.0f;
            unpack<T>(raw_x[k], x);
            unpack<T>(raw_d[k], d);
            unpack<T>(select(is_q[k], weight_q, weight_k), w);
#pragma unroll
            for (int i = 0; i < kWidth; i++) {
                x[i] *= rstd[k];
                const float dw = d[i] * x[i];
                sum_q[i] += is_q[k] ? dw : 0.0f;
                sum_k[i] += is_q[k] ? 0.0f : dw;
                d[i] *= w[i];
                sum += d[i] * x[i];
            }
            sum = warp_sum<kGroup>(sum) / HS;
#pragma unroll
            for (int i = 0; i < kWidth; i++) d[i] = rstd[k] * (d[i] - x[i] * sum);
            if (at[k] >= 0) store_vec(dqkv + at[k], pack<T>(d));
        }
    }
    auto write_sums = [&](float (&sums)[kWidth], float* partial) {
        store_floats<float, kWidth>(&shared[group][lane * kWidth], sums);
        __syncthreads();
        for (int c = threadIdx.x; c < HS; c += kThreads) {
            float total = 0.0f;
            for (int g = 0; g < kGroups; g++) total += shared[g][c];
            partial[int64_t{blockIdx.x} * HS + c] = total;
        }
        __syncthreads();
    };
    write_sums(sum_q, partial_q);
    write_sums(sum_k, partial_k);
}

// ---- any head dim

// A head of the packed projections: its first element, and how many it has.
struct QkHead {
    int64_t at;
    int width;

    __device__ QkHead(int64_t n, int h, int NH, int NKV, int HS, int KS)
        : at(n * (int64_t{NH} * HS + 2 * int64_t{NKV} * KS) + int64_t{min(h, NH)} * HS + int64_t{max(h - NH, 0)} * KS),
          width(h < NH ? HS : KS) {}
};

// Math: as qk_norm_forward_kernel.
// Source: as qk_norm_forward_kernel.
// Traffic: in read twice (L1), out written once.
// Requires: nothing of HS or alignment.
// Parallel: a warp owns a head, lane i its elements i, i + 32, ...
template <typename T>
__global__ void __launch_bounds__(kThreads)
    qk_norm_forward_loop_kernel(T* out, float* rstd_out, const T* in, const T* q_weight, const T* k_weight,
                                int64_t N, int NH, int NKV, int HS, int KS, float eps) {
    const int lane = threadIdx.x % kLanes, heads = NH + 2 * NKV;
    const int64_t head = int64_t{blockIdx.x} * (kThreads / kLanes) + threadIdx.x / kLanes;
    if (head >= N * heads) return;
    const int64_t n = head / heads;
    const int h = static_cast<int>(head - n * heads);
    const QkHead place(n, h, NH, NKV, HS, KS);
    const T* x = in + place.at;
    T* to = out + place.at;
    if (h >= NH + NKV) {
        for (int i = lane; i < place.width; i += kLanes) to[i] = x[i];
        return;
    }
    const T* weight = h < NH ? q_weight : k_weight;
    float sum = 0.0f;
    for (int i = lane; i < place.width; i += kLanes) sum += to_float(x[i]) * to_float(x[i]);
    const float rstd = 1.0f / sqrtf(warp_sum(sum) / place.width + eps);
    for (int i = lane; i < place.width; i += kLanes) {
        to[i] = from_float<T>(to_float(x[i]) * rstd * to_float(weight[i]));
    }
    if (lane == 0) rstd_out[n * (NH + NKV) + h] = rstd;
}

// Math: the partial sums of qk_norm_backward_kernel.
// Source: as qk_norm_backward_kernel.
// Traffic: query and key heads of in and dqkv read once.
// Requires: nothing of HS or alignment; runs before dqkv is overwritten.
// Parallel: a thread owns one column of partition p: rows p, p + gridDim.y, ...; blockIdx.z = 0 for q, 1 for k.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    qk_norm_backward_columns_kernel(float* partial_q, float* partial_k, const T* dqkv, const T* in,
                                    const float* rstd_in, int64_t N, int NH, int NKV, int HS, int KS) {
    const int c = blockIdx.x * kThreads + threadIdx.x;
    const bool is_q = blockIdx.z == 0;
    const int width = is_q ? HS : KS;
    if (c >= width) return;
    const int begin = is_q ? 0 : NH, end = is_q ? NH : NH + NKV;
    float sum = 0.0f;
    for (int64_t n = blockIdx.y; n < N; n += gridDim.y) {
        for (int h = begin; h < end; h++) {
            const int64_t at = QkHead(n, h, NH, NKV, HS, KS).at + c;
            sum += to_float(dqkv[at]) * to_float(in[at]) * rstd_in[n * (NH + NKV) + h];
        }
    }
    (is_q ? partial_q : partial_k)[int64_t{blockIdx.y} * width + c] = sum;
}

// Math: dx of qk_norm_backward_kernel.
// Source: as qk_norm_backward_kernel.
// Traffic: query and key heads of in and dqkv read twice (L1), dqkv written once.
// Requires: nothing of HS or alignment.
// Parallel: a warp owns a head, lane i its elements i, i + 32, ...
template <typename T>
__global__ void __launch_bounds__(kThreads)
    qk_norm_backward_loop_kernel(T* dqkv, const T* in, const float* rstd_in, const T* q_weight,
                                 const T* k_weight, int64_t N, int NH, int NKV, int HS, int KS) {
    const int lane = threadIdx.x % kLanes, heads = NH + NKV;
    const int64_t head = int64_t{blockIdx.x} * (kThreads / kLanes) + threadIdx.x / kLanes;
    if (head >= N * heads) return;
    const int64_t n = head / heads;
    const int h = static_cast<int>(head - n * heads);
    const QkHead place(n, h, NH, NKV, HS, KS);
    const int64_t start = place.at;
    const T* weight = h < NH ? q_weight : k_weight;
    const float rstd = rstd_in[head];
    float sum = 0.0f;
    for (int i = lane; i < place.width; i += kLanes) {
        sum += to_float(dqkv[start + i]) * to_float(weight[i]) * to_float(in[start + i]) * rstd;
    }
    sum = warp_sum(sum) / place.width;
    for (int i = lane; i < place.width; i += kLanes) {
        const float g = to_float(dqkv[start + i]) * to_float(weight[i]);
        dqkv[start + i] = from_float<T>(rstd * (g - to_float(in[start + i]) * rstd * sum));
    }
}

// ---- launchers

// Calls f(group) with the lanes per head as a compile-time constant; returns false if the loop kernels are needed.
template <typename T, typename F> bool with_group(int64_t HS, int64_t KS, int64_t heads, bool aligned, F&& f) {
    constexpr int64_t kMaxHeads = int64_t{1} << 30;
    if (!aligned || KS != HS || heads > kMaxHeads || HS % static_cast<int64_t>(16 / sizeof(T)) != 0) return false;
    switch (HS / static_cast<int64_t>(16 / sizeof(T))) {
        case 8: f(std::integral_constant<int, 8>{}); return true;
        case 16: f(std::integral_constant<int, 16>{}); return true;
        case 32: f(std::integral_constant<int, 32>{}); return true;
        default: return false;
    }
}

void check_widths(const char* op, int64_t NH, int64_t NKV, int64_t HS, int64_t KS) {
    CHECK(KS == HS || (NH == 1 && NKV == 1 && KS > 0 && KS < HS), "%s: %lld heads of %lld, %lld of %lld", op, ll(NH),
          ll(HS), ll(NKV), ll(KS));
}

}  // namespace

void qk_norm_forward(Ctx& ctx, const QkNormForwardArgs& args) {
    const char* op = "qk_norm_forward";
    const int64_t N = args.N, HS = args.HS, KS = args.KS, heads = args.NH + 2 * args.NKV;
    const Dtype dtype = args.out.dtype;
    check_widths(op, args.NH, args.NKV, HS, KS);
    expect(args.out, dtype, N * args.width(), op);
    expect(args.in, dtype, N * args.width(), op);
    expect(args.rstd, Dtype::kFp32, N * (args.NH + args.NKV), op);
    expect(args.q_weight, dtype, HS, op);
    expect(args.k_weight, dtype, KS, op);
    const int NH = static_cast<int>(args.NH), NKV = static_cast<int>(args.NKV);
    dispatch(dtype, op, [&](auto type) {
        using T = decltype(type);
        T *out = args.out.as<T>(), *in = args.in.as<T>();
        const T *q_weight = args.q_weight.as<T>(), *k_weight = args.k_weight.as<T>();
        float* rstd = args.rstd.as<float>();
        const bool aligned = vectorizable<T>(0, {out, in, q_weight, k_weight});
        const bool done = with_group<T>(HS, KS, N * heads, aligned, [&](auto group) {
            constexpr int kGroup = decltype(group)::value;
            const int64_t blocks = ceil_div(N * heads, kThreads / kGroup * kHeadsPerThread);
            launch_kernel(ctx, qk_norm_forward_kernel<T, kGroup>, grid_size(blocks), kThreads, out, rstd, in, q_weight,
                          k_weight, N, NH, NKV, args.eps);
        });
        if (done || qk_norm_rows_forward(ctx, args)) return;
        const int64_t blocks = ceil_div(N * heads, kThreads / kLanes);
        launch_kernel(ctx, qk_norm_forward_loop_kernel<T>, grid_size(blocks), kThreads, out, rstd, in, q_weight,
                      k_weight, N, NH, NKV, HS, KS, args.eps);
    });
}

void qk_norm_backward(Ctx& ctx, const QkNormBackwardArgs& args) {
    const char* op = "qk_norm_backward";
    const int64_t N = args.N, HS = args.HS, KS = args.KS, normed = args.NH + args.NKV;
    const Dtype dtype = args.dqkv.dtype;
    check_widths(op, args.NH, args.NKV, HS, KS);
    expect(args.dqkv, dtype, N * args.width(), op);
    expect(args.in, dtype, N * args.width(), op);
    expect(args.rstd, Dtype::kFp32, N * normed, op);
    expect(args.q_weight, dtype, HS, op);
    expect(args.k_weight, dtype, KS, op);
    expect_at_least(args.scratch, Dtype::kFp32, 2 * kPartialRows * HS, op);
    const int NH = static_cast<int>(args.NH), NKV = static_cast<int>(args.NKV);
    float *partial_q = args.scratch.as<float>(), *partial_k = partial_q + kPartialRows * HS;
    QkNormParts parts;
    dispatch(dtype, op, [&](auto type) {
        using T = decltype(type);
        T *dqkv = args.dqkv.as<T>(), *in = args.in.as<T>();
        const T *q_weight = args.q_weight.as<T>(), *k_weight = args.k_weight.as<T>();
        const float* rstd = args.rstd.as<float>();
        const bool aligned = vectorizable<T>(0, {dqkv, in, q_weight, k_weight});
        const bool done = with_group<T>(HS, KS, N * normed, aligned, [&](auto group) {
            constexpr int kGroup = decltype(group)::value;
            // One wave of resident blocks; a second, smaller one if every block would have two heads per group or more.
            const int64_t heads = N * normed, blocks = ceil_div(heads, kThreads / kGroup);
            const int64_t resident = std::min<int64_t>(kPartialRows, kBackwardBlocksPerSm * ctx.sm_count);
            const bool two_waves = blocks >= 2 * resident && resident < kPartialRows;
            const int64_t first_blocks = std::min(resident, blocks);
            const int64_t first_heads = two_waves ? heads - heads / kSecondWave : heads;
            parts.q = parts.k = two_waves ? kPartialRows : first_blocks;
            launch_kernel(ctx, qk_norm_backward_kernel<T, kGroup>, grid_size(parts.q), kThreads, dqkv, partial_q,
                          partial_k, in, rstd, q_weight, k_weight, N, NH, NKV, first_blocks, first_heads);
        });
        if (!done) parts = qk_norm_rows_backward(ctx, args);
        if (parts.q > 0) return;
        parts.q = parts.k = std::min(kPartialRows, N);
        const dim3 grid(grid_size(ceil_div(HS, kThreads)), grid_size(parts.q), 2);
        launch_kernel(ctx, qk_norm_backward_columns_kernel<T>, grid, kThreads, partial_q, partial_k, dqkv, in, rstd, N,
                      NH, NKV, HS, KS);
        const int64_t blocks = ceil_div(N * normed, kThreads / kLanes);
        launch_kernel(ctx, qk_norm_backward_loop_kernel<T>, grid_size(blocks), kThreads, dqkv, in, rstd, q_weight,
                      k_weight, N, NH, NKV, HS, KS);
    });
    const bool equal = KS == HS && parts.q == parts.k;
    const ColumnSum of_keys{args.dk_weight, partial_k};
    add_column_sums(ctx, {args.dq_weight, partial_q}, equal ? of_keys : ColumnSum{}, parts.q, HS);
    if (!equal) add_column_sums(ctx, of_keys, {}, parts.k, KS);
    if (args.quant) quantize(ctx, {.quant = args.quant, .in = args.dqkv, .N = N, .C = args.width()});
}

}  // namespace cuda
