// The custom FP8 matmul with promotion every 256 (compute capability 9.0): exact on integers, otherwise within the
// error bound of tensor cores; which calls it supports; that only gemm_set_promotion makes it a candidate.
#include <cstring>

#include "llmc/cuda/gemm.h"
#include "tests/gpu/gpu_op.h"
#include "tests/support/fp8_gemm_test.h"

using namespace op_test;

namespace {

struct Shape {
    int64_t M, N, K;
};
// A pair of blocks computes 256 x 256 results, in steps of 256 along K, two of which are in shared memory: below, at
// and above these sizes, with any number of rows. Some have results that only the first block of a pair computes.
const Shape kShapes[] = {{1, 16, 16},     {37, 48, 80},     {100, 16, 272},   {128, 128, 256}, {256, 256, 512},
                         {260, 528, 640}, {389, 400, 1168}, {130, 1600, 400}, {516, 208, 896}};
const Shape kLarge = {2308, 2128, 656};   // more tiles than multiprocessors

bool available() { return cuda::gemm_fp8_blockwise_available(gpu()); }

Fp8Product product(const Shape& s, Dtype a, Dtype result, bool accumulate) {
    return {.M = s.M, .N = s.N, .K = s.K, .kind = {a, Dtype::kE4m3, Granularity::kTensor, Granularity::kTensor},
            .result = result, .layout = result == Dtype::kFp32 ? GemmLayout::kWgrad : GemmLayout::kDgrad,
            .accumulate = accumulate};
}
void for_products(const std::function<void(Fp8Product&)>& f) {
    for (Dtype a : {Dtype::kE5m2, Dtype::kE4m3})
        for (const Shape& s : kShapes)
            for (Dtype result : {Dtype::kBf16, Dtype::kFp32})
                for (bool accumulate : {false, true}) {
                    if (!available() || left_out(s.M * s.N)) continue;
                    Fp8Product p = product(s, a, result, accumulate);
                    f(p);
                }
}
Fp8Expected expected256(const Fp8Product& p) { return expected(p, kPlaces, 256); }

using Run = void (*)(Ctx&, const GemmArgs&);
HostTensor on_gpu(Ctx& ctx, const Fp8Product& p, Run run) {
    DeviceTensor a(p.a), b(p.b), d(p.d), a_scale_inv(p.a_scale_inv), b_scale_inv(p.b_scale_inv);
    run(ctx, p.args(d.view(), a.view(), b.view(), a_scale_inv.view(), b_scale_inv.view(), {}));
    cuda::synchronize(ctx);
    return d.download();
}
HostTensor by_custom(const Fp8Product& p) { return on_gpu(gpu(), p, cuda::gemm_promote256); }
HostTensor by_library(const Fp8Product& p) { return on_gpu(gpu(), p, cuda::gemm); }

// A new context: no plans, search off.
struct FreshContext {
    Ctx ctx;
    FreshContext(int64_t promotion, bool search) {
        cuda::device_open(ctx, 0);
        cuda::gemm_set_promotion(ctx, promotion);
        cuda::gemm_set_search(ctx, search);
    }
    ~FreshContext() { cuda::device_close(ctx); }
};

}  // namespace

TEST_CASE("gpu gemm promote256 is exact on whole numbers and powers of two") {
    for_products([](Fp8Product& p) {
        fill(p, 2);
        const HostTensor want = expected256(p).product.to(p.result);
        // Sums are exact, but before they are added to a bf16 D they are rounded to bf16.
        const bool twice = p.accumulate && p.result == Dtype::kBf16;
        check_close(p.name(), by_custom(p), want, [&](int64_t i) {
            const double sum = std::fabs(want.get(i) - (twice ? p.d.get(i) : 0));
            return twice ? 1.02 * unit_roundoff(p.result) * (sum + 2 * std::fabs(want.get(i))) : 0;
        });
    });
}

TEST_CASE("gpu gemm promote256 stays within the error bound of tensor cores") {
    for_products([](Fp8Product& p) {
        fill(p, 0);
        const Fp8Expected e = expected256(p);
        check_close(p.name(), by_custom(p), e.product, gpu_bound(p, e), 1.0 / 16);
    });
}

TEST_CASE("gpu gemm promote256: a changed code in the last row or column is detected") {
    if (!available()) return;
    for (Dtype a : {Dtype::kE5m2, Dtype::kE4m3})
        for (Dtype result : {Dtype::kBf16, Dtype::kFp32}) {
            Fp8Product p = product({272, 416, 272}, a, result, result == Dtype::kFp32);
            fill(p, 0);
            const Fp8Expected e = expected256(p);
            const auto smaller = [](double x, double y) { return std::fabs(x) < std::fabs(y); };
            const std::vector<double> of_a = decoded(p.a), of_b = decoded(p.b);
            Fp8Product wrong_a = p, wrong_b = p;   // another sign of the largest element of the last row
            codes_of(wrong_a.a)[std::max_element(of_a.end() - p.K, of_a.end(), smaller) - of_a.begin()] ^= 0x80;
            codes_of(wrong_b.b)[std::max_element(of_b.end() - p.K, of_b.end(), smaller) - of_b.begin()] ^= 0x80;
            CHECK_EQ(first_difference(by_custom(p), e.product, gpu_bound(p, e)), "");
            CHECK_NE(first_difference(by_custom(wrong_a), e.product, gpu_bound(p, e)), "");
            CHECK_NE(first_difference(by_custom(wrong_b), e.product, gpu_bound(p, e)), "");
        }
}

TEST_CASE("gpu gemm promote256 over many tiles is equal to the library on whole numbers, and to itself") {
    if (!available() || left_out(kLarge.M * kLarge.N)) return;
    for (Dtype result : {Dtype::kBf16, Dtype::kFp32}) {
        Fp8Product p = product(kLarge, Dtype::kE5m2, result, result == Dtype::kFp32);
        fill(p, 1);
        const HostTensor first = by_custom(p);
        CHECK_EQ(first_difference(first, by_library(p), [](int64_t) { return 0.0; }), "");
        for (int i = 0; i < 3; i++) CHECK(by_custom(p).same_bits(first));
    }
}

// The error of a partial sum grows with its length, by a factor between the square root of 2 and 2.
TEST_CASE("gpu gemm promote256 acts, and costs accuracy") {
    if (!available()) return;
    for (Dtype a : {Dtype::kE5m2, Dtype::kE4m3}) {
        Fp8Product p = product({128, 256, 4096}, a, Dtype::kFp32, false);
        fill(p, 0);
        const HostTensor want = expected256(p).product;
        CHECK_GT(rms_error(by_custom(p), want), 1.1 * rms_error(by_library(p), want));
    }
}

TEST_CASE("gpu gemm promotion: without a search 256 runs the custom kernel, 128 and other calls the library") {
    if (!available()) return;
    for (Dtype result : {Dtype::kBf16, Dtype::kFp32}) {
        FreshContext plain(128, false), longer(256, false);
        Fp8Product p = product({144, 272, 2064}, Dtype::kE5m2, result, result == Dtype::kFp32);
        fill(p, 0);
        const HostTensor library = on_gpu(plain.ctx, p, cuda::gemm), custom = by_custom(p);
        CHECK_FALSE(library.same_bits(custom));
        CHECK(on_gpu(longer.ctx, p, cuda::gemm).same_bits(custom));
        CHECK_EQ(cuda::fp8_matmuls(longer.ctx), 1);
        p.fast = true;
        CHECK(on_gpu(longer.ctx, p, cuda::gemm).same_bits(on_gpu(plain.ctx, p, cuda::gemm)));
        CHECK_NE(cuda::gemm_promotion_text(longer.ctx).find("runs 1 of 1 matmuls"), std::string::npos);
        // A context with 128 does not use the plans of one with 256.
        FreshContext importing(128, false);
        p.fast = false;
        CHECK_EQ(cuda::gemm_import_plans(importing.ctx, cuda::gemm_export_plans(longer.ctx)), "");
        CHECK(on_gpu(importing.ctx, p, cuda::gemm).same_bits(library));
    }
}

TEST_CASE("gpu gemm promotion: a search with 128 never chooses the custom kernel") {
    if (!available()) return;
    FreshContext searching(128, true);
    for (const Shape& s : {Shape{1024, 2048, 1024}, Shape{144, 272, 2064}})
        for (Dtype result : {Dtype::kBf16, Dtype::kFp32}) {
            Fp8Product p = product(s, Dtype::kE5m2, result, false);
            fill(p, 0);
            on_gpu(searching.ctx, p, cuda::gemm);
        }
    const std::string plans = cuda::gemm_export_plans(searching.ctx);
    CHECK_EQ(plans.find("promote256"), std::string::npos);
    CHECK_EQ(plans.find("\"own_kernel\":true"), std::string::npos);
    CHECK_EQ(cuda::gemm_promotion_text(searching.ctx), "");
}

TEST_CASE("gpu gemm promotion: a search with 256 decides, adds to D once, and its plans can be imported") {
    if (!available()) return;
    for (Dtype result : {Dtype::kBf16, Dtype::kFp32}) {
        FreshContext searching(256, true), importing(256, false);
        Fp8Product p = product({144, 272, 2064}, Dtype::kE5m2, result, true);
        fill(p, 0);
        const Fp8Expected e = expected256(p);
        const HostTensor searched = on_gpu(searching.ctx, p, cuda::gemm);
        check_close(p.name(), searched, e.product, gpu_bound(p, e));
        CHECK(on_gpu(searching.ctx, p, cuda::gemm).same_bits(searched));
        CHECK_EQ(cuda::fp8_matmuls(searching.ctx), 2);
        std::string plans = cuda::gemm_export_plans(searching.ctx);
        CHECK_NE(plans.find("\"promote256\":true"), std::string::npos);
        CHECK_EQ(cuda::gemm_import_plans(importing.ctx, plans), "");
        CHECK(on_gpu(importing.ctx, p, cuda::gemm).same_bits(searched));
        CHECK_EQ(cuda::gemm_export_plans(importing.ctx), plans);
        const size_t at = plans.find("\"own_kernel\":false");
        if (at != std::string::npos) plans.replace(at, std::strlen("\"own_kernel\":false"), "\"own_kernel\":true");
        CHECK_EQ(cuda::gemm_import_plans(importing.ctx, plans), "");
        CHECK(on_gpu(importing.ctx, p, cuda::gemm).same_bits(by_custom(p)));
    }
}

TEST_CASE("gpu gemm promote256 supports only what it computes") {
    if (!available()) return;
    Fp8Product p = product({32, 64, 64}, Dtype::kE5m2, Dtype::kBf16, false);
    fill(p, 0);
    DeviceTensor a(p.a), b(p.b), d(p.d), a_scale_inv(p.a_scale_inv), b_scale_inv(p.b_scale_inv);
    const GemmArgs good = p.args(d.view(), a.view(), b.view(), a_scale_inv.view(), b_scale_inv.view(), {});
    CHECK(cuda::gemm_promote256_supports(gpu(), good));
    const std::pair<const char*, std::function<void(GemmArgs&)>> changes[] = {
        {"fast accumulation", [](GemmArgs& g) { g.fast_accumulation = true; }},
        {"a bias", [](GemmArgs& g) { g.bias = g.D.slice(0, g.N), g.epilogue = GemmEpilogue::kBias; }},
        {"B in E5M2", [](GemmArgs& g) { g.A.dtype = Dtype::kE4m3, g.B.dtype = Dtype::kE5m2; }},
        {"bf16 operands", [](GemmArgs& g) { g.A.dtype = g.B.dtype = Dtype::kBf16; }},
        {"columns of D that are not 16", [](GemmArgs& g) { g.N = 24; }},
        {"rows of A and B that are not 16 bytes", [](GemmArgs& g) { g.K = 40; }},
        {"D that is not aligned", [](GemmArgs& g) { g.D.data = static_cast<char*>(g.D.data) + 8; }},
        {"blocks", [](GemmArgs& g) {
             g.A_granularity = Granularity::kBlock1x128, g.B_granularity = Granularity::kBlock128x128;
         }},
    };
    for (const auto& [name, change] : changes) {
        INFO(name);
        GemmArgs args = good;
        change(args);
        CHECK_FALSE(cuda::gemm_promote256_supports(gpu(), args));
        CHECK_THROWS_WITH_AS(cuda::gemm_promote256(gpu(), args), doctest::Contains("gemm_promote256"), Error);
    }
}
