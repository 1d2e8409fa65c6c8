// The AdamW step on a range of elements of one parameter.
#include "llmc/cuda/moments.cuh"
#include "llmc/cuda/ptx.cuh"
#include "llmc/cuda/stochastic.cuh"
#include "llmc/ops/adam_math.h"

namespace cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kBlocksPerSm = 7, kFp8BlocksPerSm = 8;   // at most 72 and 64 registers a thread

// The constants of the step, which each block computes once, since the bias corrections are powers in fp64. All threads
// of the block call it.
__device__ inline AdamConstants<float> constants_of(const StepState* state, float lr_scale, float beta1, float beta2,
                                                    float eps, float weight_decay) {
    __shared__ AdamConstants<float> constants;
    if (threadIdx.x == 0)
        constants = adam_constants<float>(beta1, beta2, eps, weight_decay, state->lr * lr_scale, state->grad_mul,
                                          state->adam_step);
    __syncthreads();
    return constants;
}

// adam_direction, to the same bits: the instructions that the compiler makes of sqrtf and / without the branches to
// their slow paths. The arguments must be from 2^-60 to 2^60 in magnitude and eps at most 2^30.
__device__ inline float quick_direction(float m_hat, float v_hat, float eps) {
    const float rsqrt = reciprocal_sqrt_approx(v_hat), near_root = v_hat * rsqrt;
    const float divisor = fmaf(fmaf(-near_root, near_root, v_hat), 0.5f * rsqrt, near_root) + eps;
    const float near_inv = reciprocal_approx(divisor);
    const float inv = fmaf(near_inv, fmaf(-divisor, near_inv, 1.0f), near_inv), near = m_hat * inv;
    return fmaf(inv, fmaf(-divisor, near, m_hat), near);
}
// At most kMiddle for positive x from 2^-60 to 2^60.
constexpr uint32_t kMiddle = 120u << 23;
__device__ inline uint32_t middle_of(float x) { return __float_as_uint(x) - (67u << 23); }

// adam_update of `count` elements, to the same bits. With one branch for all of them their square roots and divisions
// overlap.
template <int count>
__device__ inline void update_elements(const AdamConstants<float>& c, const float (&g)[count], float (&m)[count],
                                       float (&v)[count], float (&master)[count]) {
    float m_hat[count], v_hat[count];
    uint32_t farthest = 0;
#pragma unroll
    for (int j = 0; j < count; j++) {
        update_moments(c, g[j], m[j], v[j]);
        m_hat[j] = m[j] * c.inv_correction1, v_hat[j] = v[j] * c.inv_correction2;
        farthest = max(farthest, max(middle_of(fabsf(m_hat[j])), middle_of(v_hat[j])));
    }
    if (farthest <= kMiddle && c.eps <= 0x1p30f) {
#pragma unroll
        for (int j = 0; j < count; j++) master[j] = moved(c, quick_direction(m_hat[j], v_hat[j], c.eps), master[j]);
    } else {
#pragma unroll
        for (int j = 0; j < count; j++) master[j] = moved(c, adam_direction(m_hat[j], v_hat[j], c.eps), master[j]);
    }
}

// Math: adam_update of adam_math.h; bf16 moments are rounded stochastically; the entry's amax becomes the
// maximum of itself and |new master| rounded to bf16.
// Source: Loshchilov and Hutter, arXiv 1711.05101.
// Traffic: master, m, v read and written, grad read, param (optional) written, once.
// Requires: kWidth = 4 needs tensors aligned to 4 elements; the remaining elements are processed one by one.
// Parallel: a thread owns every (kThreads gridDim.x)-th group of kWidth elements; all blocks are resident.
template <typename T, typename Moment, typename Grad, int kWidth>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    adamw_kernel(T* param, float* master, Moment* m, Moment* v, const Grad* grad, const StepState* state,
                 float lr_scale, float beta1, float beta2, float eps, float weight_decay,
                 const __grid_constant__ PhiloxKeys keys, int64_t element_offset, ScaleEntry* entry, int64_t elems) {
    wait_for_previous_kernels();
    if (state->skip) return;
    __shared__ uint32_t amaxes[kThreads / 32];
    const int64_t step = state->adam_step;
    const AdamConstants<float> c = constants_of(state, lr_scale, beta1, beta2, eps, weight_decay);
    uint32_t amax = 0;   // bits of fp32 values; rounding is monotonic, so it is deferred to the end
    // The random bits of an element: low half for m, high half for v.
    auto random_of = [&](int64_t i) {
        if constexpr (!std::is_same_v<Moment, bf16>) return 0u;
        const uint4 random = philox_words(keys, static_cast<uint64_t>(element_offset + i),
                                          static_cast<uint64_t>(step));
        return __byte_perm(random.x, random.y, 0x5410);
    };
    auto finish = [&](uint32_t random, float& m_value, float& v_value, float master_value) {
        amax = max(amax, amax_bits_of(master_value));
        if constexpr (std::is_same_v<Moment, bf16>) {
            m_value = stochastic_round(m_value, random);
            v_value = stochastic_round(v_value, random >> 16);
        }
    };
    const int64_t groups = elems / kWidth;
    const int64_t thread = int64_t{blockIdx.x} * kThreads + threadIdx.x;
    const int64_t threads = int64_t{gridDim.x} * kThreads;
    for (int64_t group = thread; group < groups; group += threads) {
        const int64_t i = group * kWidth;
        float gs[kWidth], ms[kWidth], vs[kWidth], values[kWidth];
        load_floats<float, kWidth>(master + i, values);
        load_floats<Moment, kWidth>(m + i, ms);
        load_floats<Moment, kWidth>(v + i, vs);
        load_floats<Grad, kWidth>(grad + i, gs);
        // Random numbers are generated while the loads are in flight: 705 us instead of 748 on an H200 (2^27
        // elements, bf16 moments and gradients).
        uint32_t random[kWidth];
#pragma unroll
        for (int j = 0; j < kWidth; j++) {
            random[j] = random_of(i + j);
            if constexpr (std::is_same_v<Moment, bf16>) random[j] = ptx::opaque(random[j]);
        }
        update_elements(c, gs, ms, vs, values);
#pragma unroll
        for (int j = 0; j < kWidth; j++) finish(random[j], ms[j], vs[j], values[j]);
        store_floats<float, kWidth>(master + i, values);
        store_floats<Moment, kWidth>(m + i, ms);
        store_floats<Moment, kWidth>(v + i, vs);
        if (param != nullptr) store_floats<T, kWidth>(param + i, values);
    }
    const int64_t rest = groups * kWidth + thread;
    if (rest < elems) {
        float m_value = to_float(m[rest]), v_value = to_float(v[rest]), value = master[rest];
        adam_update(c, to_float(grad[rest]), m_value, v_value, value);
        finish(random_of(rest), m_value, v_value, value);
        master[rest] = value;
        m[rest] = from_float<Moment>(m_value);
        v[rest] = from_float<Moment>(v_value);
        if (param != nullptr) param[rest] = from_float<T>(value);
    }
    if (entry != nullptr) record_block_amax<kThreads>(&entry->amax_bits, __uint_as_float(amax), amaxes);
}

template <typename T, typename Moment, typename Grad> void launch_adamw(Ctx& ctx, const AdamWArgs& args) {
    const int64_t elems = args.master.elems;
    constexpr int kWidth = 4;
    auto launch = [&](auto width) {
        const int64_t groups = std::max<int64_t>(elems / decltype(width)::value, 1);
        const int64_t blocks = std::min(ceil_div(groups, kThreads), int64_t{kBlocksPerSm} * ctx.sm_count);
        launch_early(ctx, adamw_kernel<T, Moment, Grad, decltype(width)::value>, grid_size(blocks), kThreads, 0,
                     args.param.as<T>(), args.master.as<float>(), args.m.as<Moment>(), args.v.as<Moment>(),
                     args.grad.as<Grad>(), args.state, args.lr_scale, args.beta1, args.beta2, args.eps,
                     args.weight_decay, philox_keys(args.rng_key), args.element_offset, args.entry, elems);
    };
    bool vector = true;
    for (const Tensor* t : {&args.param, &args.master, &args.m, &args.v, &args.grad}) {
        vector = vector && aligned(*t, kWidth);
    }
    if (vector) launch(std::integral_constant<int, kWidth>{});
    else launch(std::integral_constant<int, 1>{});
}

// Math: ema += share (master - ema), see EmaArgs; one fma an element, as on the CPU.
// Source: Polyak and Juditsky, SIAM J. Control Optim. 30 (1992); the share is ema_share of adam_math.h.
// Traffic: master read, ema read and written, once.
// Requires: kWidth = 4 needs tensors aligned to 4 elements; the remaining elements are processed one by one.
// Parallel: a thread owns every (kThreads gridDim.x)-th group of kWidth elements.
template <int kWidth>
__global__ void __launch_bounds__(kThreads)
    ema_kernel(float* ema, const float* master, const StepState* state, double decay, int64_t elems) {
    wait_for_previous_kernels();
    if (state->skip) return;
    __shared__ float shared_share;
    if (threadIdx.x == 0) shared_share = static_cast<float>(ema_share(decay, state->adam_step));
    __syncthreads();
    const float share = shared_share;
    const int64_t groups = elems / kWidth, threads = int64_t{gridDim.x} * kThreads;
    const int64_t thread = int64_t{blockIdx.x} * kThreads + threadIdx.x;
    for (int64_t group = thread; group < groups; group += threads) {
        float values[kWidth], masters[kWidth];
        load_floats<float, kWidth>(ema + group * kWidth, values);
        load_floats<float, kWidth>(master + group * kWidth, masters);
#pragma unroll
        for (int j = 0; j < kWidth; j++) values[j] = fmaf(share, masters[j] - values[j], values[j]);
        store_floats<float, kWidth>(ema + group * kWidth, values);
    }
    const int64_t rest = groups * kWidth + thread;
    if (rest < elems) ema[rest] = fmaf(share, master[rest] - ema[rest], ema[rest]);
}

// ---- moments in fp8

// What a lane reads of a block: four elements and the scales.
template <typename Grad> struct BlockPart {
    alignas(16) float master[4];
    alignas(4 * sizeof(Grad)) Grad grad[4];
    uint32_t m, v;
    float m_inv, v_inv;
};

// Math: adam_update of adam_math.h, moments as in moment_codes.h; the entry's amax as in adamw_kernel.
// Source: Loshchilov and Hutter, arXiv 1711.05101; moments in blocks: COAT, arXiv 2410.19313.
// Traffic: master, m, v and their scales read and written, grad read, param (optional) written, once.
// Requires: `vector` needs tensors aligned to 4 elements; otherwise, and in the last, shorter block of 128, elements
// are accessed one by one.
// Parallel: a warp owns every (gridDim.x kThreads / 32)-th pair of blocks of 128, a lane four consecutive elements of
// each, and loads the next block before it computes; all thread blocks are resident.
template <typename T, typename Grad>
__global__ void __launch_bounds__(kThreads, kFp8BlocksPerSm)
    adamw_fp8_kernel(T* param, float* master, uint8_t* m, uint8_t* v, float* m_scale_inv, float* v_scale_inv,
                     const Grad* grad, const StepState* state, float lr_scale, float beta1, float beta2, float eps,
                     float weight_decay, const __grid_constant__ PhiloxKeys keys, int64_t element_offset,
                     ScaleEntry* entry, bool vector, int64_t elems) {
    wait_for_previous_kernels();
    if (state->skip) return;
    __shared__ uint32_t amaxes[kThreads / 32];
    const int64_t step = state->adam_step;
    const AdamConstants<float> c = constants_of(state, lr_scale, beta1, beta2, eps, weight_decay);
    const int lane = threadIdx.x % 32;
    uint32_t amax = 0;
    // Updates `count` elements of the lane and stores the scales; `values` become the masters, m and v the new codes.
    // All lanes of a warp call it.
    auto update = [&](uint32_t block, BlockPart<Grad>& part, float (&values)[4], int count) {
        const int64_t element = element_offset + int64_t{block} * kScaleBlock + 4 * lane;
        const uint4 words = philox_words<kMomentRounds>(keys, static_cast<uint64_t>(element) / 4,
                                                        static_cast<uint64_t>(step));
        const uint32_t random[4] = {words.x, words.y, words.z, words.w};
        float gs[4], ms[4], vs[4];
        float m_amax = 0;
        uint32_t v_amax = 0;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            gs[j] = to_float(part.grad[j]), values[j] = part.master[j];
            vs[j] = decode_v(part.v >> (8 * j), part.v_inv);
        }
        decode_m4(part.m, part.m_inv, ms);
        update_elements(c, gs, ms, vs, values);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (j < count) amax = max(amax, amax_bits_of(values[j]));
            m_amax = ptx::max_or_nan(m_amax, fabsf(ms[j])), v_amax = max(v_amax, __float_as_uint(vs[j]));   // v >= 0
        }
        const MomentScale of_m = moment_scale(__reduce_max_sync(~0u, __float_as_uint(m_amax)), kLog2LargestM);
        const MomentScale of_v = moment_scale(__reduce_max_sync(~0u, v_amax), kLog2LargestV);
        part.m = encode_m4(ms, of_m.scale, random), part.v = encode_v4(vs, of_v.scale, random);
        if (lane == 0) m_scale_inv[block] = of_m.scale_inv, v_scale_inv[block] = of_v.scale_inv;
    };
    const auto load = [&](uint32_t block) {
        const int64_t i = int64_t{block} * kScaleBlock + 4 * lane;
        BlockPart<Grad> part;
        using Grads = std::conditional_t<sizeof(Grad) == 2, uint2, uint4>;
        *reinterpret_cast<uint4*>(part.master) = *reinterpret_cast<const uint4*>(master + i);
        *reinterpret_cast<Grads*>(part.grad) = *reinterpret_cast<const Grads*>(grad + i);
        part.m = *reinterpret_cast<const uint32_t*>(m + i), part.v = *reinterpret_cast<const uint32_t*>(v + i);
        part.m_inv = m_scale_inv[block], part.v_inv = v_scale_inv[block];
        return part;
    };
    const uint32_t warps = gridDim.x * (kThreads / 32);
    const auto whole = static_cast<uint32_t>(vector ? elems / kScaleBlock : 0);
    const auto all = static_cast<uint32_t>(scale_blocks(elems));
    const uint32_t warp = blockIdx.x * (kThreads / 32) + threadIdx.x / 32, pairs = whole / 2;
    float values[4];
    const auto update_whole = [&](uint32_t block, BlockPart<Grad>& part) {
        update(block, part, values, 4);
        const int64_t i = int64_t{block} * kScaleBlock + 4 * lane;
        store_floats<float, 4>(master + i, values);
        *reinterpret_cast<uint32_t*>(m + i) = part.m, *reinterpret_cast<uint32_t*>(v + i) = part.v;
        if (param != nullptr) store_floats<T, 4>(param + i, values);
    };
    BlockPart<Grad> part = {};
    if (warp < pairs) part = load(2 * warp);
    for (uint32_t pair = warp; pair < pairs; pair += warps) {
        BlockPart<Grad> second = load(2 * pair + 1);
        update_whole(2 * pair, part);
        if (pair + warps < pairs) part = load(2 * (pair + warps));
        update_whole(2 * pair + 1, second);
    }
    for (uint32_t block = 2 * pairs + warp; block < all; block += warps) {
        const int64_t i = int64_t{block} * kScaleBlock + 4 * lane;
        const int count = static_cast<int>(min(max(elems - i, int64_t{0}), int64_t{4}));
        BlockPart<Grad> part = {};
        for (int j = 0; j < 4; j++)
            if (j < count) part.master[j] = master[i + j], part.grad[j] = grad[i + j];
        part.m = load_bytes(m + i, count), part.v = load_bytes(v + i, count);
        part.m_inv = m_scale_inv[block], part.v_inv = v_scale_inv[block];
        update(block, part, values, count);
        for (int j = 0; j < 4; j++) {
            if (j < count) master[i + j] = values[j];
            if (j < count && param != nullptr) param[i + j] = from_float<T>(values[j]);
        }
        store_bytes(m + i, part.m, count), store_bytes(v + i, part.v, count);
    }
    if (entry != nullptr) record_block_amax<kThreads>(&entry->amax_bits, __uint_as_float(amax), amaxes);
}

template <typename T, typename Grad> void launch_adamw_fp8(Ctx& ctx, const AdamWArgs& args) {
    const int64_t elems = args.master.elems, blocks = scale_blocks(elems);
    expect(args.m_scale_inv, Dtype::kFp32, blocks, "adamw: m_scale_inv");
    expect(args.v_scale_inv, Dtype::kFp32, blocks, "adamw: v_scale_inv");
    CHECK(args.element_offset % kScaleBlock == 0, "adamw: fp8 moments from element %lld",
          (long long)args.element_offset);
    CHECK(blocks <= INT32_MAX, "adamw: fp8 moments of %lld elements", (long long)elems);   // numbered in 32 bits
    bool vector = true;
    for (const Tensor* t : {&args.param, &args.master, &args.m, &args.v, &args.grad}) vector &= aligned(*t, 4);
    const int64_t thread_blocks = std::min(ceil_div(blocks, kThreads / 32), int64_t{kFp8BlocksPerSm} * ctx.sm_count);
    launch_early(ctx, adamw_fp8_kernel<T, Grad>, grid_size(thread_blocks), kThreads, 0, args.param.as<T>(),
                 args.master.as<float>(), static_cast<uint8_t*>(args.m.data), static_cast<uint8_t*>(args.v.data),
                 args.m_scale_inv.as<float>(), args.v_scale_inv.as<float>(), args.grad.as<Grad>(), args.state,
                 args.lr_scale, args.beta1, args.beta2, args.eps, args.weight_decay, philox_keys(args.rng_key),
                 args.element_offset, args.entry, vector, elems);
}

}  // namespace

void adamw(Ctx& ctx, const AdamWArgs& args) {
    const int64_t elems = args.master.elems;
    if (elems == 0) return;
    expect(args.master, Dtype::kFp32, elems, "adamw: master");
    if (args.param) expect(args.param, args.param.dtype, elems, "adamw: param");
    expect(args.m, args.m.dtype, elems, "adamw: m");
    const bool fp8 = args.m.dtype == Dtype::kE4m3;
    expect(args.v, fp8 ? Dtype::kUe5m3 : args.m.dtype, elems, "adamw: v");
    expect(args.grad, args.grad.dtype, elems, "adamw: grad");
    CHECK(args.state != nullptr, "adamw without a state");
    dispatch(args.param.dtype, "adamw: param", [&](auto param) {
        dispatch(args.grad.dtype, "adamw: grad", [&](auto grad) {
            if (fp8) return launch_adamw_fp8<decltype(param), decltype(grad)>(ctx, args);
            dispatch(args.m.dtype, "adamw: moments", [&](auto moment) {
                launch_adamw<decltype(param), decltype(moment), decltype(grad)>(ctx, args);
            });
        });
    });
}

void ema(Ctx& ctx, const EmaArgs& args) {
    const int64_t elems = args.ema.elems;
    if (elems == 0) return;
    expect(args.ema, Dtype::kFp32, elems, "ema: ema");
    expect(args.master, Dtype::kFp32, elems, "ema: master");
    constexpr int kWidth = 4;
    const auto launch = [&](auto width) {
        const int64_t groups = std::max<int64_t>(elems / decltype(width)::value, 1);
        const int64_t blocks = std::min(ceil_div(groups, kThreads), int64_t{16} * ctx.sm_count);
        launch_early(ctx, ema_kernel<decltype(width)::value>, grid_size(blocks), kThreads, 0, args.ema.as<float>(),
                     args.master.as<float>(), args.state, args.decay, elems);
    };
    if (aligned(args.ema, kWidth) && aligned(args.master, kWidth)) launch(std::integral_constant<int, kWidth>{});
    else launch(std::integral_constant<int, 1>{});
}

}  // namespace cuda
