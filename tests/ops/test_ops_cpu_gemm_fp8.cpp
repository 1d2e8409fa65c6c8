// FP8 matmul of the CPU against plain loops in double over the decoded codes and their scales.
#include "tests/support/fp8_gemm_test.h"

#include "tests/support/files_test.h"
#include "tests/support/random_inputs.h"

using namespace op_test;

namespace gemm_fp8_test {

namespace {

struct Shape {
    int64_t M, N, K;
};
// Sizes around a block (128) and kDepth (256); N and K multiples of 16; any M, with block scales rounded up to a
// multiple of 4.
const Shape kShapes[] = {{1, 16, 16}, {7, 48, 80}, {130, 32, 128}, {33, 144, 272}, {5, 16, 1040}, {3, 528, 48}};

int64_t rows_of(const Shape& s, const Fp8Kind& kind) { return kind.blocks() ? (s.M + 3) / 4 * 4 : s.M; }

void for_products(const std::function<void(Fp8Product&)>& f) {
    for (const Fp8Kind& kind : fp8_kinds())
        for (const Shape& s : kShapes)
            for (Dtype result : {Dtype::kBf16, Dtype::kFp32})
                for (bool accumulate : {false, true}) {
                    Fp8Product p{.M = rows_of(s, kind), .N = s.N, .K = s.K, .kind = kind, .result = result};
                    p.layout = kGemmLayouts[(s.M + static_cast<int>(result)) % 3];
                    p.accumulate = accumulate;
                    f(p);
                }
}

// A small product for tests that change it.
Fp8Product small_product(const Fp8Kind& kind) {
    Fp8Product p{.M = 12, .N = 160, .K = 272, .kind = kind, .result = Dtype::kFp32};
    return fill(p, 0);
}
const Fp8Kind kTensors = fp8_kinds()[0], kBlocks = fp8_kinds()[1];

}  // namespace

TEST_CASE("cpu fp8 gemm is exact on integers and powers of two") {
    Ctx ctx;
    for_products([&](Fp8Product& p) {
        fill(p, 2, !p.accumulate && p.N != 48);
        check_equal(p.name(), p.on_cpu(ctx), expected(p, 13, 128).product.to(p.result));
    });
}

TEST_CASE("cpu fp8 gemm stays within its error bound") {
    Ctx ctx;
    for_products([&](Fp8Product& p) {
        fill(p, 0, !p.accumulate && p.N != 48);
        const Fp8Expected e = expected(p, 13, 128);
        check_close(p.name(), p.on_cpu(ctx), e.product, cpu_bound(p, e));
    });
}

TEST_CASE("cpu fp8 gemm: NaN and infinity affect only their row") {
    Ctx ctx;
    for (auto [format, code] : {std::pair{Dtype::kE4m3, 0x7f}, {Dtype::kE5m2, 0x7c}, {Dtype::kE5m2, 0xfe}}) {
        Fp8Product p = small_product({format, Dtype::kE4m3, Granularity::kTensor, Granularity::kTensor});
        codes_of(p.a)[p.K + 3] = static_cast<uint8_t>(code);
        const HostTensor out = p.on_cpu(ctx);
        for (int64_t i = 0; i < p.M * p.N; i++) CHECK_EQ(std::isfinite(out.get(i)), i / p.N != 1);
    }
}

TEST_CASE("cpu fp8 gemm does not depend on the number of threads") {
    Ctx ctx;
    for (const Fp8Kind& kind : fp8_kinds())
        for (const Shape& s : {Shape{97, 560, 304}, Shape{1, 528, 704}}) {
            Fp8Product p{.M = rows_of(s, kind), .N = s.N, .K = s.K, .kind = kind, .result = Dtype::kFp32};
            fill(p, 0);
            check_threads([&] { return std::vector<HostTensor>{p.on_cpu(ctx)}; });
        }
}

TEST_CASE("cpu counts the matmuls of two FP8 operands") {
    Ctx ctx;
    Fp8Product p = small_product(kTensors);
    p.on_cpu(ctx), p.on_cpu(ctx);
    CHECK_EQ(cpu::fp8_matmuls(ctx), 2);
    HostTensor a = random_tensor(Dtype::kBf16, 256, 1), b = random_tensor(Dtype::kBf16, 256, 2), d(Dtype::kBf16, 256);
    cpu::gemm(ctx, {.D = d.view(), .A = a.view(), .B = b.view(), .M = 16, .N = 16, .K = 16});
    CHECK_EQ(cpu::fp8_matmuls(ctx), 2);
    CHECK_EQ(cpu::fp8_matmuls(Ctx{}), 0);
}

TEST_CASE("cpu fp8 gemm refuses what cuBLASLt cannot do") {
    Ctx ctx;
    auto refused = [&](const Fp8Kind& kind, const std::string& reason, auto change) {
        Fp8Product p = small_product(kind);
        HostTensor d = p.d;
        GemmArgs args = p.args(d.view(), p.a.view(), p.b.view(), p.a_scale_inv.view(), p.b_scale_inv.view(), {});
        change(args);
        files_test::check_contains(files_test::error_of([&] { cpu::gemm(ctx, args); }), {reason});
    };
    HostTensor bias(Dtype::kFp32, 160), floats(Dtype::kFp32, 12 * 272), spare(Dtype::kFp32, 4096);
    refused(kTensors, "no product of E5M2", [](GemmArgs& g) { g.A.dtype = g.B.dtype = Dtype::kE5m2; });
    refused(kTensors, "the other is not", [&](GemmArgs& g) { g.A = floats.view(); });
    refused(kTensors, "multiples of 16", [](GemmArgs& g) { g.K = 8, g.A.elems = 12 * 8, g.B.elems = 160 * 8; });
    refused(kTensors, "multiples of 16", [](GemmArgs& g) { g.N = 8, g.D.elems = 12 * 8, g.B.elems = 8 * 272; });
    refused(kTensors, "bf16 or fp32 D", [](GemmArgs& g) { g.D.dtype = Dtype::kFp64; });
    refused(kTensors, "bias", [&](GemmArgs& g) { g.bias = bias.view(); });
    refused(kTensors, "A_scale_inv has another number", [](GemmArgs& g) { g.A_scale_inv = {}; });
    refused(kTensors, "not 16-byte aligned", [&](GemmArgs& g) { g.A_scale_inv = spare.view().slice(1, 1); });
    refused(kTensors, "not 16-byte aligned", [&](GemmArgs& g) { g.B_scale_inv = spare.view().slice(1, 1); });
    refused(kTensors, "both", [](GemmArgs& g) { g.A_granularity = Granularity::kBlock1x128; });
    refused(kBlocks, "both", [](GemmArgs& g) { g.A_granularity = Granularity::kBlock128x128; });
    refused(kBlocks, "both", [](GemmArgs& g) { g.B_granularity = Granularity::kTensor; });
    refused(kBlocks, "B_scale_inv has another number", [](GemmArgs& g) { g.B_granularity = Granularity::kBlock1x128; });
    refused(kBlocks, "scales are fp32", [](GemmArgs& g) { g.A_scale_inv.dtype = Dtype::kBf16; });
    refused(kBlocks, "M in multiples of 4", [](GemmArgs& g) {
        g.M = 10, g.A.elems = 10 * 272, g.D.elems = 10 * 160, g.A_scale_inv.elems = 30;
    });
    refused(kBlocks, "fast accumulation", [](GemmArgs& g) { g.fast_accumulation = true; });
}

}  // namespace gemm_fp8_test
