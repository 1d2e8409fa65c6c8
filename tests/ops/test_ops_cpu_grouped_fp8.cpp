// FP8 matmuls of experts and scaling-aware transposes on the CPU.
#include <numeric>

#include "tests/support/grouped_fp8_test.h"

namespace grouped_fp8_test {

TEST_CASE("cpu grouped FP8 gemm of integers equals double loops for any sizes of experts") {
    for (const std::vector<int64_t>& rows : expert_sizes())
        for (auto [wide, narrow] : {std::pair<int64_t, int64_t>{16, 16}, {48, 144}, {144, 48}})
            for (auto [layout, result, accumulate] :
                 {std::tuple{GemmLayout::kForward, Dtype::kBf16, false}, {GemmLayout::kDgrad, Dtype::kBf16, false},
                  {GemmLayout::kWgrad, Dtype::kBf16, false}, {GemmLayout::kWgrad, Dtype::kFp32, false},
                  {GemmLayout::kWgrad, Dtype::kFp32, true}}) {
                INFO(rows.size() << " experts, " << wide << " x " << narrow << ", layout " << static_cast<int>(layout));
                Fp8Experts p = fp8_experts(rows, wide, narrow, layout, result, accumulate);
                CHECK_EQ(first_difference(p.on_cpu(), p.expected()), "");
            }
}

TEST_CASE("cpu grouped FP8 gemm: a changed border, a changed scale and wrong arguments are found") {
    for (GemmLayout layout : {GemmLayout::kForward, GemmLayout::kWgrad}) {
        Fp8Experts p = fp8_experts({5, 7, 9}, 32, 16, layout, Dtype::kBf16, false);
        const HostTensor want = p.expected();
        p.offsets.set(1, p.wgrad() ? 3 : 9);   // instead of 8; weight gradients sum whole blocks of 128 rows
        CHECK_NE(first_difference(p.on_cpu(), want), "");
        p.offsets.set(1, 8);
        const int64_t of_row = layout == GemmLayout::kForward ? p.begin(1) : padded_rows(p.begin(1), 1) / 128 * 16;
        p.a_scale_inv.set(of_row, 4 * p.a_scale_inv.get(of_row));
        CHECK_NE(first_difference(p.on_cpu(), want), "");
        p.a_scale_inv = HostTensor(Dtype::kFp32, 4);
        CHECK_THROWS_WITH_AS(p.on_cpu(), doctest::Contains("types or scales do not fit"), Error);
    }
}

TEST_CASE("padded rows of experts: whole blocks, no overlap, at most E blocks more than rows") {
    for (int64_t offset = 0; offset < 300; offset++)
        for (int64_t rows = 0; rows < 300; rows++) {
            const int64_t begin = padded_rows(offset, 3), room = padded_rows(offset + rows, 4) - begin;
            const bool fits = begin % 128 == 0 && room >= round_up(rows, 128) && room <= round_up(rows, 128) + 128;
            if (!fits) FAIL(strf("offset %lld, %lld rows", ll(offset), ll(rows)).c_str());
        }
    CHECK_LE(padded_rows(1000, 7), 1000 + 7 * 128);
}

// Rows of any expert from the codes, against quantizing the values that were quantized before: equal where nothing
// underflows, which takes rows of similar size; otherwise what is lost is below half of the smallest code.
TEST_CASE("cpu transpose_scaled: exact without underflow, otherwise the flushed values are counted") {
    Ctx ctx;
    for (const std::vector<int64_t>& rows : expert_sizes())
        for (int64_t C : {16, 144, 256})
            for (int spread : {0, 20}) {
                ScaledRows s = scaled_rows(rows, C, spread);
                HostTensor out = s.codes_out(), scales = s.scales_out();
                Fp8Counts counts{};
                cpu::transpose_scaled(ctx, s.args(out.view(), scales.view(), s.codes.view(), s.scale_inv.view(),
                                                  s.offsets.view(), &counts));
                int64_t wrong = 0, flushed = 0, others = 0;
                const int64_t P = s.columns();
                std::vector<int64_t> row_of(static_cast<size_t>(P), -1);
                for (int64_t e = 0; e < s.experts(); e++)
                    for (int64_t i = 0; i < rows[static_cast<size_t>(e)]; i++) {
                        const auto offset = static_cast<int64_t>(s.offsets.get(e));
                        row_of[static_cast<size_t>(padded_rows(offset, e) + i)] = offset + i;
                    }
                for (int64_t c = 0; c < C; c++)
                    for (int64_t p = 0; p < P; p++) {
                        const double got = Fp8Experts::value(out, scales, Granularity::kBlock1x128, C, P, c, p);
                        const int64_t row = row_of[static_cast<size_t>(p)];
                        const double want = row < 0 ? 0 : s.values.get(row * C + c);
                        const double least = scales.get(p / 128 * C + c) * 0x1p-9;   // of a code
                        flushed += want != 0 && got == 0;
                        others += row < 0 && codes_of(out)[c * P + p] != 0;
                        // A multiple of the smallest code, and at most 15 of its own last digits, is exact.
                        const bool exact = std::fabs(want) >= 8 * least || want == 0;
                        wrong += exact ? got != want : std::fabs(got - want) > least / 2;
                    }
                INFO(rows.size() << " experts, C " << C << ", spread " << spread);
                CHECK_EQ(wrong, 0);
                CHECK_EQ(others, 0);
                CHECK_EQ(counts.flushed, static_cast<unsigned long long>(flushed));
                CHECK_EQ(counts.saturated + counts.nonfinite, 0u);
                CHECK_EQ(counts.elems, static_cast<unsigned long long>(std::reduce(rows.begin(), rows.end()) * C));
                if (spread > 0 && rows.size() == 5) CHECK_GT(flushed, 0);
            }
}

}  // namespace grouped_fp8_test
