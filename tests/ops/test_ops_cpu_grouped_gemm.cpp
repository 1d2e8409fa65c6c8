// Matmuls of experts on the CPU against double loops.
#include "tests/support/grouped_gemm_test.h"

namespace grouped_gemm_test {

TEST_CASE("cpu grouped gemm equals double loops for any sizes of experts") {
    const std::vector<int64_t> kSizes[] = {{0, 1, 127, 128, 129}, {129, 0, 0, 1, 0}, {0, 70, 0}, {0, 0}};
    Ctx ctx;
    for (const std::vector<int64_t>& rows : kSizes)
        for (auto [type, result] : {std::pair{Dtype::kFp32, Dtype::kFp32}, {Dtype::kBf16, Dtype::kBf16},
                                    {Dtype::kBf16, Dtype::kFp32}, {Dtype::kFp64, Dtype::kFp64}})
            for (GemmLayout layout : {GemmLayout::kForward, GemmLayout::kDgrad, GemmLayout::kWgrad})
                for (bool accumulate : {false, true}) {
                    if (accumulate && layout != GemmLayout::kWgrad) continue;
                    GroupedProduct p = grouped_product(rows, 21, 10, layout, type, result, accumulate, false);
                    HostTensor want, magnitude, d = p.d;
                    p.expect(want, magnitude);
                    cpu::grouped_gemm(ctx, p.args(d.view(), p.a.view(), p.b.view(), p.offsets.view()));
                    INFO("layout " << static_cast<int>(layout) << ", +=: " << accumulate << ", " << rows.size());
                    CHECK_EQ(first_difference(d, want, [&](int64_t i) {
                        const double sums = 2 * 130 * acc_roundoff(type) * (magnitude.get(i) + std::fabs(want.get(i)));
                        return sums + 1.01 * unit_roundoff(result) * (std::fabs(want.get(i)) + sums);
                    }), "");
                }
}

TEST_CASE("cpu grouped gemm: integers are exact, one changed row border is found, wrong sizes are refused") {
    Ctx ctx;
    GroupedProduct p = grouped_product({5, 7, 9}, 8, 24, GemmLayout::kForward, Dtype::kBf16, Dtype::kBf16, false, true);
    HostTensor want, magnitude, d = p.d;
    p.expect(want, magnitude);
    const auto run = [&] {
        cpu::grouped_gemm(ctx, p.args(d.view(), p.a.view(), p.b.view(), p.offsets.view()));
        return first_difference(d, want);
    };
    CHECK_EQ(run(), "");
    p.offsets.set(1, 9);   // instead of 8
    CHECK_NE(run(), "");
    GroupedGemmArgs args = p.args(d.view(), p.a.view(), p.b.view(), p.offsets.view());
    p.offsets.set(1, 16);   // behind the next
    CHECK_THROWS_AS(cpu::grouped_gemm(ctx, args), Error);
    p.offsets.set(1, 8);
    args.accumulate = true;
    CHECK_THROWS_AS(cpu::grouped_gemm(ctx, args), Error);
    args.accumulate = false, args.E = 2;
    CHECK_THROWS_AS(cpu::grouped_gemm(ctx, args), Error);
}

TEST_CASE("cpu expert_bias_backward adds the rows of each expert") {
    Ctx ctx;
    for (auto [type, grad] : {std::pair{Dtype::kFp32, Dtype::kFp32}, {Dtype::kBf16, Dtype::kFp32},
                              {Dtype::kBf16, Dtype::kBf16}, {Dtype::kFp64, Dtype::kFp64}})
        for (int64_t C : {1, 3, 130}) {
            const int64_t begins[] = {2, 2, 35, 36, 50}, E = 4, R = 53;   // none of the first expert; some of nobody
            HostTensor dout = random_tensor(type, R * C, 1), offsets(Dtype::kInt32, E + 1);
            for (int64_t c = 0; c < C; c++) dout.set(c, std::nan("")), dout.set((R - 1) * C + c, std::nan(""));
            for (int64_t e = 0; e <= E; e++) offsets.set(e, static_cast<double>(begins[e]));
            HostTensor dbias = random_tensor(grad, E * C, 2), want = dbias.to(Dtype::kFp64), size = want;
            cpu::expert_bias_backward(ctx, {.dbias = dbias.view(), .dout = dout.view(), .offsets = offsets.view(),
                                            .E = E, .R = R, .C = C});
            for (int64_t i = 0; i < E * C; i++) {
                size.set(i, std::fabs(want.get(i)));
                for (int64_t r = begins[i / C]; r < begins[i / C + 1]; r++) {
                    const double x = dout.get(r * C + i % C);
                    want.set(i, want.get(i) + x), size.set(i, size.get(i) + std::fabs(x));
                }
            }
            const auto bound = [&](int64_t i) {   // 33 additions
                return 2 * 33 * acc_roundoff(type) * size.get(i) + 1.01 * unit_roundoff(grad) * std::fabs(want.get(i));
            };
            CHECK_EQ(first_difference(dbias, want, bound), "");
            dbias.set(C, dbias.get(C) + 1);
            CHECK_NE(first_difference(dbias, want, bound), "");
        }
}

}  // namespace grouped_gemm_test
