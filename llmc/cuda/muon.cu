// The operations of Muon that are not matmuls.
#include "llmc/cuda/moments.cuh"
#include "llmc/cuda/stochastic.cuh"
#include "llmc/ops/adam_math.h"

namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWidth = 4;   // elements per access
constexpr int kFp8BlocksPerSm = 6;   // 40 registers a thread

// Calls body(i, width) for groups of kWidth elements of [0, n) and for the elements that remain.
template <int kWidth, typename Body> __device__ inline void for_groups(int64_t n, Body&& body) {
    const int64_t groups = n / kWidth, thread = int64_t{blockIdx.x} * kThreads + threadIdx.x;
    for (int64_t g = thread; g < groups; g += int64_t{gridDim.x} * kThreads)
        body(g * kWidth, std::integral_constant<int, kWidth>{});
    const int64_t rest = groups * kWidth + thread;
    if (rest < n) body(rest, std::integral_constant<int, 1>{});
}

// Math: nesterov_update of adam_math.h; bf16 moments are rounded stochastically.
// Source: MuonMomentumArgs.
// Traffic: m and grad read and written, once.
// Requires: kWidth = 4 needs tensors aligned to 4 elements.
// Parallel: a thread owns every (kThreads gridDim.x)-th group of kWidth elements.
template <typename Moment, typename Grad, int kWidth>
__global__ void __launch_bounds__(kThreads)
    muon_momentum_kernel(Moment* m, Grad* grad, const StepState* state, float beta,
                         const __grid_constant__ PhiloxKeys keys, int64_t element_offset, int64_t elems) {
    wait_for_previous_kernels();
    if (state->skip) return;
    const float grad_mul = state->grad_mul;
    const auto step = static_cast<uint64_t>(state->adam_step);
    for_groups<kWidth>(elems, [&](int64_t i, auto access) {
        constexpr int width = decltype(access)::value;
        float ms[width], gs[width];
        load_floats<Moment, width>(m + i, ms);
        load_floats<Grad, width>(grad + i, gs);
#pragma unroll
        for (int j = 0; j < width; j++) {
            gs[j] = nesterov_update(beta, gs[j] * grad_mul, ms[j]);
            if constexpr (std::is_same_v<Moment, bf16>)
                ms[j] = stochastic_round(ms[j], philox_words(keys, static_cast<uint64_t>(element_offset + i + j),
                                                            step).x);
        }
        store_floats<Moment, width>(m + i, ms);
        store_floats<Grad, width>(grad + i, gs);
    });
}

// Math: nesterov_update of adam_math.h; the momentum's codes and scales are those of m in moment_codes.h.
// Source: MuonMomentumArgs; moments in blocks: COAT, arXiv 2410.19313.
// Traffic: m, its scales and grad read and written, once.
// Requires: `vector` needs tensors aligned to 4 elements; otherwise, and in the last, shorter block of 128, elements
// are accessed one by one.
// Parallel: a warp owns every (gridDim.x kThreads / 32)-th block of 128, a lane four consecutive elements of it, and
// loads the next block before it computes; all thread blocks are resident.
template <typename Grad>
__global__ void __launch_bounds__(kThreads, kFp8BlocksPerSm)
    muon_momentum_fp8_kernel(uint8_t* m, float* m_scale_inv, Grad* grad, const StepState* state, float beta,
                             const __grid_constant__ PhiloxKeys keys, int64_t element_offset, bool vector,
                             int64_t elems) {
    wait_for_previous_kernels();
    if (state->skip) return;
    const float grad_mul = state->grad_mul;
    const auto step = static_cast<uint64_t>(state->adam_step);
    const int lane = threadIdx.x % 32;
    // Replaces the lane's gradients, stores the scale and returns the new codes. All lanes of a warp call it.
    const auto update = [&](int64_t block, uint32_t codes, float scale_inv, float (&gs)[4]) {
        const int64_t element = element_offset + block * kScaleBlock + 4 * lane;
        const uint4 words = philox_words<kMomentRounds>(keys, static_cast<uint64_t>(element) / 4, step);
        float ms[4];
        numbers_of_m4(codes, ms);
        uint32_t amax = 0;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            ms[j] *= scale_inv;
            gs[j] = nesterov_update(beta, gs[j] * grad_mul, ms[j]);
            amax = max(amax, amax_bits_of(ms[j]));
        }
        const MomentScale scale = moment_scale(__reduce_max_sync(~0u, amax), kLog2LargestM);
        if (lane == 0) m_scale_inv[block] = scale.scale_inv;
        return scale.scale == 0.0f ? 0 : encode_m4(ms, scale.scale * (1.0f / kUnbiasM), words);
    };
    struct Part {
        float grad[4], scale_inv;
        uint32_t m;
    };
    const auto load = [&](int64_t block) {
        const int64_t i = block * kScaleBlock + 4 * lane;
        Part part;
        load_floats<Grad, 4>(grad + i, part.grad);
        part.m = *reinterpret_cast<const uint32_t*>(m + i), part.scale_inv = m_scale_inv[block];
        return part;
    };
    const int64_t warps = int64_t{gridDim.x} * (kThreads / 32), whole = vector ? elems / kScaleBlock : 0;
    int64_t block = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / 32;
    Part next = {};
    if (block < whole) next = load(block);
    for (; block < whole; block += warps) {
        Part part = next;
        if (block + warps < whole) next = load(block + warps);
        const int64_t i = block * kScaleBlock + 4 * lane;
        *reinterpret_cast<uint32_t*>(m + i) = update(block, part.m, part.scale_inv, part.grad);
        store_floats<Grad, 4>(grad + i, part.grad);
    }
    for (; block < scale_blocks(elems); block += warps) {
        const int64_t i = block * kScaleBlock + 4 * lane;
        const int count = static_cast<int>(min(max(elems - i, int64_t{0}), int64_t{4}));
        float gs[4] = {};
        for (int j = 0; j < 4; j++)
            if (j < count) gs[j] = to_float(grad[i + j]);
        store_bytes(m + i, update(block, load_bytes(m + i, count), m_scale_inv[block], gs), count);
        for (int j = 0; j < 4; j++)
            if (j < count) grad[i + j] = from_float<Grad>(gs[j]);
    }
}

// Math: of each matrix, *= muon_norm_inv(its sum of squares, margin), rounded to T.
// Source: MuonNormalizeArgs.
// Traffic: the matrices read and written once.
// Requires: kWidth = 4 needs matrices aligned to 4 elements.
// Parallel: as muon_momentum_kernel, for matrix blockIdx.y; each block computes the factor once, in fp64.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    muon_normalize_kernel(T* matrix, const double* sum_squares, double margin, int64_t elems) {
    __shared__ float shared;
    wait_for_previous_kernels();
    if (threadIdx.x == 0) shared = static_cast<float>(muon_norm_inv(sum_squares[blockIdx.y], margin));
    __syncthreads();
    const float by = shared;
    matrix += int64_t{blockIdx.y} * elems;
    for_groups<kWidth>(elems, [&](int64_t i, auto access) {
        constexpr int width = decltype(access)::value;
        float values[width];
        load_floats<T, width>(matrix + i, values);
#pragma unroll
        for (int j = 0; j < width; j++) values[j] *= by;
        store_floats<T, width>(matrix + i, values);
    });
}

// Math: of each (k, k) matrix, square = a I + b gram + c square.
// Source: MuonPolynomialArgs.
// Traffic: gram and square read, square written, once; most of it from the L2 cache.
// Requires: kWidth = 4 needs a multiple of 4 columns, aligned to 4 elements.
// Parallel: a block per row of all matrices.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    muon_polynomial_kernel(T* square, const T* gram, int k, float a, float b, float c) {
    wait_for_previous_kernels();
    const int row = static_cast<int>(blockIdx.x % static_cast<uint32_t>(k));
    const int64_t begin = int64_t{blockIdx.x} * k;
    for (int column = static_cast<int>(threadIdx.x) * kWidth; column < k; column += kThreads * kWidth) {
        float squares[kWidth], grams[kWidth];
        load_floats<T, kWidth>(square + begin + column, squares);
        load_floats<T, kWidth>(gram + begin + column, grams);
#pragma unroll
        for (int j = 0; j < kWidth; j++)
            squares[j] = polynomial_element(a, b, c, grams[j], squares[j], row == column + j);
        store_floats<T, kWidth>(square + begin + column, squares);
    }
}

// Math: new_v = row_moment of adam_math.h, or v if state->skip; row *= row_norm_inv(new_v), rounded to T.
// Source: MuonRowNormArgs.
// Traffic: the matrix read and written once (the second read comes from the L1 or L2 cache), v read, new_v written.
// Requires: kWidth = 4 needs a multiple of 4 columns, aligned to 4 elements.
// Parallel: a block per row; sums in fp64.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    muon_row_norm_kernel(T* matrix, const float* v, float* new_v, const StepState* state, int64_t cols, double beta2) {
    __shared__ double shared[32];
    wait_for_previous_kernels();
    T* const row = matrix + int64_t{blockIdx.x} * cols;
    double squares = 0;
    const auto for_row = [&](auto&& body) {
        for (int64_t i = int64_t{threadIdx.x} * kWidth; i < cols; i += kThreads * kWidth) {
            float values[kWidth];
            load_floats<T, kWidth>(row + i, values);
            body(i, values);
        }
    };
    for_row([&](int64_t, float(&values)[kWidth]) {
#pragma unroll
        for (int j = 0; j < kWidth; j++) squares += static_cast<double>(values[j]) * static_cast<double>(values[j]);
    });
    squares = block_sum(squares, shared, threadIdx.x / 32, threadIdx.x % 32, kThreads / 32);
    const float old = v[blockIdx.x], now = state->skip ? old : row_moment(beta2, old, squares, cols);
    const float by = row_norm_inv(now);
    for_row([&](int64_t i, float(&values)[kWidth]) {
#pragma unroll
        for (int j = 0; j < kWidth; j++) values[j] *= by;
        store_floats<T, kWidth>(row + i, values);
    });
    if (threadIdx.x == 0) new_v[blockIdx.x] = now;
}

// Math: decayed_step of adam_math.h; the entry's amax becomes the maximum of itself and |new master| rounded to bf16.
// Source: MuonUpdateArgs.
// Traffic: master read and written, direction read, param (optional) written, once.
// Requires: kWidth = 4 needs tensors aligned to 4 elements.
// Parallel: as muon_momentum_kernel.
template <typename T, typename Grad, int kWidth>
__global__ void __launch_bounds__(kThreads)
    muon_update_kernel(T* param, float* master, const Grad* direction, const StepState* state, float scale,
                       float weight_decay, ScaleEntry* entry, int64_t elems) {
    __shared__ uint32_t amaxes[kThreads / 32];
    wait_for_previous_kernels();
    if (state->skip) return;
    const float lr = state->lr;
    uint32_t amax = 0;   // bits of fp32 values; rounding is monotonic, so it is deferred to the end
    for_groups<kWidth>(elems, [&](int64_t i, auto access) {
        constexpr int width = decltype(access)::value;
        float values[width], directions[width];
        load_floats<float, width>(master + i, values);
        load_floats<Grad, width>(direction + i, directions);
#pragma unroll
        for (int j = 0; j < width; j++) {
            values[j] = decayed_step(lr, scale, weight_decay, directions[j], values[j]);
            amax = max(amax, amax_bits_of(values[j]));
        }
        store_floats<float, width>(master + i, values);
        if (param != nullptr) store_floats<T, width>(param + i, values);
    });
    if (entry != nullptr) record_block_amax<kThreads>(&entry->amax_bits, __uint_as_float(amax), amaxes);
}

// Calls f(width) with the elements per access.
template <typename F> void with_alignment(std::initializer_list<Tensor> tensors, F&& f) {
    const bool vector = std::all_of(tensors.begin(), tensors.end(), [](const Tensor& t) { return aligned(t, kWidth); });
    if (vector) f(std::integral_constant<int, kWidth>{});
    else f(std::integral_constant<int, 1>{});
}

// For with_alignment: makes accesses single where rows are unaligned.
Tensor row_stand_in(Dtype dtype, int64_t cols) {
    return {reinterpret_cast<void*>(cols * dtype_bytes(dtype)), dtype, cols};
}

// Blocks of a grid in which all blocks are resident.
dim3 resident_blocks(const Ctx& ctx, int64_t elems, int width) {
    return grid_size(std::min<int64_t>(ceil_div(std::max<int64_t>(elems / width, 1), kThreads), 8 * ctx.sm_count));
}

template <typename Grad> void launch_momentum_fp8(Ctx& ctx, const MuonMomentumArgs& args) {
    const int64_t elems = args.grad.elems, blocks = scale_blocks(elems);
    expect(args.m_scale_inv, Dtype::kFp32, blocks, "muon_momentum: m_scale_inv");
    CHECK(args.element_offset % kScaleBlock == 0, "muon_momentum: fp8 momentum from element %lld",
          (long long)args.element_offset);
    const int64_t thread_blocks = std::min(ceil_div(blocks, kThreads / 32), int64_t{kFp8BlocksPerSm} * ctx.sm_count);
    launch_early(ctx, muon_momentum_fp8_kernel<Grad>, grid_size(thread_blocks), kThreads, 0,
                 static_cast<uint8_t*>(args.m.data), args.m_scale_inv.as<float>(), args.grad.as<Grad>(), args.state,
                 args.beta, philox_keys(args.rng_key), args.element_offset,
                 aligned(args.m, kWidth) && aligned(args.grad, kWidth), elems);
}

}  // namespace

void muon_momentum(Ctx& ctx, const MuonMomentumArgs& args) {
    const int64_t elems = args.grad.elems;
    if (elems == 0) return;
    expect(args.m, args.m.dtype, elems, "muon_momentum: m");
    if (args.m.dtype == Dtype::kE4m3)
        return dispatch(args.grad.dtype, "muon_momentum: grad",
                        [&](auto grad) { launch_momentum_fp8<decltype(grad)>(ctx, args); });
    dispatch(args.m.dtype, "muon_momentum: m", [&](auto moment) {
        dispatch(args.grad.dtype, "muon_momentum: grad", [&](auto grad) {
            with_alignment({args.m, args.grad}, [&](auto width) {
                using M = decltype(moment);
                using G = decltype(grad);
                launch_early(ctx, muon_momentum_kernel<M, G, decltype(width)::value>,
                             resident_blocks(ctx, elems, width), kThreads, 0, args.m.as<M>(), args.grad.as<G>(),
                             args.state, args.beta, philox_keys(args.rng_key), args.element_offset, elems);
            });
        });
    });
}

void muon_normalize(Ctx& ctx, const MuonNormalizeArgs& args) {
    const int64_t elems = args.matrix.elems / args.matrices;
    expect(args.matrix, args.matrix.dtype, args.matrices * elems, "muon_normalize: matrix");
    const Tensor next = args.matrices > 1 ? row_stand_in(args.matrix.dtype, elems) : Tensor{};
    dispatch(args.matrix.dtype, "muon_normalize: matrix", [&](auto type) {
        with_alignment({args.matrix, next}, [&](auto width) {
            using T = decltype(type);
            dim3 blocks = resident_blocks(ctx, elems, width);
            blocks.y = grid_size(args.matrices);
            launch_early(ctx, muon_normalize_kernel<T, decltype(width)::value>, blocks, kThreads, 0,
                         args.matrix.as<T>(), args.sum_squares, args.margin, elems);
        });
    });
}

void muon_polynomial(Ctx& ctx, const MuonPolynomialArgs& args) {
    const int64_t rows = args.matrices * args.k;
    expect(args.square, args.square.dtype, rows * args.k, "muon_polynomial: square");
    expect(args.gram, args.square.dtype, rows * args.k, "muon_polynomial: gram");
    dispatch(args.square.dtype, "muon_polynomial", [&](auto type) {
        with_alignment({args.square, args.gram, row_stand_in(args.gram.dtype, args.k)}, [&](auto width) {
            using T = decltype(type);
            launch_early(ctx, muon_polynomial_kernel<T, decltype(width)::value>, grid_size(rows), kThreads, 0,
                         args.square.as<T>(), args.gram.as<T>(), static_cast<int>(args.k), static_cast<float>(args.a),
                         static_cast<float>(args.b), static_cast<float>(args.c));
        });
    });
}

void muon_row_norm(Ctx& ctx, const MuonRowNormArgs& args) {
    expect(args.matrix, args.matrix.dtype, args.rows * args.cols, "muon_row_norm: matrix");
    expect(args.v, Dtype::kFp32, args.rows, "muon_row_norm: v");
    expect(args.new_v, Dtype::kFp32, args.rows, "muon_row_norm: new_v");
    dispatch(args.matrix.dtype, "muon_row_norm", [&](auto type) {
        with_alignment({args.matrix, row_stand_in(args.matrix.dtype, args.cols)}, [&](auto width) {
            using T = decltype(type);
            launch_early(ctx, muon_row_norm_kernel<T, decltype(width)::value>, grid_size(args.rows), kThreads, 0,
                         args.matrix.as<T>(), args.v.as<float>(), args.new_v.as<float>(), args.state, args.cols,
                         args.beta2);
        });
    });
}

void muon_update(Ctx& ctx, const MuonUpdateArgs& args) {
    const int64_t elems = args.master.elems;
    if (elems == 0) return;
    expect(args.master, Dtype::kFp32, elems, "muon_update: master");
    expect(args.direction, args.direction.dtype, elems, "muon_update: direction");
    if (args.param) expect(args.param, args.param.dtype, elems, "muon_update: param");
    dispatch(args.param ? args.param.dtype : Dtype::kBf16, "muon_update: param", [&](auto param) {
        dispatch(args.direction.dtype, "muon_update: direction", [&](auto grad) {
            with_alignment({args.param, args.master, args.direction}, [&](auto width) {
                using T = decltype(param);
                using G = decltype(grad);
                launch_early(ctx, muon_update_kernel<T, G, decltype(width)::value>,
                             resident_blocks(ctx, elems, width), kThreads, 0,
                             args.param ? args.param.as<T>() : nullptr, args.master.as<float>(),
                             args.direction.as<G>(), args.state, args.scale, args.weight_decay, args.entry, elems);
            });
        });
    });
}

}  // namespace cuda
