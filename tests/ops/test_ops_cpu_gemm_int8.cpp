// INT8 matmul of the CPU against a loop in int64, rounded as ops.h says.
#include "tests/support/int8_gemm_test.h"

#include "tests/support/files_test.h"
#include "tests/support/random_inputs.h"

using namespace op_test;

namespace gemm_int8_test {

namespace {

HostTensor expected(Int8Product& p) {
    HostTensor d(Dtype::kBf16, p.M * p.N);
    for (int64_t m = 0; m < p.M; m++)
        for (int64_t n = 0; n < p.N; n++) {
            int64_t sum = 0;
            for (int64_t k = 0; k < p.K; k++) sum += p.a_codes()[m * p.K + k] * p.b_codes()[n * p.K + k];
            const float scale = static_cast<float>(p.a_scale_inv.get(m)) * static_cast<float>(p.b_scale_inv.get(n));
            const auto rounded = static_cast<float>(sum);
            d.set(m * p.N + n, p.bias.elems() ? std::fma(rounded, scale, static_cast<float>(p.bias.get(n)))
                                              : rounded * scale);
        }
    return d;
}

}  // namespace

// Extreme codes give sums above 2^24, where the conversion to fp32 rounds.
TEST_CASE("cpu int8 gemm is a loop in integers, to the bit") {
    Ctx ctx;
    const int64_t kShapes[][3] = {{1, 16, 16},    {7, 48, 80},    {130, 32, 256},
                                  {33, 144, 272}, {5, 528, 1040}, {3, 16, 14336}};
    for (const auto& [M, N, K] : kShapes)
        for (bool bias : {false, true})
            for (bool extreme : {false, true}) {
                Int8Product p = int8_product(M, N, K, bias, extreme);
                check_equal(p.name(), p.on_cpu(ctx), expected(p));
            }
}

TEST_CASE("cpu int8 gemm does not depend on the number of threads, and counts as an FP8 matmul") {
    Ctx ctx;
    Int8Product p = int8_product(97, 560, 304, true);
    check_threads([&] { return std::vector<HostTensor>{p.on_cpu(ctx)}; });
    CHECK_EQ(cpu::fp8_matmuls(ctx), 4);
}

TEST_CASE("cpu int8 gemm: a row whose scale is NaN is NaN, and only it") {
    Ctx ctx;
    Int8Product p = int8_product(12, 160, 272, true);
    p.a_scale_inv.set(3, std::nan(""));
    const HostTensor d = p.on_cpu(ctx);
    for (int64_t i = 0; i < p.M * p.N; i++) CHECK_EQ(std::isnan(d.get(i)), i / p.N == 3);
}

TEST_CASE("cpu int8 gemm refuses what the GPU cannot do") {
    Ctx ctx;
    const auto refused = [&](const std::string& reason, auto change) {
        Int8Product p = int8_product(12, 160, 272, false);
        GemmArgs args = p.args(p.d.view(), p.a.view(), p.b.view(), p.a_scale_inv.view(), p.b_scale_inv.view(), {});
        change(args);
        files_test::check_contains(files_test::error_of([&] { cpu::gemm(ctx, args); }), {reason});
    };
    HostTensor spare(Dtype::kFp32, 4096);
    refused("the other is not", [](GemmArgs& g) { g.A.dtype = Dtype::kE4m3; });
    refused("the other is not", [](GemmArgs& g) { g.B.dtype = Dtype::kE4m3; });
    refused("only as in the forward pass", [](GemmArgs& g) { g.layout = GemmLayout::kDgrad; });
    refused("only as in the forward pass", [](GemmArgs& g) { g.accumulate = true; });
    refused("bf16 D", [&](GemmArgs& g) { g.D = spare.view().slice(0, 12 * 160); });
    refused("multiples of 16", [](GemmArgs& g) { g.K = 8, g.A.elems = 12 * 8, g.B.elems = 160 * 8; });
    refused("multiples of 16", [](GemmArgs& g) { g.N = 8, g.D.elems = 12 * 8, g.B.elems = 8 * 272; });
    refused("131072", [](GemmArgs& g) { g.K = 131088, g.A.elems = 12 * g.K, g.B.elems = 160 * g.K; });
    refused("bias", [&](GemmArgs& g) { g.bias = spare.view().slice(0, 160); });
    refused("a scale per row", [](GemmArgs& g) { g.A_granularity = Granularity::kTensor; });
    refused("a scale per row", [](GemmArgs& g) { g.B_granularity = Granularity::kTensor; });
    refused("scales are fp32", [](GemmArgs& g) { g.B_scale_inv.dtype = Dtype::kInt32; });
    refused("needs M elements", [](GemmArgs& g) { g.A_scale_inv.elems = 13; });
    refused("needs M elements", [](GemmArgs& g) { g.B_scale_inv = {}; });
    refused("16-byte aligned", [&](GemmArgs& g) { g.B_scale_inv = spare.view().slice(1, 160); });
}

}  // namespace gemm_int8_test
