// The consumers of the fused attention backward at head dim 128.
#pragma once
#include "llmc/cuda/attention_backward_fused_sm90.cuh"

namespace cuda {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900   // as in ptx.cuh

// One consumer warpgroup of 64 keys. The order of its products: S and dP of step n, dV, dK, then dQ of step n - 1
// followed by S of step n + 1. The tensor cores thus run dP during the exponentials, dV while dS is computed, and S
// while dQ is stored, and a consumer needs the other's dS one step later. Only dK is awaited with no product queued
// behind it, because ptxas keeps dS in registers that dQ needs; the other consumer fills that gap.
struct Consumer128 : FusedConsumer<FusedTiles128> {
    static constexpr int HS = P::HS;
    float dk[HS / 2], dv[HS / 2];
    float s[32], dp[32];
    uint32_t p[4][4], ds[4][4];   // P and dS as operands; products may still be reading them
    uint32_t item = 0, step = 0;  // current indices

    // Starts s = own tile^T, summed over the head dim: 64 rows of each, in shared memory.
    __device__ static void start_scores(float (&s)[32], uint32_t own, uint32_t tile) {
        const uint64_t a = tile_descriptor(own, P::kKeyPanel), b = tile_descriptor(tile, P::kQueryPanel);
        ptx::pin(s);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < HS / 16; i++) {
            const uint64_t keys = along_columns(a, i, P::kKeyPanel), queries = along_columns(b, i, P::kQueryPanel);
            ptx::wgmma<64, false, false>(s, keys, queries, i > 0);
        }
        ptx::wgmma_commit();
    }
    // Starts sums += a tile, summed over the 64 rows of the tile.
    __device__ static void start_sums(float (&sums)[HS / 2], const uint32_t (&a)[4][4], uint32_t tile) {
        const uint64_t b = tile_descriptor(tile, P::kQueryPanel);
        ptx::pin(sums);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; i++) ptx::wgmma<HS, true>(sums, a[i], along_rows(b, i), true);
        ptx::wgmma_commit();
    }
    // Shared address of this consumer's keys, opaque because no registers are left for descriptors of all its parts.
    __device__ uint32_t own_keys() const {
        return ptx::opaque(state.key_tile(item) + consumer * 64 * kPanelRowBytes);
    }
    __device__ void start_step_scores() {
        state.queries().await_full(step);
        start_scores(s, own_keys(), state.query_tile(step));
    }
    __device__ void start_step_dp() {
        state.douts().await_full(step);
        start_scores(dp, own_keys() + P::kKeyBytes, state.dout_tile(step));
    }
    // Processes a step whose queries all precede these keys.
    __device__ void skip() {
        const uint32_t zeros[4][4] = {};
        store_ds(zeros, step);
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
        start_sums(dv, p, state.dout_tile(step));
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
        start_sums(dk, ds, state.query_tile(step));
        store_ds(ds, step);
        ptx::wgmma_wait<0>();
        release_step(step++);
    }
    // Starts this consumer's columns of dQ = dS K, with the dS of both consumers.
    __device__ void start_dq(float (&dq)[HS / 4], uint32_t of_step) const {
        state.grads().await_full(of_step);
        const uint32_t keys = state.key_tile(item) + consumer * P::kKeyPanel;
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
            store_dq(dq, step - 2, step - 2);
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
            store_dq(dq, done, done);
        }
    }
};

template <bool kBorders>
__device__ void consume(FusedState<FusedTiles128> state, char* memory, int consumer, const CUtensorMap& out_map,
                        const AttentionShape& shape, const Schedule& schedule) {
    using P = Fused<FusedTiles128>;
    const int warp = warp_uniform(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x) % 32;
    const int NH = static_cast<int>(shape.NH), NKV = static_cast<int>(shape.NKV);
    Consumer128 c{{state, memory, consumer, warp, lane, shape.softmax_mul * kLog2e}, {}, {}, {}, {}, {}, {}};
    // With this bound, which no block reaches, ptxas 13.0 keeps the step and its addresses in uniform registers. That
    // saves a fourth of the instructions of a step.
    for (uint32_t rounds = 0; rounds <= schedule.items; rounds++) {
        state.items().await_full(c.item);
        const uint32_t item = warp_uniform(state.number(memory, c.item));
        if (item >= schedule.items) break;
        const uint32_t begin = c.step;
        {
            const Steps steps = Steps::of<kBorders>(shape, schedule, item);
            const int row = steps.at.tile * P::kKeys + warp * 16;
            const std::conditional_t<kBorders, EndQueries, NoBorders> borders(shape, steps.at.b, row, lane);
#pragma unroll
            for (int i = 0; i < P::HS / 2; i++) c.dk[i] = c.dv[i] = 0;
            c.visit(steps, schedule.group, row, borders);
        }
        // Recomputed, so that none of this occupies registers during visit().
        const uint32_t again = warp_uniform(state.number(memory, c.item));
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
        c.await_stored();
        c.store_own(out_map, c.dk, 1, row, panel, at.b);
    }
    if (lane == 0) ptx::bulk_wait_read<0>();   // shared memory must outlive the copies
}

#endif

}  // namespace cuda
