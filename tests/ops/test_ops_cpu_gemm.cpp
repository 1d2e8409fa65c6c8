// Matmul of the CPU against plain loops.
#include "tests/support/op_test.h"

namespace gemm_test {

using op_test::Bound;
using op_test::HostTensor;
using op_test::random_tensor;

namespace {

struct Shape {
    int64_t M, N, K;
};
// Sizes around those of the kernel (6 x 16), a block of K (256) and a strip (512).
const Shape kShapes[] = {{1, 1, 1},     {1, 37, 5},    {6, 16, 256}, {7, 17, 257},
                         {97, 45, 300}, {33, 530, 31}, {5, 3, 1030}};
const GemmLayout kLayouts[] = {GemmLayout::kForward, GemmLayout::kDgrad, GemmLayout::kWgrad};

double element_a(const HostTensor& a, const Shape& s, GemmLayout layout, int64_t m, int64_t k) {
    return a.get(layout == GemmLayout::kWgrad ? k * s.M + m : m * s.K + k);
}
double element_b(const HostTensor& b, const Shape& s, GemmLayout layout, int64_t n, int64_t k) {
    return b.get(layout == GemmLayout::kForward ? n * s.K + k : k * s.N + n);
}

// The product in double, and the sum of the terms' absolute values.
struct Expected {
    HostTensor product, magnitude;
};
Expected plain_product(const HostTensor& a, const HostTensor& b, const Shape& s, GemmLayout layout) {
    Expected e{HostTensor(Dtype::kFp64, s.M * s.N), HostTensor(Dtype::kFp64, s.M * s.N)};
    for (int64_t m = 0; m < s.M; m++)
        for (int64_t n = 0; n < s.N; n++) {
            double sum = 0, magnitude = 0;
            for (int64_t k = 0; k < s.K; k++) {
                double term = element_a(a, s, layout, m, k) * element_b(b, s, layout, n, k);
                sum += term;
                magnitude += std::fabs(term);
            }
            e.product.set(m * s.N + n, sum);
            e.magnitude.set(m * s.N + n, magnitude);
        }
    return e;
}

// Largest number of roundings of a term: in a block of 256, then over the blocks.
double chain(int64_t K) { return static_cast<double>(std::min<int64_t>(K, 256) + K / 256 + 1); }

GemmArgs arguments(HostTensor& d, HostTensor& a, HostTensor& b, const Shape& s, GemmLayout layout) {
    return {.D = d.view(), .A = a.view(), .B = b.view(), .M = s.M, .N = s.N, .K = s.K, .layout = layout};
}

}  // namespace

TEST_CASE("cpu gemm stays within its error bound") {
    Ctx ctx;
    for (auto [in, out] : {std::pair{Dtype::kFp32, Dtype::kFp32}, {Dtype::kBf16, Dtype::kFp32},
                           {Dtype::kBf16, Dtype::kBf16}, {Dtype::kFp64, Dtype::kFp64}})
        for (const Shape& s : kShapes)
            for (GemmLayout layout : kLayouts)
                for (bool accumulate : {false, true}) {
                    HostTensor a = random_tensor(in, s.M * s.K, 1), b = random_tensor(in, s.N * s.K, 2);
                    HostTensor before = random_tensor(out, s.M * s.N, 3), d(out, s.M * s.N);
                    Expected e = plain_product(a, b, s, layout);
                    if (accumulate) d = before;
                    GemmArgs args = arguments(d, a, b, s, layout);
                    args.accumulate = accumulate;
                    cpu::gemm(ctx, args);
                    HostTensor want = e.product;
                    for (int64_t i = 0; accumulate && i < d.elems(); i++)
                        want.set(i, want.get(i) + before.get(i));
                    op_test::check_close("gemm", d, want, [&](int64_t i) {
                        // in the double case the plain loops round as well
                        double sums = 2 * chain(s.K) * op_test::acc_roundoff(in) * e.magnitude.get(i);
                        return sums + 1.01 * op_test::unit_roundoff(out) * (std::fabs(want.get(i)) + sums);
                    });
                }
}

TEST_CASE("cpu gemm adds a bias") {
    Ctx ctx;
    const Shape s{19, 35, 70};
    for (Dtype dtype : {Dtype::kFp32, Dtype::kBf16, Dtype::kFp64}) {
        HostTensor a = random_tensor(dtype, s.M * s.K, 1, 0.3), b = random_tensor(dtype, s.N * s.K, 2, 0.3);
        HostTensor bias = random_tensor(dtype, s.N, 3), d(dtype, s.M * s.N);
        Expected e = plain_product(a, b, s, GemmLayout::kForward);
        GemmArgs args = arguments(d, a, b, s, GemmLayout::kForward);
        args.bias = bias.view();
        cpu::gemm(ctx, args);
        HostTensor want = e.product;
        for (int64_t i = 0; i < d.elems(); i++) want.set(i, want.get(i) + bias.get(i % s.N));
        const double acc = op_test::acc_roundoff(dtype), round = 1.01 * op_test::unit_roundoff(dtype);
        op_test::check_close("D", d, want, [&](int64_t i) {
            const double size = std::fabs(want.get(i));
            return 2 * chain(s.K) * acc * e.magnitude.get(i) + acc * size + round * size;
        });
    }
}

TEST_CASE("cpu gemm of several matrices has the bits of each alone, and reads no other") {
    Ctx ctx;
    constexpr int64_t kCount = 3;
    for (Dtype type : {Dtype::kFp32, Dtype::kBf16, Dtype::kFp64})
        for (GemmLayout layout : kLayouts) {
            const Shape s{24, 40, 72};
            HostTensor a = random_tensor(type, kCount * s.M * s.K, 1), b = random_tensor(type, kCount * s.N * s.K, 2);
            HostTensor d(type, kCount * s.M * s.N), changed = d, alone = d;
            const auto args = [&](HostTensor& to) {
                return GemmArgs{.D = to.view(), .A = a.view(), .B = b.view(), .M = s.M, .N = s.N, .K = s.K,
                                .layout = layout, .matrices = kCount};
            };
            cpu::gemm(ctx, args(d));
            for (int64_t i = 0; i < kCount; i++)
                cpu::gemm(ctx, {.D = alone.view().slice(i * s.M * s.N, s.M * s.N),
                                .A = a.view().slice(i * s.M * s.K, s.M * s.K),
                                .B = b.view().slice(i * s.N * s.K, s.N * s.K), .M = s.M, .N = s.N, .K = s.K,
                                .layout = layout});
            CHECK(alone.same_bits(d));
            a.set(2 * s.M * s.K - 1, 100);   // of the second matrix
            cpu::gemm(ctx, args(changed));
            for (int64_t i = 0; i < kCount; i++) {
                bool same = true;
                for (int64_t j = i * s.M * s.N; j < (i + 1) * s.M * s.N; j++) same &= changed.get(j) == d.get(j);
                CHECK(same == (i != 1));
            }
        }
}

TEST_CASE("cpu gemm refuses unsupported arguments") {
    Ctx ctx;
    const Shape s{4, 4, 4};
    HostTensor a = random_tensor(Dtype::kFp32, 16, 1), b = random_tensor(Dtype::kFp32, 16, 2), d(Dtype::kFp32, 16);
    HostTensor narrow(Dtype::kBf16, 16), bias(Dtype::kFp32, 4), integers(Dtype::kInt32, 16);
    auto refused = [&](auto change) {
        GemmArgs args = arguments(d, a, b, s, GemmLayout::kForward);
        change(args);
        CHECK_THROWS_AS(cpu::gemm(ctx, args), Error);
    };
    refused([](GemmArgs& g) { g.M = 5; });
    refused([](GemmArgs& g) { g.K = 0; });
    refused([&](GemmArgs& g) { g.B = narrow.view(); });
    refused([&](GemmArgs& g) { g.A = g.B = integers.view(); });
    refused([&](GemmArgs& g) { g.D = narrow.view(); });
    refused([&](GemmArgs& g) { g.bias = a.view(); });
    refused([&](GemmArgs& g) { g.bias = bias.view(), g.accumulate = true; });
    refused([](GemmArgs& g) { g.M = 2, g.N = 8, g.K = 2, g.symmetric = true; });
    refused([](GemmArgs& g) { g.matrices = 2; });
    refused([](GemmArgs& g) { g.matrices = 1, g.accumulate = true; });
    refused([&](GemmArgs& g) { g.matrices = 1, g.bias = bias.view(); });
}

TEST_CASE("gemm: the bits of a row do not depend on other rows") {
    for (GemmLayout layout : {GemmLayout::kForward, GemmLayout::kDgrad})
        for (Dtype type : {Dtype::kFp32, Dtype::kBf16, Dtype::kFp64})
            for (const Shape& s : {Shape{26, 37, 530}, {26, 130, 257}, {26, 15, 7}}) {
                HostTensor a = random_tensor(type, s.M * s.K, 1), b = random_tensor(type, s.N * s.K, 2);
                HostTensor all(type, s.M * s.N);
                Ctx ctx;
                cpu::gemm(ctx, arguments(all, a, b, s, layout));
                for (int64_t rows : {1, 5, 13, 24}) {
                    HostTensor some(type, rows * s.K), out(type, rows * s.N);
                    for (int64_t i = 0; i < some.elems(); i++) some.set(i, a.get((s.M - rows) * s.K + i));
                    cpu::gemm(ctx, arguments(out, some, b, {rows, s.N, s.K}, layout));
                    int64_t differ = 0;
                    for (int64_t i = 0; i < out.elems(); i++) differ += out.get(i) != all.get((s.M - rows) * s.N + i);
                    INFO("layout " << static_cast<int>(layout) << " rows " << rows << " N " << s.N << " K " << s.K);
                    CHECK_EQ(differ, 0);
                }
            }
}

}  // namespace gemm_test
