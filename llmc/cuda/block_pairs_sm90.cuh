// Persistent matmul kernels of compute capability 9.0 whose blocks work in pairs: order of the results, and launch.
#pragma once
#include <algorithm>

#include "llmc/cuda/pipeline_sm90.cuh"
#include "llmc/cuda/tensor_map.h"

namespace cuda {

// An item is the 256 x 256 results of a cluster of two blocks, each of which computes half of them; cluster c of G
// computes items c, c + G, ... Items are ordered in groups of 8 in M and within a group along N, so that concurrent
// items form roughly a square and share operands in the L2 cache.
struct BlockPairs {
    static constexpr int kBlocks = 2, kRows = 256, kColumns = 256;
    static constexpr uint32_t kGroup = 8;
    uint32_t items, rows, columns;   // items in all, in M, in N

    struct Place {
        int row, column;   // the cluster's first
    };
    __device__ Place place(uint32_t item) const {
        const uint32_t group = item / (kGroup * columns), rest = item - group * (kGroup * columns);
        const uint32_t size = min(kGroup, rows - group * kGroup);
        return {static_cast<int>((group * kGroup + rest % size) * kRows), static_cast<int>(rest / size * kColumns)};
    }
    __device__ static uint32_t rank() { return ptx::block_index() % kBlocks; }
    __device__ static uint32_t first() { return ptx::block_index() / kBlocks; }
    __device__ static uint32_t step() { return gridDim.x / kBlocks; }
};

// A block's ring and the addresses of its stages, of the shared memory that Tile describes.
template <typename Tile> struct TileState {
    uint32_t shared;
    Ring<Tile::kStages> ring;

    __device__ explicit TileState(uint32_t base)
        : shared(base), ring{base + Tile::kBarriers, base + Tile::kBarriers + 8 * Tile::kStages} {}
    __device__ uint32_t rows() const { return shared + ring.stage * Tile::kRowBytes; }
    __device__ uint32_t columns() const { return shared + Tile::kColumnsAt + ring.stage * Tile::kColumnBytes; }
};

// Launches kernel(args...) in clusters of two blocks, one for each item, but not more than can run at once. `name` is
// for errors.
template <auto kernel, int threads, int shared_bytes, typename... Args>
void launch_clusters(Ctx& ctx, const char* name, int64_t items, const Args&... args) {
    constexpr int kBlocks = BlockPairs::kBlocks;
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = kBlocks;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream_of(ctx);
    config.attrs = &attribute;
    config.numAttrs = 1;
    config.gridDim = dim3(grid_size(ctx.sm_count / kBlocks * kBlocks));
    static const int resident = [&] {   // clusters; any more would wait until another has finished all its items
        int clusters = 0;
        allow_shared_memory(kernel, shared_bytes);
        CUDA_CHECK(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config));
        CHECK(clusters > 0, "%s: no room for a cluster", name);
        return clusters;
    }();
    config.gridDim.x = grid_size(kBlocks * std::min<int64_t>(items, resident));
    CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, args...));
}

// Launches kernel(maps, problem, BlockPairs) for M x N results.
template <auto kernel, int threads, int shared_bytes, typename Maps, typename Problem>
void launch_block_pairs(Ctx& ctx, const char* name, int64_t M, int64_t N, const Maps& maps, const Problem& problem) {
    const int64_t rows = ceil_div(M, BlockPairs::kRows), columns = ceil_div(N, BlockPairs::kColumns);
    const int64_t items = rows * columns;
    CHECK(M < (1 << 30) && N < (1 << 30) && items < (1 << 30), "%s: M %lld, N %lld", name, (long long)M, (long long)N);
    const BlockPairs pairs{static_cast<uint32_t>(items), static_cast<uint32_t>(rows), static_cast<uint32_t>(columns)};
    launch_clusters<kernel, threads, shared_bytes>(ctx, name, items, maps, problem, pairs);
}

}  // namespace cuda
