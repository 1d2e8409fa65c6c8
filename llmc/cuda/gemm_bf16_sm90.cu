// Matmuls of BF16 operands by wgmma that compute a list of results: the lower triangles of symmetric products, products
// of several matrices, or those of experts, whose sizes are read on the device.
//
// As in the INT8 matmul, a product of the next step is always queued behind the one that runs. In symmetric products,
// consumer 1 begins each tile two steps after consumer 0, so that each of them stores while the other has the tensor
// cores for itself. Of experts, whose items are found by loads that depend on each other, consumers find the next item
// while products run, and skip products of 64 rows that an item does not have.
#include "llmc/cuda/common.cuh"
#include "llmc/cuda/gemm.h"
#if defined(LLMC_SM90A)   // these use instructions that older devices lack
#include "llmc/cuda/gemm_bf16_consumer_sm90.cuh"
#endif

namespace cuda {
#if defined(LLMC_SM90A)
namespace {

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

// Loads an item. share, columns: those of the item; where they are constants, the thread has half of the instructions,
// which otherwise take 700 of the 1,024 cycles of a step.
template <bool a_by_k, bool b_by_k>
__device__ __forceinline__ void load_item(TileState<Bf16Tile>& state, const Bf16Maps& maps, const Bf16Place& at,
                                          Bf16Place::Share share, int columns, int of_a, int of_b, int rank) {
    using T = Bf16Tile;
    const bool same_rows = share == Bf16Place::Share::kRows, same_columns = share == Bf16Place::Share::kColumns;
    const int boxes = columns / T::kBox, steps = bf16_steps(at.depth);
    const int row = same_rows ? rank : 0, end_row = same_rows ? rank + 1 : T::kRows / T::kBox;
    const int column = same_columns ? rank * boxes / 2 : 0, end_column = same_columns ? column + boxes / 2 : boxes;
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        const uint32_t full = state.ring.claim(T::kRowBytes + boxes * T::kBoxBytes);
        const int k = at.k + step * T::kDepth;
        load_boxes<a_by_k>(state.rows(), maps.a, full, at.row, k, of_a, row, end_row, same_rows);
        load_boxes<b_by_k>(state.columns(), maps.b, full, at.column, k, of_b, column, end_column, same_columns);
        state.ring.next();
    }
}

// The thread that issues TMA loads.
template <typename Tiles, bool a_by_k, bool b_by_k>
__device__ void load_bf16(TileState<Bf16Tile> state, const Bf16Maps& maps, Tiles tiles) {
    using Share = Bf16Place::Share;
    const int rank = static_cast<int>(BlockPairs::rank());
    Bf16Place at;
    for (uint32_t round = 0; tiles.find(item_of(round), rank, at); round++) {
        const int of_a = Tiles::kMatrices ? at.matrix : 0;
        const int of_b = Tiles::kMatrices || Tiles::kWeightsAreB ? at.matrix : 0;
        const auto load = [&](Share share, int columns) {
            load_item<a_by_k, b_by_k>(state, maps, at, share, columns, of_a, of_b, rank);
        };
        if (std::is_same_v<Tiles, SymmetricTiles>) load(at.share, at.columns);
        else if (at.share == Share::kRows) load(Share::kRows, Bf16Tile::kColumns);
        else load(Share::kColumns, Bf16Tile::kColumns);
    }
}

// The thread that issues TMA stores of results for which tiles.in_turns().
template <typename Tiles> __device__ void store_bf16(uint32_t shared, const Bf16Maps& maps, Tiles tiles) {
    using T = Bf16Tile;
    const int rank = static_cast<int>(BlockPairs::rank());
    uint32_t parity = 0;
    Bf16Place at;
    for (uint32_t round = 0; tiles.find(item_of(round), rank, at); round++)
        for (int consumer = 0; consumer < T::kConsumers; consumer++, parity ^= 1) {
            const int row = at.row + T::kBox * consumer;
            // Of rows of an expert only whole boxes: the consumer stores the others.
            const bool any = Tiles::kWeightsAreB ? row + T::kBox <= at.end_row : row < at.end_row;
            ptx::barrier_wait(shared + T::kWritten, parity);
#pragma unroll
            for (int i = 0; i < T::kResultBoxes; i++) {
                const int column = at.column + T::kBox * i;
                if (any && column < tiles.n)
                    ptx::store_matrix_box(&maps.d, shared + T::kResultsAt + i * T::kBoxBytes, column, row,
                                          Tiles::kWeightsAreB ? 0 : at.matrix);
                ptx::bulk_commit();
            }
            const uint32_t free = shared + T::kFree + 8 * T::kResultBoxes * (1 - consumer);
            ptx::bulk_wait_read<3>();
            ptx::barrier_arrive(free);
            ptx::bulk_wait_read<2>();
            ptx::barrier_arrive(free + 8);
            ptx::bulk_wait_read<1>();
            ptx::barrier_arrive(free + 16);
            ptx::bulk_wait_read<0>();
            ptx::barrier_arrive(free + 24);
        }
}

// Math: the results of the list, D[m, n] = sum over k of a[m, k] b[n, k] in fp32, rounded to bf16. SymmetricTiles also
//       writes each to D[n, m]; ExpertSums may keep fp32, and may add to D, after rounding.
// Source: PTX ISA 9.0, wgmma of .bf16. The halved list: Lawson et al., ACM TOMS 5 (1979), as SYRK of the BLAS.
// Traffic: the rows and columns of the tiles read, mostly from the L2 cache; 2 bytes written per element of D.
// Requires: sm_90a; A, B and D 16-byte aligned, with multiples of 8 elements per row.
// Parallel: a cluster of 2 blocks computes an item, each block 128 rows. Its last warpgroup issues TMA loads, and most
//           stores of experts; each other one owns 64 rows.
template <typename Tiles, bool a_by_k, bool b_by_k>
__global__ void __launch_bounds__(Bf16Tile::kThreads, 1)
gemm_bf16_sm90_kernel(const __grid_constant__ Bf16Maps maps, const Tiles tiles) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using T = Bf16Tile;
    extern __shared__ __align__(1024) char memory[];
    const TileState<T> state(ptx::shared_address(memory));
    const int group_of_warps = warp_uniform(threadIdx.x / 128);
    if (threadIdx.x == 0) {
        state.ring.init(4 * T::kConsumers * T::kCluster);
        ptx::barrier_init(state.shared + T::kWritten, 4);
        for (int i = 0; i < T::kConsumers * T::kResultBoxes; i++) ptx::barrier_init(state.shared + T::kFree + 8 * i, 1);
        ptx::barrier_init_fence();
        ptx::prefetch_map(&maps.a);
        ptx::prefetch_map(&maps.b);
    }
    __cluster_barrier_arrive();   // no block may copy into another or free its stages before its barriers exist
    __cluster_barrier_wait();
    if (group_of_warps == T::kConsumers) {
        ptx::registers_shrink<T::kProducerRegisters>();
        if (threadIdx.x == 128 * T::kConsumers) load_bf16<Tiles, a_by_k, b_by_k>(state, maps, tiles);
        if constexpr (!std::is_same_v<Tiles, SymmetricTiles>)
            if (threadIdx.x == 128 * T::kConsumers + 32 && tiles.in_turns()) store_bf16(state.shared, maps, tiles);
        __syncwarp();
    } else {
        ptx::registers_grow<T::kConsumerRegisters>();
        Bf16Consumer<Tiles, a_by_k, b_by_k> consumer{
            state, maps, group_of_warps, warp_uniform(threadIdx.x / 32) % 4, static_cast<int>(threadIdx.x) % 32, 0, {}};
        consumer.run(tiles);
    }
    __cluster_barrier_arrive();   // no block may exit while the other still copies or arrives here
    __cluster_barrier_wait();
#endif
}

template <typename Tiles, bool a_by_k, bool b_by_k>
void launch_bf16(Ctx& ctx, int64_t items, const Bf16Maps& maps, const Tiles& tiles) {
    constexpr auto kKernel = gemm_bf16_sm90_kernel<Tiles, a_by_k, b_by_k>;
    launch_clusters<kKernel, Bf16Tile::kThreads, Bf16Tile::kSharedBytes>(ctx, "gemm_bf16", items, maps, tiles);
    CHECK_LAUNCH("gemm_bf16_sm90_kernel");
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
           && args.layout != GemmLayout::kDgrad && args.N <= 1 << 20 && args.K < 1 << 30 && args.count() < 1 << 16
           && args.count() * ceil_div(args.N, int64_t{256}) * ceil_div(args.N, int64_t{256}) < 1 << 30;
}

void gemm_symmetric(Ctx& ctx, const GemmArgs& args) {
    CHECK(gemm_symmetric_supports(ctx, args), "gemm_symmetric: not a product that it makes, or not on this device");
#if defined(LLMC_SM90A)
    const int64_t n = args.N, K = args.K, groups = ceil_div(n, int64_t{2} * Bf16Tile::kRows), matrices = args.count();
    const bool by_k = args.layout == GemmLayout::kWgrad;
    const auto operand = [&](const Tensor& matrix) { return map_of(matrix, by_k ? K : n, by_k ? n : K, matrices); };
    const Bf16Maps maps{operand(args.A), operand(args.B), map_of(args.D, n, n, matrices)};
    const SymmetricTiles tiles{static_cast<uint32_t>(matrices), static_cast<uint32_t>(groups), static_cast<int>(n),
                               static_cast<int>(K)};
    const int64_t items = SymmetricTiles::items_of(matrices, groups);
    if (by_k) launch_bf16<SymmetricTiles, true, true>(ctx, items, maps, tiles);
    else launch_bf16<SymmetricTiles, false, false>(ctx, items, maps, tiles);
#endif
}

bool gemm_matrices_supports(const Ctx& ctx, const GemmArgs& args) {
    const bool bf16_only = args.A.dtype == Dtype::kBf16 && args.B.dtype == Dtype::kBf16 && args.D.dtype == Dtype::kBf16;
    const bool aligned = vectorizable<bf16>(args.N, {args.A.data, args.B.data, args.D.data}) && args.K % 8 == 0;
    return kSm90aCode && ctx.sm == 90 && bf16_only && aligned && !args.bias && !args.accumulate
           && args.layout != GemmLayout::kWgrad && args.M < 1 << 20 && args.N < 1 << 20 && args.K < 1 << 30
           && args.count() < 1 << 16
           && args.count() * ceil_div(args.M, int64_t{256}) * ceil_div(args.N, int64_t{256}) < 1 << 30;
}

void gemm_matrices(Ctx& ctx, const GemmArgs& args) {
    CHECK(gemm_matrices_supports(ctx, args), "gemm_matrices: not products that it makes, or not on this device");
#if defined(LLMC_SM90A)
    const int64_t M = args.M, N = args.N, K = args.K, matrices = args.count();
    const bool by_k = args.layout == GemmLayout::kDgrad;
    const Bf16Maps maps{map_of(args.A, M, K, matrices), map_of(args.B, by_k ? K : N, by_k ? N : K, matrices),
                        map_of(args.D, M, N, matrices)};
    const MatrixTiles tiles{static_cast<int>(matrices), static_cast<int>(M), static_cast<int>(N), static_cast<int>(K)};
    if (by_k) launch_bf16<MatrixTiles, false, true>(ctx, tiles.items(), maps, tiles);
    else launch_bf16<MatrixTiles, false, false>(ctx, tiles.items(), maps, tiles);
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

void grouped_gemm_sm90([[maybe_unused]] Ctx& ctx, [[maybe_unused]] const GroupedGemmArgs& args) {
#if defined(LLMC_SM90A)
    const int32_t* offsets = args.offsets.as<int32_t>();
    const int64_t E = args.E, M = args.M, N = args.N, K = args.K;
    const int experts = static_cast<int>(E), n = static_cast<int>(N);
    if (args.layout == GemmLayout::kWgrad) {
        const Bf16Maps maps{map_of(args.A, K, M), map_of(args.B, K, N), map_of(args.D, M, N, E)};
        const ExpertSums tiles{offsets, experts, static_cast<int>(M), n, args.D.dtype == Dtype::kFp32, args.accumulate};
        return launch_bf16<ExpertSums, true, true>(ctx, tiles.items(), maps, tiles);
    }
    const bool by_k = args.layout == GemmLayout::kDgrad;
    const Bf16Maps maps{map_of(args.A, M, K), map_of(args.B, by_k ? K : N, by_k ? N : K, E), map_of(args.D, M, N)};
    const ExpertRows tiles{offsets, args.D.as<bf16>(), experts, n, static_cast<int>(K)};
    const int64_t most = (M / 256 + E) * ceil_div(N, int64_t{256});   // items
    if (by_k) launch_bf16<ExpertRows, false, true>(ctx, most, maps, tiles);
    else launch_bf16<ExpertRows, false, false>(ctx, most, maps, tiles);
#endif
}

}  // namespace cuda
