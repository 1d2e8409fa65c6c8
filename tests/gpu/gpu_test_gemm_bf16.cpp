// BF16 matmuls of the custom kernel (compute capability 9.0): equal to the CPU's where sums are exact.
#include "llmc/cuda/gemm.h"
#include "tests/gpu/gpu_op.h"
#include "tests/support/grouped_gemm_test.h"

using namespace op_test;

namespace gemm_bf16_test {

namespace {

// Products of several matrices; symmetric ones are of (N, K) matrices, with any A and B: the lower half counts.
struct Products {
    int64_t count, M, N, K;
    GemmLayout layout;
    bool symmetric;
    HostTensor a, b;
    bool alone = false;   // a matrix that no call takes for one of several

    Products(int64_t matrices, int64_t m, int64_t n, int64_t k, GemmLayout of, bool mirrored, bool integers)
        : count(matrices), M(m), N(n), K(k), layout(of), symmetric(mirrored), a(make(integers, m * k, 1)),
          b(make(integers, n * k, 2)) {}
    // One symmetric product; square: of A and A.
    static Products one_symmetric(int64_t side, int64_t depth, bool wgrad, bool integers, bool square) {
        Products p(1, side, side, depth, wgrad ? GemmLayout::kWgrad : GemmLayout::kForward, true, integers);
        if (square) p.b = p.a;
        p.alone = true;
        return p;
    }
    HostTensor make(bool integers, int64_t elems, uint64_t key) const {
        return integers ? random_integers(Dtype::kBf16, count * elems, key, 2)
                        : random_tensor(Dtype::kBf16, count * elems, key);
    }
    // Of matrices [first, first + some).
    GemmArgs args(Tensor D, Tensor A, Tensor B, int64_t first, int64_t some) const {
        return {.D = D.slice(first * M * N, some * M * N), .A = A.slice(first * M * K, some * M * K),
                .B = B.slice(first * N * K, some * N * K), .M = M, .N = N, .K = K, .layout = layout,
                .symmetric = symmetric, .matrices = alone ? 0 : some};
    }
    // With `at_once` matrices a call.
    HostTensor on_gpu(int64_t at_once = 1, void (*multiply)(Ctx&, const GemmArgs&) = cuda::gemm) const {
        DeviceTensor x(a), y(b), d(HostTensor(Dtype::kBf16, count * M * N).fill(NAN));
        for (int64_t first = 0; first < count; first += at_once)
            multiply(gpu(), args(d.view(), x.view(), y.view(), first, std::min(at_once, count - first)));
        cuda::synchronize(gpu());
        return d.download();
    }
    // Symmetric ones have the lower half of the CPU's product in both halves.
    HostTensor expected(Dtype result = Dtype::kBf16) {
        HostTensor d(result, count * M * N);
        Ctx ctx;
        cpu::gemm(ctx, args(d.view(), a.view(), b.view(), 0, count));
        for (int64_t m = 0; symmetric && m < count; m++)
            for (int64_t i = 0; i < N; i++)
                for (int64_t j = i + 1; j < N; j++) d.set((m * N + i) * N + j, d.get((m * N + j) * N + i));
        return d;
    }
    // The matrices that differ.
    std::vector<int64_t> differing(const HostTensor& x, const HostTensor& y) const {
        std::vector<int64_t> different;
        for (int64_t m = 0; m < count; m++)
            for (int64_t i = 0; i < M * N; i++)
                if (x.get(m * M * N + i) != y.get(m * M * N + i)) {
                    different.push_back(m);
                    break;
                }
        return different;
    }
};

bool available() {
    return cuda::gemm_symmetric_supports(gpu(), GemmArgs{.D{nullptr, Dtype::kBf16, 64}, .A{nullptr, Dtype::kBf16, 64},
                                                         .B{nullptr, Dtype::kBf16, 64}, .M = 8, .N = 8, .K = 8});
}

}  // namespace

// Tiles are 128 x 256 and 128 x 128 in groups of 256, steps 64 of K, of which 4 are in shared memory: sizes below, at
// and above each. A general product, of which the lower half must be in both halves, and A A^T; twice.
TEST_CASE("gpu symmetric gemm: the lower half of the CPU's product in both halves") {
    if (!available()) return;
    for (int64_t n : {8, 64, 128, 136, 256, 264, 520, 776, 1000, 1536, 4096})
        for (int64_t K : {8, 64, 72, 200, 328, 1000})
            for (bool wgrad : {false, true}) {
                if (left_out(n * n) || left_out(n * K)) continue;
                if (n >= 1000 && K != 72 && (K != 1000 || n == 4096)) continue;   // they take long on the CPU
                for (bool square : {false, true}) {
                    INFO("n " << n << ", K " << K << ", wgrad " << wgrad << ", square " << square);
                    auto p = Products::one_symmetric(n, K, wgrad, true, square);
                    const HostTensor want = p.expected(), got = p.on_gpu(1, cuda::gemm_symmetric);
                    CHECK_EQ(first_difference(got, want), "");
                    CHECK(p.on_gpu(1, cuda::gemm_symmetric).same_bits(got));
                    p.a.set(n * K - 1, p.a.get(n * K - 1) + 8);
                    if (!square) CHECK_FALSE(p.on_gpu(1, cuda::gemm_symmetric).same_bits(got));
                }
            }
}

TEST_CASE("gpu symmetric gemm of random numbers is as near to fp64 as the rounding of its result, and symmetric") {
    if (!available()) return;
    for (auto [n, K] : {std::pair<int64_t, int64_t>{1000, 3000}, {2304, 1032}}) {
        if (left_out(n * n)) continue;
        for (bool wgrad : {false, true})
            for (auto multiply : {cuda::gemm_symmetric, cuda::gemm}) {   // gemm calls it for the larger one
                auto p = Products::one_symmetric(n, K, wgrad, false, true);
                const HostTensor want = p.expected(Dtype::kFp32), got = p.on_gpu(1, multiply);
                // The tensor cores drop bits of fp32 sums: 2^-12 of the root mean square of sums is far above that.
                const double size = std::sqrt(static_cast<double>(K));
                check_close("D", got, want, [&](int64_t i) {
                    return 0x1p-8 * std::fabs(want.get(i)) + 0x1p-12 * size;
                });
                int64_t unequal = 0;
                for (int64_t i = 0; i < n; i++)
                    for (int64_t j = 0; j < i; j++) unequal += got.get(i * n + j) != got.get(j * n + i);
                CHECK_EQ(unequal, 0);
            }
    }
}

// ---- several matrices

namespace {

struct Sides {
    int64_t count, M, N, K;
};

}  // namespace

// Counts that are odd, one, and more than fill the multiprocessors; sides below, at and above tiles of 256, halves of
// 128 and boxes of 64, and K around steps of 64. Integers: sums are exact, so the bits are the CPU's. Random numbers:
// the bits of one matrix at a time, and of two. One changed element changes its own matrix, and no other.
TEST_CASE("gpu gemm of several matrices: each has the CPU's sums, and the same bits in every batch") {
    if (!available()) return;
    const Sides sides[] = {{1, 768, 768, 768}, {3, 8, 8, 8},     {5, 64, 136, 72},   {7, 128, 256, 64},
                           {3, 264, 520, 328}, {5, 520, 264, 8}, {2, 136, 1000, 200}, {73, 256, 256, 64},
                           {141, 72, 264, 72}, {9, 300, 304, 136}};
    for (const Sides& s : sides)
        for (GemmLayout layout : {GemmLayout::kForward, GemmLayout::kDgrad, GemmLayout::kWgrad})
            for (bool symmetric : {false, true}) {
                if (symmetric ? layout == GemmLayout::kDgrad : layout == GemmLayout::kWgrad) continue;
                const int64_t M = symmetric ? s.N : s.M;
                if (left_out(s.count * M * s.N) || left_out(s.count * s.N * s.K)) continue;
                INFO(s.count << " of " << M << " x " << s.N << " x " << s.K << ", layout " << static_cast<int>(layout)
                             << ", symmetric " << symmetric);
                Products exact(s.count, M, s.N, s.K, layout, symmetric, true);
                const Tensor any{nullptr, Dtype::kBf16, 0};
                REQUIRE((symmetric ? cuda::gemm_symmetric_supports : cuda::gemm_matrices_supports)(
                    gpu(), {.D = any, .A = any, .B = any, .M = M, .N = s.N, .K = s.K, .layout = layout,
                            .matrices = s.count}));
                const HostTensor found = exact.on_gpu(s.count);
                CHECK_EQ(first_difference(found, exact.expected()), "");
                CHECK(exact.on_gpu(s.count).same_bits(found));

                Products random(s.count, M, s.N, s.K, layout, symmetric, false);
                const HostTensor together = random.on_gpu(s.count);
                CHECK(random.on_gpu(1).same_bits(together));
                CHECK(random.on_gpu(2).same_bits(together));
                if (s.count > 9) continue;   // these take long
                for (HostTensor* operand : {&random.a, &random.b})
                    for (int64_t m : {int64_t{0}, s.count / 2, s.count - 1}) {
                        // In a symmetric product, of a row and of a column that the lower half has.
                        const int64_t each = operand->elems() / s.count;
                        const int64_t at = operand == &random.a ? (m + 1) * each - 1 : m * each;
                        const double before = operand->get(at);
                        operand->set(at, before + 8);
                        CHECK(random.differing(random.on_gpu(s.count), together) == std::vector<int64_t>{m});
                        operand->set(at, before);
                    }
            }
}

// Types and sides without the kernels run one matrix after another.
TEST_CASE("gpu gemm of several matrices without a kernel for them equals one by one") {
    for (Dtype type : {Dtype::kFp32, Dtype::kBf16}) {
        constexpr int64_t kCount = 3, kM = 24, kN = 40, kK = 12;   // K is no multiple of 8
        const HostTensor a = random_tensor(type, kCount * kM * kK, 1), b = random_tensor(type, kCount * kN * kK, 2);
        DeviceTensor x(a), y(b), d(HostTensor(type, kCount * kM * kN)), each(HostTensor(type, kCount * kM * kN));
        cuda::gemm(gpu(), {.D = d.view(), .A = x.view(), .B = y.view(), .M = kM, .N = kN, .K = kK, .matrices = kCount});
        for (int64_t i = 0; i < kCount; i++)
            cuda::gemm(gpu(), {.D = each.view().slice(i * kM * kN, kM * kN), .A = x.view().slice(i * kM * kK, kM * kK),
                               .B = y.view().slice(i * kN * kK, kN * kK), .M = kM, .N = kN, .K = kK});
        cuda::synchronize(gpu());
        CHECK(d.download().same_bits(each.download()));
    }
}

// Compares it with the CPU, twice. A sum that is added to bf16 is rounded before on the GPU.
static void check_grouped(const grouped_gemm_test::GroupedProduct& p, Dtype result) {
    INFO(p.experts() << " experts, " << p.all_rows() << " rows, " << p.wide << " x " << p.narrow << ", layout "
                     << static_cast<int>(p.layout) << ", +=: " << p.accumulate << ", " << dtype_name(result));
    HostTensor want = p.d, a = p.a, b = p.b, offsets = p.offsets;
    Ctx ctx;
    cpu::grouped_gemm(ctx, p.args(want.view(), a.view(), b.view(), offsets.view()));
    HostTensor before;
    for (int repeat = 0; repeat < 2; repeat++) {
        DeviceTensor x(a), y(b), d(p.d), of(offsets);
        cuda::grouped_gemm(gpu(), p.args(d.view(), x.view(), y.view(), of.view()));
        cuda::synchronize(gpu());
        const HostTensor got = d.download();
        if (repeat > 0) CHECK(got.same_bits(before));
        before = got;
        if (p.accumulate && result == Dtype::kBf16)
            CHECK_EQ(first_difference(got, want, [&](int64_t i) {
                return 0x1p-8 * (2 * std::fabs(want.get(i)) + std::fabs(p.d.get(i)));
            }), "");
        else CHECK_EQ(first_difference(got, want), "");
    }
}

// Rows of an expert are in items of 256 or 128, boxes of 64, and steps of 64 of weight gradients; columns in tiles of
// 256 and boxes of 64 or 32. Rows of no expert are NaN. The fp32 operands go through the library.
TEST_CASE("gpu grouped gemm equals the CPU for any sizes of experts") {
    const std::vector<int64_t> kSizes[] = {{0, 1, 127, 128, 129}, {64, 63, 65, 0, 513}, {0, 700, 0}, {256}, {0, 0}};
    for (const std::vector<int64_t>& rows : kSizes)
        for (auto [wide, narrow] : {std::pair<int64_t, int64_t>{8, 8}, {264, 72}, {40, 520}, {528, 136}, {784, 328}})
            for (GemmLayout layout : {GemmLayout::kForward, GemmLayout::kDgrad, GemmLayout::kWgrad})
                for (Dtype result : {Dtype::kBf16, Dtype::kFp32})
                    for (bool accumulate : {false, true}) {
                        const bool wgrad = layout == GemmLayout::kWgrad;
                        if (left_out(wide * narrow) || (accumulate && !wgrad)) continue;
                        const bool fp32 = result == Dtype::kFp32 && !wgrad;
                        check_grouped(grouped_gemm_test::grouped_product(rows, wide, narrow, layout,
                                                                         fp32 ? Dtype::kFp32 : Dtype::kBf16, result,
                                                                         accumulate, true),
                                      result);
                    }
}

// More items than clusters, so that a block computes several, and its stores overlap with the next one, which takes two
// steps or six.
TEST_CASE("gpu grouped gemm of many experts equals the CPU") {
    if (left_out(1 << 20)) return;
    std::vector<int64_t> rows;
    for (uint64_t e = 0; e < 40; e++) rows.push_back(philox(5, e).word[0] % 500);
    rows[7] = rows[8] = rows[39] = 0, rows[20] = 2000;
    for (int64_t narrow : {72, 328})
        for (GemmLayout layout : {GemmLayout::kForward, GemmLayout::kDgrad, GemmLayout::kWgrad})
            for (Dtype result : {Dtype::kBf16, Dtype::kFp32}) {
                if (layout != GemmLayout::kWgrad && result == Dtype::kFp32) continue;
                check_grouped(grouped_gemm_test::grouped_product(rows, 776, narrow, layout, Dtype::kBf16, result,
                                                                 result == Dtype::kFp32, true),
                              result);
            }
}

}  // namespace gemm_bf16_test
