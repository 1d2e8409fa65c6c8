// Matmul of FP8 operands on the CPU: codes are decoded when they are packed and accumulated in fp32.
//
// Definition of an element of a product. kTensor: the sum of gemm_kernel.h over the decoded codes, times the rounded
// product of the two scales. Blocks: for every 128 k one chain of fma from 0 in ascending k, times the rounded product
// of their two scales; these terms are added in ascending order.
#include "llmc/ops/gemm_fp8.h"

#include "llmc/cpu/cast_lines.h"
#include "llmc/cpu/gemm_tiles.h"

namespace cpu {

// An FP8 number that load decodes, so that FP8 is packed like every other type.
template <Dtype format> struct Fp8Code {
    uint8_t code;
};

template <Dtype format> inline Vec<float> load(const Fp8Code<format>* p) {
    static const float* const values = fp8_values(format);
    __m128i codes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return _mm256_i32gather_ps(values, _mm256_cvtepu8_epi32(codes), 4);
}

namespace {

// Scales of B for one block of k and the columns of a tile.
void block_scales(float* scales, const GemmArgs& args, int64_t block, int64_t left, int64_t columns) {
    const float* scale_inv = args.B_scale_inv.as<float>();
    for (int64_t j = 0; j < columns; j++) {
        const int64_t n = left + j;
        scales[j] = scale_inv[args.B_granularity == Granularity::kBlock1x128
                                  ? block * args.N + n
                                  : n / kScaleBlock * block_row_stride(args.K) + block];
    }
}

// sums = (k == 0) or += the product over one block of k, which is in tile.spare, times its scales.
void add_block_product(const GemmArgs& args, const Tile<float>& tile, int64_t k) {
    float column_scales[kTileColumns];
    block_scales(column_scales, args, k / kScaleBlock, tile.left, tile.columns);
    const float* row_scales = args.A_scale_inv.as<float>() + k / kScaleBlock * args.M + tile.top;
    for (int64_t row = 0; row < tile.rows; row++) {
        const float* product = tile.spare + row * tile.stride;
        float* sums = tile.sums + row * tile.stride;
        const Vec<float> row_scale(row_scales[row]);
        for_lanes<float>(tile.columns, [&](int64_t i, auto n) {
            Vec<float> value = row_scale * load(column_scales + i, n) * load(product + i, n);
            if (k > 0) value = load(sums + i, n) + value;
            store(sums + i, value, n);
        });
    }
}

void multiply_sums(const Tile<float>& tile, float scale) {
    for (int64_t row = 0; row < tile.rows; row++) {
        float* sums = tile.sums + row * tile.stride;
        for_lanes<float>(tile.columns,
                         [&](int64_t i, auto n) { store(sums + i, load(sums + i, n) * Vec<float>(scale), n); });
    }
}

template <Dtype a_format, Dtype b_format> void run_fp8(const GemmArgs& args) {
    const Operand<Fp8Code<a_format>> a{static_cast<const Fp8Code<a_format>*>(args.A.data), args.K, false, args.M};
    const Operand<Fp8Code<b_format>> b{static_cast<const Fp8Code<b_format>*>(args.B.data), args.K, false, args.N};
    const bool blocks = args.A_granularity != Granularity::kTensor;
    const float scale = blocks ? 1.0f : args.A_scale_inv.as<float>()[0] * args.B_scale_inv.as<float>()[0];
    run_tiles<float>(
        args, a, b, blocks ? kScaleBlock : kDepth,
        [&](const Tile<float>& tile, int64_t k, auto&& product) {
            if (!blocks) return product(tile.sums, k > 0);
            product(tile.spare, false);
            add_block_product(args, tile, k);
        },
        [&](const Tile<float>& tile) {
            if (!blocks) multiply_sums(tile, scale);
            if (args.D.dtype == Dtype::kBf16) finish_tile<bf16, bf16>(args, tile);
            else finish_tile<bf16, float>(args, tile);
        });
}

}  // namespace

void gemm_fp8(const GemmArgs& args) {
    const char* error = fp8_gemm_error(args);
    CHECK(!error, "gemm M %lld N %lld K %lld: %s", (long long)args.M, (long long)args.N, (long long)args.K, error);
    constexpr Dtype kE4m3 = Dtype::kE4m3, kE5m2 = Dtype::kE5m2;
    if (args.A.dtype == kE5m2) run_fp8<kE5m2, kE4m3>(args);
    else if (args.B.dtype == kE5m2) run_fp8<kE4m3, kE5m2>(args);
    else run_fp8<kE4m3, kE4m3>(args);
}

}  // namespace cpu
