// INT8 matrices with a scale per row, and their transposes in FP8. CPU.
#include "llmc/cpu/cast_lines.h"
#include "llmc/cpu/gemm_kernel.h"

namespace cpu {
namespace {

constexpr int kTurned = static_cast<int>(kTurnedColumns);

// Lanes i and i + d (i / d even) become their sum and their difference.
template <int d> Vec<float> butterfly(Vec<float> x) {
    static_assert(d == 1 || d == 2 || d == 4);
    const __m256 partner = d == 1 ? _mm256_permute_ps(x.v, 0xb1)
                           : d == 2 ? _mm256_permute_ps(x.v, 0x4e) : _mm256_permute2f128_ps(x.v, x.v, 1);
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), bit = _mm256_and_si256(lane, _mm256_set1_epi32(d));
    return partner + _mm256_xor_ps(x.v, _mm256_castsi256_ps(_mm256_slli_epi32(bit, d == 1 ? 31 : d == 2 ? 30 : 29)));
}

// turned = 8 x' of a group.
void turn_group(float* turned, const bf16* in) {
    Vec<float> x[8];
    for (int i = 0; i < 8; i++) x[i] = butterfly<4>(butterfly<2>(butterfly<1>(load(in + 8 * i))));
    for (int d = 1; d < 8; d *= 2)
        for (int i = 0; i < 8; i++) {
            if (i & d) continue;
            const Vec<float> sum = x[i] + x[i + d], difference = x[i] - x[i + d];
            x[i] = sum, x[i + d] = difference;
        }
    for (int i = 0; i < 8; i++) store(turned + 8 * i, x[i]);
}

// turned = 8 x' of `count` elements of a row from `begin` on.
void turn_line(float* turned, const Tensor& in, int64_t begin, int64_t count) {
    for (int64_t i = 0; i < count; i += kTurned) {
        bf16 x[kTurned];
        if (in.dtype == Dtype::kBf16) std::copy_n(in.as<bf16>() + begin + i, kTurned, x);
        else round_line(x, in.as<float>() + begin + i, kTurned);
        turn_group(turned + i, x);
    }
}
// The bits of the amax of x', of 8 x'.
uint32_t amax_of_turned(const float* turned, int64_t count) {
    const uint32_t bits = amax_of_line(turned, count);
    return bits < kInfinityBits ? amax_bits_of(float_of_bits(bits) / 8) : kInfinityBits;
}
// The codes of 8 x'. A multiplication by 1/8 is exact. The sum rounds to an integer, which its last bits are.
void code_line(int8_t* codes, const float* turned, uint32_t amax_bits, int64_t count) {
    const float scale = int8_row_scale(amax_bits).scale / 8;
    if (scale == 0) return static_cast<void>(std::fill_n(codes, count, int8_t{0}));
    for (int64_t i = 0; i < count; i++)
        codes[i] = static_cast<int8_t>(std::bit_cast<uint32_t>(turned[i] * scale + 0x1.8p23f));
}

void check_groups(const char* op, const Tensor& in, int64_t begin, int64_t R, int64_t C) {
    check_tensor(op, "in", in, in.dtype == Dtype::kBf16 ? Dtype::kBf16 : Dtype::kFp32, in.elems);
    const bool groups = begin % kTurned == 0 && in.elems % kTurned == 0 && C % kTurned == 0;
    CHECK(begin >= 0 && begin + in.elems <= R * C && groups,
          "%s: elements [%lld, +%lld) of %lld x %lld, in groups of %d", op, ll(begin), ll(in.elems), ll(R), ll(C),
          kTurned);
}

// Calls body(row, begin, turned, count) for the part of each row of a shard range: begin counts from the range's start.
template <typename Body> void for_turned_rows(const Tensor& in, int64_t begin, int64_t C, Body&& body) {
    const int64_t end = begin + in.elems;
#pragma omp parallel if (in.elems >= kParallelElems)
    {
        const auto turned = make_buffer<float>(std::min(C, in.elems));
#pragma omp for schedule(static)
        for (int64_t row = begin / C; row < ceil_div(end, C); row++) {
            const int64_t first = std::max(begin, row * C), count = std::min(end, (row + 1) * C) - first;
            turn_line(turned.get(), in, first - begin, count);
            body(row, first - begin, turned.get(), count);
        }
    }
}

// Columns [left, left + 64) of up to kScaleBlock rows from `top` on, turned back and cast.
template <Dtype format> void transpose_tile(const TransposeInt8Args& args, int64_t top, int64_t left) {
    const int64_t R = args.R, C = args.C, count = std::min(kScaleBlock, R - top);
    int16_t sum[kTurned][kScaleBlock] = {};
    float unit[kScaleBlock], scale[kScaleBlock], x[kScaleBlock];
    std::fill(scale, scale + kScaleBlock, args.entry->scale);
    for (int64_t r = 0; r < count; r++) {
        unit[r] = args.scale_inv.as<float>()[top + r] / 8;
        for (int64_t c = 0; c < kTurned; c++) sum[c][r] = args.in.as<int8_t>()[(top + r) * C + left + c];
    }
    for (int d = 1; d < kTurned; d *= 2)
        for (int c = 0; c < kTurned; c++) {
            if (c & d) continue;
            for (int64_t r = 0; r < kScaleBlock; r++) {
                const int16_t a = sum[c][r], b = sum[c + d][r];
                sum[c][r] = static_cast<int16_t>(a + b), sum[c + d][r] = static_cast<int16_t>(a - b);
            }
        }
    Tally tally;
    for (int64_t c = 0; c < kTurned; c++) {
        for (int64_t r = 0; r < count; r++) x[r] = static_cast<float>(sum[c][r]) * unit[r];
        uint8_t* codes = static_cast<uint8_t*>(args.out.data) + (left + c) * R + top;
        cast_line<format>(codes, x, scale, count);
        if (args.counts) count_line<format>(tally, codes, x, scale, count);
    }
    if (args.counts) add_counts(args.counts, kTurned * count, tally);
}

}  // namespace

void quantize_int8(Ctx&, const QuantizeInt8Args& args) {
    const int64_t N = args.N, C = args.C;
    check_groups("quantize_int8", args.in, 0, N, C);
    check_tensor("quantize_int8", "in", args.in, args.in.dtype, N * C);
    check_tensor("quantize_int8", "out", args.out, Dtype::kInt8, N * C);
    check_tensor("quantize_int8", "scale_inv", args.scale_inv, Dtype::kFp32, N);
    if (args.state && args.state->skip) return;
    for_turned_rows(args.in, 0, C, [&](int64_t row, int64_t begin, const float* turned, int64_t count) {
        const uint32_t amax = amax_of_turned(turned, count);
        code_line(args.out.as<int8_t>() + begin, turned, amax, count);
        args.scale_inv.as<float>()[row] = int8_row_scale(amax).scale_inv;
    });
}

void row_amax(Ctx&, const RowAmaxArgs& args) {
    if (args.in.elems == 0) return;
    check_groups("row_amax", args.in, args.begin, args.R, args.C);
    for_turned_rows(args.in, args.begin, args.C, [&](int64_t row, int64_t, const float* turned, int64_t count) {
        raise_amax(&args.amaxes[row], amax_of_turned(turned, count));
    });
}

void quantize_int8_run(Ctx&, const QuantizeInt8RunArgs& args) {
    if (args.in.elems == 0) return;
    check_groups("quantize_int8_run", args.in, args.begin, args.R, args.C);
    check_tensor("quantize_int8_run", "out", args.out, Dtype::kInt8, args.in.elems);
    for_turned_rows(args.in, args.begin, args.C, [&](int64_t row, int64_t begin, const float* turned, int64_t count) {
        code_line(args.out.as<int8_t>() + begin, turned, args.amaxes[row], count);
    });
}

void row_scales(Ctx&, const RowScalesArgs& args) {
    check_tensor("row_scales", "scale_inv", args.scale_inv, Dtype::kFp32, args.R);
    for (int64_t r = 0; r < args.R; r++) args.scale_inv.as<float>()[r] = int8_row_scale(args.amaxes[r]).scale_inv;
}

void transpose_int8(Ctx&, const TransposeInt8Args& args) {
    const int64_t R = args.R, C = args.C;
    CHECK(is_fp8(args.out.dtype) && R % 16 == 0 && C % kTurned == 0, "transpose_int8: %lld x %lld to %s", ll(R), ll(C),
          dtype_name(args.out.dtype));
    check_tensor("transpose_int8", "in", args.in, Dtype::kInt8, R * C);
    check_tensor("transpose_int8", "out", args.out, args.out.dtype, R * C);
    check_tensor("transpose_int8", "scale_inv", args.scale_inv, Dtype::kFp32, R);
    args.entry->scale_inv = 1 / args.entry->scale;
    const int64_t columns = C / kTurned, tiles = scale_blocks(R) * columns;
    parallel_for(tiles, R * C, [&](int64_t tile) {
        const int64_t top = tile % scale_blocks(R) * kScaleBlock, left = tile / scale_blocks(R) * kTurned;
        if (args.out.dtype == Dtype::kE4m3) transpose_tile<Dtype::kE4m3>(args, top, left);
        else transpose_tile<Dtype::kE5m2>(args, top, left);
    });
}

}  // namespace cpu
