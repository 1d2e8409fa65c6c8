// A candidate for the fused attention backward at head dim 64 with less traffic in shared memory: one consumer computes
// dQ of a step. The products of a consumer's next step run during the elementwise work of this one, and two additions
// to dQ may be in flight.
#include "dev/bench/attention_candidates/attention_candidates.h"
#include "dev/bench/attention_candidates/backward64.cuh"

namespace attention_candidates {
namespace {

using P = Tiles;

struct Maps {
    CUtensorMap keys, queries, douts, dkeys;
};

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
// The thread that claims items and issues TMA loads.
__device__ void load_tiles(State state, char* memory, uint32_t* taken, const Maps& maps, const AttentionShape& shape,
                           const Schedule& schedule) {
    const int NH = static_cast<int>(shape.NH), NKV = static_cast<int>(shape.NKV);
    auto take = [&](uint32_t item) {
        const uint32_t number = atomicAdd(taken, 1u);
        state.items().await_empty(item);
        State::number(memory, item) = number;
        if (number >= schedule.items) state.items().arrive_full(item);
        return number;
    };
    auto load_own = [&](const Steps& steps, uint32_t item) {
        const Schedule::Place& at = steps.at;
        const int panel = NH + at.head, first = at.tile * P::kKeys;
        const uint32_t full = state.items().full_of(item), keys = state.key_tile(item);
        ptx::barrier_expect(full, 2 * P::kKeyBytes);
        ptx::load_box(keys, &maps.keys, full, first, panel, at.b);
        ptx::load_box(keys + P::kKeyBytes, &maps.keys, full, first, panel + NKV, at.b);
    };
    for_steps<false>(shape, schedule, take, load_own, [&](const Steps& steps, int tile, int i, uint32_t step) {
        const int row = tile * P::kQueries, b = steps.at.b, panel = steps.at.head * schedule.group + i;
        const uint32_t queries_full = state.queries().full_of(step), douts_full = state.douts().full_of(step);
        state.queries().await_empty(step);
        ptx::barrier_expect(queries_full, P::kQueryBytes);
        ptx::load_box(state.query_tile(step), &maps.queries, queries_full, row, panel, b);
        ptx::barrier_expect(douts_full, P::kQueryBytes);
        ptx::load_box(state.dout_tile(step), &maps.douts, douts_full, row, panel, b);
    });
}

// The warp that loads lse and delta of the queries.
__device__ void load_stats(State state, char* memory, const float* lse, const float* delta,
                           const AttentionShape& shape, const Schedule& schedule, int lane) {
    const int T = static_cast<int>(shape.T);
    auto take = [&](uint32_t item) { return warp_uniform(lane == 0 ? state.follow(memory, item) : 0); };
    for_steps<false>(shape, schedule, take, no_item, [&](const Steps& steps, int tile, int i, uint32_t step) {
        const int query = tile * P::kQueries + lane;
        const uint64_t row = static_cast<uint64_t>(steps.first_head + i) * static_cast<uint32_t>(T) + query;
        float minus_lse[2], minus_delta[2];   // beyond the end P = 0
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const bool inside = query + 32 * half < T;
            minus_lse[half] = inside ? -kLog2e * lse[row + 32 * half] : -INFINITY;
            minus_delta[half] = inside ? -delta[row + 32 * half] : 0;
        }
        state.stats().await_empty(step);
        float* const to = reinterpret_cast<float*>(memory + state.stats_at(step));
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint32_t at = State::stat_float(lane + 32 * half);
            to[at] = minus_lse[half], to[P::kStatHalfBytes / 4 + at] = minus_delta[half];
        }
        state.stats().arrive_full(step);
    });
}

// The thread that adds a consumer's partial dQ to the sums in memory: key tile j adds after the tiles before it, and
// the first one stores. The turn of the first of the two units counts for both. kInFlight = 2: the turn of an addition
// advances after the next one was issued, if that one can be issued at once. Deadlock-free: an addition never stays
// incomplete while the thread waits for its turn, for a consumer or for an item.
template <int kInFlight>
__device__ void add_sums(State state, char* memory, int consumer, DqSums sums, const AttentionShape& shape,
                         const Schedule& schedule) {
    const Slots<P::kSumStages> ring = state.sums(consumer);
    const uint32_t from = state.shared + State::sums_at(consumer);
    uint32_t added = 0;
    uint32_t open_unit = 0, open_turns = 0;   // of the addition in flight; turns after it, 0: none
    auto advance = [&] {
        ptx::fence_async_global();
        sums.turns[open_unit + 1] = open_turns;
        ptx::store_release(sums.turns + open_unit, open_turns);
        open_turns = 0;
    };
    auto complete = [&] {
        if (open_turns == 0) return;
        ptx::bulk_wait<0>();
        advance();
    };
    auto take = [&](uint32_t item) {
        complete();
        return state.follow(memory, item);
    };
    for_steps<false>(shape, schedule, take, no_item, [&](const Steps& steps, int tile, int i, uint32_t) {
        if (!State::owns(consumer, (steps.end - 1 - tile) * schedule.group + i)) return;
        const uint32_t turn = steps.at.tile, unit = sums.unit(0, steps.first_head + i, tile, 0);
        float* const to = sums.data + static_cast<uint64_t>(unit) * (sum_bytes(P::HS) / 4);
        if (turn > 0) {
            if (ptx::load_acquire(sums.turns + unit) != turn) {
                complete();
                while (ptx::load_acquire(sums.turns + unit) != turn) {}
            }
            ptx::fence_async_global();
        }
        if (open_turns > 0 && !ptx::barrier_test(ring.full_of(added), ring.parity(added))) complete();
        ring.await_full(added);
        if (turn == 0) ptx::bulk_store(to, from, P::kSumBytes);
        else ptx::bulk_add(to, from, P::kSumBytes);
        ptx::bulk_commit();
        if (open_turns > 0) {
            ptx::bulk_wait<1>();
            advance();
        }
        open_unit = unit, open_turns = turn + 1;
        ptx::bulk_wait_read<0>();
        ring.arrive_empty(added++);
        if (kInFlight == 1) complete();
    });
}

// Starts d = a b or d += a b with rows of a in registers.
__device__ void start_sums(float (&d)[32], const uint32_t (&a)[4][4], uint32_t tile) {
    const Operand b(tile, P::kQueryBytes);
    ptx::pin(d);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; i++) ptx::wgmma<64, true>(d, a[i], b.rows(i), true);
    ptx::wgmma_commit();
}
__device__ void start_scores(float (&d)[32], uint32_t own, uint32_t tile) {
    const Operand a(own, P::kKeyBytes), b(tile, P::kQueryBytes);
    ptx::pin(d);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; i++) ptx::wgmma<64, false, false>(d, a.columns(i), b.columns(i), i > 0);
    ptx::wgmma_commit();
}
// Keeps operands of products in flight in their registers until this place.
__device__ void hold(uint32_t (&a)[4][4]) {
#pragma unroll
    for (auto& part : a) {
#pragma unroll
        for (uint32_t& x : part) x = ptx::opaque(x);
    }
}

// One consumer warpgroup of 64 keys. A part is S and dP of step n, dK of step n - 1, dV of step n and dQ of step
// n - 1: S of the next step and dK of this one start as soon as dS is computed, dK and dP run during the exponentials,
// dV and dQ while dS is computed. The consumers compute dQ of steps in turns, 64 columns instead of 32 each, so dS is
// read from shared memory once. Parts begin with no product in flight: ptxas 13.0 serializes products that are in
// flight where a loop begins again (C7514).
struct Consumer {
    const State state;
    char* const memory;
    const int consumer, warp, lane;   // warp: within the block
    const float mul;
    float dk[32], dv[32];
    float s[32], dp[32], dq[32];
    uint32_t p[4][4], ds[4][4];   // P and dS as operands; products may still be reading them
    uint32_t item = 0, step = 0;  // current indices
    uint32_t stored = 0;          // dQ stored so far

    __device__ uint32_t own_keys() const { return state.key_tile(item) + consumer * 64 * kPanelRowBytes; }
    __device__ void start_step_scores() {
        state.queries().await_full(step);
        start_scores(s, own_keys(), state.query_tile(step));
    }
    __device__ void start_step_dp() {
        state.douts().await_full(step);
        start_scores(dp, own_keys() + P::kKeyBytes, state.dout_tile(step));
    }
    // Stores a step's dS to shared memory, for both consumers.
    __device__ void store_ds(const uint32_t (&part)[4][4], uint32_t of_step) const {
        state.grads().await_empty(of_step);
        const uint32_t to = state.grad_tile(of_step) + (consumer * 64 + warp % 4 * 16) * kPanelRowBytes +
                            panel_offset(lane & 15, lane >> 4);
#pragma unroll
        for (int j = 0; j < 4; j++) ptx::store_matrix_x4(to ^ (2 * j << 4), part[j]);   // chunks 2 j and 2 j + 1
        ptx::fence_async();
        __syncwarp();
        if (lane == 0) state.grads().arrive_full(of_step);
    }
    __device__ void release_step(uint32_t of_step) const {
        if (lane == 0) state.queries().arrive_empty(of_step);
    }
    // Processes a step whose queries all precede these keys.
    __device__ void skip() {
        const uint32_t zeros[4][4] = {};
        store_ds(zeros, step);
        state.queries().await_full(step), state.douts().await_full(step), state.stats().await_full(step);
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
    // Stores the completed dQ to shared memory, each four registers of a thread as one float4.
    __device__ void store_dq(uint32_t of_step) {
        ptx::pin(dq);
        if (lane == 0) state.grads().arrive_empty(of_step);
        state.sums(consumer).await_empty(stored);
        auto* const to = reinterpret_cast<float4*>(memory + State::sums_at(consumer)) + threadIdx.x % 128;
#pragma unroll
        for (int i = 0; i < 8; i++)
            to[128 * i] = make_float4(dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
        ptx::fence_async();
        __syncwarp();
        if (lane == 0) state.sums(consumer).arrive_full(stored);
        stored++;
    }
    // Starts dK of the step before, whose dS is in registers, and stores this dS.
    __device__ void use_ds() {
        start_sums(dk, ds, state.query_tile(step - 1));
        store_ds(ds, step - 1);
    }
    // Computes P, dV and dS of a step. kFirst: of an item; otherwise also dK of the step before. kOwner: also dQ of the
    // step before. Nothing is in flight before and after. behind: the tile's first query minus the warp's first key;
    // if <= 0, some queries precede some keys. dq_left: dQ of two steps before is still in registers.
    template <bool kFirst, bool kOwner> __device__ void visit_step(int behind, bool dq_left) {
        start_step_scores();
        if (!kFirst) use_ds();
        start_step_dp();
        if (dq_left) store_dq(step - 2);
        ptx::wgmma_wait<kFirst ? 1 : 2>();   // S; in flight: dK, dP
        ptx::pin(s);
        if (behind <= 0) mask_past(s, behind, lane);
        state.stats().await_full(step);
        const auto* const stats = reinterpret_cast<const float4*>(memory + State::stats_at(step)) +
                                  lane % 4 * (P::kStatLaneFloats / 4);
#pragma unroll
        for (int i = 0; i < 32; i += 8) {   // two adjacent columns, and those eight columns further
            const float4 minus_lse = stats[i / 8];
#pragma unroll
            for (int half = 0; half < 4; half += 2) {
                s[i + half] = exp2_approx(fmaf(s[i + half], mul, minus_lse.x));
                s[i + half + 1] = exp2_approx(fmaf(s[i + half + 1], mul, minus_lse.y));
                s[i + half + 4] = exp2_approx(fmaf(s[i + half + 4], mul, minus_lse.z));
                s[i + half + 5] = exp2_approx(fmaf(s[i + half + 5], mul, minus_lse.w));
            }
        }
#pragma unroll
        for (int j = 0; j < 4; j++) as_operand(p[j], s, j);
        start_sums(dv, p, state.dout_tile(step));
        if (kOwner) start_dq(step - 1);
        ptx::wgmma_wait<kOwner ? 2 : 1>();   // dK, dP; in flight: dV, dQ
        ptx::pin(dp);
        hold(ds);
        if (!kFirst) release_step(step - 1);
#pragma unroll
        for (int i = 0; i < 32; i += 8) {
            const float4 minus_delta = stats[P::kStatHalfBytes / 16 + i / 8];
#pragma unroll
            for (int half = 0; half < 4; half += 2) {
                dp[i + half] = s[i + half] * (dp[i + half] + minus_delta.x);
                dp[i + half + 1] = s[i + half + 1] * (dp[i + half + 1] + minus_delta.y);
                dp[i + half + 4] = s[i + half + 4] * (dp[i + half + 4] + minus_delta.z);
                dp[i + half + 5] = s[i + half + 5] * (dp[i + half + 5] + minus_delta.w);
            }
        }
#pragma unroll
        for (int j = 0; j < 4; j++) as_operand(ds[j], dp, j);
        ptx::wgmma_wait<0>();
        hold(p);
        step++;
    }
    // Runs `visits` steps, whose queries attend to these keys, up to dK of the last one. Computes dQ of those of them,
    // except for the last, that this consumer owns.
    __device__ void visit(int visits, int group, int behind) {
        if (visits <= 0) return;
        int left = group;
        auto next_tile = [&] {
            if (--left == 0) left = group, behind -= P::kQueries;
        };
        visit_step<true, false>(behind, false);
        next_tile();
        int number = 1;
        if (State::owns(consumer, 1) && number < visits) {
            visit_step<false, false>(behind, false);
            next_tile();
            number++;
        }
        bool dq_left = false;
        while (number < visits) {
            visit_step<false, true>(behind, false);
            next_tile();
            dq_left = true;
            if (++number == visits) break;
            visit_step<false, false>(behind, true);
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
        if (State::owns(consumer, done - begin)) {
            start_dq(done);
            store();
            ptx::wgmma_wait<0>();
            store_dq(done);
        } else {
            store();
        }
        while (++done < end) {
            while (step < end && step < done + 2) skip();
            if (!State::owns(consumer, done - begin)) continue;
            start_dq(done);
            ptx::wgmma_wait<0>();
            store_dq(done);
        }
    }
};

__device__ void consume(State state, char* memory, int consumer, const CUtensorMap& out_map,
                        const AttentionShape& shape, const Schedule& schedule) {
    const int warp = static_cast<int>(uniform(threadIdx.x / 32)), lane = static_cast<int>(threadIdx.x) % 32;
    const int NH = static_cast<int>(shape.NH), NKV = static_cast<int>(shape.NKV);
    Consumer c{state, memory, consumer, warp, lane, shape.softmax_mul * kLog2e, {}, {}, {}, {}, {}, {}, {}};
    while (true) {
        state.items().await_full(c.item);
        const uint32_t item = uniform(State::number(memory, c.item));
        if (item >= schedule.items) break;
        const uint32_t begin = c.step;
        const Steps steps = Steps::of<false>(shape, schedule, item);
        const int row = steps.at.tile * P::kKeys + warp * 16;
#pragma unroll
        for (int i = 0; i < 32; i++) c.dk[i] = c.dv[i] = 0;
        c.visit((steps.end - steps.first - consumer) * schedule.group, schedule.group,
                (steps.end - 1) * P::kQueries - row);
        c.finish(begin, begin + (steps.end - steps.first) * schedule.group, [&] {
            c.store_results(out_map, shape.softmax_mul, row, NH + steps.at.head, NKV, steps.at.b);
        });
        if (lane == 0) state.items().arrive_empty(c.item);
        c.item++;
    }
    if (lane == 0) ptx::bulk_wait_read<0>();   // shared memory must outlive the copies
}

#endif

// Math: as attention_backward_fused_sm90_kernel.
// Source: Shah et al., FlashAttention-3, arXiv 2407.08608; PTX ISA 9.0, wgmma, cp.async.bulk.tensor and
//         cp.reduce.async.bulk.
// Traffic: as attention_backward_fused_sm90_kernel.
// Requires: delta; zeros in taken and turns; sm_90a; bf16, HS 64, 16-byte aligned, no borders; dynamic shared memory
//           of kSharedBytes.
// Parallel: as attention_backward_fused_sm90_kernel.
template <int kInFlight>
__global__ void __launch_bounds__(P::kThreads, 1)
attention_backward64_kernel(const __grid_constant__ Maps maps, DqSums sums, const float* lse, const float* delta,
                            AttentionShape shape, Schedule schedule) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) char memory[];
    const State state{ptx::shared_address(memory)};
    const int consumer = static_cast<int>(uniform(threadIdx.x / 128));
    if (threadIdx.x == 0) {
        state.init();
        ptx::barrier_init_fence();
    }
    __syncthreads();
    if (consumer == P::kConsumers) {
        ptx::registers_shrink<P::kProducerRegisters>();
        const int warp = warp_uniform(threadIdx.x / 32) % 4, lane = static_cast<int>(threadIdx.x) % 32;
        if (warp == 0 && lane == 0) load_tiles(state, memory, sums.taken, maps, shape, schedule);
        else if (warp == 1) load_stats(state, memory, lse, delta, shape, schedule, lane);
        else if (warp >= 2 && lane == 0) add_sums<kInFlight>(state, memory, warp - 2, sums, shape, schedule);
    } else {
        ptx::registers_grow<P::kConsumerRegisters>();
        consume(state, memory, consumer, maps.dkeys, shape, schedule);
    }
#endif
}

template <int kInFlight>
void launch(Ctx& ctx, const AttentionBackwardArgs& args, const DqSums& sums, const AttentionShape& shape) {
    const int64_t B = shape.B, T = shape.T, width = shape.row(), out_width = shape.NH * P::HS;
    const Maps maps{panel_map(args.qkv.data, B, T, width, P::kKeys, 1),
                    panel_map(args.qkv.data, B, T, width, P::kQueries, 1),
                    panel_map(args.dout.data, B, T, out_width, P::kQueries, 1),
                    panel_map(args.dqkv.data, B, T, width, 16, 1)};
    const Schedule schedule = make_ordered_schedule(shape, P::kKeys, ctx.sm_count);
    auto* const kernel = attention_backward64_kernel<kInFlight>;
    allow_shared_memory(kernel, P::kSharedBytes);
    const unsigned grid = grid_size(std::min<int64_t>(schedule.items, ctx.sm_count));
    kernel<<<grid, P::kThreads, P::kSharedBytes, stream_of(ctx)>>>(maps, sums, args.lse.as<float>(),
                                                                  args.delta.as<float>(), shape, schedule);
    CHECK_LAUNCH("attention_backward64_kernel");
}

}  // namespace

void backward64(Ctx& ctx, const AttentionBackwardArgs& args, const DqSums& sums, const AttentionShape& shape,
                int in_flight) {
    CHECK(shape.HS == P::HS && !shape.has_borders() && !args.fast, "attention_candidates::backward64: not its case");
    (in_flight == 2 ? launch<2> : launch<1>)(ctx, args, sums, shape);
}

}  // namespace attention_candidates
