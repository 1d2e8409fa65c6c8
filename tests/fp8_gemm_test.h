// Products of FP8 operands for the tests of both devices: codes, strongly non-uniform factors, and the product in
// double with what may be lost on the way.
#pragma once
#include "tests/op_test.h"

#include "llmc/fp8.h"

namespace op_test {

inline constexpr GemmLayout kGemmLayouts[] = {GemmLayout::kForward, GemmLayout::kDgrad, GemmLayout::kWgrad};

// Types and granularities of the two operands.
struct Fp8Kind {
    Dtype a, b;
    Granularity a_granularity, b_granularity;
    bool blocks() const { return a_granularity != Granularity::kTensor; }
};
// All that a matmul takes.
inline std::vector<Fp8Kind> fp8_kinds() {
    constexpr Granularity kT = Granularity::kTensor, kV = Granularity::kBlock1x128, kB = Granularity::kBlock128x128;
    std::vector<Fp8Kind> kinds;
    for (auto [a, b] : {std::pair{Dtype::kE4m3, Dtype::kE4m3}, {Dtype::kE5m2, Dtype::kE4m3},
                        {Dtype::kE4m3, Dtype::kE5m2}})
        for (auto [of_a, of_b] : {std::pair{kT, kT}, {kV, kB}, {kV, kV}}) kinds.push_back({a, b, of_a, of_b});
    return kinds;
}

inline uint8_t* codes_of(HostTensor& t) { return static_cast<uint8_t*>(t.data()); }
// Where the factor of element (r, k) of an (R, K) matrix lies.
inline int64_t grid_index(Granularity granularity, int64_t R, int64_t K, int64_t r, int64_t k) {
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
    HostTensor a = {}, b = {}, a_grid = {}, b_grid = {}, d = {}, bias = {};

    std::string name() const {
        return strf("M %lld N %lld K %lld, %s x %s -> %s, granularities %d %d, layout %d%s%s%s", (long long)M,
                    (long long)N, (long long)K, dtype_name(kind.a), dtype_name(kind.b), dtype_name(result),
                    static_cast<int>(kind.a_granularity), static_cast<int>(kind.b_granularity),
                    static_cast<int>(layout), accumulate ? ", accumulates" : "", fast ? ", fast" : "",
                    bias.elems() ? ", bias" : "");
    }
    // Views on tensors of the caller's device.
    GemmArgs args(Tensor D, Tensor A, Tensor B, Tensor A_grid, Tensor B_grid, Tensor of_bias) const {
        return {.D = D, .A = A, .B = B, .bias = of_bias, .pre = {}, .M = M, .N = N, .K = K, .layout = layout,
                .epilogue = of_bias ? GemmEpilogue::kBias : GemmEpilogue::kNone, .accumulate = accumulate,
                .A_granularity = kind.a_granularity, .B_granularity = kind.b_granularity, .A_grid = A_grid,
                .B_grid = B_grid, .fast_accumulation = fast};
    }
    // D as the CPU leaves it.
    HostTensor on_cpu(Ctx& ctx) {
        HostTensor out = d;
        cpu::gemm(ctx, args(out.view(), a.view(), b.view(), a_grid.view(), b_grid.view(), bias.view()));
        return out;
    }
    double factor_a(int64_t m, int64_t k) const {
        return a_grid.get(grid_index(kind.a_granularity, M, K, m, k));
    }
    double factor_b(int64_t n, int64_t k) const {
        return b_grid.get(grid_index(kind.b_granularity, N, K, n, k));
    }
};

// Factors of an (R, K) matrix between 2^-4 and 2^4, powers of two or not; those that no element uses stay NaN.
inline HostTensor random_factors(Granularity granularity, int64_t R, int64_t K, uint64_t key, bool powers) {
    HostTensor grid(Dtype::kFp32, grid_elems(granularity, R, K));
    for (int64_t r = 0; r < R; r++)
        for (int64_t k = 0; k < K; k += 128) {
            const int64_t at = grid_index(granularity, R, K, r, k);
            const Philox4 random = philox(key, static_cast<uint64_t>(at));
            const double mantissa = powers ? 1 : 1 + random.word[1] * 0x1p-32;
            grid.set(at, std::ldexp(mantissa, static_cast<int>(random.word[0] % 8) - 4));
        }
    return grid;
}

// Normal numbers of a spread that uses the format well, or whole numbers up to `limit` if that is not 0.
inline HostTensor random_codes(Dtype format, int64_t elems, uint64_t key, int64_t limit = 0) {
    const HostTensor values = limit ? random_integers(Dtype::kFp32, elems, key, limit)
                                    : random_tensor(Dtype::kFp32, elems, key, fp8_largest(format) / 8);
    HostTensor t(format, elems);
    for (int64_t i = 0; i < elems; i++) codes_of(t)[i] = to_fp8(format, static_cast<float>(values.get(i)));
    return t;
}

// Fills operands, factors and what D holds before. limit != 0: whole numbers and powers of two, for exact sums.
inline Fp8Product& fill(Fp8Product& p, int64_t limit, bool with_bias = false) {
    p.a = random_codes(p.kind.a, p.M * p.K, 1, limit);
    p.b = random_codes(p.kind.b, p.N * p.K, 2, limit);
    p.a_grid = random_factors(p.kind.a_granularity, p.M, p.K, 3, limit != 0);
    p.b_grid = random_factors(p.kind.b_granularity, p.N, p.K, 4, limit != 0);
    p.d = HostTensor(p.result, p.M * p.N);
    const double size = limit ? 0 : 100 * std::sqrt(static_cast<double>(p.K));
    if (p.accumulate) p.d = limit ? random_integers(p.result, p.M * p.N, 5, 50)
                                  : random_tensor(p.result, p.M * p.N, 5, size);
    if (with_bias) p.bias = limit ? random_integers(Dtype::kBf16, p.N, 6, 50)
                                  : random_tensor(Dtype::kBf16, p.N, 6, size);
    return p;
}

// The product in double, the sum of the terms' absolute values, and what tensor cores may lose.
struct Fp8Expected {
    HostTensor product, magnitude, tensor_cores;
};

// The codes' values, unscaled.
inline std::vector<double> decoded(const HostTensor& codes) {
    std::vector<double> values(static_cast<size_t>(codes.elems()));
    for (int64_t i = 0; i < codes.elems(); i++)
        values[static_cast<size_t>(i)] = from_fp8(codes.dtype(), static_cast<const uint8_t*>(codes.data())[i]);
    return values;
}

// Sums of one run of k that tensor cores add up by themselves. They take 32 products at a time: these and the sum so
// far are aligned to the largest of the 33, and what lies below `bits` binary places of it is cut off. Source:
// DeepSeek-V3, arXiv 2412.19437, section 3.5.2, which reports 13 places for Hopper.
struct TensorCoreRun {
    double sum = 0, magnitude = 0, lost = 0;
    TensorCoreRun(const double* a, const double* b, int64_t K, int bits) {
        for (int64_t begin = 0; begin < K; begin += 32) {
            const int64_t end = std::min(begin + 32, K);
            double largest = std::fabs(sum), next = sum;
            for (int64_t k = begin; k < end; k++) {
                largest = std::max(largest, std::fabs(a[k] * b[k]));
                next += a[k] * b[k];
            }
            largest = std::max(largest, std::fabs(next));
            const double place = largest > 0 ? std::ldexp(1.0, std::ilogb(largest) - bits) : 1;
            lost += place;   // the sum itself
            for (int64_t k = begin; k < end; k++) {
                const double term = std::fabs(a[k] * b[k]) / place;
                lost += (term - static_cast<double>(static_cast<int64_t>(term))) * place;
                magnitude += term * place;
            }
            sum = next;
        }
    }
};

// `run`: how many k tensor cores add up before fp32 registers take over; the factors are constant in 128.
inline Fp8Expected expected(const Fp8Product& p, int bits, int64_t run) {
    const int64_t M = p.M, N = p.N, K = p.K;
    const std::vector<double> a = decoded(p.a), b = decoded(p.b);
    auto empty = [&] { return HostTensor(Dtype::kFp64, M * N); };
    Fp8Expected e{empty(), empty(), empty()};
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < M * N; i++) {
        double sum = 0, magnitude = 0, lost = 0;
        for (int64_t k = 0; k < K; k += run) {
            const TensorCoreRun part(a.data() + i / N * K + k, b.data() + i % N * K + k, std::min(run, K - k), bits);
            const double factor = p.factor_a(i / N, k) * p.factor_b(i % N, k);
            sum += factor * part.sum, magnitude += factor * part.magnitude, lost += factor * part.lost;
        }
        if (p.bias.elems()) sum += p.bias.get(i % N);
        if (p.accumulate) sum += p.d.get(i);
        e.product.set(i, sum), e.magnitude.set(i, magnitude), e.tensor_cores.set(i, lost);
    }
    return e;
}

// A grid of blocks in the other order of its two axes, its number of factors as it was.
inline HostTensor transposed_grid(const HostTensor& grid, int64_t inner) {
    HostTensor t = grid;
    const int64_t outer = grid.elems() / inner;
    for (int64_t i = 0; i < grid.elems(); i++) t.set(i % inner * outer + i / inner, grid.get(i));
    return t;
}

}  // namespace op_test
