// Operands of the weight gradients of experts from rowwise FP8 codes.
#include "llmc/cuda/quantize.cuh"
#include "llmc/ops/ops_moe.h"

namespace cuda {
namespace {

struct ScaledRows {
    const uint8_t* codes;
    const float* scale_inv;
    const int32_t* offsets;
    int64_t R, C;
    int E;
};

// Finds the rows [first, first + count) of block `block` of 128 padded rows, which the threads look for together;
// count <= 0 if it has none. Ends with a barrier.
__device__ inline int2 rows_of_block(const ScaledRows& in, int block, int2& found) {
    if (threadIdx.x == 0) found = make_int2(0, 0);
    __syncthreads();
    for (int e = static_cast<int>(threadIdx.x); e < in.E; e += kTileThreads<1>) {
        const int begin = in.offsets[e], end = in.offsets[e + 1], number = block - (begin / kTile + e);
        if (number < 0 || block >= end / kTile + e + 1) continue;
        found = make_int2(begin + number * kTile, end - begin - number * kTile);
    }
    __syncthreads();
    return found;
}

// Math: out[c, p] = to_fp8(in[r, c] in_scale_inv[c / 128, r] scale), scale = block_scale of the amax of 128 values of a
//     column; p = padded_rows(offsets[e], e) + r - offsets[e], 0 for every other p.
// Source: FP8-Flow-MoE, arXiv 2511.02302; TransposeScaledArgs.
// Traffic: codes read, and written for all p, once; scales.
// Requires: C a multiple of 16, tensors aligned to 16 bytes.
// Parallel: a block owns a tile of 128 x 128 (quantize_tile.cuh), whose rows are of one expert.
template <typename Kind>
__global__ void __launch_bounds__(kTileThreads<1>, 4)
    transpose_scaled_kernel(const __grid_constant__ TileOut out, const __grid_constant__ ScaledRows in) {
    __shared__ TileShared<1> shared;
    __shared__ int2 found;
    wait_for_previous_kernels();
    const int row_tile = static_cast<int>(blockIdx.z) * kTileGroup + static_cast<int>(blockIdx.x);
    if (int64_t{row_tile} * kTile >= out.N) return;
    const TileThread t = tile_thread(row_tile, blockIdx.y, out.N, out.C);
    const int2 rows = rows_of_block(in, row_tile, found);
    const float* scales = in.scale_inv + blockIdx.y * in.R;
    uint2 codes[8];
    float scale[8];
#pragma unroll
    for (int r = 0; r < 8; r++) {
        const int64_t row = rows.x + t.row_in_tile(r);
        const bool valid = t.column_valid() && t.row_in_tile(r) < rows.y;
        codes[r] = valid ? *reinterpret_cast<const uint2*>(in.codes + row * in.C + t.column()) : make_uint2(0, 0);
        scale[r] = valid ? scales[row] : 1.0f;
    }
    TileValues<1> value;
#pragma unroll
    for (int r = 0; r < 8; r++) value[0][r] = from_e4m3x8(codes[r], scale[r]);
    write_tile<Kind, 1>(out, t, value, shared);
    if constexpr (Kind::kCount) {   // write_tile has counted all P rows
        const int64_t more = (in.offsets[in.E] - in.offsets[0] - out.N) * in.C;
        if (threadIdx.x + blockIdx.x + blockIdx.y + blockIdx.z == 0)
            atomicAdd(&out.counts->elems, static_cast<unsigned long long>(more));
    }
}

}  // namespace

void transpose_scaled(Ctx& ctx, const TransposeScaledArgs& args) {
    const int64_t R = args.R, C = args.C, E = args.E, P = padded_rows(R, E);
    const char* op = "transpose_scaled";
    expect(args.in, Dtype::kE4m3, R * C, op);
    expect_aligned(args.in, op);
    expect(args.in_scale_inv, Dtype::kFp32, scale_blocks(C) * R, op);
    expect(args.offsets, Dtype::kInt32, E + 1, op);
    CHECK(P < (1 << 24) && C < (1 << 23) && E > 0 && args.out.dtype == Dtype::kE4m3, "%s: %lld x %lld of %lld experts",
          op, ll(R), ll(C), ll(E));
    const QuantOut quant{.transposed = args.out, .granularity = Granularity::kBlock1x128,
                         .transposed_scale_inv = args.out_scale_inv, .counts = args.counts};
    const ScaledRows in{static_cast<const uint8_t*>(args.in.data), args.in_scale_inv.as<float>(),
                        args.offsets.as<int32_t>(), R, C, static_cast<int>(E)};
    const dim3 grid(kTileGroup, grid_size(ceil_div(C, kTile)), grid_size(ceil_div(P, kTile * kTileGroup)));
    const auto launch = [&](auto kernel) {
        launch_early(ctx, kernel, grid, kTileThreads<1>, 0, tile_out(quant, {}, P, C, op), in);
    };
    if (args.counts) launch(transpose_scaled_kernel<TileKind<TileCast::kBlock1x128, Dtype::kE4m3, true>>);
    else launch(transpose_scaled_kernel<TileKind<TileCast::kBlock1x128, Dtype::kE4m3, false>>);
}

}  // namespace cuda
