// Attention backward on compute capability 9.0: what its large kernels share.
//
// Two, so that every gradient is summed by one warpgroup, in one order: one owns queries and meets keys (dq: three
// products a tile), one owns keys and meets the queries of all heads of its group (dk and dv: four products a tile).
#pragma once
#include "llmc/cuda/attention_sm90.cuh"

namespace cuda {

// dq of dqkv; reads delta. dk and dv of dqkv; reads delta.
void attention_backward_query_sm90(Ctx& ctx, const AttentionBackwardArgs& args, const AttentionShape& shape);
void attention_backward_key_sm90(Ctx& ctx, const AttentionBackwardArgs& args, const AttentionShape& shape);

// Starts s = a tile^T over the head.
template <int HS>
__device__ inline void start_scores(float (&s)[32], const uint32_t (&a)[HS / 16][4], uint32_t tile,
                                    uint32_t panel_bytes) {
    const uint64_t b = tile_descriptor(tile, panel_bytes);
    ptx::pin(s);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < HS / 16; i++) ptx::wgmma<64, false>(s, a[i], along_columns(b, i, panel_bytes), i > 0);
    ptx::wgmma_commit();
}

// The same with the 64 rows of a in shared memory.
template <int HS>
__device__ inline void start_scores_shared(float (&s)[32], uint32_t own, uint32_t own_panel_bytes, uint32_t tile,
                                           uint32_t panel_bytes) {
    const uint64_t a = tile_descriptor(own, own_panel_bytes), b = tile_descriptor(tile, panel_bytes);
    ptx::pin(s);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < HS / 16; i++) {
        ptx::wgmma<64, false, false>(s, along_columns(a, i, own_panel_bytes), along_columns(b, i, panel_bytes), i > 0);
    }
    ptx::wgmma_commit();
}

// Starts sums += a tile over the 64 rows of the tile.
template <int HS>
__device__ inline void start_sums(float (&sums)[HS / 2], const uint32_t (&a)[4][4], uint32_t tile,
                                  uint32_t panel_bytes) {
    const uint64_t b = tile_descriptor(tile, panel_bytes);
    ptx::pin(sums);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; i++) ptx::wgmma<HS, true>(sums, a[i], along_rows(b, i), true);
    ptx::wgmma_commit();
}

// The warp's 16 rows of results times mul to global memory through its own shared memory.
template <int HS>
__device__ inline void store_rows(const CUtensorMap& map, uint32_t shared, float (&d)[HS / 2], float mul, int row,
                                  int panel, int batch, int lane) {
#pragma unroll
    for (float& x : d) x *= mul;
    if (lane == 0) ptx::bulk_wait_read<0>();   // what was here before has left
    __syncwarp();
    stage_rows(shared, d, lane);
    ptx::fence_async();
    __syncwarp();
    if (lane == 0) {
        ptx::store_box(&map, shared, row, panel, batch);
        ptx::bulk_commit();
    }
}

}  // namespace cuda
