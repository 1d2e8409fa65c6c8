// Mixtures of experts: sorting of rows by expert.
#include "llmc/cuda/common.cuh"

namespace cuda {
namespace {

constexpr int kLanes = 32;

// In chunks of kSortChunk slots, each of a warp.

// The number of a slot's expert among those from `first` on; -1: it is none of these E.
__device__ inline int expert_here(const int32_t* experts, int64_t slot, int first, int E) {
    const int e = experts[slot] - first;
    return e >= 0 && e < E ? e : -1;
}

// Math: counts[chunk][e] = number of the chunk's slots of expert first + e.
// Source: none.
// Traffic: experts read, counts written, once.
// Requires: nothing.
// Parallel: a block of one warp per chunk.
__global__ void __launch_bounds__(kLanes)
    sort_count_kernel(int32_t* counts, const int32_t* experts, int64_t slots, int first, int E) {
    __shared__ int32_t count[kMaxRouterExperts];
    wait_for_previous_kernels();
    for (int e = threadIdx.x; e < E; e += kLanes) count[e] = 0;
    __syncwarp();
    const int64_t begin = blockIdx.x * kSortChunk, end = min(slots, begin + kSortChunk);
    for (int64_t slot = begin + threadIdx.x; slot < end; slot += kLanes)
        if (const int e = expert_here(experts, slot, first, E); e >= 0) atomicAdd(&count[e], 1);
    __syncwarp();
    for (int e = threadIdx.x; e < E; e += kLanes) counts[int64_t{blockIdx.x} * E + e] = count[e];
}

// Math: counts[chunk][e] = number of slots of expert e in earlier chunks; offsets[e] = slots of lower experts, at most
//       R; load = max(load, all slots).
// Source: none.
// Traffic: counts read and written, once; from the L2 cache.
// Requires: E <= 1024 threads.
// Parallel: one block; a thread per expert.
__global__ void __launch_bounds__(1024)
    sort_scan_kernel(int32_t* counts, int32_t* offsets, int32_t* load, int64_t chunks, int32_t R, int E) {
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
        offsets[i] = min(offset, R);
        offset += totals[i];
    }
    offsets[E] = min(offset, R);
    if (load) *load = max(*load, offset);
}

// Math: slot_rows[slot] = offsets[e] + slots of e in earlier chunks + earlier slots of e in the chunk, or -1 if that is
//       not below R or the slot's expert is not here; the inverse.
// Source: none.
// Traffic: experts read, slot_rows and row_slots written, once.
// Requires: nothing.
// Parallel: a block of one warp per chunk, 32 slots at a time; lanes with the same expert count those before them.
__global__ void __launch_bounds__(kLanes)
    sort_scatter_kernel(int32_t* row_slots, int32_t* slot_rows, const int32_t* counts, const int32_t* offsets,
                        const int32_t* experts, int64_t slots, int32_t R, int first, int E) {
    __shared__ int32_t next[kMaxRouterExperts];
    wait_for_previous_kernels();
    for (int e = threadIdx.x; e < E; e += kLanes) next[e] = offsets[e] + counts[int64_t{blockIdx.x} * E + e];
    __syncwarp();
    const int64_t begin = blockIdx.x * kSortChunk, end = min(slots, begin + kSortChunk);
    for (int64_t some = begin; some < end; some += kLanes) {
        const int64_t slot = some + threadIdx.x;
        const int e = slot < end ? expert_here(experts, slot, first, E) : -1;
        const uint32_t same = __match_any_sync(0xffffffffu, e), lower = same & ((1u << threadIdx.x) - 1);
        const int32_t row = e >= 0 ? next[e] + __popc(lower) : R;
        __syncwarp();
        if (slot < end) slot_rows[slot] = row < R ? row : -1;
        if (row < R) row_slots[row] = static_cast<int32_t>(slot);
        if (e >= 0 && lower == 0) next[e] += __popc(same);
        __syncwarp();
    }
}

}  // namespace

void sort_experts(Ctx& ctx, const SortExpertsArgs& args) {
    const int64_t slots = args.N * args.K, chunks = ceil_div(slots, kSortChunk), R = args.row_slots.elems;
    expect(args.offsets, Dtype::kInt32, args.E + 1, "sort_experts: offsets");
    expect(args.scratch, Dtype::kInt32, chunks * args.E, "sort_experts: scratch");
    for (const Tensor& t : {args.experts, args.slot_rows}) expect(t, Dtype::kInt32, slots, "sort_experts: slots");
    expect(args.row_slots, Dtype::kInt32, R, "sort_experts: rows");
    device::fill_bytes(ctx, args.row_slots.data, 0xff, args.row_slots.bytes());
    int32_t *const counts = args.scratch.as<int32_t>(), *const offsets = args.offsets.as<int32_t>();
    const int32_t* const experts = args.experts.as<int32_t>();
    launch_early(ctx, sort_count_kernel, grid_size(chunks), kLanes, 0, counts, experts, slots, args.first,
                 args.E);
    launch_early(ctx, sort_scan_kernel, 1, static_cast<unsigned>(round_up(args.E, kLanes)), 0, counts, offsets,
                 args.load ? args.load.as<int32_t>() : nullptr, chunks, R, args.E);
    launch_early(ctx, sort_scatter_kernel, grid_size(chunks), kLanes, 0, args.row_slots.as<int32_t>(),
                 args.slot_rows.as<int32_t>(), counts, offsets, experts, slots, R, args.first, args.E);
}

}  // namespace cuda
