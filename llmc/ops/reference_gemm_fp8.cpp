#include "llmc/ops/reference_gemm_fp8.h"

namespace reference {

namespace {

// A sum over a range of k that tensor cores accumulate without fp32 registers. Tensor cores add 32 products at a time:
// the products and the accumulator are aligned to the largest of the 33 and truncated `bits` places below it. Source:
// DeepSeek-V3, arXiv 2412.19437, section 3.5.2, which reports 13 places for Hopper.
struct TensorCoreSum {
    double sum = 0, magnitude = 0, lost = 0;
    TensorCoreSum(const double* a, const double* b, int64_t K, int bits) {
        for (int64_t begin = 0; begin < K; begin += 32) {
            const int64_t end = std::min(begin + 32, K);
            double largest = std::fabs(sum), next = sum;
            for (int64_t k = begin; k < end; k++) {
                largest = std::max(largest, std::fabs(a[k] * b[k]));
                next += a[k] * b[k];
            }
            largest = std::max(largest, std::fabs(next));
            const double place = largest > 0 ? std::ldexp(1.0, std::ilogb(largest) - bits) : 1;
            lost += place;   // truncation of the accumulator
            for (int64_t k = begin; k < end; k++) {
                const double term = std::fabs(a[k] * b[k]) / place;
                lost += (term - static_cast<double>(static_cast<int64_t>(term))) * place;
                magnitude += term * place;
            }
            sum = next;
        }
    }
};

}  // namespace

Fp8Expected expected(const Fp8Product& p, int bits, int64_t range) {
    const int64_t M = p.M, N = p.N, K = p.K;
    const std::vector<double> a = decoded(p.a), b = decoded(p.b);
    auto empty = [&] { return HostTensor(Dtype::kFp64, M * N); };
    Fp8Expected e{empty(), empty(), empty()};
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < M * N; i++) {
        double sum = 0, magnitude = 0, lost = 0;
        for (int64_t k = 0; k < K; k += range) {
            const TensorCoreSum part(a.data() + i / N * K + k, b.data() + i % N * K + k, std::min(range, K - k), bits);
            const double scale = p.scale_a(i / N, k) * p.scale_b(i % N, k);
            sum += scale * part.sum, magnitude += scale * part.magnitude, lost += scale * part.lost;
        }
        if (p.bias.elems()) sum += p.bias.get(i % N);
        if (p.accumulate) sum += p.d.get(i);
        e.product.set(i, sum), e.magnitude.set(i, magnitude), e.tensor_cores.set(i, lost);
    }
    return e;
}

}  // namespace reference
