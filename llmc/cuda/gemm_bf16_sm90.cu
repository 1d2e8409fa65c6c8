// Matmuls of BF16 operands by wgmma that compute a list of results: the lower triangle of a symmetric product, or the
// products of experts, whose sizes are read on the device.
//
// As in the INT8 matmul, a product of the next step is always queued behind the one that runs, and consumer 1 begins
// each tile two steps after consumer 0, so that each of them stores while the other has the tensor cores for itself.
#include "llmc/cuda/common.cuh"
#include "llmc/cuda/gemm.h"
#if defined(LLMC_SM90A)   // these use instructions that older devices lack
#include "llmc/cuda/gemm_bf16_consumer_sm90.cuh"
#endif

namespace cuda {
#if defined(LLMC_SM90A)
namespace {

// The boxes of a step that block `rank` loads: [row, end_row) of the item's rows, [column, end_column) of its columns.
struct Bf16Boxes {
    bool same_rows, same_columns;   // for both blocks of the cluster
    int row, end_row, column, end_column;

    __device__ Bf16Boxes(const Bf16Place& at, int rank)
        : same_rows(at.share == Bf16Place::Share::kRows), same_columns(at.share == Bf16Place::Share::kColumns) {
        const int boxes = at.columns / Bf16Tile::kBox;
        row = same_rows ? rank : 0, end_row = same_rows ? rank + 1 : Bf16Tile::kRows / Bf16Tile::kBox;
        column = same_columns ? rank * boxes / 2 : 0, end_column = same_columns ? column + boxes / 2 : boxes;
    }
};

// Loads boxes [first, end) of an operand's 64 adjacent elements of K from k on. by_k: a row in memory is one element of
// K. to_both: into both blocks of the cluster.
template <bool by_k>
__device__ inline void load_boxes(uint32_t to, const CUtensorMap& map, uint32_t full, int start, int k, int matrix,
                                  int first, int end, bool to_both) {
    constexpr uint16_t kAll = (1 << Bf16Tile::kCluster) - 1;
    for (int i = first; i < end; i++) {
        const int along = start + i * Bf16Tile::kBox, x = by_k ? along : k, y = by_k ? k : along;
        const uint32_t box = to + i * Bf16Tile::kBoxBytes;
        if (to_both) ptx::load_matrix_box_to_blocks(box, &map, full, x, y, kAll, matrix);
        else ptx::load_matrix_box(box, &map, full, x, y, matrix);
    }
}

// Brings the old results of an item to the L2 cache, spread over its steps.
__device__ inline void prefetch_results(const CUtensorMap& map, const ExpertSums& tiles, const Bf16Place& at, int step,
                                        int steps) {
    using T = Bf16Tile;
    const int width = tiles.fp32 ? 32 : 64, rows = T::kRows / T::kBox;
#pragma unroll 1
    for (int i = step; i < rows * T::kColumns / width; i += steps)
        ptx::prefetch_matrix_box(&map, at.column + i / rows * width, at.row + i % rows * T::kBox, at.expert);
}

// Loads an item of experts. That it is known what the blocks share saves two thirds of the instructions: the thread
// otherwise needs 700 of the 1,024 cycles of a step.
template <bool a_by_k, bool b_by_k, bool same_rows, typename T>
__device__ void load_item(TileState<T>& state, const Bf16Maps& maps, const Bf16Place& at, int rank, int of_b) {
    constexpr int kRowBoxes = same_rows ? 1 : 2, kColumnBoxes = same_rows ? 4 : 2;   // that this block loads
    const int row = same_rows ? rank : 0, column = same_rows ? 0 : 2 * rank, steps = bf16_steps(at.depth);
    const int end_column = column + kColumnBoxes;
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        const uint32_t full = state.ring.claim(T::kRowBytes + T::kColumnBytes);
        const int k = at.k + step * T::kDepth;
        load_boxes<a_by_k>(state.rows(), maps.a, full, at.row, k, 0, row, row + kRowBoxes, same_rows);
        load_boxes<b_by_k>(state.columns(), maps.b, full, at.column, k, of_b, column, end_column, !same_rows);
        state.ring.next();
    }
}

// The thread that issues TMA loads.
template <typename Tiles, bool a_by_k, bool b_by_k, typename T>
__device__ void load_bf16(TileState<T> state, const Bf16Maps& maps, Tiles tiles) {
    const int rank = static_cast<int>(BlockPairs::rank());
    Bf16Place at;
    for (uint32_t round = 0; tiles.find(item_of(round), rank, at); round++) {
        if constexpr (T::kOverlap) {
            const int matrix = Tiles::kWeightsAreB ? at.expert : 0;
            if (at.share == Bf16Place::Share::kRows) load_item<a_by_k, b_by_k, true>(state, maps, at, rank, matrix);
            else load_item<a_by_k, b_by_k, false>(state, maps, at, rank, matrix);
            continue;
        }
        const int steps = bf16_steps(at.depth), boxes = at.columns / T::kBox;
        const Bf16Boxes of(at, rank);
        const int of_b = Tiles::kWeightsAreB ? at.expert : 0;
#pragma unroll 1
        for (int step = 0; step < steps; step++) {
            const uint32_t full = state.ring.claim(T::kRowBytes + boxes * T::kBoxBytes);
            const int k = at.k + step * T::kDepth;
            load_boxes<a_by_k>(state.rows(), maps.a, full, at.row, k, 0, of.row, of.end_row, of.same_rows);
            load_boxes<b_by_k>(state.columns(), maps.b, full, at.column, k, of_b, of.column, of.end_column,
                               of.same_columns);
            state.ring.next();
        }
    }
}

template <bool by_k>
__device__ inline void prefetch_boxes(const CUtensorMap& map, int start, int k, int matrix, int first, int end) {
#pragma unroll 1
    for (int i = first; i < end; i++) {
        const int along = start + i * Bf16Tile::kBox;
        ptx::prefetch_matrix_box(&map, by_k ? along : k, by_k ? k : along, matrix);
    }
}
// The thread that brings operands and old results to the L2 cache. Items of an expert that have rows or columns in
// common run at about the same time, and the first of them brings these. The thread waits for each stage and releases
// it as consumers do, so that it is always `ahead` steps before them.
template <typename Tiles, bool a_by_k, bool b_by_k, typename T>
__device__ void prefetch_bf16(TileState<T> state, const Bf16Maps& maps, Tiles tiles, const GroupedTuning& tuning) {
    const int rank = static_cast<int>(BlockPairs::rank());
    int ahead = 0;
    const auto pass = [&] {
        state.ring.wait();
        state.ring.release(0);
        state.ring.next();
    };
    Bf16Place at;
    for (uint32_t round = 0; tiles.find(item_of(round), rank, at); round++) {
        const Bf16Boxes of(at, rank);
        const int steps = bf16_steps(at.depth), of_b = Tiles::kWeightsAreB ? at.expert : 0;
        const bool rows = tuning.ahead > 0 && at.first_of_rows, columns = tuning.ahead > 0 && at.first_of_columns;
#pragma unroll 1
        for (int step = 0; step < steps; step++) {
            const int k = at.k + step * Bf16Tile::kDepth;
            if (rows) prefetch_boxes<a_by_k>(maps.a, at.row, k, 0, of.row, of.end_row);
            if (columns) prefetch_boxes<b_by_k>(maps.b, at.column, k, of_b, of.column, of.end_column);
            if constexpr (std::is_same_v<Tiles, ExpertSums>)
                if (tuning.results) prefetch_results(maps.d, tiles, at, step, steps);
            if (ahead == tuning.ahead) pass();
            else ahead++;
        }
    }
    while (ahead-- > 0) pass();
}

// Math: the results of the list, D[m, n] = sum over k of a[m, k] b[n, k] in fp32, rounded to bf16. SymmetricTiles also
//       writes each to D[n, m]; ExpertSums may keep fp32, and may add to D, after rounding.
// Source: PTX ISA 9.0, wgmma of .bf16. The halved list: Lawson et al., ACM TOMS 5 (1979), as SYRK of the BLAS.
// Traffic: the rows and columns of the tiles read, mostly from the L2 cache; 2 bytes written per element of D.
// Requires: sm_90a; A, B and D 16-byte aligned, with multiples of 8 elements per row.
// Parallel: a cluster of 2 blocks computes an item, each block 128 rows. Its last warpgroup issues TMA loads, each
//           other one owns 64 rows.
template <typename Tiles, bool a_by_k, bool b_by_k, typename T>
__global__ void __launch_bounds__(T::kThreads, 1)
gemm_bf16_sm90_kernel(const __grid_constant__ Bf16Maps maps, const Tiles tiles, const GroupedTuning tuning) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) char memory[];
    const TileState<T> state(ptx::shared_address(memory));
    const bool prefetches = T::kOverlap && (tuning.ahead > 0 || tuning.results);
    const int group_of_warps = warp_uniform(threadIdx.x / 128);
    if (threadIdx.x == 0) {
        state.ring.init(4 * T::kConsumers * T::kCluster + prefetches);
        ptx::barrier_init_fence();
        ptx::prefetch_map(&maps.a);
        ptx::prefetch_map(&maps.b);
    }
    __cluster_barrier_arrive();   // no block may copy into another or free its stages before its barriers exist
    __cluster_barrier_wait();
    if (group_of_warps == T::kConsumers) {
        ptx::registers_shrink<T::kProducerRegisters>();
        if (threadIdx.x == 128 * T::kConsumers) load_bf16<Tiles, a_by_k, b_by_k>(state, maps, tiles);
        if constexpr (T::kOverlap)
            if (prefetches && threadIdx.x == 128 * T::kConsumers + 32)
                prefetch_bf16<Tiles, a_by_k, b_by_k>(state, maps, tiles, tuning);
        __syncwarp();
    } else {
        ptx::registers_grow<T::kConsumerRegisters>();
        Bf16Consumer<Tiles, a_by_k, b_by_k, T> consumer{
            state, maps, group_of_warps, warp_uniform(threadIdx.x / 32) % 4, static_cast<int>(threadIdx.x) % 32, tuning,
            0, {}};
        consumer.run(tiles);
    }
    __cluster_barrier_arrive();   // no block may exit while the other still copies or arrives here
    __cluster_barrier_wait();
#endif
}

template <typename Tiles, bool a_by_k, bool b_by_k>
void launch_bf16(Ctx& ctx, int64_t items, const Bf16Maps& maps, const Tiles& tiles, const GroupedTuning& tuning = {}) {
    const auto launch = [&](auto tile) {
        using T = decltype(tile);
        constexpr auto kKernel = gemm_bf16_sm90_kernel<Tiles, a_by_k, b_by_k, T>;
        launch_clusters<kKernel, T::kThreads, T::kSharedBytes>(ctx, "gemm_bf16", items, maps, tiles, tuning);
        CHECK_LAUNCH("gemm_bf16_sm90_kernel");
    };
    if constexpr (!std::is_same_v<Tiles, SymmetricTiles>) {
        CHECK(tuning.lead < tuning.stages && (tuning.stages == 3 || tuning.stages == 4), "grouped_gemm: lead %d of %d",
              tuning.lead, tuning.stages);
        if (tuning.overlap && tuning.stages == 3) return launch(Bf16TileOf<true, 3, 4>{});
        if (tuning.overlap) return launch(Bf16TileOf<true, 4, 2>{});
    }
    launch(Bf16Tile{});
}

// A map of an operand or of results, (rows, columns) matrices.
CUtensorMap map_of(const Tensor& matrix, int64_t rows, int64_t columns, int64_t matrices = 1) {
    return box_map(matrix, rows, columns, columns, Bf16Tile::kBox, kPanelRowBytes, matrices);
}

}  // namespace
#endif

bool gemm_symmetric_supports(const Ctx& ctx, const GemmArgs& args) {
    const bool bf16_only = args.A.dtype == Dtype::kBf16 && args.B.dtype == Dtype::kBf16 && args.D.dtype == Dtype::kBf16;
    const bool aligned = vectorizable<bf16>(args.N, {args.A.data, args.B.data, args.D.data})
                         && (args.layout == GemmLayout::kWgrad || args.K % 8 == 0);
    return kSm90aCode && ctx.sm == 90 && bf16_only && aligned && args.M == args.N && !args.bias && !args.accumulate
           && args.layout != GemmLayout::kDgrad && args.N <= 1 << 20 && args.K < 1 << 30;
}

void gemm_symmetric(Ctx& ctx, const GemmArgs& args) {
    CHECK(gemm_symmetric_supports(ctx, args), "gemm_symmetric: not a product that it makes, or not on this device");
#if defined(LLMC_SM90A)
    const int64_t n = args.N, K = args.K, groups = ceil_div(n, int64_t{2} * Bf16Tile::kRows);
    const bool by_k = args.layout == GemmLayout::kWgrad;
    const auto operand = [&](const Tensor& matrix) { return map_of(matrix, by_k ? K : n, by_k ? n : K); };
    const Bf16Maps maps{operand(args.A), operand(args.B), map_of(args.D, n, n)};
    const SymmetricTiles tiles{static_cast<uint32_t>(groups), static_cast<int>(n), static_cast<int>(K)};
    const int64_t items = SymmetricTiles::items_of(groups);
    if (by_k) launch_bf16<SymmetricTiles, true, true>(ctx, items, maps, tiles);
    else launch_bf16<SymmetricTiles, false, false>(ctx, items, maps, tiles);
#endif
}

bool grouped_gemm_supports(const Ctx& ctx, const GroupedGemmArgs& args) {
    const bool wgrad = args.layout == GemmLayout::kWgrad;
    const bool types = args.A.dtype == Dtype::kBf16 && args.B.dtype == Dtype::kBf16
                       && (args.D.dtype == Dtype::kBf16 || (wgrad && args.D.dtype == Dtype::kFp32));
    const bool aligned = vectorizable<bf16>(args.N, {args.A.data, args.B.data, args.D.data})
                         && (wgrad ? args.M : args.K) % 8 == 0;
    const bool sizes = args.M > 0 && args.K > 0 && args.M < 1 << 30 && args.N < 1 << 20 && args.K < 1 << 30
                       && args.E < 1 << 16;
    return kSm90aCode && ctx.sm == 90 && types && aligned && sizes;
}

void grouped_gemm_sm90([[maybe_unused]] Ctx& ctx, [[maybe_unused]] const GroupedGemmArgs& args,
                       [[maybe_unused]] const GroupedTuning& tuning) {
#if defined(LLMC_SM90A)
    const int32_t* offsets = args.offsets.as<int32_t>();
    const int64_t E = args.E, M = args.M, N = args.N, K = args.K;
    const int experts = static_cast<int>(E), n = static_cast<int>(N);
    if (args.layout == GemmLayout::kWgrad) {
        const Bf16Maps maps{map_of(args.A, K, M), map_of(args.B, K, N), map_of(args.D, M, N, E)};
        const ExpertSums tiles{offsets, experts, static_cast<int>(M), n, args.D.dtype == Dtype::kFp32, args.accumulate,
                               static_cast<char*>(args.D.data)};
        return launch_bf16<ExpertSums, true, true>(ctx, tiles.items(), maps, tiles, tuning);
    }
    const bool by_k = args.layout == GemmLayout::kDgrad;
    const Bf16Maps maps{map_of(args.A, M, K), map_of(args.B, by_k ? K : N, by_k ? N : K, E), map_of(args.D, M, N)};
    const ExpertRows tiles{offsets, args.D.as<bf16>(), experts, n, static_cast<int>(K)};
    const int64_t most = (M / 256 + E) * ceil_div(N, int64_t{256});   // items
    if (by_k) launch_bf16<ExpertRows, false, true>(ctx, most, maps, tiles, tuning);
    else launch_bf16<ExpertRows, false, false>(ctx, most, maps, tiles, tuning);
#endif
}

}  // namespace cuda
