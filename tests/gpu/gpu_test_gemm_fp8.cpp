// FP8 matmul of the GPU: exact on integers, otherwise within the error bound of tensor cores, for every pair of types
// and granularities; refused arguments; the count of FP8 matmuls.
#include "tests/gpu/gpu_op.h"
#include "tests/support/fp8_gemm_test.h"

using namespace op_test;

namespace gemm_fp8_test {

namespace {

struct Shape {
    int64_t M, N, K;
};
// N and K multiples of 16, mostly odd ones; below, at and above a block of 128; GPT-2 1558M's 1600 = 12.5 blocks in N
// and K. M need not be a multiple of 16: a few rows, and with one scale per tensor any number.
const Shape kShapes[] = {{4, 32, 144},    {1, 48, 80},     {100, 16, 272},  {16, 48, 80},
                         {128, 128, 128}, {144, 272, 528}, {48, 1600, 400}, {112, 400, 1600}};
const Fp8Kind kTensors = fp8_kinds()[0], kBlocks = fp8_kinds()[1];

Fp8Product product(const Shape& s, const Fp8Kind& kind, Dtype result) {
    Fp8Product p{.M = s.M, .N = s.N, .K = s.K, .kind = kind, .result = result};
    p.layout = kGemmLayouts[static_cast<size_t>(s.N / 16 + static_cast<int>(result)) % 3];
    return p;
}

// shift_bytes misaligns the scales.
HostTensor on_gpu(Ctx& ctx, const Fp8Product& p, int64_t shift_bytes = 0) {
    DeviceTensor a(p.a), b(p.b), d(p.d), bias(p.bias), a_scale_inv(p.a_scale_inv, shift_bytes),
        b_scale_inv(p.b_scale_inv);
    cuda::gemm(ctx, p.args(d.view(), a.view(), b.view(), a_scale_inv.view(), b_scale_inv.view(), bias.view()));
    cuda::synchronize(ctx);
    return d.download();
}

void for_products(const std::function<void(Fp8Product&)>& f) {
    for (const Fp8Kind& kind : fp8_kinds())
        for (const Shape& s : kShapes)
            for (Dtype result : {Dtype::kBf16, Dtype::kFp32})
                for (bool accumulate : {false, true})
                    for (bool fast : {false, true}) {
                        if (left_out(s.M * s.N) || (kind.blocks() && (fast || s.M % 4 != 0))) continue;
                        Fp8Product p = product(s, kind, result);
                        p.accumulate = accumulate, p.fast = fast;
                        f(p);
                    }
}

}  // namespace

TEST_CASE("gpu fp8 gemm is exact on whole numbers and powers of two") {
    for_products([](Fp8Product& p) {
        fill(p, p.fast ? 1 : 2, !p.accumulate && p.M != 16);
        const HostTensor want = expected_of(p).product.to(p.result);
        // Sums are exact, but where they are added to a bf16 D the library rounds them to bf16 first.
        const bool twice = p.accumulate && p.result == Dtype::kBf16;
        check_close(p.name(), on_gpu(gpu(), p), want, [&](int64_t i) {
            const double sum = std::fabs(want.get(i) - (twice ? p.d.get(i) : 0));
            return twice ? 1.02 * unit_roundoff(p.result) * (sum + 2 * std::fabs(want.get(i))) : 0;
        });
    });
}

TEST_CASE("gpu fp8 gemm stays within the error bound of tensor cores") {
    for_products([](Fp8Product& p) {
        fill(p, 0, !p.accumulate && p.M != 16);
        const Fp8Expected e = expected_of(p);
        // The bound assumes that all truncation errors have one sign, so it is wide without promotion.
        check_close(p.name(), on_gpu(gpu(), p), e.product, gpu_bound(p, e), p.fast ? 1.0 / 8 : 1.0 / 16);
    });
}

TEST_CASE("gpu fp8 gemm: fast accumulation acts, and costs accuracy") {
    for (const Fp8Kind& kind : {kTensors, fp8_kinds()[3]}) {
        Fp8Product p = product({64, 128, 2048}, kind, Dtype::kFp32);
        fill(p, 0);
        const HostTensor want = expected_of(p).product, precise = on_gpu(gpu(), p);
        p.fast = true;
        CHECK_GT(rms_error(on_gpu(gpu(), p), want), 2 * rms_error(precise, want));
    }
}

TEST_CASE("gpu fp8 gemm: searching adds to D once; equal bits afterwards and with imported plans") {
    FreshContext first, second;
    cuda::gemm_set_search(first.ctx, true);
    for (const Fp8Kind& kind : {kTensors, kBlocks, fp8_kinds()[5]}) {
        Fp8Product p = product({144, 272, 2064}, kind, Dtype::kFp32);
        p.accumulate = true;
        fill(p, 0);
        const Fp8Expected e = expected_of(p);
        const HostTensor searched = on_gpu(first.ctx, p);
        check_close(p.name(), searched, e.product, gpu_bound(p, e));
        CHECK(on_gpu(first.ctx, p).same_bits(searched));
        const std::string plans = cuda::gemm_export_plans(first.ctx);
        CHECK_EQ(cuda::gemm_import_plans(second.ctx, plans), "");
        CHECK(on_gpu(second.ctx, p).same_bits(searched));
        CHECK_EQ(cuda::gemm_export_plans(second.ctx), plans);
    }
}

TEST_CASE("gpu counts FP8 matmuls, without those of a search") {
    FreshContext fresh;
    cuda::gemm_set_search(fresh.ctx, true);
    Fp8Product p = product({16, 48, 80}, kTensors, Dtype::kBf16);
    fill(p, 0);
    CHECK_EQ(cuda::fp8_matmuls(fresh.ctx), 0);
    on_gpu(fresh.ctx, p);
    CHECK_EQ(cuda::fp8_matmuls(fresh.ctx), 1);
    for (int i = 0; i < 3; i++) on_gpu(fresh.ctx, p);
    CHECK_EQ(cuda::fp8_matmuls(fresh.ctx), 4);
    DeviceTensor a(random_tensor(Dtype::kBf16, 256, 1)), b(random_tensor(Dtype::kBf16, 256, 2)),
        d(HostTensor(Dtype::kBf16, 256));
    cuda::gemm(fresh.ctx, {.D = d.view(), .A = a.view(), .B = b.view(), .M = 16, .N = 16, .K = 16});
    CHECK_EQ(cuda::fp8_matmuls(fresh.ctx), 4);
    Fp8Product refused = p;
    refused.kind.a = refused.kind.b = Dtype::kE5m2;
    refused.a = random_codes(Dtype::kE5m2, p.M * p.K, 1), refused.b = random_codes(Dtype::kE5m2, p.N * p.K, 2);
    CHECK_NE(error_of([&] { on_gpu(fresh.ctx, refused); }).find("no product of E5M2"), std::string::npos);
    CHECK_EQ(cuda::fp8_matmuls(fresh.ctx), 4);
}

TEST_CASE("gpu fp8 gemm: a wrong call is one line that names it") {
    Fp8Product p = product({16, 48, 80}, kTensors, Dtype::kBf16);
    fill(p, 0);
    const std::string error = error_of([&] { on_gpu(gpu(), p, 4); });
    CHECK_NE(error.find("A_scale_inv or B_scale_inv not 16-byte aligned"), std::string::npos);
    Fp8Product rows = product({18, 48, 80}, kBlocks, Dtype::kBf16);
    CHECK_NE(error_of([&] { on_gpu(gpu(), fill(rows, 0)); }).find("need M in multiples of 4"), std::string::npos);
    CHECK_NE(error.find("M 16 N 48 K 80, e4m3 -> bf16, scales tensor x tensor, fast accumulation 0"),
             std::string::npos);
}

}  // namespace gemm_fp8_test
