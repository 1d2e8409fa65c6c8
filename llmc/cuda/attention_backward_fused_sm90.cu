// Attention backward on compute capability 9.0 in one kernel: blocks own keys, sum dk and dv in registers and add what
// they know of dq to sums in memory.
#include "llmc/cuda/attention_backward_fused_sm90.cuh"

namespace cuda {
namespace {

struct FusedMaps {
    CUtensorMap keys, queries, douts, dkeys;
};

// The thread that takes items and orders copies into shared memory.
template <int HS, bool kDocuments>
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
    for_steps<kDocuments>(shape, schedule, take, load_own, [&](const Steps& steps, int tile, int i, uint32_t step) {
        const int row = tile * P::kQueries, b = steps.at.b, panel = (steps.at.head * schedule.group + i) * P::kPanels;
        const uint32_t queries_full = state.queries().full_of(step), douts_full = state.douts().full_of(step);
        state.queries().await_empty(step);
        ptx::barrier_expect(queries_full, P::kQueryBytes);
        ptx::load_box(state.query_tile(step), &maps.queries, queries_full, row, panel, b);
        ptx::barrier_expect(douts_full, P::kQueryBytes);
        ptx::load_box(state.dout_tile(step), &maps.douts, douts_full, row, panel, b);
    });
}

// The warp that fetches lse and delta of the queries: rows of T floats begin anywhere, which the copy engine cannot do.
template <int HS, bool kDocuments>
__device__ void load_stats(FusedState<HS> state, char* memory, const float* lse, const float* delta,
                           const AttentionShape& shape, const Schedule& schedule, int lane) {
    using P = Fused<HS>;
    const int T = static_cast<int>(shape.T);
    auto take = [&](uint32_t item) { return warp_uniform(lane == 0 ? state.follow(memory, item) : 0); };
    for_steps<kDocuments>(shape, schedule, take, no_item, [&](const Steps& steps, int tile, int i, uint32_t step) {
        const int query = tile * P::kQueries + lane;
        const uint64_t row = static_cast<uint64_t>(steps.first_head + i) * static_cast<uint32_t>(T) + query;
        const bool inside[2] = {query < T, query + 32 < T};
        float minus_lse[2], minus_delta[2];   // no weight beyond the end
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

// The thread that adds a consumer's share of dq to the sums in memory. In turn: tile j of keys after those before it.
// The first one stores. A turn is passed on when the addition is done, not only read. It is asked for before the sum is
// there: most often it has come by then.
template <int HS, bool kDocuments, bool kInTurn>
__device__ void add_sums(FusedState<HS> state, char* memory, int consumer, QuerySums sums,
                         const AttentionShape& shape, const Schedule& schedule) {
    using P = Fused<HS>;
    const uint32_t barriers = ptx::opaque(state.sums(consumer).full);
    const uint32_t own = ptx::opaque(state.shared + state.sums_at(consumer, 0));
    const Slots<P::kSumStages> ring{barriers, barriers + 8 * P::kSumStages};
    auto take = [&](uint32_t item) { return state.follow(memory, item); };
    for_steps<kDocuments>(shape, schedule, take, no_item, [&](const Steps& steps, int tile, int i, uint32_t step) {
        const uint32_t unit = sums.unit(0, steps.first_head + i, tile, consumer);
        float* const to = sums.data + static_cast<uint64_t>(unit) * (P::kSumBytes / 4);
        const uint32_t from = own + ring.stage(step) * P::kSumBytes;
        uint32_t turn = ptx::opaque(steps.first) / (P::kKeys / P::kQueries);
        if (kDocuments) {
            const uint32_t token = steps.at.b * static_cast<uint32_t>(shape.T) + tile * P::kQueries;   // of all
            turn -= static_cast<uint32_t>(shape.document_start(0, token)) / P::kKeys;
        }
        if (kInTurn && turn > 0) {
            while (ptx::load_acquire(sums.turns + unit) != turn) {}
            ptx::fence_async_global();
        }
        ring.await_full(step);
        if (kInTurn && turn == 0) ptx::bulk_store(to, from, P::kSumBytes);
        else ptx::bulk_add(to, from, P::kSumBytes);
        ptx::bulk_commit();
        ptx::bulk_wait_read<0>();
        ring.arrive_empty(step);
        if (kInTurn) {
            ptx::bulk_wait<0>();
            ptx::fence_async_global();
            ptx::store_release(sums.turns + unit, turn + 1);
        }
    });
    ptx::bulk_wait<0>();
}

// One consumer warpgroup of 64 keys. Its products in order: of step n the scores and the gradients of weights (dp),
// dv, dk; then dq of step n - 1 and behind it the scores of step n + 1. So the tensor cores have dp while exponentials
// are worked out, dv while ds is, scores while dq is put away, and the other consumer's ds is wanted a step late. Only
// dk is waited for with nothing behind it: ptxas has ds in registers that dq takes. The other consumer fills that gap.
template <int HS> struct FusedConsumer {
    using P = Fused<HS>;
    const FusedState<HS> state;
    char* const memory;
    const int consumer, warp, lane;   // warp: of the block
    const float mul;
    float dk[HS / 2], dv[HS / 2];
    float s[32], dp[32];
    uint32_t p[4][4], ds[4][4];   // weights and gradients of scores as operands; products that read them run on
    uint32_t item = 0, step = 0;  // numbers of the present ones

    // First byte of this consumer's keys (opaque: no register is left for descriptors of all its parts), and of this
    // warp's 16 keys in the buffer of a step's ds. No shuffle here: one lane alone asks too.
    __device__ uint32_t own_keys() const {
        return ptx::opaque(state.key_tile(item) + consumer * 64 * kPanelRowBytes);
    }
    __device__ uint32_t own_grads(uint32_t of_step) const {
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
    // ds to shared memory, for both consumers.
    __device__ void put_grads() const {
        state.grads().await_empty(step);
        const uint32_t to = own_grads(step) + panel_offset(lane & 15, lane >> 4);
#pragma unroll
        for (int j = 0; j < 4; j++) ptx::store_matrix_x4(to ^ (2 * j << 4), ds[j]);   // chunks 2 j and 2 j + 1
        ptx::fence_async();
        __syncwarp();
        if (lane == 0) state.grads().arrive_full(step);
    }
    __device__ void release_step(uint32_t of_step) const {
        if (lane == 0) state.queries().arrive_empty(of_step);
    }
    // A step whose queries come before all of these keys.
    __device__ void skip() {
#pragma unroll
        for (int j = 0; j < 4; j++) ds[j][0] = ds[j][1] = ds[j][2] = ds[j][3] = 0;
        put_grads();
        state.queries().await_full(step), state.douts().await_full(step), state.stats().await_full(step);
        release_step(step++);
    }
    // From scores and dp under way to the end of the step but for dq; nothing is under way then. behind: the tile's
    // first query minus the warp's first key; until 0 some queries come before some keys.
    template <typename Borders> __device__ void use_scores(int behind, const Borders& borders) {
        ptx::wgmma_wait<1>();   // dp runs on
        ptx::pin(s);
        if (behind <= 0) mask_past(s, behind, lane);
        borders.mask(s, behind, lane);
        state.stats().await_full(step);
        const float* stats = reinterpret_cast<const float*>(memory + state.stats_at(step)) + 2 * (lane % 4);
#pragma unroll
        for (int i = 0; i < 32; i += 2) {   // columns side by side
            const float2 minus_lse = *reinterpret_cast<const float2*>(stats + 8 * (i / 4));
            s[i] = exp2_approx(fmaf(s[i], mul, minus_lse.x));
            s[i + 1] = exp2_approx(fmaf(s[i + 1], mul, minus_lse.y));
        }
#pragma unroll
        for (int j = 0; j < 4; j++) as_operand(p[j], s, j);
        start_sums<HS>(dv, p, state.dout_tile(step), P::kQueryPanel);
        ptx::wgmma_wait<1>();   // dv runs on
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
        put_grads();
        ptx::wgmma_wait<0>();
        release_step(step++);
    }
    // Starts this consumer's columns of dq: ds of both consumers times the keys.
    __device__ void start_query_sums(float (&dq)[HS / 4], uint32_t of_step) const {
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
    // Puts them away once they are done, each thread its registers in a place of its own.
    __device__ void put_query_sums(float (&dq)[HS / 4], uint32_t of_step) const {
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
    // The warp's 16 rows of d to global memory through its part of the buffers of ds, one panel in each.
    __device__ void store_own(const CUtensorMap& map, float (&d)[HS / 2], int first_buffer, int row, int panel, int b) {
#pragma unroll
        for (int j = 0; j < HS / 16; j++) {
            uint32_t part[4];
            as_operand(part, d, j);
            const uint32_t to = own_grads(first_buffer + j / 4);
            ptx::store_matrix_x4(to + panel_offset(lane & 15, 2 * (j % 4) + (lane >> 4)), part);
        }
        ptx::fence_async();
        __syncwarp();
        if (lane > 0) return;
        for (int i = 0; i < P::kPanels; i++) ptx::store_box(&map, own_grads(first_buffer + i), row, panel + i, b);
        ptx::bulk_commit();
    }
    __device__ void await_stored() const {
        if (lane == 0) ptx::bulk_wait_read<0>();
        __syncwarp();
    }
    // Steps that these keys see, with dq of the step before the one before.
    template <typename Borders>
    __device__ void visit(const Steps& steps, int group, int first_key, const Borders& borders) {
        int visits = (steps.end - steps.first - consumer) * group, left = group;
        int behind = (steps.end - 1) * P::kQueries - first_key;
        for (int number = 0; number < visits; number++) {
            if (number == 2) break;
            start_step_scores();
            start_step_dp();
            await_stored();   // the results of the item before
            use_scores(behind, borders);
            if (--left == 0) left = group, behind -= P::kQueries;
        }
        for (visits -= 2; visits > 0; visits--) {
            float dq[HS / 4];
            start_query_sums(dq, step - 2);
            start_step_scores();
            ptx::wgmma_wait<1>();   // scores run on
            put_query_sums(dq, step - 2);
            start_step_dp();
            use_scores(behind, borders);
            if (--left == 0) left = group, behind -= P::kQueries;
        }
        ptx::pin(dk);
        ptx::pin(dv);
    }
    // dq of steps from `done` to `end` (numbers), and those that come before all of these keys.
    __device__ void finish(uint32_t done, uint32_t end) {
        await_stored();
        for (; done < end; done++) {
            while (step < end && step < done + 2) skip();
            float dq[HS / 4];
            start_query_sums(dq, done);
            ptx::wgmma_wait<0>();
            put_query_sums(dq, done);
        }
    }
};

template <int HS, bool kDocuments>
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
            const Steps steps = Steps::of<kDocuments>(shape, schedule, item);
            const int row = steps.at.tile * P::kKeys + warp * 16;
            const std::conditional_t<kDocuments, EndQueries, NoBorders> borders(shape, steps.at.b, row, lane);
#pragma unroll
            for (int i = 0; i < HS / 2; i++) c.dk[i] = c.dv[i] = 0;
            c.visit(steps, schedule.group, row, borders);
        }
        // Worked out again: nothing of this lies in registers during the visits.
        const uint32_t again = warp_uniform(FusedState<HS>::number(memory, c.item));
        const Steps steps = Steps::of<kDocuments>(shape, schedule, again);
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
//       reads this key head (kDocuments: those of j's document); sums_t += sum_j ds_tj k_j over the block's keys j;
//       p_tj = exp(s_tj - lse_t), ds_tj = p_tj (dout_t . v_j - delta_t)
// Source: Dao, FlashAttention-2, arXiv 2307.08691, algorithm 2; Shah et al., FlashAttention-3, arXiv 2407.08608; PTX
//         ISA 9.0, wgmma, cp.async.bulk.tensor and cp.reduce.async.bulk.
// Traffic: k, v read and dk, dv written once; q, dout, lse, delta of the group read and sums (fp32) added to once per
//          block of keys that sees them (mostly L2).
// Requires: delta; taken and turns, or sums, of zeros; sm_90a; bf16, HS 64 or 128, 16-byte aligned; dynamic shared
//           memory of kSharedBytes.
// Parallel: a block takes 128 keys of one key head after the other (Schedule), each of two warpgroups 64 of them, and
//           meets 64 queries at a time, those of all heads of the group; of the last warpgroup a thread orders copies,
//           a warp fetches statistics, two threads add sums.
template <int HS, bool kDocuments, bool kInTurn>
__global__ void __launch_bounds__(Fused<HS>::kThreads, 1)
attention_backward_fused_sm90_kernel(const __grid_constant__ FusedMaps maps, QuerySums sums, const float* lse,
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
        if (warp == 0 && lane == 0) load_tiles<HS, kDocuments>(state, memory, sums.taken, maps, shape, schedule);
        else if (warp == 1) load_stats<HS, kDocuments>(state, memory, lse, delta, shape, schedule, lane);
        else if (warp >= 2 && lane == 0)
            add_sums<HS, kDocuments, kInTurn>(state, memory, warp - 2, sums, shape, schedule);
    } else {
        ptx::registers_grow<P::kConsumerRegisters>();
        consume<HS, kDocuments>(state, memory, consumer, maps.dkeys, shape, schedule);
    }
#endif
}

template <int HS, bool kDocuments, bool kInTurn>
void launch(Ctx& ctx, const AttentionBackwardArgs& args, const QuerySums& sums, const AttentionShape& shape) {
    using P = Fused<HS>;
    const int64_t B = shape.B, T = shape.T, width = shape.row(), out_width = shape.NH * HS;
    const FusedMaps maps{panel_map(args.qkv.data, B, T, width, P::kKeys, P::kPanels),
                         panel_map(args.qkv.data, B, T, width, P::kQueries, P::kPanels),
                         panel_map(args.dout.data, B, T, out_width, P::kQueries, P::kPanels),
                         panel_map(args.dqkv.data, B, T, width, 16, 1)};
    const Schedule schedule = make_turns_schedule(shape, P::kKeys, ctx.sm_count);
    auto* const kernel = attention_backward_fused_sm90_kernel<HS, kDocuments, kInTurn>;
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, P::kSharedBytes));
    const unsigned grid = grid_size(std::min<int64_t>(schedule.items, ctx.sm_count));
    kernel<<<grid, P::kThreads, P::kSharedBytes, stream_of(ctx)>>>(maps, sums, args.lse.as<float>(),
                                                                  args.delta.as<float>(), shape, schedule);
    CHECK_LAUNCH("attention_backward_fused_sm90_kernel");
}

template <int HS>
void launch(Ctx& ctx, const AttentionBackwardArgs& args, const QuerySums& sums, const AttentionShape& shape) {
    auto* const in_turn = shape.documents ? launch<HS, true, true> : launch<HS, false, true>;
    auto* const at_will = shape.documents ? launch<HS, true, false> : launch<HS, false, false>;
    (args.fast ? at_will : in_turn)(ctx, args, sums, shape);
}

}  // namespace

void attention_backward_fused_sm90(Ctx& ctx, const AttentionBackwardArgs& args, const QuerySums& sums,
                                   const AttentionShape& shape) {
    (shape.HS == 64 ? launch<64> : launch<128>)(ctx, args, sums, shape);
}

}  // namespace cuda
