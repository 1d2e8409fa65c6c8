// Grouped FP8 matmuls for tests of both devices: experts of given sizes, NaN in rows of no expert and in blocks that
// belong to none, and the result of double loops.
#pragma once
#include <array>

#include "tests/support/fp8_gemm_test.h"

namespace grouped_fp8_test {

using namespace op_test;

struct Fp8Experts {
    std::vector<int64_t> rows;   // of each expert
    int64_t wide, narrow;        // N and K, or N and M of kWgrad
    GemmLayout layout;
    bool accumulate;
    HostTensor a, b, a_scale_inv, b_scale_inv, d, offsets;

    bool wgrad() const { return layout == GemmLayout::kWgrad; }
    int64_t experts() const { return static_cast<int64_t>(rows.size()); }
    int64_t begin(int64_t e) const { return static_cast<int64_t>(offsets.get(e)); }
    int64_t all_rows() const { return round_up(begin(experts()) + 5, 4); }
    int64_t columns() const { return padded_rows(all_rows(), experts()); }   // of transposed operands
    // of: a, b, their scale_inv, d, offsets
    GroupedGemmArgs args(const std::array<Tensor, 6>& of) const {
        return {.D = of[4], .A = of[0], .B = of[1], .offsets = of[5], .E = experts(),
                .M = wgrad() ? narrow : all_rows(), .N = wide, .K = wgrad() ? all_rows() : narrow, .layout = layout,
                .accumulate = accumulate, .A_scale_inv = of[2], .B_scale_inv = of[3]};
    }
    template <typename Hold> auto views(std::array<Hold*, 6> held) const {
        std::array<Tensor, 6> all;
        for (size_t i = 0; i < 6; i++) all[i] = held[i]->view();
        return all;
    }
    HostTensor on_cpu() {
        HostTensor out = d;
        Ctx ctx;
        cpu::grouped_gemm(ctx, args(views<HostTensor>({&a, &b, &a_scale_inv, &b_scale_inv, &out, &offsets})));
        return out;
    }
    // Element (row, k) of an operand, dequantized.
    static double value(const HostTensor& codes, const HostTensor& scales, Granularity granularity, int64_t R,
                        int64_t K, int64_t row, int64_t k, int64_t matrix = 0) {
        const uint8_t code = static_cast<const uint8_t*>(codes.data())[(matrix * R + row) * K + k];
        return from_fp8(Dtype::kE4m3, code)
               * scales.get(matrix * scale_inv_elems(granularity, R, K) + scale_inv_index(granularity, R, K, row, k));
    }
    // D in double, rounded to its type once.
    HostTensor expected() const {
        constexpr Granularity kVectors = Granularity::kBlock1x128, kBlocks = Granularity::kBlock128x128;
        HostTensor want = d;
        for (int64_t e = 0; e < experts(); e++) {
            const int64_t first = begin(e), end = begin(e + 1), padded = padded_rows(first, e);
            for (int64_t m = wgrad() ? 0 : first; m < (wgrad() ? narrow : end); m++)
                for (int64_t n = 0; n < wide; n++) {
                    const int64_t at = wgrad() ? (e * narrow + m) * wide + n : m * wide + n;
                    double sum = accumulate ? d.get(at) : 0;
                    for (int64_t k = 0; k < (wgrad() ? end - first : narrow); k++)
                        sum += wgrad() ? value(a, a_scale_inv, kVectors, narrow, columns(), m, padded + k)
                                             * value(b, b_scale_inv, kVectors, wide, columns(), n, padded + k)
                                       : value(a, a_scale_inv, kVectors, all_rows(), narrow, m, k)
                                             * value(b, b_scale_inv, kBlocks, wide, narrow, n, k, e);
                    want.set(at, sum);
                }
        }
        return want;
    }
};

// Small integers and scales that are powers of two, whose sums are exact. D begins as NaN, or as 7 where it stays.
inline Fp8Experts fp8_experts(const std::vector<int64_t>& rows, int64_t wide, int64_t narrow, GemmLayout layout,
                              Dtype result, bool accumulate) {
    constexpr Granularity kVectors = Granularity::kBlock1x128, kBlocks = Granularity::kBlock128x128;
    constexpr uint8_t kNan = 0x7f;
    Fp8Experts p{.rows = rows, .wide = wide, .narrow = narrow, .layout = layout, .accumulate = accumulate, .a{}, .b{},
                 .a_scale_inv{}, .b_scale_inv{}, .d{}, .offsets{}};
    std::vector<int32_t> offsets{3};   // rows before it belong to no expert
    for (int64_t count : rows) offsets.push_back(offsets.back() + static_cast<int32_t>(count));
    p.offsets = int_tensor(offsets);
    const int64_t all = p.all_rows(), P = p.columns(), E = p.experts(), weights = E * wide * narrow;
    const bool wgrad = p.wgrad();
    p.a = random_codes(Dtype::kE4m3, wgrad ? narrow * P : all * narrow, 1, 2);
    p.b = random_codes(Dtype::kE4m3, wgrad ? wide * P : weights, 2, 2);
    p.a_scale_inv = random_scales(kVectors, wgrad ? narrow : all, wgrad ? P : narrow, 3, true);
    p.b_scale_inv = HostTensor(Dtype::kFp32, wgrad ? scale_inv_elems(kVectors, wide, P)
                                                   : E * scale_inv_elems(kBlocks, wide, narrow));
    for (int64_t e = 0; e < (wgrad ? 1 : E); e++) {
        const HostTensor one = random_scales(wgrad ? kVectors : kBlocks, wide, wgrad ? P : narrow,
                                             static_cast<uint64_t>(4 + e), true);
        for (int64_t i = 0; i < one.elems(); i++) p.b_scale_inv.set(e * one.elems() + i, one.get(i));
    }
    p.d = accumulate ? random_integers(result, weights, 5, 50) : HostTensor(result, wgrad ? weights : all * wide);
    if (!wgrad) {
        for (int64_t row = 0; row < all; row++) {
            if (row >= 3 && row < offsets.back()) continue;
            std::fill_n(codes_of(p.a) + row * narrow, narrow, kNan);
            for (int64_t i = 0; i < wide; i++) p.d.set(row * wide + i, 7);
        }
        return p;
    }
    // Of a padded column: the rows that fill up an expert's last block are zeros; blocks of no expert are NaN.
    std::vector<uint8_t> fill(static_cast<size_t>(P), kNan);
    for (int64_t e = 0; e < E; e++) {
        auto first = fill.begin() + padded_rows(p.begin(e), e);
        std::fill_n(first, round_up(rows[static_cast<size_t>(e)], 128), 0);
        std::fill_n(first, rows[static_cast<size_t>(e)], 1);   // its own values
    }
    for (auto [codes, height] : {std::pair{&p.a, narrow}, {&p.b, wide}})
        for (int64_t i = 0; i < height * P; i++)
            if (fill[static_cast<size_t>(i % P)] != 1) codes_of(*codes)[i] = fill[static_cast<size_t>(i % P)];
    return p;
}

inline const std::vector<std::vector<int64_t>>& expert_sizes() {
    static const std::vector<std::vector<int64_t>> sizes{{0, 1, 127, 128, 129}, {64, 63, 65, 0, 513}, {0, 700, 0},
                                                         {256}, {0, 0}, {385, 3, 255}};
    return sizes;
}

// Rowwise codes of random numbers whose rows differ in size by powers of two, with their scales.
struct ScaledRows {
    int64_t R, C;
    HostTensor values, codes, scale_inv, offsets;   // values: bf16, dequantized

    int64_t experts() const { return offsets.elems() - 1; }
    int64_t columns() const { return padded_rows(R, experts()); }
    TransposeScaledArgs args(Tensor out, Tensor out_scales, Tensor in, Tensor in_scales, Tensor of,
                             Fp8Counts* counts) const {
        return {.out = out, .out_scale_inv = out_scales, .in = in, .in_scale_inv = in_scales, .offsets = of,
                .counts = counts, .R = R, .C = C, .E = experts()};
    }
    HostTensor codes_out() const { return HostTensor(Dtype::kE4m3, C * columns()); }
    HostTensor scales_out() const { return HostTensor(Dtype::kFp32, columns() / 128 * C); }
};
// spread: of the exponents of rows.
inline ScaledRows scaled_rows(const std::vector<int64_t>& rows, int64_t C, int spread) {
    ScaledRows s{.R = 0, .C = C, .values{}, .codes{}, .scale_inv{}, .offsets{}};
    std::vector<int32_t> offsets{3};
    for (int64_t count : rows) offsets.push_back(offsets.back() + static_cast<int32_t>(count));
    s.R = round_up(offsets.back() + 5, 16), s.offsets = int_tensor(offsets);
    HostTensor x = random_tensor(Dtype::kBf16, s.R * C, 7);
    for (int64_t i = 0; i < x.elems(); i++)
        x.set(i, std::ldexp(x.get(i), -static_cast<int>(philox(8, static_cast<uint64_t>(i / C)).word[0]
                                                        % static_cast<uint32_t>(spread + 1))));
    s.codes = HostTensor(Dtype::kE4m3, s.R * C), s.scale_inv = HostTensor(Dtype::kFp32, scale_blocks(C) * s.R);
    Ctx ctx;
    cpu::quantize(ctx, {.quant = {.rowwise = s.codes.view(), .granularity = Granularity::kBlock1x128,
                                  .rowwise_scale_inv = s.scale_inv.view()},
                        .in = x.view(), .N = s.R, .C = C});
    s.values = HostTensor(Dtype::kBf16, s.R * C);
    for (int64_t r = 0; r < s.R; r++)
        for (int64_t c = 0; c < C; c++)
            s.values.set(r * C + c, Fp8Experts::value(s.codes, s.scale_inv, Granularity::kBlock1x128, s.R, C, r, c));
    return s;
}

}  // namespace grouped_fp8_test
