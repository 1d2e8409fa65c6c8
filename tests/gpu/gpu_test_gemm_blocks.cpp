// The custom blockwise FP8 matmul (compute capability 9.0): exact on integers, otherwise within the error bound of
// tensor cores; bitwise equal to the library where both are exact; which shapes it supports.
#include "llmc/cuda/gemm.h"
#include "tests/gpu/gpu_op.h"
#include "tests/support/fp8_gemm_test.h"

using namespace op_test;

namespace gemm_blocks_test {

namespace {

struct Shape {
    int64_t M, N, K;
};
// The kernel computes tiles of 256 x 128, with blocks in pairs along N, in steps of 128 along K, four of which are in
// shared memory. The shapes are below, at and above each of these sizes; some have last columns that only the first
// block of a pair computes, or only a few rows.
const Shape kShapes[] = {{4, 16, 16},      {4, 32, 144},    {100, 16, 272},   {128, 128, 128}, {256, 256, 512},
                         {144, 272, 528},  {260, 144, 640}, {388, 384, 1168}, {48, 1600, 400}, {112, 400, 1600}};
const Fp8Kind kKinds[] = {{Dtype::kE4m3, Dtype::kE4m3, Granularity::kBlock1x128, Granularity::kBlock128x128},
                          {Dtype::kE4m3, Dtype::kE4m3, Granularity::kBlock1x128, Granularity::kBlock1x128}};

bool takes(const Ctx& ctx, const Fp8Kind& kind) {
    GemmArgs args{};
    args.A.dtype = kind.a, args.B.dtype = kind.b;
    args.A_granularity = kind.a_granularity, args.B_granularity = kind.b_granularity;
    return cuda::gemm_fp8_blockwise_supports(ctx, args);
}
// Shared by all cases; null if the kernel cannot run.
Ctx* context() {
    static FreshContext opened;
    return takes(opened.ctx, kKinds[0]) ? &opened.ctx : nullptr;
}

HostTensor on_gpu(const Fp8Product& p, void (*gemm)(Ctx&, const GemmArgs&) = cuda::gemm_fp8_blockwise) {
    DeviceTensor a(p.a), b(p.b), d(p.d), bias(p.bias), a_scale_inv(p.a_scale_inv), b_scale_inv(p.b_scale_inv);
    gemm(*context(), p.args(d.view(), a.view(), b.view(), a_scale_inv.view(), b_scale_inv.view(), bias.view()));
    cuda::synchronize(*context());
    return d.download();
}

void for_products(const std::function<void(Fp8Product&)>& f) {
    for (const Fp8Kind& kind : kKinds)
        for (const Shape& s : kShapes)
            for (Dtype result : {Dtype::kBf16, Dtype::kFp32})
                for (bool accumulate : {false, true}) {
                    if (left_out(s.M * s.N)) continue;
                    Fp8Product p{.M = s.M, .N = s.N, .K = s.K, .kind = kind, .result = result,
                                 .accumulate = accumulate};
                    f(p);
                }
}

// What D is if the product is exact. A sum that is added to a bf16 D is rounded to bf16 before.
HostTensor exact(const Fp8Product& p) {
    Fp8Product alone = p;
    alone.accumulate = false;
    HostTensor sums = expected_of(alone).product.to(p.result);
    if (!p.accumulate) return sums;
    HostTensor total(Dtype::kFp32, sums.elems());
    for (int64_t i = 0; i < sums.elems(); i++) total.set(i, sums.get(i) + p.d.get(i));
    return total.to(p.result);
}

}  // namespace

TEST_CASE("gpu custom blockwise gemm is exact on whole numbers and powers of two, with and without a bias") {
    if (!context()) return;
    for_products([](Fp8Product& p) {
        fill(p, 2, p.M % 8 == 0);
        check_close(p.name(), on_gpu(p), exact(p), [](int64_t) { return 0.0; });
    });
}

TEST_CASE("gpu custom blockwise gemm stays within the error bound of tensor cores") {
    if (!context()) return;
    for_products([](Fp8Product& p) {
        fill(p, 0, p.M % 8 == 0);
        const Fp8Expected e = expected_of(p);
        check_close(p.name(), on_gpu(p), e.product, gpu_bound(p, e), 1.0 / 16);
    });
}

// More tiles than multiprocessors, so that a block computes several; the last group of tiles has only one row.
TEST_CASE("gpu custom blockwise gemm over many tiles is bitwise equal to the library in every run") {
    if (!context() || left_out(1 << 20)) return;
    for (const Fp8Kind& kind : kKinds)
        for (Dtype result : {Dtype::kBf16, Dtype::kFp32})
            for (bool accumulate : {false, true})
                for (const Shape& s : {Shape{2308, 2128, 2064}, {1028, 4368, 128}})
                    for (int64_t limit : {1, 0}) {   // exact sums, sums that are rounded
                        Fp8Product p{.M = s.M, .N = s.N, .K = s.K, .kind = kind, .result = result,
                                     .accumulate = accumulate};
                        // Other scales of both vectors would be multiplied in another order.
                        fill(p, limit, false, kind.b_granularity == Granularity::kBlock1x128);
                        CAPTURE(p.name());
                        const HostTensor first = on_gpu(p);
                        CHECK_EQ(first_difference(first, on_gpu(p, cuda::gemm)), "");
                        for (int i = 0; i < 3; i++) CHECK(on_gpu(p).same_bits(first));
                    }
}

// With scales that are not powers of two, the custom kernel and the library round differently, so the bits show which
// one ran.
TEST_CASE("gpu custom blockwise gemm: a plan that names it runs it, a search keeps the bits, and all count as FP8") {
    if (!context()) return;
    Ctx& ctx = *context();
    Fp8Product p{.M = 48, .N = 80, .K = 272, .kind = kKinds[1], .result = Dtype::kFp32};
    fill(p, 0);
    const HostTensor own = on_gpu(p);
    const int64_t before = cuda::fp8_matmuls(ctx);
    const HostTensor library = on_gpu(p, cuda::gemm);   // its first answer
    CHECK(!library.same_bits(own));
    for (bool by_own : {true, false}) {
        std::string plans = cuda::gemm_export_plans(ctx);
        const std::string name = "\"custom\":", no = name + (by_own ? "false" : "true");
        for (size_t at = 0; (at = plans.find(no, at)) != std::string::npos;)
            plans.replace(at, no.size(), name + (by_own ? "true" : "false"));
        CHECK_EQ(cuda::gemm_import_plans(ctx, plans), "");
        CHECK_EQ(cuda::gemm_export_plans(ctx), plans);
        CHECK(on_gpu(p, cuda::gemm).same_bits(by_own ? own : library));
    }
    CHECK_EQ(cuda::fp8_matmuls(ctx), before + 3);
    cuda::gemm_set_search(ctx, true);
    for (const Fp8Kind& kind : kKinds)
        for (bool accumulate : {true, false}) {
            p = {.M = 64, .N = 80, .K = 272, .kind = kind, .accumulate = accumulate};
            fill(p, 0, false, true);
            CHECK(on_gpu(p, cuda::gemm).same_bits(on_gpu(p)));
        }
    cuda::gemm_set_search(ctx, false);
    CHECK_EQ(cuda::fp8_matmuls(ctx), before + 7);   // searches do not count
}

TEST_CASE("gpu custom blockwise gemm supports only E4M3 with scales of blocks; a plan for others is refused") {
    if (!context()) return;
    Ctx& ctx = *context();
    for (const Fp8Kind& kind : fp8_kinds())
        CHECK_EQ(takes(ctx, kind), kind.a == Dtype::kE4m3 && kind.b == Dtype::kE4m3 && kind.blocks());
    Fp8Product p{.M = 16, .N = 32, .K = 400, .kind = fp8_kinds()[0]};
    fill(p, 0);
    CHECK_THROWS_WITH_AS(on_gpu(p), doctest::Contains("not a product that it makes"), Error);
    on_gpu(p, cuda::gemm);
    std::string plans = cuda::gemm_export_plans(ctx);
    const size_t row = plans.find("\"K\":400");
    REQUIRE_NE(row, std::string::npos);
    const std::string no = "\"custom\":false";
    plans.replace(plans.find(no, row), no.size(), "\"custom\":true");
    CHECK_EQ(cuda::gemm_import_plans(ctx, plans), "");
    CHECK_THROWS_WITH_AS(on_gpu(p, cuda::gemm), doctest::Contains("names the custom kernel"), Error);
}

}  // namespace gemm_blocks_test
