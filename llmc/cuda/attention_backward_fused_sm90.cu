// Attention backward on compute capability 9.0 in one kernel: blocks own keys, accumulate dK and dV in registers, and
// add partial dQ to fp32 sums in memory. At head dim 256 without dQ.
#include "llmc/cuda/attention_backward_consumer128_sm90.cuh"
#include "llmc/cuda/attention_backward_consumer256_sm90.cuh"
#include "llmc/cuda/attention_backward_consumer64_sm90.cuh"
#include "llmc/cuda/attention_backward_producers_sm90.cuh"

namespace cuda {
namespace {

// Math: dv_j = sum_t p_tj dout_t; dk_j = softmax_mul sum_t ds_tj q_t, over the queries t >= j of every query head that
//       reads this key head (kBorders: those that attend to j); sums_t += sum_j ds_tj k_j over the block's keys j;
//       p_tj = exp(s_tj - lse_t), ds_tj = p_tj (dout_t . v_j - delta_t) (kCap, HS 256: times 1 - (s_tj / softcap)^2)
// Source: Dao, FlashAttention-2, arXiv 2307.08691, algorithm 2; Shah et al., FlashAttention-3, arXiv 2407.08608; PTX
//         ISA 9.0, wgmma, cp.async.bulk.tensor and cp.reduce.async.bulk.
// Traffic: k, v read and dk, dv written once; q, dout, lse, delta of the group read and sums (fp32) added to once per
//          key tile that they attend to (mostly L2).
// Requires: delta; zeros in taken and turns; sm_90a; bf16, HS 64, 72 to 96 by 8, 128 or 256, 16-byte aligned; dynamic
//           shared memory of kSharedBytes.
// Parallel: a block processes tiles of 128 keys (Schedule), each consumer warpgroup 64 of them, in steps of 64 queries
//           over all heads of the group. In the last warpgroup one thread issues TMA loads, one warp loads statistics
//           and two threads add sums. HS 256: no sums; tiles of 64 keys, for which one consumer computes dV, one dK.
template <typename Tiles, bool kBorders, bool kCap>
__global__ void __launch_bounds__(Fused<Tiles>::kThreads, 1)
attention_backward_fused_sm90_kernel(const __grid_constant__ FusedMaps maps, DqSums sums, const float* lse,
                                     const float* delta, AttentionShape shape, Schedule schedule) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using P = Fused<Tiles>;
    extern __shared__ __align__(1024) char memory[];
    const FusedState<Tiles> state{ptx::shared_address(memory)};
    const int consumer = warp_uniform(threadIdx.x / 128);
    if (threadIdx.x == 0) {
        state.init();
        ptx::barrier_init_fence();
    }
    __syncthreads();
    if (consumer == P::kConsumers) {
        ptx::registers_shrink<P::kProducerRegisters>();
        const int warp = warp_uniform(threadIdx.x / 32) % 4, lane = static_cast<int>(threadIdx.x) % 32;
        if (warp == 0 && lane == 0) load_tiles<kBorders>(state, memory, sums.taken, maps, shape, schedule);
        else if (warp == 1) load_stats<kBorders>(state, memory, lse, delta, shape, schedule, lane);
        else if constexpr (!P::kSplit) {
            if (warp >= 2 && lane == 0) add_sums<kBorders>(state, memory, warp - 2, sums, shape, schedule);
        }
    } else {
        ptx::registers_grow<P::kConsumerRegisters>();
        if constexpr (kCap) consume<kBorders, true>(state, memory, consumer, maps.dkeys, shape, schedule);
        else consume<kBorders>(state, memory, consumer, maps.dkeys, shape, schedule);
    }
#endif
}

template <typename Tiles, bool kBorders, bool kCap = false>
void launch(Ctx& ctx, const AttentionBackwardArgs& args, const DqSums& sums, const AttentionShape& shape) {
    using P = Fused<Tiles>;
    using Panels = HeadPanels<P::kDim>;
    const FusedMaps maps{Panels::map(args.qkv, shape, shape.row(), P::kKeys),
                         Panels::map(args.qkv, shape, shape.row(), P::kQueries),
                         Panels::map(args.dout, shape, shape.NH * shape.HS, P::kQueries),
                         Panels::map(args.dqkv, shape, shape.row(), 16, 1)};
    const Schedule schedule = make_ordered_schedule(shape, P::kKeys, ctx.sm_count);
    auto* const kernel = attention_backward_fused_sm90_kernel<Tiles, kBorders, kCap>;
    allow_shared_memory(kernel, P::kSharedBytes);
    const unsigned grid = grid_size(std::min<int64_t>(schedule.items, ctx.sm_count));
    kernel<<<grid, P::kThreads, P::kSharedBytes, stream_of(ctx)>>>(maps, sums, args.lse.as<float>(),
                                                                  args.delta.as<float>(), shape, schedule);
    CHECK_LAUNCH("attention_backward_fused_sm90_kernel");
}

template <typename Tiles>
void launch(Ctx& ctx, const AttentionBackwardArgs& args, const DqSums& sums, const AttentionShape& shape) {
    if constexpr (Tiles::kSplit) {
        const auto capped = shape.has_borders() ? launch<Tiles, true, true> : launch<Tiles, false, true>;
        if (shape.softcap > 0) return capped(ctx, args, sums, shape);
    }
    (shape.has_borders() ? launch<Tiles, true> : launch<Tiles, false>)(ctx, args, sums, shape);
}

}  // namespace

void attention_backward_fused_sm90(Ctx& ctx, const AttentionBackwardArgs& args, const DqSums& sums,
                                   const AttentionShape& shape) {
    by_head_dim(shape.HS, [&](auto dim) {
        using Smaller = std::conditional_t<dim.value == 64, FusedTiles64, FusedTiles128<dim.value>>;
        launch<std::conditional_t<dim.value == 256, FusedTiles256, Smaller>>(ctx, args, sums, shape);
    });
}

}  // namespace cuda
