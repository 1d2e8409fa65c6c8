// The AdamW step on a range of elements of one parameter.
#include "llmc/cuda/fp8.cuh"
#include "llmc/cuda/ptx.cuh"
#include "llmc/cuda/stochastic.cuh"
#include "llmc/ops/adam_math.h"
#include "llmc/ops/moment_codes.h"

namespace cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kBlocksPerSm = 7;   // 72 registers a thread

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
    auto update = [&](uint32_t random, float g, float& m_value, float& v_value, float& master_value) {
        adam_update(c, g, m_value, v_value, master_value);
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
#pragma unroll
        for (int j = 0; j < kWidth; j++) update(random[j], gs[j], ms[j], vs[j], values[j]);
        store_floats<float, kWidth>(master + i, values);
        store_floats<Moment, kWidth>(m + i, ms);
        store_floats<Moment, kWidth>(v + i, vs);
        if (param != nullptr) store_floats<T, kWidth>(param + i, values);
    }
    const int64_t rest = groups * kWidth + thread;
    if (rest < elems) {
        float m_value = to_float(m[rest]), v_value = to_float(v[rest]), value = master[rest];
        update(random_of(rest), to_float(grad[rest]), m_value, v_value, value);
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
        CHECK_LAUNCH("adamw_kernel");
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

// Four elements of a lane, as pointers to the first of them.
template <typename T, typename Grad> struct FourElements {
    T* param;   // null: not stored
    float* master;
    uint8_t *m, *v;
    const Grad* grad;
};
// The low `count` bytes of a word.
__device__ inline uint32_t load_bytes(const uint8_t* p, int count) {
    uint32_t word = 0;
    for (int j = 0; j < count; j++) word |= uint32_t{p[j]} << (8 * j);
    return word;
}
__device__ inline void store_bytes(uint8_t* p, uint32_t word, int count) {
    for (int j = 0; j < count; j++) p[j] = static_cast<uint8_t>(word >> (8 * j));
}

// Math: adam_update of adam_math.h, moments as in moment_codes.h; the entry's amax as in adamw_kernel.
// Source: Loshchilov and Hutter, arXiv 1711.05101; moments in blocks: COAT, arXiv 2410.19313.
// Traffic: master, m, v and their scales read and written, grad read, param (optional) written, once.
// Requires: `vector` needs tensors aligned to 4 elements; otherwise, and in the last, shorter block of 128, elements
// are accessed one by one.
// Parallel: a warp owns every (gridDim.x kThreads / 32)-th block of 128, a lane four consecutive elements of it; all
// thread blocks are resident.
template <typename T, typename Grad>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    adamw_fp8_kernel(T* param, float* master, uint8_t* m, uint8_t* v, float* m_scale_inv, float* v_scale_inv,
                     const Grad* grad, const StepState* state, float lr_scale, float beta1, float beta2, float eps,
                     float weight_decay, const __grid_constant__ PhiloxKeys keys, int64_t element_offset,
                     ScaleEntry* entry, bool vector, int64_t elems) {
    wait_for_previous_kernels();
    if (state->skip) return;
    __shared__ uint32_t amaxes[kThreads / 32];
    const int64_t step = state->adam_step;
    const AdamConstants<float> c = constants_of(state, lr_scale, beta1, beta2, eps, weight_decay);
    uint32_t amax = 0;
    auto update = [&](int64_t block, const FourElements<T, Grad>& at, int count, auto whole) {
        constexpr bool kWhole = decltype(whole)::value;
        float gs[4] = {}, ms[4] = {}, vs[4] = {}, values[4] = {};
        uint32_t m_word, v_word;
        if constexpr (kWhole) {
            load_floats<float, 4>(at.master, values);
            load_floats<Grad, 4>(at.grad, gs);
            m_word = *reinterpret_cast<const uint32_t*>(at.m), v_word = *reinterpret_cast<const uint32_t*>(at.v);
        } else {
            for (int j = 0; j < 4; j++)
                if (j < count) values[j] = at.master[j], gs[j] = to_float(at.grad[j]);
            m_word = load_bytes(at.m, count), v_word = load_bytes(at.v, count);
        }
        const float m_inv = m_scale_inv[block], v_inv = v_scale_inv[block];
        // Random numbers are generated while the loads are in flight.
        const int64_t element = element_offset + block * kScaleBlock + 4 * (threadIdx.x % 32);
        const uint4 words = philox_words(keys, static_cast<uint64_t>(element) / 4, static_cast<uint64_t>(step));
        const uint32_t random[4] = {ptx::opaque(words.x), ptx::opaque(words.y), ptx::opaque(words.z),
                                    ptx::opaque(words.w)};
        uint32_t m_amax = 0, v_amax = 0;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (!kWhole && j >= count) continue;
            ms[j] = decode_m(m_word >> (8 * j), m_inv), vs[j] = decode_v(v_word >> (8 * j), v_inv);
            adam_update(c, gs[j], ms[j], vs[j], values[j]);
            amax = max(amax, amax_bits_of(values[j]));
            m_amax = max(m_amax, amax_bits_of(ms[j])), v_amax = max(v_amax, amax_bits_of(vs[j]));
        }
        const MomentScale of_m = moment_scale(__reduce_max_sync(~0u, m_amax), kLog2LargestM);
        const MomentScale of_v = moment_scale(__reduce_max_sync(~0u, v_amax), kLog2LargestV);
        m_word = v_word = 0;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            m_word |= (encode_m(ms[j], of_m.scale, random[j]) & 0xffu) << (8 * j);
            v_word |= (encode_v(vs[j], of_v.scale, random[j] >> 16) & 0xffu) << (8 * j);
        }
        if (of_m.scale == 0.0f) m_word = 0;
        if (of_v.scale == 0.0f) v_word = 0;
        if constexpr (kWhole) {
            store_floats<float, 4>(at.master, values);
            *reinterpret_cast<uint32_t*>(at.m) = m_word, *reinterpret_cast<uint32_t*>(at.v) = v_word;
            if (at.param != nullptr) store_floats<T, 4>(at.param, values);
        } else {
            for (int j = 0; j < 4; j++) {
                if (j < count) at.master[j] = values[j];
                if (j < count && at.param != nullptr) at.param[j] = from_float<T>(values[j]);
            }
            store_bytes(at.m, m_word, count), store_bytes(at.v, v_word, count);
        }
        if (threadIdx.x % 32 == 0) m_scale_inv[block] = of_m.scale_inv, v_scale_inv[block] = of_v.scale_inv;
    };
    const int64_t warps = int64_t{gridDim.x} * (kThreads / 32);
    for (int64_t block = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / 32; block < scale_blocks(elems);
         block += warps) {
        const int64_t i = block * kScaleBlock + 4 * (threadIdx.x % 32);
        const FourElements<T, Grad> at{param == nullptr ? nullptr : param + i, master + i, m + i, v + i, grad + i};
        const int count = static_cast<int>(min(max(elems - i, int64_t{0}), int64_t{4}));
        if (vector && (block + 1) * kScaleBlock <= elems) update(block, at, 4, std::true_type{});
        else update(block, at, count, std::false_type{});
    }
    if (entry != nullptr) record_block_amax<kThreads>(&entry->amax_bits, __uint_as_float(amax), amaxes);
}

template <typename T, typename Grad> void launch_adamw_fp8(Ctx& ctx, const AdamWArgs& args) {
    const int64_t elems = args.master.elems, blocks = scale_blocks(elems);
    expect(args.m_scale_inv, Dtype::kFp32, blocks, "adamw: m_scale_inv");
    expect(args.v_scale_inv, Dtype::kFp32, blocks, "adamw: v_scale_inv");
    CHECK(args.element_offset % kScaleBlock == 0, "adamw: fp8 moments from element %lld",
          (long long)args.element_offset);
    bool vector = true;
    for (const Tensor* t : {&args.param, &args.master, &args.m, &args.v, &args.grad}) vector &= aligned(*t, 4);
    const int64_t thread_blocks = std::min(ceil_div(blocks, kThreads / 32), int64_t{kBlocksPerSm} * ctx.sm_count);
    launch_early(ctx, adamw_fp8_kernel<T, Grad>, grid_size(thread_blocks), kThreads, 0, args.param.as<T>(),
                 args.master.as<float>(), static_cast<uint8_t*>(args.m.data), static_cast<uint8_t*>(args.v.data),
                 args.m_scale_inv.as<float>(), args.v_scale_inv.as<float>(), args.grad.as<Grad>(), args.state,
                 args.lr_scale, args.beta1, args.beta2, args.eps, args.weight_decay, philox_keys(args.rng_key),
                 args.element_offset, args.entry, vector, elems);
    CHECK_LAUNCH("adamw_fp8_kernel");
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
        CHECK_LAUNCH("ema_kernel");
    };
    if (aligned(args.ema, kWidth) && aligned(args.master, kWidth)) launch(std::integral_constant<int, kWidth>{});
    else launch(std::integral_constant<int, 1>{});
}

}  // namespace cuda
