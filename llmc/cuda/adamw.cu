// The AdamW step on a range of elements of one parameter.
#include "llmc/cuda/moments.cuh"
#include "llmc/cuda/ptx.cuh"
#include "llmc/cuda/stochastic.cuh"
#include "llmc/ops/adam_math.h"

namespace cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kBlocksPerSm = 7, kFp8BlocksPerSm = 5;   // at most 72 and 96 registers a thread

// The constants of the step, which each block computes once, since the bias corrections are powers in fp64. All threads
// of the block call it.
__device__ inline AdamConstants<float> constants_of(const StepState* state, float lr_scale, float beta1, float beta2,
                                                    float eps, float weight_decay, int64_t moments_begin) {
    __shared__ AdamConstants<float> constants;
    if (threadIdx.x == 0)
        constants = adam_constants<float>(beta1, beta2, eps, weight_decay, state->lr * lr_scale, state->grad_mul,
                                          state->adam_step - moments_begin);
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

// The new masters of adam_update, to the same bits, from new moments. `quick`: they and eps are in the range of
// quick_direction. With one branch for all elements their square roots and divisions overlap.
template <int count>
__device__ inline void move_masters(const AdamConstants<float>& c, bool quick, const float (&m)[count],
                                    const float (&v)[count], float (&master)[count]) {
    if (quick) {
#pragma unroll
        for (int j = 0; j < count; j++)
            master[j] = moved(c, quick_direction(m[j] * c.inv_correction1, v[j] * c.inv_correction2, c.eps), master[j]);
    } else {
#pragma unroll
        for (int j = 0; j < count; j++)
            master[j] = moved(c, adam_direction(m[j] * c.inv_correction1, v[j] * c.inv_correction2, c.eps), master[j]);
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
                 float lr_scale, float beta1, float beta2, float eps, float weight_decay, int64_t moments_begin,
                 const __grid_constant__ PhiloxKeys keys, int64_t element_offset, ScaleEntry* entry, int64_t elems) {
    wait_for_previous_kernels();
    if (state->skip) return;
    __shared__ uint32_t amaxes[kThreads / 32];
    const int64_t step = state->adam_step;
    const AdamConstants<float> c = constants_of(state, lr_scale, beta1, beta2, eps, weight_decay, moments_begin);
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
        uint32_t farthest = 0;
#pragma unroll
        for (int j = 0; j < kWidth; j++) {
            update_moments(c, gs[j], ms[j], vs[j]);
            farthest = max(farthest, max(middle_of(fabsf(ms[j] * c.inv_correction1)),
                                         middle_of(vs[j] * c.inv_correction2)));
        }
        move_masters(c, farthest <= kMiddle && c.eps <= 0x1p30f, ms, vs, values);
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
                     args.weight_decay, args.moments_begin, philox_keys(args.rng_key), args.element_offset, args.entry,
                     elems);
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

// Blocks of 128 that a warp updates at once: its accesses are long, and it computes addresses and scales once for all.
constexpr int kFp8Blocks = 4;

template <typename T, typename Grad> struct Fp8Tensors {
    T* param;
    float* master;
    uint8_t *m, *v;
    const Grad* grad;
    float *m_scale_inv, *v_scale_inv;
};

// What a lane has of kFp8Blocks blocks: four consecutive elements of each.
struct LaneBlocks {
    float master[4 * kFp8Blocks], grad[4 * kFp8Blocks];
    uint32_t m[kFp8Blocks], v[kFp8Blocks];

    // `i`: the first element. `rest`: elements from there on. If kWhole, all exist, and the tensors are aligned.
    template <bool kWhole, typename T, typename Grad>
    __device__ void load(const Fp8Tensors<T, Grad>& t, int64_t i, int64_t rest) {
#pragma unroll
        for (int k = 0; k < kFp8Blocks; k++, i += kScaleBlock, rest -= kScaleBlock) {
            float masters[4] = {}, grads[4] = {};
            if constexpr (kWhole) {
                load_floats<float, 4>(t.master + i, masters), load_floats<Grad, 4>(t.grad + i, grads);
                m[k] = *reinterpret_cast<const uint32_t*>(t.m + i), v[k] = *reinterpret_cast<const uint32_t*>(t.v + i);
            } else {
                m[k] = v[k] = 0;
                for (int j = 0; j < 4; j++) {
                    if (j >= rest) continue;
                    masters[j] = t.master[i + j], grads[j] = to_float(t.grad[i + j]);
                    m[k] |= uint32_t{t.m[i + j]} << (8 * j), v[k] |= uint32_t{t.v[i + j]} << (8 * j);
                }
            }
#pragma unroll
            for (int j = 0; j < 4; j++) master[4 * k + j] = masters[j], grad[4 * k + j] = grads[j];
        }
    }
    // Lanes k and kFp8Blocks + k have the scales of block k's m and v, times 1 / kUnbias of each; 0: the block is NaN.
    // counter: philox's of the first element. All lanes of a warp call it.
    __device__ void encode(const float* ms, const float* vs, float unbiased_scale, const PhiloxKeys& keys,
                           uint64_t counter, uint64_t step) {
#pragma unroll
        for (int k = 0; k < kFp8Blocks; k++) {
            const uint4 random = philox_words<kMomentRounds>(keys, counter + k * kScaleBlock / 4, step);
            m[k] = encode_m4(ms + 4 * k, __shfl_sync(~0u, unbiased_scale, k), random);
            v[k] = encode_v4(vs + 4 * k, __shfl_sync(~0u, unbiased_scale, kFp8Blocks + k), random);
        }
        if (!__any_sync(~0u, unbiased_scale == 0.0f)) return;
#pragma unroll
        for (int k = 0; k < kFp8Blocks; k++) {
            if (__shfl_sync(~0u, unbiased_scale, k) == 0.0f) m[k] = 0;
            if (__shfl_sync(~0u, unbiased_scale, kFp8Blocks + k) == 0.0f) v[k] = 0;
        }
    }
    // Raises amax to that of the masters.
    template <bool kWhole, typename T, typename Grad>
    __device__ void store(const Fp8Tensors<T, Grad>& t, int64_t i, int64_t rest, float& amax) const {
#pragma unroll
        for (int k = 0; k < kFp8Blocks; k++, i += kScaleBlock, rest -= kScaleBlock) {
            float masters[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                masters[j] = master[4 * k + j];
                if (kWhole || j < rest) amax = ptx::max_or_nan(amax, fabsf(masters[j]));
            }
            if constexpr (kWhole) {
                store_floats<float, 4>(t.master + i, masters);
                *reinterpret_cast<uint32_t*>(t.m + i) = m[k], *reinterpret_cast<uint32_t*>(t.v + i) = v[k];
                if (t.param != nullptr) store_floats<T, 4>(t.param + i, masters);
            } else {
                for (int j = 0; j < 4; j++) {
                    if (j >= rest) continue;
                    t.master[i + j] = masters[j];
                    t.m[i + j] = static_cast<uint8_t>(m[k] >> (8 * j));
                    t.v[i + j] = static_cast<uint8_t>(v[k] >> (8 * j));
                    if (t.param != nullptr) t.param[i + j] = from_float<T>(masters[j]);
                }
            }
        }
    }
};

// element[i], without a branch or an array in memory.
template <int count> __device__ inline uint32_t select(const uint32_t (&element)[count], int i) {
    if constexpr (count == 1) {
        return element[0];
    } else {
        uint32_t half[count / 2];
#pragma unroll
        for (int j = 0; j < count / 2; j++) half[j] = i & 1 ? element[2 * j + 1] : element[2 * j];
        return select(half, i / 2);
    }
}
// Bits of moments from 2^-60 to 2^50, which quick_direction takes with bias corrections of at most 2^10.
constexpr uint32_t kLeastQuick = 67u << 23, kMostQuick = 177u << 23;

// Math: adam_update of adam_math.h, moments as in moment_codes.h; the entry's amax as in adamw_kernel.
// Source: Loshchilov and Hutter, arXiv 1711.05101; moments in blocks: COAT, arXiv 2410.19313.
// Traffic: master, m, v and their scales read and written, grad read, param (optional) written, once.
// Requires: `vector` needs tensors aligned to 4 elements; otherwise, and in the last blocks, elements are accessed one
// by one.
// Parallel: a warp owns every (gridDim.x kThreads / 32)-th group of kFp8Blocks blocks of 128, a lane four consecutive
// elements of each; all thread blocks are resident.
template <typename T, typename Grad>
__global__ void __launch_bounds__(kThreads, kFp8BlocksPerSm)
    adamw_fp8_kernel(const __grid_constant__ Fp8Tensors<T, Grad> tensors, const StepState* state, float lr_scale,
                     float beta1, float beta2, float eps, float weight_decay, int64_t moments_begin,
                     const __grid_constant__ PhiloxKeys keys, int64_t element_offset, ScaleEntry* entry, bool vector,
                     int64_t elems) {
    wait_for_previous_kernels();
    if (state->skip) return;
    __shared__ uint32_t amaxes[kThreads / 32];
    const auto step = static_cast<uint64_t>(state->adam_step);
    const AdamConstants<float> c = constants_of(state, lr_scale, beta1, beta2, eps, weight_decay, moments_begin);
    const bool quick_constants = c.eps <= 0x1p30f && fmaxf(c.inv_correction1, c.inv_correction2) <= 0x1p10f;
    // Of every eight lanes, four have the scales of m's blocks, and four those of v's.
    const int lane = threadIdx.x % 32, own = lane % (2 * kFp8Blocks);
    const bool of_v = own >= kFp8Blocks;
    float* const scales = of_v ? tensors.v_scale_inv : tensors.m_scale_inv;
    const float beta = of_v ? c.beta2 * kUnbiasV : c.beta1, bias = of_v ? 1.0f / kUnbiasV : 1.0f / kUnbiasM;
    const int log2_largest = of_v ? kLog2LargestV : kLog2LargestM;
    const auto all = static_cast<uint32_t>(scale_blocks(elems));
    const uint32_t warp = blockIdx.x * (kThreads / 32) + threadIdx.x / 32, warps = gridDim.x * (kThreads / 32);
    float amax = 0;
    for (uint32_t first = kFp8Blocks * warp; first < all; first += kFp8Blocks * warps) {
        const int64_t begin = int64_t{first} * kScaleBlock + 4 * lane, rest = elems - begin;
        const bool whole = vector && (int64_t{first} + kFp8Blocks) * kScaleBlock <= elems;
        const uint32_t scale_block = first + own % kFp8Blocks;
        const float scale_inv = scale_block < all ? scales[scale_block] : 0.0f;
        LaneBlocks lanes;
        if (whole) lanes.load<true>(tensors, begin, rest);
        else lanes.load<false>(tensors, begin, rest);
        float ms[4 * kFp8Blocks], vs[4 * kFp8Blocks];
        float least_m = INFINITY;
        uint32_t least_v = kInfinityBits, most = 0, amaxes_of[2 * kFp8Blocks];
#pragma unroll
        for (int k = 0; k < kFp8Blocks; k++) {
            numbers_of_m4(lanes.m[k], ms + 4 * k), numbers_of_v4(lanes.v[k], vs + 4 * k);
            AdamConstants<float> of_block = c;   // the betas times the scales of the numbers
            of_block.beta1 = __shfl_sync(~0u, beta * scale_inv, k);
            of_block.beta2 = __shfl_sync(~0u, beta * scale_inv, kFp8Blocks + k);
            float m_amax = 0;
            uint32_t v_amax = 0;
#pragma unroll
            for (int j = 4 * k; j < 4 * k + 4; j++) {
                update_moments(of_block, lanes.grad[j], ms[j], vs[j]);
                const uint32_t v_bits = __float_as_uint(vs[j]);   // in the order of the numbers: v >= 0
                m_amax = ptx::max_or_nan(m_amax, fabsf(ms[j])), v_amax = max(v_amax, v_bits);
                least_m = fminf(least_m, fabsf(ms[j])), least_v = min(least_v, v_bits);
            }
            most = max(most, max(__float_as_uint(m_amax), v_amax));
            amaxes_of[k] = __reduce_max_sync(~0u, __float_as_uint(m_amax));
            amaxes_of[kFp8Blocks + k] = __reduce_max_sync(~0u, v_amax);
        }
        const MomentScale scale = moment_scale(select(amaxes_of, own), log2_largest);
        if (lane < 2 * kFp8Blocks && scale_block < all) scales[scale_block] = scale.scale_inv;
        const float unbiased_scale = bias * scale.scale;
        const bool quick = quick_constants && min(__float_as_uint(least_m), least_v) >= kLeastQuick
                           && most <= kMostQuick;
        move_masters(c, quick, ms, vs, lanes.master);
        lanes.encode(ms, vs, unbiased_scale, keys, static_cast<uint64_t>(element_offset + begin) / 4, step);
        if (whole) lanes.store<true>(tensors, begin, rest, amax);
        else lanes.store<false>(tensors, begin, rest, amax);
    }
    if (entry != nullptr) record_block_amax<kThreads>(&entry->amax_bits, amax, amaxes);
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
    const int64_t groups = ceil_div(blocks, int64_t{kFp8Blocks} * (kThreads / 32));
    const Fp8Tensors<T, Grad> tensors = {args.param.as<T>(), args.master.as<float>(),
                                         static_cast<uint8_t*>(args.m.data), static_cast<uint8_t*>(args.v.data),
                                         args.grad.as<Grad>(), args.m_scale_inv.as<float>(),
                                         args.v_scale_inv.as<float>()};
    launch_early(ctx, adamw_fp8_kernel<T, Grad>, grid_size(std::min(groups, int64_t{kFp8BlocksPerSm} * ctx.sm_count)),
                 kThreads, 0, tensors, args.state, args.lr_scale, args.beta1, args.beta2, args.eps, args.weight_decay,
                 args.moments_begin, philox_keys(args.rng_key), args.element_offset, args.entry, vector, elems);
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
