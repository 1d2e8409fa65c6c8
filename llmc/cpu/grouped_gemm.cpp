// Matmuls of experts, and transposes of their FP8 operands. CPU.
#include "llmc/ops/grouped_gemm.h"

#include <cstring>

#include "llmc/cpu/gemm_tiles.h"
#include "llmc/cpu/quantize.h"

namespace cpu {

const char* experts_kernel(const Ctx&, Dtype) { return "one after another on the CPU"; }

namespace {

// out (rows, columns) = columns [first, first + columns) of in, whose rows have `stride` elements.
template <typename T>
void copy_columns(T* out, const T* in, int64_t rows, int64_t stride, int64_t first, int64_t columns) {
    for (int64_t r = 0; r < rows; r++) std::copy_n(in + r * stride + first, columns, out + r * columns);
}

// The matmul of an expert in FP8, by gemm_fp8 of copies: their rows are a multiple of 4 for kForward and kDgrad, or
// their columns those of the expert for kWgrad.
void fp8_expert(const GroupedGemmArgs& a, int64_t e, int64_t begin, int64_t rows) {
    const bool wgrad = a.layout == GemmLayout::kWgrad;
    const int64_t M = wgrad ? a.M : round_up(rows, 4), N = a.N, K = wgrad ? round_up(rows, kScaleBlock) : a.K;
    const int64_t first = padded_rows(begin, e), stride = padded_rows(a.K, a.E), blocks = scale_blocks(K);
    auto A = make_buffer<uint8_t>(M * K), B = make_buffer<uint8_t>(wgrad ? N * K : 16);
    auto scales = make_buffer<float>(blocks * M);
    auto D = make_buffer<bf16>(wgrad ? 8 : M * N);
    GemmArgs args{.D = {D.get(), Dtype::kBf16, M * N}, .A = {A.get(), Dtype::kE4m3, M * K},
                  .B = {B.get(), Dtype::kE4m3, N * K}, .M = M, .N = N, .K = K, .layout = a.layout,
                  .accumulate = a.accumulate, .A_granularity = Granularity::kBlock1x128,
                  .B_granularity = wgrad ? Granularity::kBlock1x128 : Granularity::kBlock128x128,
                  .A_scale_inv = {scales.get(), Dtype::kFp32, blocks * M}};
    const int64_t b_scales = scale_inv_elems(args.B_granularity, N, K);
    if (wgrad) {
        copy_columns(A.get(), static_cast<const uint8_t*>(a.A.data), M, stride, first, K);
        copy_columns(B.get(), static_cast<const uint8_t*>(a.B.data), N, stride, first, K);
        args.D = a.D.slice(e * M * N, M * N);
        args.A_scale_inv = a.A_scale_inv.slice(first / kScaleBlock * M, blocks * M);
        args.B_scale_inv = a.B_scale_inv.slice(first / kScaleBlock * N, b_scales);
        return gemm_fp8(args);
    }
    std::memset(A.get(), 0, static_cast<size_t>(M * K));
    std::fill_n(scales.get(), blocks * M, 1.0f);
    std::memcpy(A.get(), static_cast<const uint8_t*>(a.A.data) + begin * K, static_cast<size_t>(rows * K));
    for (int64_t k = 0; k < blocks; k++)
        std::copy_n(a.A_scale_inv.as<float>() + k * a.M + begin, rows, scales.get() + k * M);
    args.B = a.B.slice(e * N * K, N * K);
    args.B_scale_inv = a.B_scale_inv.slice(e * b_scales, b_scales);
    gemm_fp8(args);
    std::copy_n(D.get(), rows * N, a.D.as<bf16>() + begin * N);
}

}  // namespace

void grouped_gemm(Ctx& ctx, const GroupedGemmArgs& args) {
    check_grouped_gemm(args);
    const auto clear = [](const Tensor& weights) {
        std::memset(weights.data, 0, static_cast<size_t>(weights.bytes()));
    };
    const int32_t* offsets = args.offsets.as<int32_t>();
    if (!is_fp8(args.A.dtype))
        return for_experts(args, offsets, [&](const GemmArgs& expert) { gemm(ctx, expert); }, clear);
    ctx.fp8_matmuls++;
    const bool clears = args.layout == GemmLayout::kWgrad && !args.accumulate;
    for (int64_t e = 0; e < args.E; e++) {
        const int64_t rows = offsets[e + 1] - offsets[e];
        if (rows > 0) fp8_expert(args, e, offsets[e], rows);
        else if (clears) clear(args.D.slice(e * args.M * args.N, args.M * args.N));
    }
}

void transpose_scaled(Ctx&, const TransposeScaledArgs& args) {
    const int64_t R = args.R, C = args.C, P = padded_rows(R, args.E);
    check_tensor("transpose_scaled", "in", args.in, Dtype::kE4m3, R * C);
    check_tensor("transpose_scaled", "in_scale_inv", args.in_scale_inv, Dtype::kFp32, scale_blocks(C) * R);
    check_tensor("transpose_scaled", "offsets", args.offsets, Dtype::kInt32, args.E + 1);
    const QuantOut quant{.transposed = args.out, .granularity = Granularity::kBlock1x128,
                         .transposed_scale_inv = args.out_scale_inv, .counts = args.counts};
    check_quant("transpose_scaled", quant, Dtype::kBf16, P, C);
    auto x = make_buffer<bf16>(P * C);
    std::fill_n(x.get(), P * C, bf16(0.0f));
    const int32_t* offsets = args.offsets.as<int32_t>();
    for (int64_t e = 0; e < args.E; e++)
        for (int64_t r = offsets[e]; r < offsets[e + 1]; r++) {
            const uint8_t* codes = static_cast<const uint8_t*>(args.in.data) + r * C;
            bf16* to = x.get() + (padded_rows(offsets[e], e) + r - offsets[e]) * C;
            for (int64_t c = 0; c < C; c++)
                to[c] = bf16(from_fp8(Dtype::kE4m3, codes[c])
                             * args.in_scale_inv.as<float>()[c / kScaleBlock * R + r]);
        }
    apply_quant(quant, x.get(), P, C);
    if (args.counts) args.counts->elems -= static_cast<uint64_t>((P - offsets[args.E] + offsets[0]) * C);
}

}  // namespace cpu
