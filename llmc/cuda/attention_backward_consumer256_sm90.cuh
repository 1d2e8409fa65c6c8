// The consumers of the fused attention backward at head dim 256.
#pragma once
#include "llmc/cuda/attention_backward_fused_sm90.cuh"

namespace cuda {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900   // as in ptx.cuh

// Where the dQ of an item's steps are added, in the order of the steps.
struct DqUnits {
    const DqSums& sums;
    uint32_t first_unit;     // of the group's first head
    int tile, left, group;   // of queries; heads of the group

    __device__ DqUnits(const Steps& steps, const DqSums& sums, int group)
        : sums(sums), first_unit(steps.first_head * sums.tiles), tile(steps.end - 1), left(group), group(group) {}
    __device__ uint32_t unit() const { return first_unit + (group - left) * sums.tiles + tile; }
    __device__ void next() {
        if (--left == 0) left = group, tile--;
    }
};

// One of two consumer warpgroups of the same 64 keys. Each computes S and dP of 32 of a step's queries, for both, and
// dK, dV and dQ of 128 of the 256 columns. A pass of its loop starts dV and dK of step n - 1, adds dQ of step n - 2 to
// memory meanwhile, and starts S and dP of step n; P of step n is computed during dP. Last it computes dQ of step
// n - 1, in the registers of S and dP, while the consumers exchange P and dS of step n. A pass begins with no product
// in flight, as at head dim 64.
struct Consumer256 : FusedConsumer<FusedTiles256> {
    static constexpr uint32_t kOwnPanels = 2;
    float dk[64], dv[64], dq[64];
    float s[16], dp[16];
    uint32_t item = 0, step = 0;   // current indices
    // Of the completed dQ and of the next one: the unit of the sums, and whether nothing was added to it before.
    uint32_t unit = 0, next_unit = 0;
    bool first = false, next_first = false;

    // Starts s = K or V, times 32 rows of a tile, and a statistic, summed over the head dim.
    template <bool kDelta> __device__ void start_scores(float (&s)[16], uint32_t own, uint32_t tile) const {
        const uint32_t rows = tile + consumer * 32 * kPanelRowBytes;
        const Operand a(own, P::kKeyPanel), b(rows, P::kQueryPanel);
        ptx::pin(s);
        ptx::wgmma_fence();
        start_with_statistic<kDelta>(s, step, consumer * 32);
#pragma unroll
        for (int i = 0; i < P::HS / 16; i++) {
            static_assert(P::kKeyPanel == P::kQueryPanel);
            const uint32_t at = i / 4 * P::kKeyPanel + i % 4 * 32;
            ptx::wgmma<32, false, false>(s, a.at(at), b.at(at), true);
        }
        ptx::wgmma_commit();
    }
    // Starts sums += P or dS (64 keys, 64 queries), times this consumer's columns of a tile of queries; no commit.
    __device__ void start_sums(float (&sums)[64], uint32_t weights, uint32_t tile) const {
        const Operand a(weights, P::kGradBytes), b(tile + consumer * kOwnPanels * P::kQueryPanel, P::kQueryPanel);
        ptx::pin(sums);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; i++)
            ptx::wgmma<128, false, true>(sums, a.columns(i), b.rows(i), true);
    }
    // Starts dV and dK of a step, when both consumers have stored its P and dS.
    __device__ void start_dv_dk(uint32_t of_step) {
        state.grads().await_full(of_step);
        start_sums(dv, state.prob_tile(of_step), state.dout_tile(of_step));
        start_sums(dk, state.grad_tile(of_step), state.query_tile(of_step));
        ptx::wgmma_commit();
    }
    // Starts this consumer's columns of dQ = dS K.
    __device__ void start_dq(uint32_t of_step) {
        const uint32_t keys = state.key_tile(item) + consumer * kOwnPanels * P::kKeyPanel;
        const Operand a(state.grad_tile(of_step), P::kGradBytes), b(keys, P::kKeyPanel);
        ptx::pin(dq);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < P::kKeys / 16; i++)
            ptx::wgmma<128, true, true>(dq, a.rows(i), b.rows(i), i > 0);
        ptx::wgmma_commit();
    }
    // Waits for the end of dQ, the last product in flight, which is added next, and releases the step's P and dS.
    __device__ void await_dq(uint32_t of_step) {
        unit = next_unit, first = next_first;
        ptx::wgmma_wait<0>();
        ptx::pin(dq);
        if (lane == 0) state.grads().arrive_empty(of_step);
    }
    // Stores the warp's 16 keys and this consumer's 32 queries of P or dS as bf16.
    __device__ void store_part(uint32_t tile, const float (&d)[16]) const {
        const uint32_t to = tile + warp % 4 * 16 * kPanelRowBytes + panel_offset(lane & 15, 4 * consumer + (lane >> 4));
#pragma unroll
        for (int j = 0; j < 2; j++) {
            uint32_t part[4];
            as_operand(part, d, j);
            ptx::store_matrix_x4(to ^ (2 * j << 4), part);
        }
    }
    // Waits until the turn has come to add the next dQ. As in add_sums, key tile j adds after the tiles before it, and
    // the first one stores; a tile's turn is over when its eight warps have passed it on.
    template <bool kBorders>
    __device__ void await_turn(DqUnits& at, const AttentionShape& shape, const Steps& steps) {
        uint32_t turn = steps.at.tile;
        if (kBorders) {
            const int t = at.tile * P::kQueries;
            const uint32_t row = steps.at.b * static_cast<uint32_t>(shape.T) + t;
            turn -= static_cast<uint32_t>(shape.first_key_of_row(row, t)) / P::kKeys;
        }
        next_unit = at.unit(), next_first = turn == 0;
        while (ptx::load_acquire(at.sums.turns + next_unit) < turn * P::kWarps) {}
        at.next();
    }
    // Adds the completed dQ to the sums in memory.
    __device__ void add_dq(const DqSums& sums) {
        float* const to = sums.data + static_cast<uint64_t>(unit) * (P::kSumBytes / 4) + consumer * (P::kSumBytes / 8)
                          + threadIdx.x % 128 * 4;
        if (first) {
#pragma unroll
            for (int i = 0; i < 16; i++)
                reinterpret_cast<float4*>(to)[128 * i] = make_float4(dq[4 * i], dq[4 * i + 1], dq[4 * i + 2],
                                                                    dq[4 * i + 3]);
            return;
        }
#pragma unroll
        for (int i = 0; i < 16; i++)
            ptx::add_global4(to + 512 * i, dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
    }
    // Passes the turn on. Waits until the warp's additions are performed, so it should come some time after them.
    __device__ void pass_turn(const DqSums& sums) const {
        __syncwarp();
        if (lane == 0) ptx::add_release(sums.turns + unit, 1);
    }
    // Runs a step up to its dS, and what is left of the two before it. kFirst: of an item. dq_left: dQ of two steps
    // before is still in registers. behind: the first of the consumer's queries minus the warp's first key; if <= 0,
    // some queries precede some keys. await: awaits the turn of the dQ that is computed.
    template <bool kFirst, typename Borders, typename Await>
    __device__ void visit_step(int behind, const Borders& borders, const DqSums& sums, bool dq_left, Await await) {
        if (!kFirst) start_dv_dk(step - 1);
        if (!kFirst && dq_left) add_dq(sums);
        state.queries().await_full(step);
        start_scores<false>(s, state.key_tile(item), state.query_tile(step));
        state.douts().await_full(step);
        start_scores<true>(dp, state.key_tile(item) + P::kKeyBytes, state.dout_tile(step));
        if (!kFirst) await();
        if (!kFirst && dq_left) pass_turn(sums);
        ptx::wgmma_wait<1>();   // dP is still in flight
        ptx::pin(s);
        if (!kFirst) release_step(step - 1);
        if (behind <= 0) mask_past(s, behind, lane);
        borders.mask(s, behind, lane);
#pragma unroll
        for (float& x : s) x = exp2_approx(x * mul);
        state.grads().await_empty(step);
        store_part(state.prob_tile(step), s);
        ptx::wgmma_wait<0>();
        ptx::pin(dp);
#pragma unroll
        for (int i = 0; i < 16; i++) dp[i] *= s[i];
        store_part(state.grad_tile(step), dp);
        ptx::fence_async();
        __syncwarp();
        if (lane == 0) state.grads().arrive_full(step);
        if (kFirst) {
#pragma unroll
            for (float& x : dq) x = 0;   // or it would occupy registers in this step
        } else {
            start_dq(step - 1);
            await_dq(step - 1);
        }
        step++;
    }
    // Stores the warp's 16 rows of d, which the two products of its keys no longer need, through K's or V's place.
    __device__ void store_own(const CUtensorMap& map, const float (&d)[64], uint32_t tile, int row, int place, int b) {
        const uint32_t own = tile + consumer * kOwnPanels * P::kKeyPanel + warp % 4 * 16 * kPanelRowBytes;
        stage_rows<P::kKeyPanel>(own, d, lane);
        ptx::fence_async();
        __syncwarp();
        if (lane > 0) return;
        for (uint32_t p = 0; p < kOwnPanels; p++)
            HeadPanels<P::kDim>::store(map, own + p * P::kKeyPanel, row, place, consumer * kOwnPanels + p, b);
        ptx::bulk_commit();
    }
};

template <bool kBorders>
__device__ void consume(FusedState<FusedTiles256> state, char* memory, int consumer, const CUtensorMap& out_map,
                        const DqSums& sums, const AttentionShape& shape, const Schedule& schedule) {
    using P = Fused<FusedTiles256>;
    const int warp = static_cast<int>(uniform(threadIdx.x / 32)), lane = static_cast<int>(threadIdx.x) % 32;
    Consumer256 c{{state, memory, static_cast<int>(uniform(consumer)), warp, lane, shape.softmax_mul * kLog2e},
                  {}, {}, {}, {}, {}};
    while (true) {
        state.items().await_full(c.item);
        const uint32_t item = uniform(state.number(memory, c.item));
        if (item >= schedule.items) break;
        const Steps steps = Steps::of<kBorders, P::kKeys>(shape, schedule, item);
        const int row = steps.at.tile * P::kKeys + warp % 4 * 16, visits = (steps.end - steps.first) * schedule.group;
        const std::conditional_t<kBorders, EndQueries, NoBorders> borders(shape, steps.at.b, row, lane);
        DqUnits units(steps, sums, schedule.group);
        auto await = [&] { c.await_turn<kBorders>(units, shape, steps); };
#pragma unroll
        for (int i = 0; i < 64; i++) c.dk[i] = c.dv[i] = 0;
        int left = schedule.group, behind = (steps.end - 1) * P::kQueries + c.consumer * 32 - row;
        c.visit_step<true>(behind, borders, sums, false, await);
        for (int number = 1; number < visits; number++) {
            if (--left == 0) left = schedule.group, behind -= P::kQueries;
            c.visit_step<false>(behind, borders, sums, number >= 2, await);
        }
        c.start_dv_dk(c.step - 1);
        if (visits >= 2) c.add_dq(sums);
        c.start_dq(c.step - 1);
        ptx::wgmma_wait<1>();   // dQ is still in flight
        c.release_step(c.step - 1);
        if (visits >= 2) c.pass_turn(sums);
        await();
        c.await_dq(c.step - 1);
        ptx::pin(c.dv);
        ptx::pin(c.dk);
        c.add_dq(sums);
        state.grads().await_empty(c.step + 1);   // until both consumers have completed the last step
        const int head = static_cast<int>(shape.NH) + steps.at.head, b = steps.at.b, NKV = static_cast<int>(shape.NKV);
        const uint32_t keys = state.key_tile(c.item);
        c.store_own(out_map, c.dv, keys + P::kKeyBytes, row, (head + NKV) * P::kPanels, b);
#pragma unroll
        for (float& x : c.dk) x *= shape.softmax_mul;
        c.store_own(out_map, c.dk, keys, row, head * P::kPanels, b);
        c.pass_turn(sums);
        if (lane == 0) ptx::bulk_wait_read<0>(), state.items().arrive_empty(c.item);
        c.item++;
    }
}

#endif

}  // namespace cuda
