// Attention backward on compute capability 9.0 in one kernel: blocks own keys, accumulate dK and dV in registers, and
// add partial dQ to fp32 sums in memory.
#include "llmc/cuda/attention_backward_fused_sm90.cuh"

namespace cuda {
namespace {

struct FusedMaps {
    CUtensorMap keys, queries, douts, dkeys;
};

// The thread that claims items and issues TMA loads.
template <int HS, bool kBorders>
__device__ void load_tiles(FusedState<HS> state, char* memory, uint32_t* taken, const FusedMaps& maps,
                           const AttentionShape& shape, const Schedule& schedule) {
    using P = Fused<HS>;
    const int NH = static_cast<int>(shape.NH), NKV = static_cast<int>(shape.NKV);
    auto take = [&](uint32_t item) {
        const uint32_t number = atomicAdd(taken, 1u);
        state.items().await_empty(item);
        FusedState<HS>::number(memory, item) = number;
        if (number >= schedule.items) state.items().arrive_full(item);
        return number;
    };
    auto load_own = [&](const Steps& steps, uint32_t item) {
        const Schedule::Place& at = steps.at;
        const int panel = (NH + at.head) * P::kPanels, first = at.tile * P::kKeys;
        const uint32_t full = state.items().full_of(item), keys = state.key_tile(item);
        ptx::barrier_expect(full, 2 * P::kKeyBytes);
        ptx::load_box(keys, &maps.keys, full, first, panel, at.b);
        ptx::load_box(keys + P::kKeyBytes, &maps.keys, full, first, panel + NKV * P::kPanels, at.b);
    };
    for_steps<kBorders>(shape, schedule, take, load_own, [&](const Steps& steps, int tile, int i, uint32_t step) {
        const int row = tile * P::kQueries, b = steps.at.b, panel = (steps.at.head * schedule.group + i) * P::kPanels;
        const uint32_t queries_full = state.queries().full_of(step), douts_full = state.douts().full_of(step);
        state.queries().await_empty(step);
        ptx::barrier_expect(queries_full, P::kQueryBytes);
        ptx::load_box(state.query_tile(step), &maps.queries, queries_full, row, panel, b);
        ptx::barrier_expect(douts_full, P::kQueryBytes);
        ptx::load_box(state.dout_tile(step), &maps.douts, douts_full, row, panel, b);
    });
}

// The warp that loads lse and delta of the queries. TMA cannot, since rows of T floats need not be aligned.
template <int HS, bool kBorders>
__device__ void load_stats(FusedState<HS> state, char* memory, const float* lse, const float* delta,
                           const AttentionShape& shape, const Schedule& schedule, int lane) {
    using P = Fused<HS>;
    const int T = static_cast<int>(shape.T);
    auto take = [&](uint32_t item) { return warp_uniform(lane == 0 ? state.follow(memory, item) : 0); };
    for_steps<kBorders>(shape, schedule, take, no_item, [&](const Steps& steps, int tile, int i, uint32_t step) {
        const int query = tile * P::kQueries + lane;
        const uint64_t row = static_cast<uint64_t>(steps.first_head + i) * static_cast<uint32_t>(T) + query;
        const bool inside[2] = {query < T, query + 32 < T};
        float minus_lse[2], minus_delta[2];   // beyond the end P = 0
#pragma unroll
        for (int i = 0; i < 2; i++) {
            minus_lse[i] = inside[i] ? -kLog2e * lse[row + 32 * i] : -INFINITY;
            minus_delta[i] = inside[i] ? -delta[row + 32 * i] : 0;
        }
        state.stats().await_empty(step);
        float* to = reinterpret_cast<float*>(memory + state.stats_at(step)) + lane;
#pragma unroll
        for (int i = 0; i < 2; i++) to[32 * i] = minus_lse[i], to[P::kQueries + 32 * i] = minus_delta[i];
        state.stats().arrive_full(step);
    });
}

// The thread that adds a consumer's partial dQ to the sums in memory. kDeterministic: key tile j adds after the tiles
// before it, and the first one stores. The turn counter advances when the addition is complete, not merely when its
// source has been read. The thread waits first for its turn and then for the partial sum, which usually arrives last.
template <int HS, bool kBorders, bool kDeterministic>
__device__ void add_sums(FusedState<HS> state, char* memory, int consumer, DqSums sums,
                         const AttentionShape& shape, const Schedule& schedule) {
    using P = Fused<HS>;
    const uint32_t barriers = ptx::opaque(state.sums(consumer).full);
    const uint32_t own = ptx::opaque(state.shared + state.sums_at(consumer, 0));
    const Slots<P::kSumStages> ring{barriers, barriers + 8 * P::kSumStages};
    auto take = [&](uint32_t item) { return state.follow(memory, item); };
    for_steps<kBorders>(shape, schedule, take, no_item, [&](const Steps& steps, int tile, int i, uint32_t step) {
        uint32_t turn = ptx::opaque(steps.first) / (P::kKeys / P::kQueries);
        if (kBorders) {
            const int t = tile * P::kQueries;
            const uint32_t row = steps.at.b * ptx::opaque(static_cast<uint32_t>(shape.T)) + t;
            turn -= static_cast<uint32_t>(shape.first_key_of_row(row, t)) / P::kKeys;
        }
        const uint32_t unit = sums.unit(0, steps.first_head + i, tile, consumer);
        float* const to = sums.data + static_cast<uint64_t>(unit) * (P::kSumBytes / 4);
        const uint32_t from = own + ring.stage(step) * P::kSumBytes;
        if (kDeterministic && turn > 0) {
            while (ptx::load_acquire(sums.turns + unit) != turn) {}
            ptx::fence_async_global();
        }
        ring.await_full(step);
        if (kDeterministic && turn == 0) ptx::bulk_store(to, from, P::kSumBytes);
        else ptx::bulk_add(to, from, P::kSumBytes);
        ptx::bulk_commit();
        ptx::bulk_wait_read<0>();
        ring.arrive_empty(step);
        if (kDeterministic) {
            ptx::bulk_wait<0>();
            ptx::fence_async_global();
            ptx::store_release(sums.turns + unit, turn + 1);
        }
    });
    ptx::bulk_wait<0>();
}

// One consumer warpgroup of 64 keys. The order of its products: S and dP of step n, dV, dK, then dQ of step n - 1
// followed by S of step n + 1. The tensor cores thus run dP during the exponentials, dV while dS is computed, and S
// while dQ is stored, and a consumer needs the other's dS one step later. Only dK is awaited with no product queued
// behind it, because ptxas keeps dS in registers that dQ needs; the other consumer fills that gap.
template <int HS> struct FusedConsumer {
    using P = Fused<HS>;
    const FusedState<HS> state;
    char* const memory;
    const int consumer, warp, lane;   // warp: within the block
    const float mul;
    float dk[HS / 2], dv[HS / 2];
    float s[32], dp[32];
    uint32_t p[4][4], ds[4][4];   // P and dS as operands; products may still be reading them
    uint32_t item = 0, step = 0;  // current indices

    // own_keys: shared address of this consumer's keys, opaque because no registers are left for descriptors of all its
    // parts. own_ds: that of this warp's 16 keys in a step's dS buffer. Neither may shuffle: single lanes call them.
    __device__ uint32_t own_keys() const {
        return ptx::opaque(state.key_tile(item) + consumer * 64 * kPanelRowBytes);
    }
    __device__ uint32_t own_ds(uint32_t of_step) const {
        return state.grad_tile(of_step) + (consumer * 64 + warp % 4 * 16) * kPanelRowBytes;
    }
    __device__ void start_step_scores() {
        state.queries().await_full(step);
        start_scores<HS>(s, own_keys(), P::kKeyPanel, state.query_tile(step), P::kQueryPanel);
    }
    __device__ void start_step_dp() {
        state.douts().await_full(step);
        start_scores<HS>(dp, own_keys() + P::kKeyBytes, P::kKeyPanel, state.dout_tile(step), P::kQueryPanel);
    }
    // Stores dS to shared memory, for both consumers.
    __device__ void store_ds() const {
        state.grads().await_empty(step);
        const uint32_t to = own_ds(step) + panel_offset(lane & 15, lane >> 4);
#pragma unroll
        for (int j = 0; j < 4; j++) ptx::store_matrix_x4(to ^ (2 * j << 4), ds[j]);   // chunks 2 j and 2 j + 1
        ptx::fence_async();
        __syncwarp();
        if (lane == 0) state.grads().arrive_full(step);
    }
    __device__ void release_step(uint32_t of_step) const {
        if (lane == 0) state.queries().arrive_empty(of_step);
    }
    // Processes a step whose queries all precede these keys.
    __device__ void skip() {
#pragma unroll
        for (int j = 0; j < 4; j++) ds[j][0] = ds[j][1] = ds[j][2] = ds[j][3] = 0;
        store_ds();
        state.queries().await_full(step), state.douts().await_full(step), state.stats().await_full(step);
        release_step(step++);
    }
    // Completes a step except for dQ, given S and dP in flight; leaves nothing in flight. behind: the tile's first
    // query minus the warp's first key; if <= 0, some queries precede some keys.
    template <typename Borders> __device__ void use_scores(int behind, const Borders& borders) {
        ptx::wgmma_wait<1>();   // dP is still in flight
        ptx::pin(s);
        if (behind <= 0) mask_past(s, behind, lane);
        borders.mask(s, behind, lane);
        state.stats().await_full(step);
        const float* stats = reinterpret_cast<const float*>(memory + state.stats_at(step)) + 2 * (lane % 4);
#pragma unroll
        for (int i = 0; i < 32; i += 2) {   // two adjacent columns
            const float2 minus_lse = *reinterpret_cast<const float2*>(stats + 8 * (i / 4));
            s[i] = exp2_approx(fmaf(s[i], mul, minus_lse.x));
            s[i + 1] = exp2_approx(fmaf(s[i + 1], mul, minus_lse.y));
        }
#pragma unroll
        for (int j = 0; j < 4; j++) as_operand(p[j], s, j);
        start_sums<HS>(dv, p, state.dout_tile(step), P::kQueryPanel);
        ptx::wgmma_wait<1>();   // dV is still in flight
        ptx::pin(dp);
#pragma unroll
        for (int i = 0; i < 32; i += 2) {
            const float2 minus_delta = *reinterpret_cast<const float2*>(stats + P::kQueries + 8 * (i / 4));
            dp[i] = s[i] * (dp[i] + minus_delta.x);
            dp[i + 1] = s[i + 1] * (dp[i + 1] + minus_delta.y);
        }
#pragma unroll
        for (int j = 0; j < 4; j++) as_operand(ds[j], dp, j);
        start_sums<HS>(dk, ds, state.query_tile(step), P::kQueryPanel);
        store_ds();
        ptx::wgmma_wait<0>();
        release_step(step++);
    }
    // Starts this consumer's columns of dQ = dS K, with the dS of both consumers.
    __device__ void start_dq(float (&dq)[HS / 4], uint32_t of_step) const {
        state.grads().await_full(of_step);
        const uint32_t keys = state.key_tile(item) + consumer * (HS == 128 ? P::kKeyPanel : kPanelRowBytes / 2);
        const uint64_t a = tile_descriptor(state.grad_tile(of_step), P::kGradBytes);
        const uint64_t b = tile_descriptor(keys, P::kKeyPanel);
        ptx::pin(dq);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < P::kKeys / 16; i++) {
            ptx::wgmma<HS / 2, true, true>(dq, along_rows(a, i), along_rows(b, i), i > 0);
        }
        ptx::wgmma_commit();
    }
    // Stores the completed dQ to shared memory, each four registers of a thread as one float4.
    __device__ void store_dq(float (&dq)[HS / 4], uint32_t of_step) const {
        ptx::pin(dq);
        if (lane == 0) state.grads().arrive_empty(of_step);
        state.sums(consumer).await_empty(of_step);
        auto* const to = reinterpret_cast<float4*>(memory + state.sums_at(consumer, of_step)) + threadIdx.x % 128;
#pragma unroll
        for (int i = 0; i < HS / 16; i++)
            to[128 * i] = make_float4(dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
        ptx::fence_async();
        __syncwarp();
        if (lane == 0) state.sums(consumer).arrive_full(of_step);
    }
    // Stores the warp's 16 rows of d to global memory through its part of the dS buffers, one panel in each.
    __device__ void store_own(const CUtensorMap& map, float (&d)[HS / 2], int first_buffer, int row, int panel, int b) {
#pragma unroll
        for (int j = 0; j < HS / 16; j++) {
            uint32_t part[4];
            as_operand(part, d, j);
            const uint32_t to = own_ds(first_buffer + j / 4);
            ptx::store_matrix_x4(to + panel_offset(lane & 15, 2 * (j % 4) + (lane >> 4)), part);
        }
        ptx::fence_async();
        __syncwarp();
        if (lane > 0) return;
        for (int i = 0; i < P::kPanels; i++) ptx::store_box(&map, own_ds(first_buffer + i), row, panel + i, b);
        ptx::bulk_commit();
    }
    __device__ void await_stored() const {
        if (lane == 0) ptx::bulk_wait_read<0>();
        __syncwarp();
    }
    // Runs the steps whose queries attend to these keys, each together with dQ of two steps before.
    template <typename Borders>
    __device__ void visit(const Steps& steps, int group, int first_key, const Borders& borders) {
        int visits = (steps.end - steps.first - consumer) * group, left = group;
        int behind = (steps.end - 1) * P::kQueries - first_key;
        for (int number = 0; number < visits; number++) {
            if (number == 2) break;
            start_step_scores();
            start_step_dp();
            await_stored();   // the results of the previous item
            use_scores(behind, borders);
            if (--left == 0) left = group, behind -= P::kQueries;
        }
        for (visits -= 2; visits > 0; visits--) {
            float dq[HS / 4];
            start_dq(dq, step - 2);
            start_step_scores();
            ptx::wgmma_wait<1>();   // S is still in flight
            store_dq(dq, step - 2);
            start_step_dp();
            use_scores(behind, borders);
            if (--left == 0) left = group, behind -= P::kQueries;
        }
        ptx::pin(dk);
        ptx::pin(dv);
    }
    // Computes dQ of steps `done` to `end` - 1, among them those whose queries all precede these keys.
    __device__ void finish(uint32_t done, uint32_t end) {
        await_stored();
        for (; done < end; done++) {
            while (step < end && step < done + 2) skip();
            float dq[HS / 4];
            start_dq(dq, done);
            ptx::wgmma_wait<0>();
            store_dq(dq, done);
        }
    }
};

template <int HS, bool kBorders>
__device__ void consume(FusedState<HS> state, char* memory, int consumer, const CUtensorMap& out_map,
                        const AttentionShape& shape, const Schedule& schedule) {
    using P = Fused<HS>;
    const int warp = warp_uniform(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x) % 32;
    const int NH = static_cast<int>(shape.NH), NKV = static_cast<int>(shape.NKV);
    FusedConsumer<HS> c{state, memory, consumer, warp, lane, shape.softmax_mul * kLog2e, {}, {}, {}, {}, {}, {}};
    while (true) {
        state.items().await_full(c.item);
        const uint32_t item = warp_uniform(FusedState<HS>::number(memory, c.item));
        if (item >= schedule.items) break;
        const uint32_t begin = c.step;
        {
            const Steps steps = Steps::of<kBorders>(shape, schedule, item);
            const int row = steps.at.tile * P::kKeys + warp * 16;
            const std::conditional_t<kBorders, EndQueries, NoBorders> borders(shape, steps.at.b, row, lane);
#pragma unroll
            for (int i = 0; i < HS / 2; i++) c.dk[i] = c.dv[i] = 0;
            c.visit(steps, schedule.group, row, borders);
        }
        // Recomputed, so that none of this occupies registers during visit().
        const uint32_t again = warp_uniform(FusedState<HS>::number(memory, c.item));
        const Steps steps = Steps::of<kBorders>(shape, schedule, again);
        const Schedule::Place& at = steps.at;
        const int row = at.tile * P::kKeys + warp * 16;
        c.finish(c.step - begin < 2 ? begin : c.step - 2, begin + (steps.end - steps.first) * schedule.group);
        if (lane == 0) state.items().arrive_empty(c.item);
        c.item++;
        state.grads().await_empty(c.step), state.grads().await_empty(c.step + 1);
        const int panel = (NH + at.head) * P::kPanels;
        c.store_own(out_map, c.dv, 0, row, panel + NKV * P::kPanels, at.b);
#pragma unroll
        for (float& x : c.dk) x *= shape.softmax_mul;
        if (P::kPanels == 2) c.await_stored();
        c.store_own(out_map, c.dk, 1, row, panel, at.b);
    }
    if (lane == 0) ptx::bulk_wait_read<0>();   // shared memory must outlive the copies
}

// Math: dv_j = sum_t p_tj dout_t; dk_j = softmax_mul sum_t ds_tj q_t, over the queries t >= j of every query head that
//       reads this key head (kBorders: those that attend to j); sums_t += sum_j ds_tj k_j over the block's keys j;
//       p_tj = exp(s_tj - lse_t), ds_tj = p_tj (dout_t . v_j - delta_t)
// Source: Dao, FlashAttention-2, arXiv 2307.08691, algorithm 2; Shah et al., FlashAttention-3, arXiv 2407.08608; PTX
//         ISA 9.0, wgmma, cp.async.bulk.tensor and cp.reduce.async.bulk.
// Traffic: k, v read and dk, dv written once; q, dout, lse, delta of the group read and sums (fp32) added to once per
//          key tile that they attend to (mostly L2).
// Requires: delta; zeros in taken and turns, or in sums; sm_90a; bf16, HS 64 or 128, 16-byte aligned; dynamic shared
//           memory of kSharedBytes.
// Parallel: a block processes tiles of 128 keys (Schedule), each consumer warpgroup 64 of them, in steps of 64 queries
//           over all heads of the group. In the last warpgroup one thread issues TMA loads, one warp loads statistics
//           and two threads add sums.
template <int HS, bool kBorders, bool kDeterministic>
__global__ void __launch_bounds__(Fused<HS>::kThreads, 1)
attention_backward_fused_sm90_kernel(const __grid_constant__ FusedMaps maps, DqSums sums, const float* lse,
                                     const float* delta, AttentionShape shape, Schedule schedule) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using P = Fused<HS>;
    extern __shared__ __align__(1024) char memory[];
    const FusedState<HS> state{ptx::shared_address(memory)};
    const int consumer = warp_uniform(threadIdx.x / 128);
    if (threadIdx.x == 0) {
        state.init();
        ptx::barrier_init_fence();
    }
    __syncthreads();
    if (consumer == P::kConsumers) {
        ptx::registers_shrink<P::kProducerRegisters>();
        const int warp = warp_uniform(threadIdx.x / 32) % 4, lane = static_cast<int>(threadIdx.x) % 32;
        if (warp == 0 && lane == 0) load_tiles<HS, kBorders>(state, memory, sums.taken, maps, shape, schedule);
        else if (warp == 1) load_stats<HS, kBorders>(state, memory, lse, delta, shape, schedule, lane);
        else if (warp >= 2 && lane == 0)
            add_sums<HS, kBorders, kDeterministic>(state, memory, warp - 2, sums, shape, schedule);
    } else {
        ptx::registers_grow<P::kConsumerRegisters>();
        consume<HS, kBorders>(state, memory, consumer, maps.dkeys, shape, schedule);
    }
#endif
}

template <int HS, bool kBorders, bool kDeterministic>
void launch(Ctx& ctx, const AttentionBackwardArgs& args, const DqSums& sums, const AttentionShape& shape) {
    using P = Fused<HS>;
    const int64_t B = shape.B, T = shape.T, width = shape.row(), out_width = shape.NH * HS;
    const FusedMaps maps{panel_map(args.qkv.data, B, T, width, P::kKeys, P::kPanels),
                         panel_map(args.qkv.data, B, T, width, P::kQueries, P::kPanels),
                         panel_map(args.dout.data, B, T, out_width, P::kQueries, P::kPanels),
                         panel_map(args.dqkv.data, B, T, width, 16, 1)};
    const Schedule schedule = make_ordered_schedule(shape, P::kKeys, ctx.sm_count);
    auto* const kernel = attention_backward_fused_sm90_kernel<HS, kBorders, kDeterministic>;
    allow_shared_memory(kernel, P::kSharedBytes);
    const unsigned grid = grid_size(std::min<int64_t>(schedule.items, ctx.sm_count));
    kernel<<<grid, P::kThreads, P::kSharedBytes, stream_of(ctx)>>>(maps, sums, args.lse.as<float>(),
                                                                  args.delta.as<float>(), shape, schedule);
    CHECK_LAUNCH("attention_backward_fused_sm90_kernel");
}

template <int HS>
void launch(Ctx& ctx, const AttentionBackwardArgs& args, const DqSums& sums, const AttentionShape& shape) {
    auto* const deterministic = shape.has_borders() ? launch<HS, true, true> : launch<HS, false, true>;
    auto* const unordered = shape.has_borders() ? launch<HS, true, false> : launch<HS, false, false>;
    (args.fast ? unordered : deterministic)(ctx, args, sums, shape);
}

}  // namespace

void attention_backward_fused_sm90(Ctx& ctx, const AttentionBackwardArgs& args, const DqSums& sums,
                                   const AttentionShape& shape) {
    (shape.HS == 64 ? launch<64> : launch<128>)(ctx, args, sums, shape);
}

}  // namespace cuda
