// The norms with quantized outputs in one pass, for delayed scaling per tensor: the row kernels' formulas on groups of
// rows (quantize_rows.cuh). A block loops over several groups; the next rows are always in flight, even while the
// transposed bytes of a group are stored.
#include "llmc/cuda/norm.cuh"

namespace cuda {
namespace {

constexpr int kForwardStages = 2, kForwardStreams = 2;    // in, residual
constexpr int kBackwardStages = 2, kBackwardStreams = 3;  // dout, x, dresidual
constexpr int kWarpRows = 8;   // rows at a time with one warp per row

// Shared memory into which a thread prefetches its own vectors, kStages rows ahead.
template <int kStages, int kStreams> struct Ring {
    uint4* memory;
    int vectors;

    __device__ uint4* slot(int stage, int stream, int v) const {
        return memory + ((stage * kStreams + stream) * blockDim.y + threadIdx.y) * vectors + v;
    }
    __device__ uint4* end() const { return memory + kStages * kStreams * blockDim.y * vectors; }
    static size_t bytes(dim3 block, int64_t C) { return sizeof(bf16) * kStages * kStreams * block.y * C; }
};

// Math: norm_forward_kernel's out, and to_fp8(out * scale).
// Source: as norm_forward_kernel.
// Traffic: in, residual read; residual_out, out (optional) written, 2 bytes per element each; 1 byte per FP8 output.
// Requires: C a multiple of 16, N too with a transposed output, aligned rows; 32 rows of bytes in shared memory.
// Parallel: a block owns groups of 32 rows, blockDim.y at a time; blockDim.x threads own a row as in the row kernel.
template <int kVecs, bool kLayer, bool kWarpPerRow>
__global__ void __launch_bounds__(kWarpPerRow ? kNormLanes * kWarpRows : kNormThreads)
    norm_forward_quantize_kernel(const __grid_constant__ NormForward<bf16> a, const __grid_constant__ RowsOut quant,
                                 int vectors) {
    extern __shared__ uint4 memory[];
    __shared__ float shared[2][kNormLanes];
    wait_for_previous_kernels();
    const Ring<kForwardStages, kForwardStreams> ring{memory, vectors};
    const int64_t C = quant.C;
    RowWalk walk, ahead;
    auto prefetch = [&](int stage) {
        const int64_t row = ahead.base + threadIdx.y;
#pragma unroll
        for (int k = 0; k < kVecs; k++) {
            const int v = threadIdx.x + k * blockDim.x;
            if (row >= a.N || v >= vectors) continue;
            __pipeline_memcpy_async(ring.slot(stage, 0, v), a.in + row * C + v * 8, 16);
            if (a.residual) __pipeline_memcpy_async(ring.slot(stage, 1, v), a.residual + row * C + v * 8, 16);
        }
        __pipeline_commit();
        ahead.advance();
    };
    for (int stage = 0; stage < kForwardStages; stage++) prefetch(stage);

    uint4 w[kVecs] = {}, b[kVecs] = {};
#pragma unroll
    for (int k = 0; k < kVecs; k++) {
        const int v = threadIdx.x + k * blockDim.x;
        if (v < vectors) w[k] = load_vec(a.weight + v * 8);
        if (v < vectors && kLayer && a.bias) b[k] = load_vec(a.bias + v * 8);
    }
    RowSum<kWarpPerRow> row_sum{shared};
    RowsWriter<true> writer(quant, ring.end(), 0, vectors * 8, vectors * 8);
    for (int stage = 0; walk.base < a.N; walk.advance(), stage = (stage + 1) % kForwardStages) {
        const int64_t row = walk.base + threadIdx.y;
        const bool active = row < a.N;
        uint4 x[kVecs] = {};
        __pipeline_wait_prior(kForwardStages - 1);
#pragma unroll
        for (int k = 0; k < kVecs; k++) {
            const int v = threadIdx.x + k * blockDim.x;
            if (!active || v >= vectors) continue;
            x[k] = *ring.slot(stage, 0, v);
            if (a.residual) x[k] = norm_add<bf16>(x[k], *ring.slot(stage, 1, v));
            if (a.residual_out) store_vec(a.residual_out + row * C + v * 8, x[k]);
        }
        prefetch(stage);
        const float2 statistics = norm_statistics<bf16, kLayer>(x, vectors, a.eps, row_sum);
        if (threadIdx.x == 0 && active) {
            if (kLayer) a.mean[row] = statistics.x;
            a.rstd[row] = statistics.y;
        }
#pragma unroll
        for (int k = 0; k < kVecs; k++) {
            const int v = threadIdx.x + k * blockDim.x;
            if (!active || v >= vectors) continue;
            const uint4 out = norm_apply<bf16, kLayer>(x[k], statistics, w[k], b[k]);
            if (a.out) store_vec(a.out + row * C + v * 8, out);
            writer.put(out, row, walk.in_group() + threadIdx.y, v * 8);
        }
        if (walk.group_ends(a.N)) writer.end_group(walk.group());
    }
    writer.finish();
}

// Partial column sums per block: dweight, dbias, and those of dx.
struct BackwardSums {
    float *weight, *bias, *dx;   // (gridDim.x, C) each; bias and dx may be null
};

// Math: norm_backward_kernel's dx and partial sums, to_fp8(dx * scale), and partial sums of dx.
// Source: as norm_backward_kernel.
// Traffic: dout, x, dresidual read, dx written, 2 bytes per element each; 1 byte per FP8 output; 4 C bytes per sum and
// block.
// Requires: as norm_forward_quantize_kernel, and kVecs vectors of at most 16 elements together.
// Parallel: a block owns groups of 32 rows, blockDim.y at a time; blockDim.x threads own a row and keep the sums of
// their columns. dx may alias dresidual.
template <int kVecs, bool kLayer, bool kCount>
__global__ void __launch_bounds__(kNormThreads, kVecs == 1 && !kCount ? 2 : 1)
    norm_backward_quantize_kernel(const __grid_constant__ NormBackward<bf16> a, const __grid_constant__ RowsOut quant,
                                  BackwardSums partial, int vectors, int group_offset) {
    extern __shared__ uint4 memory[];
    __shared__ float2 shared[2][kNormLanes];
    wait_for_previous_kernels();
    const Ring<kBackwardStages, kBackwardStreams> ring{memory, vectors};
    const int64_t C = quant.C;
    const float inv_C = 1.0f / static_cast<float>(C);
    RowWalk walk, ahead;
    auto prefetch = [&](int stage) {
        const int64_t row = ahead.base + threadIdx.y;
#pragma unroll
        for (int k = 0; k < kVecs; k++) {
            const int v = threadIdx.x + k * blockDim.x;
            if (row >= a.N || v >= vectors) continue;
            const int64_t at = row * C + v * 8;
            __pipeline_memcpy_async(ring.slot(stage, 0, v), a.dout + at, 16);
            __pipeline_memcpy_async(ring.slot(stage, 1, v), a.x + at, 16);
            if (a.dresidual) __pipeline_memcpy_async(ring.slot(stage, 2, v), a.dresidual + at, 16);
        }
        __pipeline_commit();
        ahead.advance();
    };
    for (int stage = 0; stage < kBackwardStages; stage++) prefetch(stage);

    uint4 w[kVecs] = {};
    NormColumns<bf16, kVecs> columns;
    // The sums of dx are in shared memory to save registers.
    const int threads = blockDim.x * blockDim.y, thread = threadIdx.y * blockDim.x + threadIdx.x;
    const ThreadSums<kVecs> dx_sums{
        reinterpret_cast<float4*>(reinterpret_cast<char*>(ring.end()) + group_offset) + thread, threads};
    if (kLayer && partial.dx) dx_sums.clear();
#pragma unroll
    for (int k = 0; k < kVecs; k++) {
        const int v = threadIdx.x + k * blockDim.x;
        if (v < vectors) w[k] = load_vec(a.weight + v * 8);
    }
    RowsWriter<kCount> writer(quant, ring.end(), 0, vectors * 8, vectors * 8);
    int stage = 0, buffer = 0;
    for (; walk.base < a.N; walk.advance()) {
        const int64_t row = walk.base + threadIdx.y;
        const bool active = row < a.N;
        const float2 statistics =
            active ? make_float2(kLayer ? a.mean[row] : 0.0f, a.rstd[row]) : make_float2(0.0f, 0.0f);
        uint4 d[kVecs] = {}, xs[kVecs] = {}, add[kVecs] = {};
        __pipeline_wait_prior(kBackwardStages - 1);
#pragma unroll
        for (int k = 0; k < kVecs; k++) {
            const int v = threadIdx.x + k * blockDim.x;
            if (!active || v >= vectors) continue;
            d[k] = *ring.slot(stage, 0, v);
            xs[k] = *ring.slot(stage, 1, v);
            if (a.dresidual) add[k] = *ring.slot(stage, 2, v);
        }
        prefetch(stage);
        stage = (stage + 1) % kBackwardStages;
        float2 sum = norm_backward_sums<bf16, kLayer>(columns, d, xs, w, statistics);
        sum = row_sum2<true>(sum, shared[buffer]);
        buffer ^= 1;
        const float2 means = make_float2(sum.x * inv_C, sum.y * inv_C);
#pragma unroll
        for (int k = 0; k < kVecs; k++) {
            const int v = threadIdx.x + k * blockDim.x;
            if (!active || v >= vectors) continue;
            const uint4 dx = norm_backward_apply<bf16, kLayer>(d[k], xs[k], w[k], add[k], statistics, means);
            store_vec(a.dx + row * C + v * 8, dx);
            writer.put(dx, row, walk.in_group() + threadIdx.y, v * 8);
            if (kLayer && partial.dx) dx_sums.add(k, dx);
        }
        if (walk.group_ends(a.N)) writer.end_group(walk.group());
    }
    writer.finish();
    float dx_columns[kVecs][8] = {};
    if (kLayer && partial.dx) dx_sums.take(dx_columns);
    __syncthreads();   // every thread has read its last row
    float* sums = reinterpret_cast<float*>(memory);
    write_column_sums<kVecs, 8>(partial.weight, columns.dw, sums, vectors);
    if (kLayer && partial.bias) write_column_sums<kVecs, 8>(partial.bias, columns.db, sums, vectors);
    if (kLayer && partial.dx) write_column_sums<kVecs, 8>(partial.dx, dx_columns, sums, vectors);
}

// Rows at a time: a power of two, so that a group is complete after a whole number of iterations.
dim3 group_block(dim3 block) {
    unsigned rows = 1;
    while (2 * rows * block.x <= kNormThreads && rows < 16) rows *= 2;
    return dim3(block.x, rows);
}

template <bool kLayer, int kVecs, bool kWarpPerRow>
bool launch_forward(Ctx& ctx, const NormForwardArgs& args, dim3 block) {
    auto kernel = norm_forward_quantize_kernel<kVecs, kLayer, kWarpPerRow>;
    const size_t shared_bytes =
        Ring<kForwardStages, kForwardStreams>::bytes(block, args.C) + group_bytes(args.quant, args.C);
    const int64_t blocks = row_blocks(ctx, kernel, block, shared_bytes, args.N, args.N);
    if (blocks == 0) return false;
    launch_early(ctx, kernel, grid_size(blocks), block, shared_bytes, NormForward<bf16>(args),
                 rows_out(args.quant, args.N, args.C), args.C / 8);
    return true;
}

template <bool kLayer, int kVecs, bool kCount>
bool launch_backward(Ctx& ctx, const NormBackwardArgs& args, dim3 block) {
    // The scratch memory is shared by the three sums.
    constexpr int64_t kMostBlocks = 2 * kPartialRows / 3;
    const int64_t C = args.C;
    const size_t group = group_bytes(args.quant, C);
    const size_t dx_bytes = args.quant.dbias ? sizeof(float) * 8 * kVecs * block.x * block.y : 0;
    const size_t shared_bytes = Ring<kBackwardStages, kBackwardStreams>::bytes(block, C) + group + dx_bytes;
    auto kernel = norm_backward_quantize_kernel<kVecs, kLayer, kCount>;
    const int64_t blocks = row_blocks(ctx, kernel, block, shared_bytes, args.N, kMostBlocks);
    if (blocks == 0) return false;
    float* scratch = args.scratch.as<float>();
    const BackwardSums partial{.weight = scratch, .bias = args.dbias ? scratch + blocks * C : nullptr,
                               .dx = args.quant.dbias ? scratch + 2 * blocks * C : nullptr};
    launch_early(ctx, kernel, grid_size(blocks), block, shared_bytes, NormBackward<bf16>(args),
                 rows_out(args.quant, args.N, C), partial, C / 8, group);
    add_column_sums(ctx, {args.dweight, partial.weight}, {args.dbias, partial.bias}, blocks, C);
    if (args.quant.dbias) add_column_sums(ctx, {args.quant.dbias, partial.dx}, {}, blocks, C);
    return true;
}

}  // namespace

template <bool kLayer> bool norm_forward_quantize(Ctx& ctx, const NormForwardArgs& args) {
    const int64_t C = args.C;
    if (!rows_can(args.quant) || args.quant.dbias || !NormForward<bf16>(args).vectors_fit(C)) return false;
    const RowShape shape = norm_forward_shape(C / 8, kWarpRows);
    if (shape.block.x == kNormLanes) {
        bool done = false;
        with_vecs(shape.vecs, [&](auto vecs) {
            done = launch_forward<kLayer, decltype(vecs)::value, true>(ctx, args, shape.block);
        });
        return done;
    }
    if (shape.vecs != 2) return false;   // more vectors do not fit in shared memory
    return launch_forward<kLayer, 2, false>(ctx, args, group_block(shape.block));
}
template bool norm_forward_quantize<false>(Ctx& ctx, const NormForwardArgs& args);
template bool norm_forward_quantize<true>(Ctx& ctx, const NormForwardArgs& args);

template <bool kLayer> bool norm_backward_quantize(Ctx& ctx, const NormBackwardArgs& args) {
    if (!rows_can(args.quant) || (args.quant.dbias && !kLayer)) return false;
    if (!NormBackward<bf16>(args).vectors_fit(args.C)) return false;
    const RowShape shape = norm_backward_shape(args.C / 8, 2);
    if (shape.vecs == 0) return false;
    const dim3 block = group_block(shape.block);
    auto launch = [&](auto count) {
        constexpr bool kCount = decltype(count)::value;
        if (shape.vecs == 2) return launch_backward<kLayer, 2, kCount>(ctx, args, block);
        return launch_backward<kLayer, 1, kCount>(ctx, args, block);
    };
    return args.quant.counts ? launch(std::true_type{}) : launch(std::false_type{});
}
template bool norm_backward_quantize<false>(Ctx& ctx, const NormBackwardArgs& args);
template bool norm_backward_quantize<true>(Ctx& ctx, const NormBackwardArgs& args);

}  // namespace cuda
