// dQ of the fused attention backward (compute capability 9.0) as fp32 sums in memory.
#pragma once
#include "llmc/cuda/common.cuh"

namespace cuda {

// A unit is 64 queries of a head, in the register layout of a warpgroup (wgmma.cuh): float4 number 128 i + t is
// registers 4 i .. 4 i + 3 of thread t.
inline constexpr int kSumRows = kDqTile;
__host__ __device__ constexpr uint32_t sum_bytes(int HS) { return 4 * kSumRows * HS; }

// Transposes x among every four lanes: x[k] of lane t becomes x[t] of lane k.
__device__ inline void transpose_among_four(uint32_t (&x)[4], int lane) {
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
        const bool upper = lane & step;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (i & step) continue;
            const uint32_t sent = upper ? x[i] : x[i + step];
            const uint32_t got = __shfl_xor_sync(0xffffffffu, sent, step);
            (upper ? x[i] : x[i + step]) = got;
        }
    }
}

// 32 columns of each of `groups` groups of columns, of 16 rows of a unit, in a warp: multiplied and rounded to bf16.
template <int groups> struct DqRows {
    uint32_t part[groups][2][4];

    // from: the unit. rows: which 16 of its rows; columns: which 32 of its columns, the next group `apart` further.
    __device__ DqRows(const float* from, float mul, int rows, int columns, int apart, int lane) {
        const float4* at = reinterpret_cast<const float4*>(from) + 512 * columns + 32 * rows + lane;
        float4 in[groups][4];
#pragma unroll
        for (int g = 0; g < groups; g++) {
#pragma unroll
            for (int i = 0; i < 4; i++) in[g][i] = __ldcs(at + 512 * apart * g + 128 * i);
        }
#pragma unroll
        for (int g = 0; g < groups; g++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                part[g][0][i] = pack_bf16x2(in[g][i].x * mul, in[g][i].y * mul);
                part[g][1][i] = pack_bf16x2(in[g][i].z * mul, in[g][i].w * mul);
            }
        }
    }
    // Returns eight values: columns 8 (lane % 4) ... of row 8 half + lane / 4. Call it once for each group and half: it
    // exchanges values in place.
    __device__ uint4 values(int group, int half, int lane) {
        uint32_t (&x)[4] = part[group][half];
        transpose_among_four(x, lane);
        return {x[0], x[1], x[2], x[3]};
    }
};

}  // namespace cuda
