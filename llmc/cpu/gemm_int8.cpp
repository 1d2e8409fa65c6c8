// Matmul of INT8 operands on the CPU. The product over a block of kDepth k is exact in fp32, since it is at most 256 *
// 127 * 127 < 2^24; the blocks are added as integers.
#include "llmc/cpu/gemm_tiles.h"
#include "llmc/ops/gemm_fp8.h"

namespace cpu {
namespace {

// tile.sums, which are the bits of integers, = (k == 0) or += tile.spare.
void add_block(const Tile<float>& tile, int64_t k) {
    for (int64_t row = 0; row < tile.rows; row++) {
        float* sums = tile.sums + row * tile.stride;
        const float* product = tile.spare + row * tile.stride;
        for_lanes<float>(tile.columns, [&](int64_t i, auto n) {
            __m256i sum = _mm256_cvtps_epi32(load(product + i, n).v);
            if (k > 0) sum = _mm256_add_epi32(sum, _mm256_castps_si256(load(sums + i, n).v));
            store(sums + i, Vec<float>(_mm256_castsi256_ps(sum)), n);
        });
    }
}

void finish(const GemmArgs& args, const Tile<float>& tile) {
    const float* of_rows = args.A_scale_inv.as<float>() + tile.top;
    const float* of_columns = args.B_scale_inv.as<float>() + tile.left;
    const bf16* bias = args.bias ? args.bias.as<bf16>() + tile.left : nullptr;
    for (int64_t row = 0; row < tile.rows; row++) {
        bf16* out = args.D.as<bf16>() + (tile.top + row) * args.N + tile.left;
        const float* sums = tile.sums + row * tile.stride;
        for_lanes<float>(tile.columns, [&](int64_t i, auto n) {
            const Vec<float> sum = _mm256_cvtepi32_ps(_mm256_castps_si256(load(sums + i, n).v));
            const Vec<float> scale = Vec<float>(of_rows[row]) * load(of_columns + i, n);
            store(out + i, bias ? fma(sum, scale, load(bias + i, n)) : sum * scale, n);
        });
    }
}

}  // namespace

void gemm_int8(const GemmArgs& args) {
    const char* error = int8_gemm_error(args);
    CHECK(!error, "gemm M %lld N %lld K %lld: %s", (long long)args.M, (long long)args.N, (long long)args.K, error);
    static_assert(kDepth * 128 * 128 <= 1 << 24);
    const Operand<int8_t> a{args.A.as<int8_t>(), args.K, false, args.M}, b{args.B.as<int8_t>(), args.K, false, args.N};
    run_tiles<float>(
        args, a, b, kDepth,
        [&](const Tile<float>& tile, int64_t k, auto&& product) {
            product(tile.spare, false);
            add_block(tile, k);
        },
        [&](const Tile<float>& tile) { finish(args, tile); });
}

}  // namespace cpu
