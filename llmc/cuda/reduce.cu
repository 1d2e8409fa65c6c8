// Reductions: the second stage of column sums, sums of whole tensors (squares, losses), and the decision about a step.
// Reductions over several blocks use partial sums in scratch and a second launch instead of float atomics, so that the
// order of additions is fixed.
#include "llmc/cuda/reduce.cuh"
#include "llmc/ops/adam_math.h"

namespace cuda {
namespace {

constexpr int kLanes = 32;

// Math: out[c] += sum_r partial[r, c].
// Source: plain tree reduction.
// Traffic: 4 rows C bytes read (L2: the previous kernel has just written them), one read and write of out.
// Requires: fp32 partials; out fp32 or bf16.
// Parallel: with programmatic dependent launch (saves 1.5 us of the 70 us of a norm's backward on an H200). A block
// owns 32 columns; thread (x, y) adds rows y, y + 32, ... of column x, then one warp per column adds the 32 sums.
template <typename Grad>
__global__ void __launch_bounds__(1024)
    add_column_sums_kernel(Grad* out0, Grad* out1, const float* partial0, const float* partial1, int64_t rows,
                           int64_t C) {
    __shared__ float sums[kLanes][kLanes + 1];
    wait_for_previous_kernels();
    Grad* out = blockIdx.y == 0 ? out0 : out1;
    const float* partial = blockIdx.y == 0 ? partial0 : partial1;
    const int64_t first_column = int64_t{blockIdx.x} * kLanes;
    const int64_t column = first_column + threadIdx.x;
    float sum = 0.0f;
    if (column < C) {
#pragma unroll 16
        for (int64_t row = threadIdx.y; row < rows; row += kLanes) sum += partial[row * C + column];
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    const int64_t owned = first_column + threadIdx.y;
    sum = warp_sum(sums[threadIdx.x][threadIdx.y]);
    if (threadIdx.x == 0 && owned < C) out[owned] = from_float<Grad>(to_float(out[owned]) + sum);
}

constexpr int kSumThreads = 256;

// Math: of each matrix, partial[b] = sum of x^2 over the vectors b, b + gridDim.x, ... of 256 each, in fp64.
// Source: plain sum; fp64 because billions of terms are added.
// Traffic: n elements read once.
// Requires: kWidth > 1 needs a 16-byte aligned start of each matrix; the remaining elements are read one by one.
// Parallel: a thread adds every (256 gridDim.x)-th vector of matrix blockIdx.y; block sum through shared memory.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kSumThreads) sum_squares_kernel(double* partial, const T* in, int64_t n) {
    __shared__ double shared[kLanes];
    in += int64_t{blockIdx.y} * n, partial += int64_t{blockIdx.y} * kPartialSums;
    const int64_t vectors = n / kWidth;
    const int64_t thread = int64_t{blockIdx.x} * kSumThreads + threadIdx.x;
    const int64_t step = int64_t{gridDim.x} * kSumThreads;
    double even = 0.0, odd = 0.0;
#pragma unroll 4
    for (int64_t i = thread; i < vectors; i += step) {
        float value[kWidth];
        load_floats<T, kWidth>(in + i * kWidth, value);
#pragma unroll
        for (int j = 0; j < kWidth; j++) {
            double& sum = j % 2 == 0 ? even : odd;
            sum = fma(static_cast<double>(value[j]), static_cast<double>(value[j]), sum);
        }
    }
    const int64_t rest = vectors * kWidth + thread;
    if (rest < n) even += static_cast<double>(to_float(in[rest])) * static_cast<double>(to_float(in[rest]));
    double total = block_sum(even + odd, shared, threadIdx.x / kLanes, threadIdx.x % kLanes, kSumThreads / kLanes);
    if (threadIdx.x == 0) partial[blockIdx.x] = total;
}

// Math: sum[b] += sum_i in[b * kPartialSums + i] in fp64; in: double (partial sums) or float (losses).
// Source: plain sum.
// Traffic: `count` elements per block read once.
// Requires: with several blocks, count at most kPartialSums.
// Parallel: one block per sum; thread i adds elements i, i + 1024, ...; block sum through shared memory.
template <typename V>
__global__ void __launch_bounds__(1024) add_to_sum_kernel(double* sum, const V* in, int64_t count) {
    __shared__ double shared[kLanes];
    wait_for_previous_kernels();
    in += int64_t{blockIdx.x} * kPartialSums;
    double value = 0.0;
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < count; i += 1024) value += static_cast<double>(in[i]);
    value = block_sum(value, shared, threadIdx.x / kLanes, threadIdx.x % kLanes, 1024 / kLanes);
    if (threadIdx.x == 0) sum[blockIdx.x] += value;
}

// Math: decide_step of adam_math.h.
// Source: the guard is described at StepGuardArgs.
// Traffic: one StepState.
// Requires: nothing.
// Parallel: one block; thread i counts the norms below norm i.
__global__ void __launch_bounds__(kNormWindow) step_guard_kernel(StepGuardArgs args) {
    __shared__ float median;
    const StepState& state = *args.state;
    if (args.skip_norm > 0.0f && is_median_norm(state, threadIdx.x)) median = state.norms[threadIdx.x];
    __syncthreads();
    if (threadIdx.x == 0) decide_step(args, args.skip_norm > 0.0f && state.norm_count > 0 ? median : 0.0f);
}

}  // namespace

void add_column_sums(Ctx& ctx, const ColumnSum& first, const ColumnSum& second, int64_t rows, int64_t C) {
    expect(first.out, first.out.dtype, C, "add_column_sums: out");
    const bool both = static_cast<bool>(second.out);
    if (both) expect(second.out, first.out.dtype, C, "add_column_sums: second out");
    dispatch(first.out.dtype, "gradient", [&](auto type) {
        using Grad = decltype(type);
        launch_early(ctx, add_column_sums_kernel<Grad>, dim3(grid_size(ceil_div(C, kLanes)), both ? 2 : 1),
                     dim3(kLanes, kLanes), 0, first.out.as<Grad>(), both ? second.out.as<Grad>() : nullptr,
                     first.partial, second.partial, rows, C);
    });
}

void add_partial_sums(Ctx& ctx, double* sums, const double* partial, int64_t count, int64_t sets) {
    launch_early(ctx, add_to_sum_kernel<double>, grid_size(sets), 1024, 0, sums, partial, count);
}

void sum_squares(Ctx& ctx, const SumSquaresArgs& args) {
    const int64_t n = args.in.elems / args.matrices;
    if (n == 0) return;
    expect(args.in, args.in.dtype, args.matrices * n, "sum_squares: in");
    expect_at_least(args.scratch, Dtype::kFp64, args.matrices * kPartialSums, "sum_squares: scratch");
    double* partial = args.scratch.as<double>();
    int64_t blocks = 0;
    dispatch(args.in.dtype, "sum_squares", [&](auto type) {
        using T = decltype(type);
        // Depends on n only, so that the order of additions is the same on every GPU. At least 4 vectors per thread.
        blocks = std::min(kPartialSums, ceil_div(n, int64_t{4} * kVec<T> * kSumThreads));
        with_width<T>(vectorizable<T>(args.matrices > 1 ? n : 0, {args.in.data}), [&](auto width) {
            launch_kernel(ctx, sum_squares_kernel<T, decltype(width)::value>,
                          dim3(grid_size(blocks), grid_size(args.matrices)), kSumThreads, partial, args.in.as<T>(), n);
        });
    });
    add_partial_sums(ctx, args.sum, partial, blocks, args.matrices);
}

// The losses of a micro-batch are few (N floats), so one block adds them without scratch.
void sum_losses(Ctx& ctx, const SumLossesArgs& args) {
    expect(args.losses, Dtype::kFp32, args.N, "sum_losses: losses");
    launch_early(ctx, add_to_sum_kernel<float>, 1, 1024, 0, args.sum, args.losses.as<float>(), args.N);
}

void step_guard(Ctx& ctx, const StepGuardArgs& args) {
    CHECK(args.state != nullptr, "step_guard without a state");
    launch_kernel(ctx, step_guard_kernel, 1, kNormWindow, args);
}

}  // namespace cuda
