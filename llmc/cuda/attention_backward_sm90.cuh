// Attention backward on compute capability 9.0: a fused kernel that owns keys and loops over the queries of all heads
// of its group (five products per tile), with dK and dV in registers and dQ accumulated over blocks in fp32 memory. At
// head dim 256, where these additions take longer than the products, a second kernel computes dQ (seven products).
#pragma once
#include <algorithm>

#include "llmc/cuda/attention_sm90.cuh"

namespace cuda {

// ---- fp32 sums of dQ in memory. A unit is 64 queries of a head, in the register layout of a warpgroup: float4 number
// 128 i + t is registers 4 i .. 4 i + 3 of thread t.
inline constexpr int kSumRows = 64;
__host__ __device__ constexpr uint32_t sum_bytes(int HS) { return 4 * kSumRows * HS; }
struct DqSums {
    float* data;       // units, (B * NH, tiles)
    uint32_t* taken;   // items claimed by blocks so far
    uint32_t* turns;   // additions to each unit so far
    uint32_t tiles;
};

// The schedule of the fused kernel, with ordered additions. As in Schedule, key tile 0 of all heads of a section comes
// first. Blocks loop over query tiles from the last to the first, so blocks that start together on keys of one head
// need the same sums at the same time, and a sum takes the additions in the order of key tiles, 0 first. The block that
// adds second falls behind once, by the time of one addition, and stays behind; key tiles that start later find the
// additions of earlier tiles done.
// Deadlock-free: an addition waits only for items of smaller numbers, and a block claims its next item when it is ready
// to run it, so the smallest unfinished item is always running and waits for nothing. (A static assignment could wait
// for blocks that are not resident, for example while NCCL kernels occupy multiprocessors and wait for other GPUs.)
// A section has as many heads as give every block two items: with more heads, Q, dO and sums leave the L2 cache between
// the blocks that use them, with fewer some blocks have nothing to do at its end.
inline Schedule make_ordered_schedule(const AttentionShape& shape, int64_t keys_of_tile, int64_t blocks) {
    Schedule schedule = make_schedule(shape, shape.NKV, keys_of_tile, false, blocks);
    const int64_t heads = schedule.heads, section = std::clamp<int64_t>(2 * blocks / schedule.tiles, 1, heads);
    schedule.section = static_cast<uint32_t>(section);
    schedule.sections = static_cast<uint32_t>(heads / section);
    return schedule;
}

// A ring of buffers like Ring, but stage and parity are computed from the number n of buffers passed so far: consumers
// have no registers left to keep them.
template <int stages> struct Slots {
    static_assert(stages == 1 || stages == 2 || stages == 4);
    uint32_t full, empty;   // addresses of the barriers of buffer 0; 8 bytes each

    __device__ static uint32_t stage(uint32_t n) { return n % stages; }
    __device__ static uint32_t parity(uint32_t n) { return n / stages % 2; }
    __device__ void init(uint32_t readers, uint32_t arrivals) const {
        init_full(arrivals);
        for (uint32_t i = 0; i < stages; i++) ptx::barrier_init(empty + 8 * i, readers);
    }
    __device__ void init_full(uint32_t arrivals) const {   // the `empty` barriers are shared with another ring
        for (uint32_t i = 0; i < stages; i++) ptx::barrier_init(full + 8 * i, arrivals);
    }
    __device__ uint32_t full_of(uint32_t n) const { return full + 8 * stage(n); }
    __device__ void await_full(uint32_t n) const { ptx::barrier_wait(full_of(n), parity(n)); }
    __device__ void await_empty(uint32_t n) const { ptx::barrier_wait(empty + 8 * stage(n), parity(n) ^ 1); }
    __device__ void arrive_full(uint32_t n) const { ptx::barrier_arrive(full_of(n)); }
    __device__ void arrive_empty(uint32_t n) const { ptx::barrier_arrive(empty + 8 * stage(n)); }
};

// Writes dK and dV of dqkv (=) and, below head dim 256, dQ to sums (=, since the first addition stores). Requires
// args.delta, and 0 in taken and turns.
void attention_backward_fused_sm90(Ctx& ctx, const AttentionBackwardArgs& args, const DqSums& sums,
                                   const AttentionShape& shape);

// Writes dQ of dqkv (=) at head dim 256. Requires args.delta.
void attention_backward_queries_sm90(Ctx& ctx, const AttentionBackwardArgs& args, const AttentionShape& shape);

}  // namespace cuda
