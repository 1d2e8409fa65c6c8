// The router of a mixture of experts, a warp per token.
#include "llmc/cuda/common.cuh"
#include "llmc/ops/adam_math.h"

namespace cuda {
namespace {

constexpr int kLanes = 32, kWarps = 8, kThreads = kLanes * kWarps;
static_assert(kMaxRouterExperts <= kLanes * kLanes && kMaxRouterExperts <= 1024);

// The row of a warp, of blocks of kWarps warps.
__device__ inline int64_t warp_row() { return int64_t{blockIdx.x} * kWarps + threadIdx.x / kLanes; }
unsigned warp_grid(int64_t rows) { return grid_size(ceil_div(rows, kWarps)); }

// Calls f with the experts of a lane as a compile-time constant: expert i * 32 + lane is number i of lane `lane`.
template <typename F> void with_experts(int64_t E, F&& f) {
    if (E <= 2 * kLanes) f(std::integral_constant<int, 2>{});
    else if (E <= 4 * kLanes) f(std::integral_constant<int, 4>{});
    else if (E <= 8 * kLanes) f(std::integral_constant<int, 8>{});
    else f(std::integral_constant<int, kMaxRouterExperts / kLanes>{});
}

// ---- router

// Floats as unsigned numbers in their order, NaN above or below all.
__device__ inline uint32_t ordered(float x) {
    const uint32_t bits = __float_as_uint(x);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// A bit for each of the lane's experts: the K with the largest scores, of equal ones the lower number.
template <int kPer> __device__ inline uint32_t choose_experts(const float (&p)[kPer], int E, int K, int lane) {
    uint32_t taken = 0;
    for (int k = 0; k < K; k++) {
        unsigned long long best = 0;
#pragma unroll
        for (int i = 0; i < kPer; i++) {
            const int e = i * kLanes + lane;
            const uint32_t lower = 0xffffffffu - static_cast<uint32_t>(e);
            const unsigned long long key = (static_cast<unsigned long long>(ordered(p[i])) << 32) | lower;
            if (e < E && !(taken >> i & 1u)) best = max(best, key);
        }
#pragma unroll
        for (int offset = kLanes / 2; offset > 0; offset /= 2)
            best = max(best, __shfl_xor_sync(0xffffffffu, best, offset));
        const int e = static_cast<int>(0xffffffffu - static_cast<uint32_t>(best));
        if (e % kLanes == lane) taken |= 1u << (e / kLanes);
    }
    return taken;
}

// Math: see RouterForwardArgs.
// Source: as there.
// Traffic: logits read, probs, experts and weights written, once.
// Requires: E <= kPer * 32, K <= E.
// Parallel: a warp per token.
template <typename T, int kPer>
__global__ void __launch_bounds__(kThreads)
    router_forward_kernel(float* probs, float* lse, int32_t* experts, float* weights, const T* bias, int64_t N, int E,
                          int K, RouterForm form, bool chosen, bool even, const T* logit_bias, T* spread) {
    wait_for_previous_kernels();
    const int64_t n = warp_row();
    const int lane = threadIdx.x % kLanes;
    if (n >= N) return;
    probs += n * E, experts += n * K, weights += n * K;
    float p[kPer], largest = -INFINITY, sum = 0, of_taken = 0;
#pragma unroll
    for (int i = 0; i < kPer; i++) {
        p[i] = i * kLanes + lane < E ? probs[i * kLanes + lane] : -INFINITY;
        if (logit_bias && i * kLanes + lane < E) p[i] += to_float(logit_bias[i * kLanes + lane]);
        largest = fmaxf(largest, p[i]);
    }
    largest = warp_max(largest);
#pragma unroll
    for (int i = 0; i < kPer; i++) sum += p[i] = form.sigmoid ? 1.0f / (1.0f + expf(-p[i])) : expf(p[i] - largest);
    sum = warp_sum(sum);
    if (lane == 0) lse[n] = (form.sigmoid ? 0.0f : largest) + logf(sum);
    float score[kPer];
#pragma unroll
    for (int i = 0; i < kPer; i++) {
        p[i] /= form.sigmoid ? 1.0f : sum;
        score[i] = p[i];
        if (i * kLanes + lane >= E) continue;
        probs[i * kLanes + lane] = p[i];
        if (bias) score[i] += to_float(bias[i * kLanes + lane]);
        if (even) score[i] = evenly_chosen(n, i * kLanes + lane, E, K);
    }
    uint32_t taken = 0;
    if (!chosen) taken = choose_experts<kPer>(score, E, K, lane);
    for (int k = 0; chosen && k < K; k++)
        if (experts[k] % kLanes == lane) taken |= 1u << (experts[k] / kLanes);
#pragma unroll
    for (int i = 0; i < kPer; i++) of_taken += taken >> i & 1u ? p[i] : 0.0f;
    of_taken = form.normalize ? warp_sum(of_taken) : 1.0f;
    int before = 0;   // chosen experts with lower numbers
#pragma unroll
    for (int i = 0; i < kPer; i++) {
        const bool mine = taken >> i & 1u;
        const uint32_t all = __ballot_sync(0xffffffffu, mine);
        const int k = before + __popc(all & ((1u << lane) - 1));
        const float weight = mine ? p[i] / of_taken * form.scale : 0.0f;
        if (mine) experts[k] = i * kLanes + lane, weights[k] = weight;
        if (spread && i * kLanes + lane < E) spread[n * E + i * kLanes + lane] = from_float<T>(weight);
        before += __popc(all);
    }
}

// Math: see RouterStatsArgs; the sums of a part of the tokens.
// Source: none.
// Traffic: probs and experts read, once.
// Requires: gridDim.x <= kRouterPartials.
// Parallel: a block per part of the tokens; a thread owns the columns e, e + blockDim.x, ... of all its tokens.
__global__ void __launch_bounds__(kThreads)
    router_stats_kernel(double* partial, const float* probs, const float* lse, const int32_t* experts, int64_t N, int E,
                        int K, int64_t part, bool sigmoid) {
    __shared__ int rows[kMaxRouterExperts];
    __shared__ double sums[2][kLanes];
    wait_for_previous_kernels();
    const int64_t begin = blockIdx.x * part, end = min(N, begin + part);
    partial += int64_t{blockIdx.x} * router_stats_elems(E);
    for (int e = threadIdx.x; e < E; e += kThreads) rows[e] = 0;
    __syncthreads();
    for (int64_t i = begin * K + threadIdx.x; i < end * K; i += kThreads) atomicAdd(&rows[experts[i]], 1);
    double entropy = 0, squares = 0;
    for (int e = threadIdx.x; e < E; e += kThreads) {
        double sum = 0;
        for (int64_t n = begin; n < end; n++) {
            const float p = probs[n * E + e] * (sigmoid ? expf(-lse[n]) : 1.0f);
            sum += p;
            if (p > 0.0f) entropy -= static_cast<double>(p * logf(p));
        }
        partial[E + e] = sum;
    }
    for (int64_t n = begin + threadIdx.x; n < end; n += kThreads)
        squares += static_cast<double>(lse[n]) * static_cast<double>(lse[n]);
    const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
    entropy = block_sum(entropy, sums[0], warp, lane, kWarps);
    squares = block_sum(squares, sums[1], warp, lane, kWarps);
    for (int e = threadIdx.x; e < E; e += kThreads) partial[e] = rows[e];
    if (threadIdx.x == 0) partial[2 * E] = entropy, partial[2 * E + 1] = squares;
}

// Math: stats[i] += sum over the parts of partial[part][i].
// Source: none.
// Traffic: partial read, stats read and written, once.
// Requires: nothing.
// Parallel: a thread per sum.
__global__ void __launch_bounds__(kThreads)
    router_stats_sum_kernel(double* stats, const double* partial, int64_t parts, int64_t elems) {
    wait_for_previous_kernels();
    const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
    if (i >= elems) return;
    double sum = 0;
    for (int64_t part = 0; part < parts; part++) sum += partial[part * elems + i];
    stats[i] += sum;
}

// Math: see RouterBackwardArgs.
// Source: as there.
// Traffic: probs read, dlogits written, once.
// Requires: E <= kPer * 32, K <= 32.
// Parallel: a warp per token; lane k has its k-th expert.
template <typename T, int kPer>
__global__ void __launch_bounds__(kThreads)
    router_backward_kernel(T* dlogits, const float* dweights, const float* probs, const float* lse,
                           const int32_t* experts, const float* weights, const double* load, const StepState* state,
                           int64_t N, int E, int K, RouterForm form, float aux, float z, const T* dspread) {
    wait_for_previous_kernels();
    const int64_t n = warp_row();
    const int lane = threadIdx.x % kLanes;
    if (n >= N) return;
    probs += n * E, dlogits += n * E;
    float p[kPer], dp[kPer];
    double rows = 0;
#pragma unroll
    for (int i = 0; i < kPer; i++) {
        const bool is = i * kLanes + lane < E;
        p[i] = is ? probs[i * kLanes + lane] : 0.0f;
        rows += is ? load[i * kLanes + lane] : 0.0;
    }
    rows = warp_sum(rows);
    const double mul = rows > 0 ? static_cast<double>(aux) * E * static_cast<double>(state->token_mul) / rows : 0;
#pragma unroll
    for (int i = 0; i < kPer; i++)
        dp[i] = i * kLanes + lane < E ? static_cast<float>(mul * load[i * kLanes + lane]) : 0.0f;
    const int expert = lane < K ? experts[n * K + lane] : -1;
    float of_weight = lane < K ? dweights[n * K + lane] : 0.0f;
    if (dspread && lane < K) of_weight += to_float(dspread[n * E + expert]);
    float dw = form.scale * of_weight;
    if (form.normalize) {
        const float mean = warp_sum(lane < K ? of_weight * weights[n * K + lane] : 0.0f);
        dw = (dw - mean) / warp_sum(lane < K ? probs[expert] : 0.0f);
    }
    for (int k = 0; k < K; k++) {
        const int e = __shfl_sync(0xffffffffu, expert, k);
        const float value = __shfl_sync(0xffffffffu, dw, k);
#pragma unroll
        for (int i = 0; i < kPer; i++) dp[i] += e == i * kLanes + lane ? value : 0.0f;
    }
    float dot = 0;
#pragma unroll
    for (int i = 0; i < kPer; i++) dot += dp[i] * p[i];
    dot = warp_sum(dot);
    const float of_lse = 2.0f * z * state->token_mul * lse[n];
#pragma unroll
    for (int i = 0; i < kPer; i++)
        if (i * kLanes + lane < E)
            dlogits[i * kLanes + lane] =
                from_float<T>(p[i] * (form.sigmoid ? dp[i] * (1.0f - p[i]) : dp[i] - dot + of_lse));
}

// Math: see RouterSummaryArgs; router_layer of adam_math.h.
// Source: none.
// Traffic: stats read, load written, once.
// Requires: nothing.
// Parallel: one block; a thread per layer.
__global__ void __launch_bounds__(kThreads)
    router_summary_kernel(RouterSummaryArgs args, const double* stats, double* load) {
    __shared__ double memory[kThreads * sizeof(RouterTotals) / sizeof(double)];
    RouterTotals* const shared = reinterpret_cast<RouterTotals*>(memory);
    wait_for_previous_kernels();
    RouterTotals mine;
    for (int64_t layer = threadIdx.x; layer < args.layers; layer += kThreads)
        mine.add(router_layer(args, stats + layer * router_stats_elems(args.E), load + layer * args.E));
    shared[threadIdx.x] = mine;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int i = 1; i < kThreads; i++) mine.add(shared[i]);
    mine.store(args);
}

// Math: see RouterBiasArgs; router_bias_change of adam_math.h.
// Source: as there.
// Traffic: load read, master read and written, bias written, once.
// Requires: nothing.
// Parallel: a thread per expert.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    router_bias_kernel(T* bias, float* master, const double* load, const StepState* state, int64_t E, int64_t first,
                       int64_t n, float rate) {
    wait_for_previous_kernels();
    const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
    if (i >= n || state->skip) return;
    const float value = master[i] + router_bias_change(load, E, first + i, rate);
    master[i] = value;
    if (bias) bias[i] = from_float<T>(value);
}

}  // namespace

void router_forward(Ctx& ctx, const RouterForwardArgs& args) {
    const int64_t N = args.N, E = args.E, K = args.K;
    expect(args.probs, Dtype::kFp32, N * E, "router_forward: probs");
    expect(args.lse, Dtype::kFp32, N, "router_forward: lse");
    expect(args.experts, Dtype::kInt32, N * K, "router_forward: experts");
    expect(args.weights, Dtype::kFp32, N * K, "router_forward: weights");
    CHECK(K <= E && E <= kMaxRouterExperts, "router_forward: %lld of %lld experts", ll(K), ll(E));
    const Dtype working = args.bias ? args.bias.dtype : args.logit_bias ? args.logit_bias.dtype : Dtype::kFp32;
    for (const Tensor& bias : {args.bias, args.logit_bias})
        if (bias) expect(bias, working, E, "router_forward: bias");
    if (args.spread) expect(args.spread, working, N * E, "router_forward: spread");
    dispatch(working, "router_forward", [&](auto type) {
        using T = decltype(type);
        with_experts(E, [&](auto per) {
            launch_early(ctx, router_forward_kernel<T, per>, warp_grid(N), kThreads, 0, args.probs.as<float>(),
                         args.lse.as<float>(), args.experts.as<int32_t>(), args.weights.as<float>(),
                         args.bias.as<T>(), N, E, K, args.form, args.chosen, args.even, args.logit_bias.as<T>(),
                         args.spread.as<T>());
        });
    });
}

void router_stats(Ctx& ctx, const RouterStatsArgs& args) {
    const int64_t elems = router_stats_elems(args.E), parts = std::min(kRouterPartials, ceil_div(args.N, 64));
    expect(args.stats, Dtype::kFp64, elems, "router_stats: stats");
    expect(args.scratch, Dtype::kFp64, kRouterPartials * elems, "router_stats: scratch");
    double* const partial = args.scratch.as<double>();
    launch_early(ctx, router_stats_kernel, grid_size(parts), kThreads, 0, partial, args.probs.as<float>(),
                 args.lse.as<float>(), args.experts.as<int32_t>(), args.N, args.E, args.K,
                 ceil_div(args.N, parts), args.sigmoid);
    launch_early(ctx, router_stats_sum_kernel, grid_size(ceil_div(elems, kThreads)), kThreads, 0,
                 args.stats.as<double>(), partial, parts, elems);
}

void router_backward(Ctx& ctx, const RouterBackwardArgs& args) {
    const int64_t N = args.N, E = args.E, K = args.K;
    expect(args.dlogits, args.dlogits.dtype, N * E, "router_backward: dlogits");
    expect(args.load, Dtype::kFp64, E, "router_backward: load");
    if (args.dspread) expect(args.dspread, args.dlogits.dtype, N * E, "router_backward: dspread");
    CHECK(K <= kLanes && E <= kMaxRouterExperts, "router_backward: %lld of %lld experts", ll(K), ll(E));
    dispatch(args.dlogits.dtype, "router_backward", [&](auto type) {
        using T = decltype(type);
        with_experts(E, [&](auto per) {
            launch_early(ctx, router_backward_kernel<T, per>, warp_grid(N), kThreads, 0, args.dlogits.as<T>(),
                         args.dweights.as<float>(), args.probs.as<float>(), args.lse.as<float>(),
                         args.experts.as<int32_t>(), args.weights.as<float>(), args.load.as<double>(),
                         args.state, N, E, K, args.form, args.aux, args.z, args.dspread.as<T>());
        });
    });
}

void router_summary(Ctx& ctx, const RouterSummaryArgs& args) {
    expect(args.stats, Dtype::kFp64, args.layers * router_stats_elems(args.E), "router_summary: stats");
    expect(args.load, Dtype::kFp64, args.layers * args.E, "router_summary: load");
    launch_early(ctx, router_summary_kernel, 1, kThreads, 0, args, args.stats.as<double>(),
                 args.load.as<double>());
}

void router_bias(Ctx& ctx, const RouterBiasArgs& args) {
    const int64_t n = args.master.elems;
    expect(args.master, Dtype::kFp32, n, "router_bias: master");
    expect(args.load, Dtype::kFp64, args.load.elems, "router_bias: load");
    dispatch(args.bias ? args.bias.dtype : Dtype::kFp32, "router_bias", [&](auto type) {
        using T = decltype(type);
        launch_early(ctx, router_bias_kernel<T>, grid_size(ceil_div(n, kThreads)), kThreads, 0,
                     args.bias ? args.bias.as<T>() : nullptr, args.master.as<float>(), args.load.as<double>(),
                     args.state, args.load.elems, args.first, n, args.rate);
    });
}

}  // namespace cuda
