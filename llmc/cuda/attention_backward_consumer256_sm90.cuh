// The consumers of the fused attention backward at head dim 256, which compute dK and dV.
#pragma once
#include "llmc/cuda/attention_backward_fused_sm90.cuh"

namespace cuda {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900   // as in ptx.cuh

// One of two consumer warpgroups of the same 64 keys. The first one (kValues) computes S, P and dV, the second one dP,
// dS and dK. P alone goes from the first to the second, by shared memory, to the thread of the same place. So P and dS
// are operands in registers, no tile is read twice, and products of one warpgroup run during the exponentials of the
// other. A pass of the loop starts dV (or dK) of step n - 1 and S (or dP) of step n, and begins with no product in
// flight, as at head dim 64.
// With a soft cap (kCap), the statistic of S stays apart from S, and what is passed is P times the cap's derivative.
template <bool kValues, bool kCap> struct Consumer256 : FusedConsumer<FusedTiles256> {
    static constexpr bool kCapped = kValues && kCap;
    static constexpr uint32_t kProbBytes = 64 * P::kQueries * 4;   // P of a step, fp32
    static_assert(2 * kProbBytes == P::kStepsAt - P::kGradsAt);
    const SoftCap<bf16, kCap> scores;
    float sums[128];       // dV or dK
    float d[32];           // S or dP
    uint32_t part[4][4];   // P or dS as operands
    float stat[kCapped ? 32 : 1] = {};
    uint32_t item = 0, step = 0;   // current indices

    __device__ uint32_t own_keys() const { return state.key_tile(item) + (kValues ? 0 : P::kKeyBytes); }
    __device__ float4* probs(uint32_t of_step) const {
        return reinterpret_cast<float4*>(memory + P::kGradsAt + of_step % 2 * kProbBytes) + threadIdx.x % 128;
    }
    // Starts d = K Q^T or V dO^T, and a statistic.
    __device__ void start_scores() {
        state.queries().await_full(step);   // also brings the statistics
        if (!kValues) state.douts().await_full(step);
        const Operand a(own_keys(), P::kKeyPanel);
        const Operand b(kValues ? state.query_tile(step) : state.dout_tile(step), P::kQueryPanel);
        ptx::pin(d);
        ptx::wgmma_fence();
        if constexpr (kCapped) {
            ptx::pin(stat);
            start_with_statistic<false>(stat, step);
        } else {
            start_with_statistic<!kValues>(d, step);
        }
#pragma unroll
        for (int i = 0; i < P::HS / 16; i++) {
            static_assert(P::kKeyPanel == P::kQueryPanel);
            const uint32_t at = i / 4 * P::kKeyPanel + i % 4 * 32;
            ptx::wgmma<64, false, false>(d, a.at(at), b.at(at), !kCapped || i > 0);
        }
        ptx::wgmma_commit();
    }
    // Starts sums += P dO or dS Q of a step. Products that have begun with dS show that what it was computed from has
    // left the buffer of P; an arrival after the loads would not wait for them.
    __device__ void start_sums(uint32_t of_step) {
        if (kValues) state.douts().await_full(of_step);
        const Operand b(kValues ? state.dout_tile(of_step) : state.query_tile(of_step), P::kQueryPanel);
        ptx::pin(sums);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; i++) ptx::wgmma<256, true>(sums, part[i], b.rows(i), true);
        ptx::wgmma_commit();
        if (!kValues && lane == 0) state.grads().arrive_empty(of_step);
    }
    // Keeps the operands of products in flight in their registers until this place.
    __device__ void hold() {
#pragma unroll
        for (auto& four : part) {
#pragma unroll
            for (uint32_t& x : four) x = ptx::opaque(x);
        }
    }
    // What is passed for an element of d, P or, with a cap, a score, which becomes P.
    __device__ float passed(int i) {
        if constexpr (kCapped) {
            const float slope = scores.slope(d[i]);
            d[i] = exp2_approx(fmaf(d[i], scores.mul * kLog2e, stat[i] * mul));
            return d[i] * slope;
        } else {
            return d[i];
        }
    }
    // Computes P of a step in d and passes it on.
    template <typename Borders> __device__ void pass_probs(int behind, const Borders& borders) {
        cap_scores(d, scores);
        if (behind <= 0) mask_past(d, behind, lane);
        borders.mask(d, behind, lane);
        if constexpr (!kCapped) {
#pragma unroll
            for (float& x : d) x = exp2_approx(x * mul);
        }
        state.grads().await_empty(step);
        float4* const to = probs(step);
#pragma unroll
        for (int i = 0; i < 8; i++)
            to[128 * i] = make_float4(passed(4 * i), passed(4 * i + 1), passed(4 * i + 2), passed(4 * i + 3));
        __syncwarp();
        if (lane == 0) state.grads().arrive_full(step);
    }
    // Multiplies d by P of a step.
    __device__ void take_probs() {
        state.grads().await_full(step);
        const float4* const from = probs(step);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float4 p = from[128 * i];
            d[4 * i] *= p.x, d[4 * i + 1] *= p.y, d[4 * i + 2] *= p.z, d[4 * i + 3] *= p.w;
        }
    }
    // Computes P or dS of a step, and the sums of the one before, unless this is the first one of an item. behind: the
    // tile's first query minus the warp's first key; if <= 0, some queries precede some keys.
    template <bool kFirst, typename Borders> __device__ void visit_step(int behind, const Borders& borders) {
        if (!kFirst) start_sums(step - 1);
        start_scores();
        if (!kFirst) {
            ptx::wgmma_wait<1>();
            hold();
            release_step(step - 1);
        }
        ptx::wgmma_wait<0>();
        ptx::pin(d);
        if constexpr (kCapped) ptx::pin(stat);
        if constexpr (kValues) pass_probs(behind, borders);
        else take_probs();
#pragma unroll
        for (int j = 0; j < 4; j++) as_operand(part[j], d, j);
        step++;
    }
    // Stores the sums through K's or V's place, which only this warpgroup has read.
    __device__ void store_sums(const CUtensorMap& map, int row, int place, int b) {
        ptx::named_sync<128>(1 + consumer);   // until no product of another warp reads it
        const uint32_t own = own_keys() + warp % 4 * 16 * kPanelRowBytes;
        stage_rows<P::kKeyPanel>(own, sums, lane);
        ptx::fence_async();
        __syncwarp();
        if (lane > 0) return;
        for (uint32_t p = 0; p < P::kPanels; p++)
            HeadPanels<P::kDim>::store(map, own + p * P::kKeyPanel, row, place, static_cast<int>(p), b);
        ptx::bulk_commit();
        ptx::bulk_wait_read<0>();
        state.items().arrive_empty(item);
    }
};

template <bool kValues, bool kBorders, bool kCap>
__device__ void consume_as(FusedState<FusedTiles256> state, char* memory, const CUtensorMap& out_map,
                           const AttentionShape& shape, const Schedule& schedule) {
    using P = Fused<FusedTiles256>;
    const int warp = static_cast<int>(uniform(threadIdx.x / 32)), lane = static_cast<int>(threadIdx.x) % 32;
    Consumer256<kValues, kCap> c{{state, memory, kValues ? 0 : 1, warp, lane, shape.softmax_mul * kLog2e},
                                 shape.scores<bf16, kCap>(), {}, {}, {}};
    while (true) {
        state.items().await_full(c.item);
        const uint32_t item = uniform(state.number(memory, c.item));
        if (item >= schedule.items) break;
        const Steps steps = Steps::of<kBorders, P::kKeys>(shape, schedule, item);
        const int row = steps.at.tile * P::kKeys + warp % 4 * 16, visits = (steps.end - steps.first) * schedule.group;
        const std::conditional_t<kBorders, EndQueries, NoBorders> borders(shape, steps.at.b, row, lane);
#pragma unroll
        for (float& x : c.sums) x = 0;
        int left = schedule.group, behind = (steps.end - 1) * P::kQueries - row;
        c.template visit_step<true>(behind, borders);
        for (int number = 1; number < visits; number++) {
            if (--left == 0) left = schedule.group, behind -= P::kQueries;
            c.template visit_step<false>(behind, borders);
        }
        c.start_sums(c.step - 1);
        ptx::wgmma_wait<0>();
        c.hold();
        ptx::pin(c.sums);
        c.release_step(c.step - 1);
        if (!kValues) {
#pragma unroll
            for (float& x : c.sums) x *= shape.softmax_mul;
        }
        const int head = static_cast<int>(shape.NH + (kValues ? shape.NKV : 0)) + steps.at.head;
        c.store_sums(out_map, row, head * P::kPanels, steps.at.b);
        c.item++;
    }
}

template <bool kBorders, bool kCap = false>
__device__ void consume(FusedState<FusedTiles256> state, char* memory, int consumer, const CUtensorMap& out_map,
                        const AttentionShape& shape, const Schedule& schedule) {
    if (consumer == 0) consume_as<true, kBorders, kCap>(state, memory, out_map, shape, schedule);
    else consume_as<false, kBorders, kCap>(state, memory, out_map, shape, schedule);
}

#endif

}  // namespace cuda
