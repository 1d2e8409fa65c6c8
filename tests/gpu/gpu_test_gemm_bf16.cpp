// BF16 matmuls of the custom kernel (compute capability 9.0): equal to the CPU's to the bit where sums are exact.
#include "llmc/cuda/gemm.h"
#include "tests/gpu/gpu_op.h"

using namespace op_test;

namespace gemm_bf16_test {

namespace {

// An (n, n) product whose lower half is to be mirrored.
struct SymmetricProduct {
    int64_t n, K;
    bool wgrad;
    HostTensor a, b;

    SymmetricProduct(int64_t side, int64_t depth, bool of_rows, bool integers, bool square)
        : n(side), K(depth), wgrad(of_rows), a(make(integers, 1)), b(square ? a : make(integers, 2)) {}
    HostTensor make(bool integers, uint64_t key) const {
        return integers ? random_integers(Dtype::kBf16, n * K, key, 2) : random_tensor(Dtype::kBf16, n * K, key);
    }
    GemmArgs args(Tensor D, Tensor A, Tensor B) const {
        return {.D = D, .A = A, .B = B, .M = n, .N = n, .K = K,
                .layout = wgrad ? GemmLayout::kWgrad : GemmLayout::kForward, .symmetric = true};
    }
    HostTensor on_gpu(void (*multiply)(Ctx&, const GemmArgs&)) const {
        DeviceTensor x(a), y(b), d(HostTensor(Dtype::kBf16, n * n));
        multiply(gpu(), args(d.view(), x.view(), y.view()));
        cuda::synchronize(gpu());
        return d.download();
    }
    // The lower half of the CPU's product in both halves.
    HostTensor expected(Dtype result = Dtype::kBf16) {
        HostTensor d(result, n * n);
        Ctx ctx;
        cpu::gemm(ctx, args(d.view(), a.view(), b.view()));
        for (int64_t i = 0; i < n; i++)
            for (int64_t j = i + 1; j < n; j++) d.set(i * n + j, d.get(j * n + i));
        return d;
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
                if (left_out(n * n) || left_out(n * K) || (n == 4096 && K > 200)) continue;
                for (bool square : {false, true}) {
                    INFO("n " << n << ", K " << K << ", wgrad " << wgrad << ", square " << square);
                    SymmetricProduct p(n, K, wgrad, true, square);
                    const HostTensor want = p.expected(), got = p.on_gpu(cuda::gemm_symmetric);
                    CHECK_EQ(first_difference(got, want, [](int64_t) { return 0.0; }), "");
                    CHECK(got.same_bits(want));
                    CHECK(p.on_gpu(cuda::gemm_symmetric).same_bits(got));
                    p.a.set(n * K - 1, p.a.get(n * K - 1) + 8);
                    if (!square) CHECK_FALSE(p.on_gpu(cuda::gemm_symmetric).same_bits(got));
                }
            }
}

TEST_CASE("gpu symmetric gemm of random numbers is as near to fp64 as the rounding of its result, and symmetric") {
    if (!available()) return;
    for (auto [n, K] : {std::pair<int64_t, int64_t>{1000, 3000}, {2304, 1032}}) {
        if (left_out(n * n)) continue;
        for (bool wgrad : {false, true})
            for (auto multiply : {cuda::gemm_symmetric, cuda::gemm}) {   // gemm calls it for the larger one
                SymmetricProduct p(n, K, wgrad, false, true);
                const HostTensor want = p.expected(Dtype::kFp32), got = p.on_gpu(multiply);
                // The tensor cores drop bits of fp32 sums: 2^-12 of the root mean square of sums is far above that.
                const double size = std::sqrt(static_cast<double>(K));
                check_close("D", got, want, [&](int64_t i) {
                    return 0x1p-8 * std::fabs(want.get(i)) + 0x1p-12 * size;
                });
                int64_t unequal = 0;
                for (int64_t i = 0; i < p.n; i++)
                    for (int64_t j = 0; j < i; j++) unequal += got.get(i * p.n + j) != got.get(j * p.n + i);
                CHECK_EQ(unequal, 0);
            }
    }
}

}  // namespace gemm_bf16_test
