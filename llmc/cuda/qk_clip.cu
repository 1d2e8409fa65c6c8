// QK-clip.
#include "llmc/cuda/fp8.cuh"
#include "llmc/ops/adam_math.h"

namespace cuda {
namespace {

constexpr int kThreads = 256;

// Math: see QkClipFactorsArgs; qk_clip_factor of adam_math.h.
// Source: Kimi K2, arXiv 2507.20534, section 2.1.
// Traffic: max_logits read, factors written; from the caches.
// Requires: nothing.
// Parallel: one block.
__global__ void __launch_bounds__(kThreads)
    qk_clip_factors_kernel(float* factors, const float* max_logits, int64_t NH, int64_t NKV, int64_t layers, float tau,
                           StepState* state) {
    __shared__ float largest[kThreads / 32];
    __shared__ int counts[32];
    wait_for_previous_kernels();
    const int64_t heads = NH + NKV;
    float most = 0;
    int count = 0;
    for (int64_t i = threadIdx.x; i < layers * NH; i += kThreads) {
        most = fmaxf(most, max_logits[i]);
        count += max_logits[i] > tau;
    }
    for (int64_t i = threadIdx.x; i < layers * heads; i += kThreads)
        factors[i] = qk_clip_factor(max_logits + i / heads * NH, NH, NKV, i % heads, tau);
    most = warp_max(most);
    if (threadIdx.x % 32 == 0) largest[threadIdx.x / 32] = most;
    count = block_sum(count, counts, threadIdx.x / 32, threadIdx.x % 32, kThreads / 32);
    if (threadIdx.x > 0) return;
    for (float other : largest) most = fmaxf(most, other);
    state->max_logit = most;
    state->clipped_heads = state->skip ? 0 : count;
}

// Math: see QkClipArgs.
// Source: as above.
// Traffic: master read and written, param (optional) written, once.
// Requires: nothing.
// Parallel: a thread owns every (kThreads gridDim.x)-th element.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    qk_clip_kernel(T* param, float* master, const float* factors, int64_t heads, int64_t begin, int64_t head_elems,
                   const StepState* state, ScaleEntry* entry, int64_t elems) {
    __shared__ uint32_t amaxes[kThreads / 32];
    wait_for_previous_kernels();
    if (state->skip) return;
    uint32_t amax = 0;
    for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < elems; i += int64_t{gridDim.x} * kThreads) {
        const int64_t head = (begin + i) / head_elems;
        const float value = head < heads ? master[i] * factors[head] : master[i];
        master[i] = value;
        if (param != nullptr) param[i] = from_float<T>(value);
        amax = max(amax, amax_bits_of(value));
    }
    if (entry != nullptr) record_block_amax<kThreads>(&entry->amax_bits, __uint_as_float(amax), amaxes);
}

}  // namespace

void qk_clip_factors(Ctx& ctx, const QkClipFactorsArgs& args) {
    const int64_t layers = args.max_logits.elems / args.NH;
    expect(args.max_logits, Dtype::kFp32, layers * args.NH, "qk_clip_factors: max_logits");
    expect(args.factors, Dtype::kFp32, layers * (args.NH + args.NKV), "qk_clip_factors: factors");
    launch_early(ctx, qk_clip_factors_kernel, 1, kThreads, 0, args.factors.as<float>(), args.max_logits.as<float>(),
                 args.NH, args.NKV, layers, args.tau, args.state);
}

void qk_clip(Ctx& ctx, const QkClipArgs& args) {
    const int64_t elems = args.master.elems;
    if (elems == 0) return;
    expect(args.master, Dtype::kFp32, elems, "qk_clip: master");
    if (args.param) expect(args.param, args.param.dtype, elems, "qk_clip: param");
    dispatch(args.param ? args.param.dtype : Dtype::kBf16, "qk_clip: param", [&](auto type) {
        using T = decltype(type);
        const int64_t blocks = std::min<int64_t>(ceil_div(elems, kThreads), 8 * ctx.sm_count);
        launch_early(ctx, qk_clip_kernel<T>, grid_size(blocks), kThreads, 0, args.param ? args.param.as<T>() : nullptr,
                     args.master.as<float>(), args.factors.as<const float>(), args.factors.elems, args.begin,
                     args.head_elems, args.state, args.entry, elems);
    });
}

}  // namespace cuda
