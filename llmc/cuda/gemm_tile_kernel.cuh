// Kernel template of custom matmuls: persistent blocks, one producer warp (TMA), two consumer warpgroups (wgmma).
#pragma once
#include "llmc/cuda/gemm_tile_store.cuh"

namespace cuda::tiles {

// The thread that issues TMA loads. A block of a cluster loads half of the shared operand into both blocks.
template <typename T> __device__ void load_tiles(State<T> state, const TileMaps& maps, const TileProblem& p,
                                                 const Schedule<T>& schedule) {
    const int rank = static_cast<int>(Schedule<T>::rank());
    constexpr uint16_t kAll = (1 << T::kCluster) - 1;
    for (uint32_t item = Schedule<T>::first(); item < schedule.items; item += Schedule<T>::step()) {
        const Place at = schedule.place(item);
#pragma unroll 1
        for (int step = 0; step < p.steps; step++) {
            const uint32_t full = state.ring.full + 8 * state.ring.stage;
            ptx::barrier_wait(state.ring.empty + 8 * state.ring.stage, state.ring.parity ^ 1);
            ptx::barrier_expect(full, T::kStageBytes);
            const int k = step * static_cast<int>(kDepthBytes);
            if constexpr (T::kShare == Share::kRows) {
                constexpr int kHalf = T::kRows / 2;
                ptx::load_matrix_box_to_blocks(state.rows() + rank * kHalf * kDepthBytes, &maps.a, full, k,
                                               at.row + rank * kHalf, kAll);
            } else {
                ptx::load_matrix_box(state.rows(), &maps.a, full, k, at.row);
            }
            if constexpr (T::kShare == Share::kColumns) {
                constexpr int kHalf = T::kColumns / 2;
                const void* map = T::kSwiglu && rank == 1 ? &maps.up : &maps.b;
                const int column = T::kSwiglu ? at.column : at.column + rank * kHalf;
                ptx::load_matrix_box_to_blocks(state.columns() + rank * kHalf * kDepthBytes, map, full, k, column,
                                               kAll);
            } else if constexpr (T::kSwiglu) {
                ptx::load_matrix_box(state.columns(), &maps.b, full, k, at.column);
                ptx::load_matrix_box(state.columns() + T::kColumns / 2 * kDepthBytes, &maps.up, full, k, at.column);
            } else {
                ptx::load_matrix_box(state.columns(), &maps.b, full, k, at.column);
            }
            state.ring.next();
        }
    }
}

// One consumer warpgroup. It owns kGroupRows x kColumns results, in parts of 64 x kPartColumns: part i has rows from
// 64 (i / kColumnParts) and columns from kPartColumns (i % kColumnParts).
template <typename T> struct Consumer {
    static constexpr int kSums = T::kPartColumns / 2;
    State<T> state;
    const int group, lane;
    const uint32_t empty_there;   // the `empty` barriers of the block of the cluster that this lane signals
    float sums[T::kParts][kSums];

    __device__ uint64_t rows(const State<T>& of, int part) const {
        const int row = (T::kPingPong ? 0 : group * T::kGroupRows) + part / T::kColumnParts * 64;
        return byte_tile_descriptor<kDepthBytes>(of.rows() + row * kDepthBytes);
    }
    __device__ uint64_t columns(const State<T>& of, int part) const {
        return byte_tile_descriptor<kDepthBytes>(of.columns()
                                                 + part % T::kColumnParts * T::kPartColumns * kDepthBytes);
    }
    __device__ void wait(const State<T>& of) const {
        ptx::barrier_wait(of.ring.full + 8 * of.ring.stage, of.ring.parity);
    }
    __device__ void release(uint32_t stage) const {
        __syncwarp();
        if constexpr (T::kCluster == 1) {
            if (lane == 0) ptx::barrier_arrive(state.ring.empty + 8 * stage);
        } else {
            if (lane < T::kCluster) ptx::barrier_arrive_in_block(empty_there + 8 * stage);
        }
    }

    // All sums stay in the tensor cores' accumulators. A stage is released when the products of the next have begun.
    // issued(): called once all stages have arrived.
    template <typename Issued> __device__ void multiply_fast(int steps, Issued issued) {
        uint32_t before = 0;
#pragma unroll 1
        for (int step = 0; step < steps; step++) {
            wait(state);
            ptx::wgmma_fence();
#pragma unroll
            for (int k = 0; k < 4; k++)
#pragma unroll
                for (int part = 0; part < T::kParts; part++)
                    ptx::wgmma_tile<T::kOperands, T::kPartColumns>(sums[part], along_bytes(rows(state, part), k),
                                                                   along_bytes(columns(state, part), k),
                                                                   step > 0 || k > 0);
            ptx::wgmma_commit();
            ptx::wgmma_wait<1>();
            if (step > 0) release(before);
            before = state.ring.stage;
            state.ring.next();
        }
        issued();
        ptx::wgmma_wait<0>();
        release(before);
#pragma unroll
        for (int part = 0; part < T::kParts; part++) ptx::pin(sums[part]);
    }

    // Products over kSpan stages begin from 0, and fp32 registers add them up. steps: a multiple of kSpan.
    template <typename Issued> __device__ void multiply_precise(int steps, Issued issued) {
        constexpr int kSpan = T::kSpan;
#pragma unroll
        for (int part = 0; part < T::kParts; part++)
#pragma unroll
            for (int i = 0; i < kSums; i++) sums[part][i] = 0;
        float product[kSums];
#pragma unroll 1
        for (int step = 0; step < steps; step += kSpan) {
            State<T> ahead = state;
#pragma unroll
            for (int part = 0; part < T::kParts; part++) {
                ahead = state;
                ptx::pin(product);
#pragma unroll
                for (int s = 0; s < kSpan; s++) {
                    if (part == 0) wait(ahead);
                    ptx::wgmma_fence();
#pragma unroll
                    for (int k = 0; k < 4; k++)
                        ptx::wgmma_tile<T::kOperands, T::kPartColumns>(product, along_bytes(rows(ahead, part), k),
                                                                       along_bytes(columns(ahead, part), k),
                                                                       s > 0 || k > 0);
                    ahead.ring.next();
                }
                ptx::wgmma_commit();
                if (part + 1 == T::kParts && step + kSpan >= steps) issued();
                ptx::wgmma_wait<0>();
                ptx::pin(product);
                if (part + 1 == T::kParts) {
                    for (; state.ring.stage != ahead.ring.stage; state.ring.next()) release(state.ring.stage);
                }
#pragma unroll
                for (int i = 0; i < kSums; i++) sums[part][i] += product[i];
            }
        }
    }

    __device__ void run(const TileMaps& maps, const TileProblem& p, const Schedule<T>& schedule) {
        const uint32_t step = Schedule<T>::step();
        Store<T> store(state.shared, p);
        uint32_t item = Schedule<T>::first();
        // Ping-pong: the warpgroups take turns at the ring. A barrier tells the next one that all stages of this one
        // have arrived; without it a wait could take an earlier phase for its own.
        if constexpr (T::kPingPong) {
            if (group == 1) {
                ptx::named_arrive<256>(kTurnBarrier);
                state.skip(p.steps);
                item += step;
            }
        }
        for (; item < schedule.items; item += T::kPingPong ? 2 * step : step) {
            auto issued = [&] {
                if constexpr (T::kPingPong) {
                    if (item + step < schedule.items) ptx::named_arrive<256>(kTurnBarrier + (group ^ 1));
                }
            };
            if constexpr (T::kPingPong) ptx::named_sync<256>(kTurnBarrier + group);
            if constexpr (T::kPromoteBytes > 0) multiply_precise(p.steps, issued);
            else multiply_fast(p.steps, issued);
            if constexpr (T::kPingPong) state.skip(p.steps);
            const Place at = schedule.place(ptx::opaque(item));
            store.tile(maps, p, sums, at);
        }
        store.finish(p);
    }
};

// Math: D (+)= a_scale b_scale sum over k of a[m, k] b[n, k], in the tensor cores' precision, or with their sums over
//       kPromoteBytes added in fp32; SwiGLU variants also act = swiglu(D) in E4M3 and its amax.
// Source: PTX ISA 9.0, wgmma; DeepSeek-V3, arXiv 2412.19437, section 3.3, for promotion.
// Traffic: M K + N K elements read, D written (read and written by the L2 cache's adders with accumulate).
// Requires: sm_90a; what Call says.
// Parallel: a block computes tiles of kRows x kColumns (Schedule); its last warpgroup issues TMA loads; the other two
//           share a tile, or compute a tile each in turn. Clusters of 2 share A or B.
template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
tile_kernel(const __grid_constant__ TileMaps maps, const __grid_constant__ TileProblem problem,
            const __grid_constant__ Schedule<T> schedule) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) char memory[];
    const State<T> state(ptx::shared_address(memory));
    const int group = warp_uniform(threadIdx.x / 128);
    if (threadIdx.x == 0) {
        state.init();
        ptx::prefetch_map(&maps.a);
        ptx::prefetch_map(&maps.b);
        ptx::prefetch_map(&maps.d);
    }
    if constexpr (T::kCluster == 1) {
        __syncthreads();
    } else {
        __cluster_barrier_arrive();   // no block may copy into another or free its stages before its barriers exist
        __cluster_barrier_wait();
    }
    if (group == kConsumers) {
        ptx::registers_shrink<kProducerRegisters>();
        if (threadIdx.x == 128 * kConsumers) load_tiles<T>(state, maps, problem, schedule);
        __syncwarp();
    } else {
        ptx::registers_grow<kConsumerRegisters>();
        const int lane = static_cast<int>(threadIdx.x) % 32;
        Consumer<T> consumer{state, group, lane, ptx::address_in_block(state.ring.empty, lane % T::kCluster), {}};
        consumer.run(maps, problem, schedule);
    }
    if constexpr (T::kCluster > 1) {
        __cluster_barrier_arrive();   // no block may exit while the other still copies or arrives here
        __cluster_barrier_wait();
    }
#endif
}

template <typename T> void launch(Ctx& ctx, const Call& call, int group) {
    const auto kernel = tile_kernel<T>;
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = T::kCluster;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.blockDim = dim3(kThreads);
    config.dynamicSmemBytes = T::kSharedBytes;
    config.stream = stream_of(ctx);
    config.attrs = &attribute;
    config.numAttrs = T::kCluster > 1 ? 1 : 0;
    config.gridDim = dim3(grid_size(ctx.sm_count / T::kCluster * T::kCluster));
    static const int resident = [&] {   // clusters; any more would wait until another has finished all its items
        int clusters = 0;
        allow_shared_memory(kernel, T::kSharedBytes);
        if (T::kCluster == 1) return ctx.sm_count;
        CUDA_CHECK(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config));
        CHECK(clusters > 0, "tile_kernel: no room for a cluster");
        return clusters;
    }();
    const int64_t width = T::kSwiglu ? call.N / 2 : call.N;   // columns of B that a tile's place counts
    const int64_t tile_columns = T::kSwiglu ? T::kColumns / 2 : T::kColumns;
    const int64_t rows = ceil_div(call.M, T::kRows * (T::kShare == Share::kColumns ? 2 : 1));
    const int64_t columns = ceil_div(width, tile_columns * (T::kShare == Share::kRows ? 2 : 1));
    const int64_t items = rows * columns;
    CHECK(call.M < (1 << 30) && call.N < (1 << 30) && items < (1 << 30), "tile_kernel: M %lld, N %lld",
          (long long)call.M, (long long)call.N);
    config.gridDim.x = grid_size(T::kCluster * std::min<int64_t>(items, resident));
    const Schedule<T> schedule{static_cast<uint32_t>(items), static_cast<uint32_t>(rows),
                               static_cast<uint32_t>(columns), static_cast<uint32_t>(group)};
    CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, maps_of<T>(call), problem_of<T>(call), schedule));
    CHECK_LAUNCH("tile_kernel");
}

}  // namespace cuda::tiles
