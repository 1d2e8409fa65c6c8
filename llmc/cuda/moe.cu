// Mixtures of experts: sorting of rows by expert, their permutation, and SwiGLU times the experts' weights.
#include "llmc/cuda/sigmoid.cuh"

namespace cuda {
namespace {

constexpr int kLanes = 32, kWarps = 8, kThreads = kLanes * kWarps;

// The row of a warp, of blocks of kWarps warps.
__device__ inline int64_t warp_row() { return int64_t{blockIdx.x} * kWarps + threadIdx.x / kLanes; }
unsigned warp_grid(int64_t rows) { return grid_size(ceil_div(rows, kWarps)); }

// ---- sorting, in chunks of kSortChunk slots, each of a warp

// Math: counts[chunk][e] = number of the chunk's slots of expert e.
// Source: none.
// Traffic: experts read, counts written, once.
// Requires: nothing.
// Parallel: a block of one warp per chunk.
__global__ void __launch_bounds__(kLanes) sort_count_kernel(int32_t* counts, const int32_t* experts, int64_t R, int E) {
    __shared__ int32_t count[kMaxRouterExperts];
    wait_for_previous_kernels();
    for (int e = threadIdx.x; e < E; e += kLanes) count[e] = 0;
    __syncwarp();
    const int64_t begin = blockIdx.x * kSortChunk, end = min(R, begin + kSortChunk);
    for (int64_t slot = begin + threadIdx.x; slot < end; slot += kLanes) atomicAdd(&count[experts[slot]], 1);
    __syncwarp();
    for (int e = threadIdx.x; e < E; e += kLanes) counts[int64_t{blockIdx.x} * E + e] = count[e];
}

// Math: counts[chunk][e] = number of slots of expert e in earlier chunks; offsets[e] = slots of lower experts.
// Source: none.
// Traffic: counts read and written, once; from the L2 cache.
// Requires: E <= 1024 threads.
// Parallel: one block; a thread per expert.
__global__ void __launch_bounds__(1024) sort_scan_kernel(int32_t* counts, int32_t* offsets, int64_t chunks, int E) {
    __shared__ int32_t totals[kMaxRouterExperts];
    wait_for_previous_kernels();
    const int e = threadIdx.x;
    int32_t before = 0;
#pragma unroll 8
    for (int64_t chunk = 0; chunk < chunks && e < E; chunk++) {
        const int32_t count = counts[chunk * E + e];
        counts[chunk * E + e] = before;
        before += count;
    }
    if (e < E) totals[e] = before;
    __syncthreads();
    if (e > 0) return;
    int32_t offset = 0;
    for (int i = 0; i < E; i++) {
        offsets[i] = offset;
        offset += totals[i];
    }
    offsets[E] = offset;
}

// Math: slot_rows[slot] = offsets[e] + slots of e in earlier chunks + earlier slots of e in the chunk; the inverse.
// Source: none.
// Traffic: experts read, slot_rows and row_slots written, once.
// Requires: nothing.
// Parallel: a block of one warp per chunk, 32 slots at a time; lanes with the same expert count those before them.
__global__ void __launch_bounds__(kLanes)
    sort_scatter_kernel(int32_t* row_slots, int32_t* slot_rows, const int32_t* counts, const int32_t* offsets,
                        const int32_t* experts, int64_t R, int E) {
    __shared__ int32_t next[kMaxRouterExperts];
    wait_for_previous_kernels();
    for (int e = threadIdx.x; e < E; e += kLanes) next[e] = offsets[e] + counts[int64_t{blockIdx.x} * E + e];
    __syncwarp();
    const int64_t begin = blockIdx.x * kSortChunk, end = min(R, begin + kSortChunk);
    for (int64_t first = begin; first < end; first += kLanes) {
        const int64_t slot = first + threadIdx.x;
        const int e = slot < end ? experts[slot] : -1;
        const uint32_t same = __match_any_sync(0xffffffffu, e), lower = same & ((1u << threadIdx.x) - 1);
        const int32_t row = e >= 0 ? next[e] + __popc(lower) : 0;
        __syncwarp();
        if (e >= 0) {
            slot_rows[slot] = row;
            row_slots[row] = static_cast<int32_t>(slot);
            if (lower == 0) next[e] += __popc(same);
        }
        __syncwarp();
    }
}

// ---- rows of experts; a warp per row, kWidth elements per access

// Math: out[r] = in[row_slots[r] / K].
// Source: none.
// Traffic: in read K times, mostly from the L2 cache; out written, once.
// Requires: kWidth > 1 needs aligned rows.
// Parallel: a warp per row of out.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    gather_rows_kernel(T* out, const T* in, const int32_t* row_slots, int64_t R, int K, int64_t C) {
    wait_for_previous_kernels();
    const int64_t r = warp_row();
    if (r >= R) return;
    const T* from = in + row_slots[r] / K * C;
    out += r * C;
#pragma unroll 4
    for (int64_t c = threadIdx.x % kLanes * kWidth; c < C; c += kLanes * kWidth) {
        Packed<T, kWidth> part;
        part.load(from + c);
        *reinterpret_cast<typename Packed<T, kWidth>::Raw*>(out + c) = part.raw;
    }
}

// Math: see CombineRowsArgs.
// Source: none.
// Traffic: in read, out (read and) written, once.
// Requires: as gather_rows_kernel; K <= 32.
// Parallel: a warp per row of out.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    combine_rows_kernel(T* out, const T* in, const int32_t* slot_rows, int64_t N, int K, int64_t C, bool accumulate) {
    wait_for_previous_kernels();
    const int64_t n = warp_row();
    const int lane = threadIdx.x % kLanes;
    if (n >= N) return;
    const int32_t mine = lane < K ? slot_rows[n * K + lane] : 0;
    out += n * C;
    for (int64_t begin = 0; begin < C; begin += kLanes * kWidth) {   // all lanes take part in the shuffles
        const int64_t c = begin + lane * kWidth;
        float sum[kWidth] = {}, part[kWidth];
        if (accumulate && c < C) load_floats<T, kWidth>(out + c, sum);
#pragma unroll 4
        for (int k = 0; k < K; k++) {
            const int64_t row = __shfl_sync(0xffffffffu, mine, k);
            if (c >= C) continue;
            load_floats<T, kWidth>(in + row * C + c, part);
#pragma unroll
            for (int i = 0; i < kWidth; i++) sum[i] += part[i];
        }
        if (c < C) store_floats<T, kWidth>(out + c, sum);
    }
}

// Math: see ExpertActivationForwardArgs.
// Source: Shazeer, arXiv 2002.05202.
// Traffic: in read, out written, once.
// Requires: as gather_rows_kernel.
// Parallel: a warp per row.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    expert_activation_forward_kernel(T* out, const T* in, const float* weights, const int32_t* row_slots, int64_t R,
                                     int64_t F) {
    wait_for_previous_kernels();
    const int64_t r = warp_row();
    if (r >= R) return;
    const float weight = weights[row_slots[r]];
    in += r * 2 * F, out += r * F;
    for (int64_t f = threadIdx.x % kLanes * kWidth; f < F; f += kLanes * kWidth) {
        float gate[kWidth], up[kWidth];
        load_floats<T, kWidth>(in + f, gate);
        load_floats<T, kWidth>(in + F + f, up);
#pragma unroll
        for (int i = 0; i < kWidth; i++) gate[i] = gate[i] * sigmoid<T>(gate[i]) * up[i] * weight;
        store_floats<T, kWidth>(out + f, gate);
    }
}

// Math: s = sigmoid(gate): dup = dout w gate s; dgate = dout w up s (1 + gate (1 - s)); dw = sum of dout gate s up.
// Source: derivative of the forward.
// Traffic: in and dout read, din written, once.
// Requires: as gather_rows_kernel; din may alias in.
// Parallel: a warp per row.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    expert_activation_backward_kernel(T* din, float* dweights, const T* dout, const T* in, const float* weights,
                                      const int32_t* row_slots, int64_t R, int64_t F) {
    wait_for_previous_kernels();
    const int64_t r = warp_row();
    const int lane = threadIdx.x % kLanes;
    if (r >= R) return;
    const int32_t slot = row_slots[r];
    const float weight = weights[slot];
    in += r * 2 * F, din += r * 2 * F, dout += r * F;
    float dweight = 0;
    for (int64_t f = lane * kWidth; f < F; f += kLanes * kWidth) {
        float gate[kWidth], up[kWidth], d[kWidth];
        load_floats<T, kWidth>(in + f, gate);
        load_floats<T, kWidth>(in + F + f, up);
        load_floats<T, kWidth>(dout + f, d);
#pragma unroll
        for (int i = 0; i < kWidth; i++) {
            const float s = sigmoid<float>(gate[i]), silu = gate[i] * s;   // dweights is in FP32
            dweight += d[i] * silu * up[i];
            gate[i] = d[i] * weight * up[i] * s * (1.0f + gate[i] * sigmoid_complement<float>(gate[i], s));
            up[i] = d[i] * weight * silu;
        }
        store_floats<T, kWidth>(din + f, gate);
        store_floats<T, kWidth>(din + F + f, up);
    }
    dweight = warp_sum(dweight);
    if (lane == 0) dweights[slot] = dweight;
}

}  // namespace

void sort_experts(Ctx& ctx, const SortExpertsArgs& args) {
    const int64_t R = args.N * args.K, chunks = ceil_div(R, kSortChunk);
    expect(args.offsets, Dtype::kInt32, args.E + 1, "sort_experts: offsets");
    expect(args.scratch, Dtype::kInt32, chunks * args.E, "sort_experts: scratch");
    for (const Tensor& t : {args.experts, args.row_slots, args.slot_rows})
        expect(t, Dtype::kInt32, R, "sort_experts: slots");
    int32_t *const counts = args.scratch.as<int32_t>(), *const offsets = args.offsets.as<int32_t>();
    const int32_t* const experts = args.experts.as<int32_t>();
    launch_early(ctx, sort_count_kernel, grid_size(chunks), kLanes, 0, counts, experts, R, args.E);
    launch_early(ctx, sort_scan_kernel, 1, static_cast<unsigned>(round_up(args.E, kLanes)), 0, counts, offsets, chunks,
                 args.E);
    launch_early(ctx, sort_scatter_kernel, grid_size(chunks), kLanes, 0, args.row_slots.as<int32_t>(),
                 args.slot_rows.as<int32_t>(), counts, offsets, experts, R, args.E);
}

void gather_rows(Ctx& ctx, const GatherRowsArgs& args) {
    const int64_t R = args.N * args.K;
    expect(args.row_slots, Dtype::kInt32, R, "gather_rows: row_slots");
    expect(args.in, args.in.dtype, args.N * args.C, "gather_rows: in");
    expect(args.out, args.in.dtype, R * args.C, "gather_rows: out");
    dispatch(args.in.dtype, "gather_rows", [&](auto type) {
        using T = decltype(type);
        with_width<T>(vectorizable<T>(args.C, {args.out.data, args.in.data}), [&](auto width) {
            launch_early(ctx, gather_rows_kernel<T, width>, warp_grid(R), kThreads, 0, args.out.as<T>(),
                         args.in.as<T>(), args.row_slots.as<int32_t>(), R, args.K, args.C);
        });
    });
}

void combine_rows(Ctx& ctx, const CombineRowsArgs& args) {
    expect(args.slot_rows, Dtype::kInt32, args.N * args.K, "combine_rows: slot_rows");
    expect(args.in, args.in.dtype, args.N * args.K * args.C, "combine_rows: in");
    expect(args.out, args.in.dtype, args.N * args.C, "combine_rows: out");
    CHECK(args.K <= kLanes, "combine_rows: %lld experts of a token", ll(args.K));
    dispatch(args.in.dtype, "combine_rows", [&](auto type) {
        using T = decltype(type);
        with_width<T>(vectorizable<T>(args.C, {args.out.data, args.in.data}), [&](auto width) {
            launch_early(ctx, combine_rows_kernel<T, width>, warp_grid(args.N), kThreads, 0, args.out.as<T>(),
                         args.in.as<T>(), args.slot_rows.as<int32_t>(), args.N, args.K, args.C,
                         args.accumulate);
        });
    });
}

void expert_activation_forward(Ctx& ctx, const ExpertActivationForwardArgs& args) {
    expect(args.in, args.in.dtype, args.R * 2 * args.F, "expert_activation_forward: in");
    expect(args.out, args.in.dtype, args.R * args.F, "expert_activation_forward: out");
    expect(args.weights, Dtype::kFp32, args.R, "expert_activation_forward: weights");
    dispatch(args.in.dtype, "expert_activation_forward", [&](auto type) {
        using T = decltype(type);
        with_width<T>(vectorizable<T>(args.F, {args.out.data, args.in.data}), [&](auto width) {
            launch_early(ctx, expert_activation_forward_kernel<T, width>, warp_grid(args.R), kThreads, 0,
                         args.out.as<T>(), args.in.as<T>(), args.weights.as<float>(),
                         args.row_slots.as<int32_t>(), args.R, args.F);
        });
    });
}

void expert_activation_backward(Ctx& ctx, const ExpertActivationBackwardArgs& args) {
    for (const Tensor& t : {args.in, args.din})
        expect(t, args.in.dtype, args.R * 2 * args.F, "expert_activation_backward: in");
    expect(args.dout, args.in.dtype, args.R * args.F, "expert_activation_backward: dout");
    for (const Tensor& t : {args.weights, args.dweights})
        expect(t, Dtype::kFp32, args.R, "expert_activation_backward: weights");
    dispatch(args.in.dtype, "expert_activation_backward", [&](auto type) {
        using T = decltype(type);
        const bool vectors = vectorizable<T>(args.F, {args.din.data, args.dout.data, args.in.data});
        with_width<T>(vectors, [&](auto width) {
            launch_early(ctx, expert_activation_backward_kernel<T, width>, warp_grid(args.R), kThreads, 0,
                         args.din.as<T>(), args.dweights.as<float>(), args.dout.as<T>(), args.in.as<T>(),
                         args.weights.as<float>(), args.row_slots.as<int32_t>(), args.R, args.F);
        });
    });
}

}  // namespace cuda
