// Products of FP8 operands in double, with error bounds for tensor cores and for the CPU.
#pragma once
#include "llmc/base/fp8.h"
#include "tests/support/reference.h"

namespace reference {

// Types and granularities of the two operands.
struct Fp8Kind {
    Dtype a, b;
    Granularity a_granularity, b_granularity;
    bool blocks() const { return a_granularity != Granularity::kTensor; }
};
// Index of the scale of element (r, k) of an (R, K) matrix.
inline int64_t scale_inv_index(Granularity granularity, int64_t R, int64_t K, int64_t r, int64_t k) {
    if (granularity == Granularity::kTensor) return 0;
    if (granularity == Granularity::kBlock1x128) return k / 128 * R + r;
    return r / 128 * ((K + 511) / 512 * 4) + k / 128;
}

struct Fp8Product {
    int64_t M, N, K;
    Fp8Kind kind;
    Dtype result = Dtype::kBf16;
    GemmLayout layout = GemmLayout::kForward;
    bool accumulate = false, fast = false;
    HostTensor a = {}, b = {}, a_scale_inv = {}, b_scale_inv = {}, d = {}, bias = {};

    std::string name() const {
        return strf("M %lld N %lld K %lld, %s x %s -> %s, granularities %d %d, layout %d%s%s%s", (long long)M,
                    (long long)N, (long long)K, dtype_name(kind.a), dtype_name(kind.b), dtype_name(result),
                    static_cast<int>(kind.a_granularity), static_cast<int>(kind.b_granularity),
                    static_cast<int>(layout), accumulate ? ", accumulates" : "", fast ? ", fast" : "",
                    bias.elems() ? ", bias" : "");
    }
    // Arguments with tensors of the caller's device.
    GemmArgs args(Tensor D, Tensor A, Tensor B, Tensor A_scale_inv, Tensor B_scale_inv, Tensor of_bias) const {
        return {.D = D, .A = A, .B = B, .bias = of_bias, .M = M, .N = N, .K = K, .layout = layout,
                .accumulate = accumulate, .A_granularity = kind.a_granularity, .B_granularity = kind.b_granularity,
                .A_scale_inv = A_scale_inv, .B_scale_inv = B_scale_inv, .fast_accumulation = fast};
    }
    // Returns D of the CPU.
    HostTensor on_cpu(Ctx& ctx) {
        HostTensor out = d;
        cpu::gemm(ctx, args(out.view(), a.view(), b.view(), a_scale_inv.view(), b_scale_inv.view(), bias.view()));
        return out;
    }
    double scale_a(int64_t m, int64_t k) const {
        return a_scale_inv.get(scale_inv_index(kind.a_granularity, M, K, m, k));
    }
    double scale_b(int64_t n, int64_t k) const {
        return b_scale_inv.get(scale_inv_index(kind.b_granularity, N, K, n, k));
    }
};

// The product in double, the sum of the terms' absolute values, and the error bound of tensor cores.
struct Fp8Expected {
    HostTensor product, magnitude, tensor_cores;
};

// Decodes FP8 without scales.
inline std::vector<double> decoded(const HostTensor& codes) {
    std::vector<double> values(static_cast<size_t>(codes.elems()));
    for (int64_t i = 0; i < codes.elems(); i++)
        values[static_cast<size_t>(i)] = from_fp8(codes.dtype(), static_cast<const uint8_t*>(codes.data())[i]);
    return values;
}

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

// `range`: number of k that tensor cores accumulate before the sum is added to fp32 registers. A scale is constant over
// 128 k.
inline Fp8Expected expected(const Fp8Product& p, int bits, int64_t range) {
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

// Binary places that tensor cores keep (TensorCoreSum), one less than measured: on an H200 the largest error was 0.8
// times the bound for 13 places and 2.8 times the bound for 14.
inline constexpr int kPlaces = 12;

// Tensor cores accumulate over all k if fast, otherwise over 128. Measured like kPlaces: errors of fast sums exceed the
// bound for 128.
inline Fp8Expected expected_of(const Fp8Product& p) { return expected(p, kPlaces, p.fast ? p.K : 128); }

// Error bound of the GPU, with precise or fast accumulation. `e` and `p` must outlive the result.
inline Bound gpu_bound(const Fp8Product& p, const Fp8Expected& e) {
    const double chain = static_cast<double>(p.K / 32 + 8), round = unit_roundoff(p.result);
    const bool twice = p.accumulate;   // rounds the product and then the sum with D
    return [&p, &e, chain, round, twice](int64_t i) {
        const double sums = e.tensor_cores.get(i)
                            + 2 * chain * 0x1p-24 * (e.magnitude.get(i) + std::fabs(e.product.get(i)));
        const double before = twice ? std::fabs(e.product.get(i) - p.d.get(i)) : 0;
        return sums + 1.01 * round * (std::fabs(e.product.get(i)) + before + sums);
    };
}

// Error bound of the CPU: the longest chain of fp32 sums (over 256 k, or 128 with block scales), the scales, and the
// rounding to D's dtype.
inline Bound cpu_bound(const Fp8Product& p, const Fp8Expected& e) {
    const int64_t range = p.kind.blocks() ? 128 : 256;
    const double chain = static_cast<double>(std::min(p.K, range) + p.K / range + 5);
    const double round = unit_roundoff(p.result);
    return [&e, chain, round](int64_t i) {
        const double sums = 1.01 * chain * 0x1p-24 * (e.magnitude.get(i) + std::fabs(e.product.get(i)));
        return sums + 1.01 * round * (std::fabs(e.product.get(i)) + sums);
    };
}

}  // namespace reference
