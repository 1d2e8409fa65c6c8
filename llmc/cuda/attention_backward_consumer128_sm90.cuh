// The consumers of the fused attention backward at head dim 128, and at smaller ones that are padded to 128.
#pragma once
#include "llmc/cuda/attention_backward_fused_sm90.cuh"

namespace cuda {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900   // as in ptx.cuh

// One consumer warpgroup of 64 keys. The order of its products: in every second step dQ of two steps before, then S and
// dP of step n, dV, dK. The tensor cores thus run dP during the exponentials, dV while dS is computed, and dK while dS
// is stored. dQ has the registers of S and dP, so nothing else of this consumer runs beside it; the other consumer,
// which computes no dQ in this step, fills the gap.
template <int dim> struct Consumer128 : FusedConsumer<FusedTiles128<dim>> {
    using Base = FusedConsumer<FusedTiles128<dim>>;
    using P = typename Base::P;
    using Base::consumer, Base::lane, Base::mul, Base::own_ds, Base::publish_dq, Base::release_step, Base::state,
        Base::store_dq, Base::store_ds;
    static constexpr int HS = P::HS;
    float dk[HS / 2], dv[HS / 2];
    float s[32], dp[32];
    uint32_t p[4][4], ds[4][4];   // P and dS as operands; products may still be reading them
    uint32_t item = 0, step = 0;  // current indices
    uint32_t stored = 0;          // dQ stored so far

    // Starts s = own tile^T and a statistic, summed over the head dim: 64 rows of each, in shared memory.
    template <bool kDelta> __device__ void start_scores(float (&s)[32], uint32_t own, uint32_t tile) const {
        const uint64_t a = tile_descriptor(own, P::kKeyPanel), b = tile_descriptor(tile, P::kQueryPanel);
        ptx::pin(s);
        ptx::wgmma_fence();
        Base::template start_with_statistic<kDelta>(s, step);
#pragma unroll
        for (int i = 0; i < dim / 16; i++) {
            const uint64_t keys = along_columns(a, i, P::kKeyPanel), queries = along_columns(b, i, P::kQueryPanel);
            ptx::wgmma<64, false, false>(s, keys, queries, true);
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
        start_scores<false>(s, own_keys(), state.query_tile(step));
    }
    __device__ void start_step_dp() {
        state.douts().await_full(step);
        start_scores<true>(dp, own_keys() + P::kKeyBytes, state.dout_tile(step));
    }
    // Processes a step whose queries all precede these keys.
    __device__ void skip() {
        const uint32_t zeros[4][4] = {};
        store_ds(zeros, step);
        state.queries().await_full(step), state.douts().await_full(step);
        release_step(step++);
    }
    // Completes a step except for dQ, given S and dP in flight; leaves nothing in flight. behind: the tile's first
    // query minus the warp's first key; if <= 0, some queries precede some keys.
    template <typename Borders> __device__ void use_scores(int behind, const Borders& borders) {
        ptx::wgmma_wait<1>();   // dP is still in flight
        ptx::pin(s);
        if (behind <= 0) mask_past(s, behind, lane);
        borders.mask(s, behind, lane);
#pragma unroll
        for (float& x : s) x = exp2_approx(x * mul);
#pragma unroll
        for (int j = 0; j < 4; j++) as_operand(p[j], s, j);
        start_sums(dv, p, state.dout_tile(step));
        ptx::wgmma_wait<1>();   // dV is still in flight
        ptx::pin(dp);
#pragma unroll
        for (int i = 0; i < 32; i++) dp[i] *= s[i];
#pragma unroll
        for (int j = 0; j < 4; j++) as_operand(ds[j], dp, j);
        start_sums(dk, ds, state.query_tile(step));
        store_ds(ds, step);
        ptx::wgmma_wait<0>();
        release_step(step++);
    }
    // Computes dQ = dS K of a step, with the dS of both consumers, and stores it, not yet published.
    __device__ void compute_dq(uint32_t of_step) {
        float dq[HS / 2];
        state.grads().await_full(of_step);
        const uint64_t a = tile_descriptor(state.grad_tile(of_step), P::kGradBytes);
        const uint64_t b = tile_descriptor(state.key_tile(item), P::kKeyPanel);
        ptx::pin(dq);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < P::kKeys / 16; i++)
            ptx::wgmma<HS, true, true>(dq, along_rows(a, i), along_rows(b, i), i > 0);
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        store_dq(dq, of_step, stored);
    }
    // Stores the warp's 16 rows of d to global memory through its part of the dS buffers, one panel in each.
    __device__ void store_own(const CUtensorMap& map, float (&d)[HS / 2], int first_buffer, int row, int place, int b) {
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
        for (int i = 0; i < P::kPanels; i++)
            HeadPanels<dim>::store(map, own_ds(first_buffer + i), row, place, i, b);
        ptx::bulk_commit();
    }
    __device__ void await_stored() const {
        if (lane == 0) ptx::bulk_wait_read<0>();
        __syncwarp();
    }
    // Runs the steps whose queries attend to these keys, and computes dQ of those of them, except for the last two,
    // that this consumer owns.
    template <typename Borders>
    __device__ void visit(const Steps& steps, int group, int first_key, const Borders& borders) {
        const int visits = (steps.end - steps.first - consumer) * group;
        int left = group, behind = (steps.end - 1) * P::kQueries - first_key;
        for (int number = 0; number < visits; number++) {
            const bool owner = number >= 2 && P::owns(consumer, number);
            if (owner) compute_dq(step - 2);
            start_step_scores();
            start_step_dp();
            if (number < 2) await_stored();   // the results of the previous item
            if (owner) publish_dq(stored++);
            use_scores(behind, borders);
            if (--left == 0) left = group, behind -= P::kQueries;
        }
        ptx::pin(dk);
        ptx::pin(dv);
    }
    // Computes dQ of those of the item's remaining steps, up to `end` - 1, that this consumer owns, among them those
    // whose queries all precede these keys.
    __device__ void finish(uint32_t begin, uint32_t end) {
        await_stored();
        for (uint32_t done = step - begin < 2 ? begin : step - 2; done < end; done++) {
            while (step < end && step < done + 2) skip();
            if (!P::owns(consumer, done - begin)) continue;
            compute_dq(done);
            publish_dq(stored++);
        }
    }
};

template <bool kBorders, int dim>
__device__ void consume(FusedState<FusedTiles128<dim>> state, char* memory, int consumer, const CUtensorMap& out_map,
                        const AttentionShape& shape, const Schedule& schedule) {
    using P = Fused<FusedTiles128<dim>>;
    const int warp = warp_uniform(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x) % 32;
    const int NH = static_cast<int>(shape.NH), NKV = static_cast<int>(shape.NKV);
    Consumer128<dim> c{{state, memory, consumer, warp, lane, shape.softmax_mul * kLog2e}, {}, {}, {}, {}, {}, {}};
    // With this bound, which no block reaches, ptxas 13.0 keeps the step and its addresses in uniform registers. That
    // saves a fourth of the instructions of a step.
    for (uint32_t rounds = 0; rounds <= schedule.items; rounds++) {
        state.items().await_full(c.item);
        const uint32_t item = warp_uniform(state.number(memory, c.item));
        if (item >= schedule.items) break;
        const uint32_t begin = c.step;
        {
            const Steps steps = Steps::of<kBorders, P::kKeys>(shape, schedule, item);
            const int row = steps.at.tile * P::kKeys + warp * 16;
            const std::conditional_t<kBorders, EndQueries, NoBorders> borders(shape, steps.at.b, row, lane);
#pragma unroll
            for (int i = 0; i < P::HS / 2; i++) c.dk[i] = c.dv[i] = 0;
            c.visit(steps, schedule.group, row, borders);
        }
        // Recomputed, so that none of this occupies registers during visit().
        const uint32_t again = warp_uniform(state.number(memory, c.item));
        const Steps steps = Steps::of<kBorders, P::kKeys>(shape, schedule, again);
        const Schedule::Place& at = steps.at;
        const int row = at.tile * P::kKeys + warp * 16;
        c.finish(begin, begin + (steps.end - steps.first) * schedule.group);
        if (lane == 0) state.items().arrive_empty(c.item);
        c.item++;
        state.grads().await_empty(c.step), state.grads().await_empty(c.step + 1);
        const int place = (NH + at.head) * HeadPanels<dim>::kPlaces;
        c.store_own(out_map, c.dv, 0, row, place + NKV * HeadPanels<dim>::kPlaces, at.b);
#pragma unroll
        for (float& x : c.dk) x *= shape.softmax_mul;
        c.await_stored();
        c.store_own(out_map, c.dk, 1, row, place, at.b);
    }
    if (lane == 0) ptx::bulk_wait_read<0>();   // shared memory must outlive the copies
}

#endif

}  // namespace cuda
