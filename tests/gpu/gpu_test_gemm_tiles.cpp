// The candidates for custom matmuls with one scale per tensor (dev/bench/gemm_tiles, compute capability 9.0), every
// variant: exact on integers, otherwise within the error bound of tensor cores; equal to the library over many tiles.
// They form an executable, build/cuda/tests_gemm_tiles, since nothing of the trainer depends on them.
#include "dev/bench/gemm_tiles/gemm_tiles.h"
#include "tests/gpu/gpu_op.h"
#include "tests/support/fp8_gemm_test.h"

using namespace op_test;
using gemm_tiles::Operands;
using gemm_tiles::Variant;

namespace {

struct Shape {
    int64_t M, N, K;
};
// Tiles have 64 to 512 rows (with clusters) and 128 to 512 columns, in steps of 128 bytes along K, 3 to 5 of which are
// in shared memory. The shapes are below, at and above these sizes, with any number of rows.
const Shape kShapes[] = {{1, 16, 16},     {37, 48, 80},    {100, 16, 272},   {128, 128, 128}, {144, 272, 528},
                         {260, 528, 640}, {389, 400, 1168}, {130, 1600, 400}, {516, 208, 896}};
// More tiles than multiprocessors, so that every block computes several; with fewer steps than stages, and with more.
const Shape kLarge[] = {{2308, 2128, 656}, {4100, 4368, 144}};

std::vector<Variant> all() { return gemm_tiles::variants(gpu()); }

bool is_fp8_plain(const Variant& v) { return v.operands != Operands::kBf16 && !v.swiglu; }

// The variants that compute this product, whose sums in the tensor cores have promote elements (0: all).
std::vector<Variant> variants_of(const Fp8Product& p, int promote) {
    std::vector<Variant> found;
    for (const Variant& v : all())
        if (is_fp8_plain(v) && gemm_tiles::type_of_a(v.operands) == p.kind.a && v.promote == promote)
            found.push_back(v);
    return found;
}

HostTensor on_gpu(const Variant& v, const Fp8Product& p) {
    INFO(v.name << ": " << p.name());
    DeviceTensor a(p.a), b(p.b), d(p.d), a_scale_inv(p.a_scale_inv), b_scale_inv(p.b_scale_inv);
    const gemm_tiles::Call call{.D = d.view(), .A = a.view(), .B = b.view(), .a_scale_inv = a_scale_inv.view(),
                                .b_scale_inv = b_scale_inv.view(), .M = p.M, .N = p.N, .K = p.K,
                                .accumulate = p.accumulate};
    const char* error = gemm_tiles::call_error(v, call);
    REQUIRE_MESSAGE(!error, v.name << ": " << error);
    v.run(gpu(), call);
    cuda::synchronize(gpu());
    return d.download();
}
HostTensor by_library(const Fp8Product& p) {
    DeviceTensor a(p.a), b(p.b), d(p.d), a_scale_inv(p.a_scale_inv), b_scale_inv(p.b_scale_inv);
    cuda::gemm(gpu(), p.args(d.view(), a.view(), b.view(), a_scale_inv.view(), b_scale_inv.view(), {}));
    cuda::synchronize(gpu());
    return d.download();
}

Fp8Product product(const Shape& s, Dtype a, Dtype result, bool accumulate, int promote) {
    return {.M = s.M, .N = s.N, .K = s.K, .kind = {a, Dtype::kE4m3, Granularity::kTensor, Granularity::kTensor},
            .result = result, .accumulate = accumulate, .fast = promote == 0};
}

// Every kind of product that a variant computes, with the elements per sum in the tensor cores.
void for_products(const std::function<void(Fp8Product&, int promote)>& f) {
    for (auto [a, promote] : {std::pair{Dtype::kE4m3, 0}, {Dtype::kE5m2, 128}, {Dtype::kE5m2, 256}})
        for (const Shape& s : kShapes)
            for (Dtype result : {Dtype::kBf16, Dtype::kFp32})
                for (bool accumulate : {false, true}) {
                    if (left_out(s.M * s.N)) continue;
                    Fp8Product p = product(s, a, result, accumulate, promote);
                    f(p, promote);
                }
}

// Both operands contiguous along K; in fp32, so that the CPU's product is exact for integers.
struct Bf16Product {
    int64_t M, N, K;
    HostTensor a, b, d;
    Bf16Product(const Shape& s, bool integers, Dtype result)
        : M(s.M), N(s.N), K(s.K), a(make(s.M * s.K, 1, integers)), b(make(s.N * s.K, 2, integers)),
          d(result, s.M * s.N) {}
    static HostTensor make(int64_t elems, uint64_t key, bool integers) {
        return integers ? random_integers(Dtype::kBf16, elems, key, 4) : random_tensor(Dtype::kBf16, elems, key);
    }
    std::string name(const Variant& v) const {
        return strf("%s: M %lld N %lld K %lld -> %s", v.name.c_str(), (long long)M, (long long)N, (long long)K,
                    dtype_name(d.dtype()));
    }
    // The product in double, of absolute values if asked for.
    HostTensor exact(bool magnitudes = false) const {
        HostTensor sum(Dtype::kFp64, M * N);
        const std::vector<double> x = a.values(), y = b.values();
#pragma omp parallel for schedule(static)
        for (int64_t i = 0; i < M * N; i++) {
            double total = 0;
            for (int64_t k = 0; k < K; k++) {
                const double term = x[static_cast<size_t>(i / N * K + k)] * y[static_cast<size_t>(i % N * K + k)];
                total += magnitudes ? std::fabs(term) : term;
            }
            sum.set(i, total);
        }
        return sum;
    }
    HostTensor on_gpu(const Variant& v) const {
        INFO(name(v));
        DeviceTensor x(a), y(b), to(d);
        v.run(gpu(), {.D = to.view(), .A = x.view(), .B = y.view(), .a_scale_inv = {}, .b_scale_inv = {}, .M = M,
                      .N = N, .K = K});
        cuda::synchronize(gpu());
        return to.download();
    }
};

}  // namespace

TEST_CASE("gpu gemm tiles: the table has variants of every kind with different names") {
    if (all().empty()) return;
    std::vector<std::string> names;
    for (const Variant& v : all()) names.push_back(v.name);
    std::sort(names.begin(), names.end());
    CHECK(std::adjacent_find(names.begin(), names.end()) == names.end());
    for (auto [a, promote] : {std::pair{Dtype::kE4m3, 0}, {Dtype::kE5m2, 128}, {Dtype::kE5m2, 256}})
        CHECK_FALSE(variants_of(product(kShapes[0], a, Dtype::kBf16, false, promote), promote).empty());
}

TEST_CASE("gpu gemm tiles are exact on whole numbers and powers of two") {
    for_products([](Fp8Product& p, int promote) {
        fill(p, p.fast ? 1 : 2);
        const HostTensor want = expected_of(p).product.to(p.result);
        // Sums are exact, but before they are added to a bf16 D they are rounded to bf16.
        const bool twice = p.accumulate && p.result == Dtype::kBf16;
        for (const Variant& v : variants_of(p, promote))
            check_close(v.name + ": " + p.name(), on_gpu(v, p), want, [&](int64_t i) {
                const double sum = std::fabs(want.get(i) - (twice ? p.d.get(i) : 0));
                return twice ? 1.02 * unit_roundoff(p.result) * (sum + 2 * std::fabs(want.get(i))) : 0;
            });
    });
}

TEST_CASE("gpu gemm tiles stay within the error bound of tensor cores") {
    for_products([](Fp8Product& p, int promote) {
        fill(p, 0);
        const Fp8Expected e = expected(p, kPlaces, promote ? promote : p.K);
        for (const Variant& v : variants_of(p, promote))
            check_close(v.name + ": " + p.name(), on_gpu(v, p), e.product, gpu_bound(p, e), p.fast ? 0.125 : 0.0625);
    });
}

TEST_CASE("gpu gemm tiles: a changed code in the last row or column is detected") {
    for (auto [a, promote] : {std::pair{Dtype::kE4m3, 0}, {Dtype::kE5m2, 128}, {Dtype::kE5m2, 256}}) {
        Fp8Product p = product({272, 416, 272}, a, Dtype::kFp32, false, promote);
        fill(p, 0);
        const Fp8Expected e = expected(p, kPlaces, promote ? promote : p.K);
        const auto smaller = [](double x, double y) { return std::fabs(x) < std::fabs(y); };
        const std::vector<double> of_a = decoded(p.a), of_b = decoded(p.b);
        Fp8Product wrong_a = p, wrong_b = p;   // another sign of the largest element of the last row
        codes_of(wrong_a.a)[std::max_element(of_a.end() - p.K, of_a.end(), smaller) - of_a.begin()] ^= 0x80;
        codes_of(wrong_b.b)[std::max_element(of_b.end() - p.K, of_b.end(), smaller) - of_b.begin()] ^= 0x80;
        for (const Variant& v : variants_of(p, promote)) {
            CAPTURE(v.name);
            CHECK_EQ(first_difference(on_gpu(v, p), e.product, gpu_bound(p, e)), "");
            CHECK_NE(first_difference(on_gpu(v, wrong_a), e.product, gpu_bound(p, e)), "");
            CHECK_NE(first_difference(on_gpu(v, wrong_b), e.product, gpu_bound(p, e)), "");
        }
    }
}

TEST_CASE("gpu gemm tiles over many tiles are equal to the library, and to themselves in every run") {
    if (all().empty() || left_out(1 << 20)) return;
    for (const Shape& s : kLarge)
        for (auto [a, promote] : {std::pair{Dtype::kE4m3, 0}, {Dtype::kE5m2, 128}, {Dtype::kE5m2, 256}}) {
            const Dtype result = promote ? Dtype::kFp32 : Dtype::kBf16;
            Fp8Product p = product(s, a, result, promote == 128, promote);
            fill(p, 1);   // exact sums
            const HostTensor want = by_library(p);
            for (const Variant& v : variants_of(p, promote)) {
                CAPTURE(v.name);
                const HostTensor first = on_gpu(v, p);
                CHECK_EQ(first_difference(first, want, [](int64_t) { return 0.0; }), "");
                for (int i = 0; i < 3; i++) CHECK(on_gpu(v, p).same_bits(first));
            }
        }
}

TEST_CASE("gpu gemm tiles in bf16 are exact on whole numbers, otherwise within the error of fp32 sums") {
    for (const Shape& s : kShapes)
        for (Dtype result : {Dtype::kBf16, Dtype::kFp32})
            for (bool integers : {true, false}) {
                if (all().empty() || left_out(s.M * s.N)) continue;
                const Bf16Product p(s, integers, result);
                const HostTensor want = p.exact(), rounded = want.to(result), magnitude = p.exact(true);
                const double round = unit_roundoff(result), chain = static_cast<double>(s.K + 8) * 0x1p-23;
                for (const Variant& v : all()) {
                    if (v.operands != Operands::kBf16) continue;
                    check_close(p.name(v), p.on_gpu(v), integers ? rounded : want, [&](int64_t i) {
                        const double sums = chain * magnitude.get(i);
                        return integers ? 0 : sums + 1.01 * round * (std::fabs(want.get(i)) + sums);
                    });
                }
            }
}

TEST_CASE("gpu gemm tiles: a call that a variant cannot compute is named") {
    for (const Variant& v : all()) {
        if (v.name != all()[0].name) continue;
        HostTensor a(Dtype::kE4m3, 16 * 40), scale(Dtype::kFp32, 1), d(Dtype::kBf16, 256);
        gemm_tiles::Call call{.D = d.view(), .A = a.view(), .B = a.view(), .a_scale_inv = scale.view(),
                              .b_scale_inv = scale.view(), .M = 16, .N = 16, .K = 40};
        CHECK_EQ(std::string(gemm_tiles::call_error(v, call)), "rows of A and B need whole 16 bytes");
        call.a_scale_inv = {};
        call.K = 32;
        CHECK_EQ(std::string(gemm_tiles::call_error(v, call)), "A has another type or size");
    }
}
