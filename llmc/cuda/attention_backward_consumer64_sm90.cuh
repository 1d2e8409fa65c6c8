// The consumers of the fused attention backward at head dim 64.
#pragma once
#include "llmc/cuda/attention_backward_fused_sm90.cuh"

namespace cuda {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900   // as in ptx.cuh

// One consumer warpgroup of 64 keys. A pass of its loop computes S and dP of step n, dK of step n - 1, dV of step n and
// dQ of step n - 1: S of this step and dK of the last one start as soon as its dS is computed, dK and dP run during
// the exponentials, dV and dQ while dS is computed. A pass begins with no product in flight: ptxas 13.0 serializes
// products that are in flight where a loop begins again (C7514).
struct Consumer64 : FusedConsumer<FusedTiles64> {
    float dk[32], dv[32];
    float s[32], dp[32], dq[32];
    uint32_t p[4][4], ds[4][4];   // P and dS as operands; products may still be reading them
    uint32_t item = 0, step = 0;  // current indices
    uint32_t stored = 0;          // dQ stored so far

    // Starts d += a tile, with rows of a in registers, and d = own tile^T and a statistic.
    __device__ static void start_sums(float (&d)[32], const uint32_t (&a)[4][4], uint32_t tile) {
        const Operand b(tile, P::kQueryBytes);
        ptx::pin(d);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; i++) ptx::wgmma<64, true>(d, a[i], b.rows(i), true);
        ptx::wgmma_commit();
    }
    template <bool kDelta> __device__ void start_scores(float (&d)[32], uint32_t own, uint32_t tile) const {
        const Operand a(own, P::kKeyBytes), b(tile, P::kQueryBytes);
        ptx::pin(d);
        ptx::wgmma_fence();
        start_with_statistic<kDelta>(d, step);
#pragma unroll
        for (int i = 0; i < 4; i++) ptx::wgmma<64, false, false>(d, a.columns(i), b.columns(i), true);
        ptx::wgmma_commit();
    }
    // Keeps operands of products in flight in their registers until this place.
    __device__ static void hold(uint32_t (&a)[4][4]) {
#pragma unroll
        for (auto& part : a) {
#pragma unroll
            for (uint32_t& x : part) x = ptx::opaque(x);
        }
    }
    __device__ uint32_t own_keys() const { return state.key_tile(item) + consumer * 64 * kPanelRowBytes; }
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
    // Starts dQ = dS K of a step, with the dS of both consumers.
    __device__ void start_dq(uint32_t of_step) {
        state.grads().await_full(of_step);
        const Operand a(state.grad_tile(of_step), P::kGradBytes), b(state.key_tile(item), P::kKeyBytes);
        ptx::pin(dq);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < P::kKeys / 16; i++) ptx::wgmma<64, true, true>(dq, a.rows(i), b.rows(i), i > 0);
        ptx::wgmma_commit();
    }
    __device__ void store_dq(uint32_t of_step) {
        FusedConsumer::store_dq(dq, of_step, stored);
        publish_dq(stored++);
    }
    // Starts dK of the step before, whose dS is in registers, and stores this dS.
    __device__ void use_ds() {
        start_sums(dk, ds, state.query_tile(step - 1));
        store_ds(ds, step - 1);
    }
    // Computes P, dV and dS of a step. kFirst: of an item; otherwise also dK of the step before. kOwner: also dQ of the
    // step before. Nothing is in flight before and after. behind: the tile's first query minus the warp's first key;
    // if <= 0, some queries precede some keys. dq_left: dQ of two steps before is still in registers.
    template <bool kFirst, bool kOwner, typename Borders>
    __device__ void visit_step(int behind, const Borders& borders, bool dq_left) {
        start_step_scores();
        if (!kFirst) use_ds();
        start_step_dp();
        if (dq_left) store_dq(step - 2);
        ptx::wgmma_wait<kFirst ? 1 : 2>();   // S; in flight: dK, dP
        ptx::pin(s);
        if (behind <= 0) mask_past(s, behind, lane);
        borders.mask(s, behind, lane);
#pragma unroll
        for (float& x : s) x = exp2_approx(x * mul);
#pragma unroll
        for (int j = 0; j < 4; j++) as_operand(p[j], s, j);
        start_sums(dv, p, state.dout_tile(step));
        if (kOwner) start_dq(step - 1);
        ptx::wgmma_wait<kOwner ? 2 : 1>();   // dK, dP; in flight: dV, dQ
        ptx::pin(dp);
        hold(ds);
        if (!kFirst) release_step(step - 1);
#pragma unroll
        for (int i = 0; i < 32; i++) dp[i] *= s[i];
#pragma unroll
        for (int j = 0; j < 4; j++) as_operand(ds[j], dp, j);
        ptx::wgmma_wait<0>();
        hold(p);
        step++;
    }
    // Runs `visits` steps, whose queries attend to these keys, up to dK of the last one. Computes dQ of those of them,
    // except for the last, that this consumer owns.
    template <typename Borders>
    __device__ void visit(int visits, int group, int behind, const Borders& borders) {
        if (visits <= 0) return;
        int left = group;
        auto next_tile = [&] {
            if (--left == 0) left = group, behind -= P::kQueries;
        };
        visit_step<true, false>(behind, borders, false);
        next_tile();
        int number = 1;
        if (P::owns(consumer, 1) && number < visits) {
            visit_step<false, false>(behind, borders, false);
            next_tile();
            number++;
        }
        bool dq_left = false;
        while (number < visits) {
            visit_step<false, true>(behind, borders, false);
            next_tile();
            dq_left = true;
            if (++number == visits) break;
            visit_step<false, false>(behind, borders, true);
            next_tile();
            dq_left = false;
            number++;
        }
        use_ds();
        if (dq_left) store_dq(step - 2);
        ptx::wgmma_wait<0>();
        hold(ds);
        release_step(step - 1);
    }
    // Stores the warp's 16 rows of d to global memory through shared memory.
    __device__ void store_own(const CUtensorMap& map, const float (&d)[32], int part, int row, int panel, int b) {
        const uint32_t own = state.shared + P::kResultsAt + (warp * 2 + part) * 16 * kPanelRowBytes;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            uint32_t columns[4];
            as_operand(columns, d, j);
            ptx::store_matrix_x4(own + panel_offset(lane & 15, 2 * j + (lane >> 4)), columns);
        }
        ptx::fence_async();
        __syncwarp();
        if (lane == 0) {
            ptx::store_box(&map, own, row, panel, b);
            ptx::bulk_commit();
        }
    }
    // Stores dV and dK.
    __device__ void store_results(const CUtensorMap& map, float softmax_mul, int row, int panel, int panels_to_values,
                                  int b) {
        if (lane == 0) ptx::bulk_wait_read<0>();   // the results of the previous item
        __syncwarp();
        store_own(map, dv, 0, row, panel + panels_to_values, b);
#pragma unroll
        for (float& x : dk) x *= softmax_mul;
        store_own(map, dk, 1, row, panel, b);
    }
    // Computes dQ of those of the item's remaining steps, up to `end` - 1, that this consumer owns. Calls store(),
    // which is to store dV and dK, during the first one.
    template <typename Store> __device__ void finish(uint32_t begin, uint32_t end, Store store) {
        uint32_t done = step == begin ? begin : step - 1;
        while (step < end && step < done + 2) skip();
        if (P::owns(consumer, done - begin)) {
            start_dq(done);
            store();
            ptx::wgmma_wait<0>();
            store_dq(done);
        } else {
            store();
        }
        while (++done < end) {
            while (step < end && step < done + 2) skip();
            if (!P::owns(consumer, done - begin)) continue;
            start_dq(done);
            ptx::wgmma_wait<0>();
            store_dq(done);
        }
    }
};

template <bool kBorders>
__device__ void consume(FusedState<FusedTiles64> state, char* memory, int consumer, const CUtensorMap& out_map,
                        const AttentionShape& shape, const Schedule& schedule) {
    using P = Fused<FusedTiles64>;
    const int warp = static_cast<int>(uniform(threadIdx.x / 32)), lane = static_cast<int>(threadIdx.x) % 32;
    const int NH = static_cast<int>(shape.NH), NKV = static_cast<int>(shape.NKV);
    Consumer64 c{{state, memory, static_cast<int>(uniform(consumer)), warp, lane, shape.softmax_mul * kLog2e},
                 {}, {}, {}, {}, {}, {}, {}};
    while (true) {
        state.items().await_full(c.item);
        const uint32_t item = uniform(state.number(memory, c.item));
        if (item >= schedule.items) break;
        const uint32_t begin = c.step;
        const Steps steps = Steps::of<kBorders, P::kKeys>(shape, schedule, item);
        const int row = steps.at.tile * P::kKeys + warp * 16;
        const std::conditional_t<kBorders, EndQueries, NoBorders> borders(shape, steps.at.b, row, lane);
#pragma unroll
        for (int i = 0; i < 32; i++) c.dk[i] = c.dv[i] = 0;
        c.visit((steps.end - steps.first - c.consumer) * schedule.group, schedule.group,
                (steps.end - 1) * P::kQueries - row, borders);
        c.finish(begin, begin + (steps.end - steps.first) * schedule.group, [&] {
            c.store_results(out_map, shape.softmax_mul, row, NH + steps.at.head, NKV, steps.at.b);
        });
        if (lane == 0) state.items().arrive_empty(c.item);
        c.item++;
    }
    if (lane == 0) ptx::bulk_wait_read<0>();   // shared memory must outlive the copies
}

#endif

}  // namespace cuda
