// FP8 matmuls of experts (compute capability 9.0) and scaling-aware transposes: equal to the CPU's.
#include "llmc/cuda/gemm.h"
#include "tests/gpu/gpu_op.h"
#include "tests/support/grouped_fp8_test.h"

namespace grouped_fp8_test {

// Compares it with the CPU, twice. A sum that is added to bf16 is rounded before on the GPU, so that three
// roundings differ: that of the sum, which is at most |want| + |d|, and one of either result.
static void check_experts(Fp8Experts p) {
    INFO(p.experts() << " experts, " << p.all_rows() << " rows, " << p.wide << " x " << p.narrow << ", layout "
                     << static_cast<int>(p.layout) << ", +=: " << p.accumulate << ", " << dtype_name(p.d.dtype()));
    const HostTensor want = p.on_cpu();
    HostTensor before;
    for (int repeat = 0; repeat < 2; repeat++) {
        DeviceTensor a(p.a), b(p.b), a_scales(p.a_scale_inv), b_scales(p.b_scale_inv), d(p.d), of(p.offsets);
        cuda::grouped_gemm_fp8(gpu(), p.args(p.views<DeviceTensor>({&a, &b, &a_scales, &b_scales, &d, &of})));
        cuda::synchronize(gpu());
        const HostTensor got = d.download();
        if (repeat > 0) CHECK(got.same_bits(before));
        before = got;
        const bool rounds_twice = p.accumulate && p.d.dtype() == Dtype::kBf16;
        CHECK_EQ(first_difference(got, want, [&](int64_t i) {
            return rounds_twice ? 0x1.02p-8 * (3 * std::fabs(want.get(i)) + std::fabs(p.d.get(i))) : 0.0;
        }), "");
    }
}

// Tiles are 256 x 256 or 128 x 512, steps 128 of K of which 4 are in shared memory; boxes of results 16 rows.
TEST_CASE("gpu grouped FP8 gemm equals the CPU for any sizes of experts") {
    if (!cuda::gemm_fp8_blockwise_available(gpu())) return;
    for (const std::vector<int64_t>& rows : expert_sizes())
        for (auto [wide, narrow] :
             {std::pair<int64_t, int64_t>{16, 16}, {272, 80}, {48, 528}, {528, 144}, {784, 656}})
            for (GemmLayout layout : {GemmLayout::kForward, GemmLayout::kWgrad})
                for (Dtype result : {Dtype::kBf16, Dtype::kFp32})
                    for (bool accumulate : {false, true}) {
                        const bool wgrad = layout == GemmLayout::kWgrad;
                        if (left_out(wide * narrow) || (!wgrad && (accumulate || result == Dtype::kFp32))) continue;
                        check_experts(fp8_experts(rows, wide, narrow, layout, result, accumulate));
                    }
}

// More items than clusters, so that a block computes several, and its stores overlap with the next one.
TEST_CASE("gpu grouped FP8 gemm of many experts equals the CPU") {
    if (!cuda::gemm_fp8_blockwise_available(gpu()) || left_out(1 << 20)) return;
    std::vector<int64_t> rows;
    for (uint64_t e = 0; e < 40; e++) rows.push_back(philox(5, e).word[0] % 500);
    rows[7] = rows[8] = rows[39] = 0, rows[20] = 2000;
    check_experts(fp8_experts(rows, 784, 336, GemmLayout::kForward, Dtype::kBf16, false));
    check_experts(fp8_experts(rows, 784, 336, GemmLayout::kWgrad, Dtype::kBf16, false));
    check_experts(fp8_experts(rows, 784, 336, GemmLayout::kWgrad, Dtype::kFp32, true));
}

TEST_CASE("gpu transpose_scaled equals the CPU's codes, scales and counts") {
    for (const std::vector<int64_t>& rows : expert_sizes())
        for (int64_t C : {16, 144, 256, 1040})
            for (bool counted : {false, true}) {
                if (left_out(C * 100)) continue;
                ScaledRows s = scaled_rows(rows, C, 20);
                HostTensor out = s.codes_out(), scales = s.scales_out(), counts(Dtype::kFp64, 4);
                for (int64_t i = 0; i < 4; i++) counts.set(i, 0);
                DeviceTensor to(out), scales_to(scales), codes(s.codes), in_scales(s.scale_inv), of(s.offsets),
                    counts_to(counts);
                Ctx ctx;
                const auto of_counts = [&](Tensor t) { return counted ? static_cast<Fp8Counts*>(t.data) : nullptr; };
                cpu::transpose_scaled(ctx, s.args(out.view(), scales.view(), s.codes.view(), s.scale_inv.view(),
                                                  s.offsets.view(), of_counts(counts.view())));
                cuda::transpose_scaled(gpu(), s.args(to.view(), scales_to.view(), codes.view(), in_scales.view(),
                                                     of.view(), of_counts(counts_to.view())));
                cuda::synchronize(gpu());
                INFO(rows.size() << " experts, C " << C);
                CHECK(to.download().same_bits(out));
                CHECK(scales_to.download().same_bits(scales));
                CHECK(counts_to.download().same_bits(counts));
            }
}

}  // namespace grouped_fp8_test
